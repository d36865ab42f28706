"""The native engine computes what transformers computes, for every architecture that it takes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import FAMILIES, read_decoder
from verl.rollout.request import Completion, Request, SamplingParams, make_requests

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0)
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(4)]}
LONGROPE |= {"long_factor": [2.0 + 0.3 * i for i in range(4)], "original_max_position_embeddings": 48}
LONGROPE |= {"factor": 64 / 48}
CASES = {
    "llama": ("llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
    "llama-mha": ("llama", dict(num_key_value_heads=4, head_dim=12, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(sliding_window=6)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True, rope_parameters=YARN)),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "qwen3-moe": (
        "qwen3_moe",
        # the second layer is dense
        dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=3, sliding_window=6)),
    "phi3": ("phi3", dict(sliding_window=7)),
    "phi3-longrope": ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=48)),
    "phi3-partial": ("phi3", dict(rope_parameters=PARTIAL)),
    "gemma": ("gemma", dict(head_dim=8)),
    "gemma2": ("gemma2", dict(head_dim=8, sliding_window=6, attn_logit_softcapping=0.5, final_logit_softcapping=2.0)),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
}
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [48], [5, 6, 7], [61, 62, 63, 64, 65, 66]]


def model(case: str, dtype=torch.float32, **sizes) -> torch.nn.Module:
    kind, extra = CASES[case]
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SHAPE | extra | sizes)
    # softcapping is left out by transformers' fused attention
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype)
    with torch.no_grad():  # norms, biases and logits that are not what a fresh model has: all of them must be read
        for name, p in module.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.3)
            elif "embed" in name or "lm_head" in name:
                p.copy_(torch.randn(p.shape) * 0.5)
            else:
                p.mul_(8)
        # of either sign, or a model with tied embeddings repeats its last token for ever
        norm = module.model.norm.weight
        norm.copy_(torch.randn(norm.shape) - (1 if case.startswith("gemma") else 0))
    return module


def test_every_family_has_a_case():
    with_images = {name for name in FAMILIES if name.endswith("ForConditionalGeneration")}  # test_vision.py
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind, _ in CASES.values()} == set(FAMILIES) - with_images


def check_log_probs(module: torch.nn.Module, requests: list[Request], answers: list[Completion]) -> None:
    """Against one forward pass over each whole row."""
    for request, answer in zip(requests, answers, strict=True):
        expected = expected_log_probs(module, request.prompt_ids, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=1e-5, rtol=1e-5)


def expected_log_probs(module: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """By one forward pass over the whole row: (T,) float64."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + response], device=module.device)).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).cpu().gather(1, torch.tensor(response)[:, None])[:, 0]


def check_greedy(module: torch.nn.Module, prompts: list[list[int]]) -> list[Completion]:
    """Against transformers."""
    requests = make_requests(prompts, SamplingParams(24, (), temperature=0))
    answers = NativeRollout(module).generate(requests)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    for prompt, answer in zip(prompts, answers):
        ids = torch.tensor([prompt], device=module.device)
        assert answer.token_ids == module.generate(ids, generation_config=config)[0, len(prompt) :].tolist()
    check_log_probs(module, requests, answers)
    return answers


@pytest.mark.fast("qwen2-window", "qwen3-moe", "qwen3", "gemma2", "gemma3", "llama", "phi3-longrope")
@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers(case):
    answers = check_greedy(model(case), PROMPTS)
    assert len({token for answer in answers for token in answer.token_ids}) > 5, "a model that repeats shows nothing"


@pytest.mark.parametrize("case", ["mistral", "gemma2"])
def test_rows_that_take_over_a_place_see_their_own_window(case):
    module = model(case)
    limits = [24, 3, 11, 24, 17]
    longest = max(len(prompt) + limit - 1 for prompt, limit in zip(PROMPTS, limits))
    room = 2 * longest * read_decoder(module).cache_bytes_per_token()
    requests = make_requests(PROMPTS, SamplingParams(24, (), seed=1), limits=limits)
    check_log_probs(module, requests, NativeRollout(module, cache_bytes=room).generate(requests))


def log_prob_gaps(module: torch.nn.Module, params: SamplingParams, autocast: bool = False) -> list[torch.Tensor]:
    """The differences of log-probs from one forward pass over each whole row, in bfloat16."""
    engine, gaps = NativeRollout(module, dtype=torch.bfloat16 if autocast else None), []
    for prompt, answer in zip(PROMPTS, engine.generate(make_requests(PROMPTS, params))):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = expected_log_probs(module, prompt, answer.token_ids)
        gaps.append((torch.tensor(answer.log_probs) - expected).abs())
    return gaps


@pytest.mark.parametrize(
    ("case", "sizes"), [("qwen3", {}), ("gemma3", {}), ("qwen3", {"num_hidden_layers": 1})], ids=str
)
def test_bfloat16_log_probs_are_near_the_forward_pass(case, sizes):
    gaps = log_prob_gaps(model(case, torch.bfloat16, **sizes), SamplingParams(16, (), temperature=0))
    assert max(gap.mean() for gap in gaps) < 0.05


def test_bfloat16_log_probs_of_models_of_usual_weights_are_within_a_thousandth():
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE, head_dim=16)).eval().bfloat16()
    assert torch.cat(log_prob_gaps(module, SamplingParams(24, ()))).mean() < 1e-3


def test_another_dtype_is_copied_by_each_call():
    module = model("qwen2")
    engine = NativeRollout(module, dtype=torch.float64)
    params = SamplingParams(8, (), temperature=0)
    same = NativeRollout(module.double()).generate(make_requests(PROMPTS, params))
    module.float()
    assert [a.token_ids for a in engine.generate(make_requests(PROMPTS, params))] == [a.token_ids for a in same]
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.randn(97, 32))
    assert [a.token_ids for a in engine.generate(make_requests(PROMPTS, params))] != [a.token_ids for a in same]


def test_dynamic_rotary_frequencies_are_refused_by_name():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE, rope_parameters=rope))
    with pytest.raises(ValueError, match="dynamic"):
        NativeRollout(module).generate(make_requests([[1]], SamplingParams(2, ())))


def test_longrope_is_refused_where_its_frequencies_change():
    with pytest.raises(ValueError, match=r"48 positions.*original_max_position_embeddings"):
        NativeRollout(model("phi3-longrope")).generate(make_requests([[1] * 40], SamplingParams(9, ())))


def test_a_wrapped_projection_runs_as_it_is():
    module = model("qwen2")
    module.model.layers[1].self_attn.v_proj = torch.nn.Sequential(module.model.layers[1].self_attn.v_proj)
    assert not NativeRollout(module).is_fused
    check_greedy(module, PROMPTS)


def test_products_in_bfloat16_round_where_autocast_does():
    """Over float32 parameters only products are narrow: with the sum of the layers in bfloat16 the gap is .008."""
    assert torch.cat(log_prob_gaps(model("gemma2"), SamplingParams(24, ()), autocast=True)).mean() < 4e-3
