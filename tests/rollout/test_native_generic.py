"""Models without fused layers generate with their own modules over the cache of the native engine."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.rollout.mixtures import check_experts
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.factory import check_model
from verl.rollout.native.generic import attention
from verl.rollout.native.generic.layers import _clamp_steps
from verl.rollout.native.generic.model import ModuleDecoder
from verl.rollout.request import SamplingParams, make_requests

BOUND = 2e-5
SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
DELTA |= dict(head_dim=8, layer_types=[LINEAR, FULL])
MIXTURE = dict(num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1)
LATENT = dict(kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
MAMBA2 = dict(state_size=8, chunk_size=8)
#: model type -> what differs from SHAPE
CASES = {
    "qwen3_next": DELTA | MIXTURE | dict(num_experts=4, shared_expert_intermediate_size=24),
    "qwen3_5_text": DELTA,
    "deepseek_v3": MIXTURE | LATENT | dict(num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1),
    "gpt_oss": dict(
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, layer_types=[SLIDING, FULL]
    ),
    "glm4_moe": MIXTURE | dict(head_dim=8, n_routed_experts=4, n_shared_experts=1),
    # half of the layers read the keys of earlier ones
    "gemma4_text": dict(head_dim=8, global_head_dim=16, sliding_window=6, layer_types=[SLIDING, FULL] * 2)
    | dict(num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97),
    "llama4_text": dict(head_dim=8, attention_chunk_size=6, num_local_experts=4, intermediate_size_mlp=48),
    "olmo3": dict(sliding_window=6, layer_types=[SLIDING, FULL]),
    "smollm3": dict(no_rope_layer_interval=2),
    "mamba2": MAMBA2 | dict(num_heads=8, head_dim=8, n_groups=2),
    "lfm2": dict(layer_types=["conv", FULL]),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, head_dim=8)
    | dict(mamba_chunk_size=8),
    "granite": dict(logits_scaling=8.0, residual_multiplier=0.5, embedding_multiplier=4.0),
    "gpt2": {},
    # step sizes have a lower limit
    "nemotron_h": dict(layers_block_type=["linear_attention", "full_attention"], head_dim=8, mamba_num_heads=8)
    | dict(mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8, time_step_min=0.5),
    # repeats its cached values before attention
    "diffllama": {},
}
STATES = ("qwen3_next", "mamba2", "lfm2", "falcon_h1")
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [40], [5, 6, 7], [61, 62, 63, 64], [9, 8, 7, 6]]
LIMITS = [24, 3, 11, 24, 17, 20]


def model(kind: str, dtype=torch.float32, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | CASES.get(kind, {}) | sizes)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype)
    with torch.no_grad():  # large enough for a wrong position, window or state to show
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() > 1 and parameter.std() < 0.1:
                parameter.copy_(noise * 0.2)
            else:
                parameter.add_(noise * 0.1)
    return module


def requests(**params) -> list:
    return make_requests(PROMPTS, SamplingParams(24, (), **params), limits=LIMITS)


@torch.no_grad()
def largest_difference(module: torch.nn.Module, sent: list, completions: list) -> float:
    """Of the log-probs, from one forward pass over each whole row without a cache."""
    largest = 0.0
    for request, completion in zip(sent, completions, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        logits = module(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        largest = max(largest, float((expected - torch.tensor(completion.log_probs)).abs().max()))
    return largest


@pytest.mark.parametrize("kind", CASES)
def test_log_probs_equal_the_forward_pass(kind):
    # three slots for six rows: rows move, and slots are reused
    module, sent = model(kind), requests(seed=1)
    engine = NativeRollout(module, max_rows=3)
    assert not engine.is_fused
    completions = engine.generate(sent)
    assert [len(completion.token_ids) for completion in completions] == LIMITS
    assert largest_difference(module, sent, completions) < BOUND
    assert len({token for completion in completions for token in completion.token_ids}) > 10


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text", "gpt2"])
def test_greedy_tokens_are_those_of_transformers(kind):
    module = model(kind)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    for prompt, completion in zip(PROMPTS, NativeRollout(module).generate(requests(temperature=0))):
        expected = module.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        assert completion.token_ids == expected[: len(completion.token_ids)]


@pytest.mark.fast("falcon_h1", "deepseek_v3")
@pytest.mark.parametrize("kind", [*STATES, "deepseek_v3"])
def test_requests_that_arrive_later_share_the_batch(kind):
    module, sent = model(kind), requests(seed=1)
    engine = NativeRollout(module, max_rows=3, max_length=64)

    async def one(index: int, request):
        for _ in range(3 * index):
            await asyncio.sleep(0)
        return await engine.generate_one(request)

    async def main():
        return await asyncio.gather(*(one(i, request) for i, request in enumerate(sent)))

    completions = asyncio.run(main())
    assert largest_difference(module, sent, completions) < BOUND
    assert [c.token_ids for c in completions] == [c.token_ids for c in NativeRollout(module).generate(sent)]


@pytest.mark.fast("qwen3_next", "mamba2")
@pytest.mark.parametrize("kind", STATES)
def test_a_reused_slot_starts_from_its_own_state(kind):
    module, sent = model(kind), requests(seed=1)
    engine = NativeRollout(module, max_rows=1)
    alone = [NativeRollout(module).generate([request])[0] for request in sent]
    assert [c.token_ids for c in engine.generate(sent)] == [c.token_ids for c in alone]


def test_the_parameters_are_shared_and_the_module_is_left_as_it_was():
    module, sent = model("glm4_moe"), requests(seed=1)
    module.train()
    engine = NativeRollout(module)
    before = engine.generate(sent)
    assert engine.decoder.module is module and module.training and module.config._attn_implementation == "eager"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
    after = engine.generate(sent)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert largest_difference(module.eval(), sent, after) < BOUND
    engine.sleep()
    assert [c.token_ids for c in engine.generate(sent)] == [c.token_ids for c in after]


@pytest.mark.slow
def test_another_dtype_is_copied_by_each_call():
    module, sent = model("falcon_h1"), requests(temperature=0)
    engine = NativeRollout(module, dtype=torch.float64)
    for scale in (1.0, 0.8):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(scale)
        same = NativeRollout(model("falcon_h1", torch.float64))
        same.module.load_state_dict(module.state_dict())
        assert [c.token_ids for c in engine.generate(sent)] == [c.token_ids for c in same.generate(sent)]
    assert module.dtype == torch.float32


def test_choices_of_the_routers_are_those_of_the_model():
    module = model("qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    sent = requests(seed=1)
    check_experts(module, sent, NativeRollout(module, records=True).generate(sent))


def test_the_cache_has_the_real_sizes():
    decoder = NativeRollout(model("deepseek_v3")).read()
    assert decoder.cache_bytes_per_token() == 2 * (16 + 4) * 4, "latents and rotated keys of two layers"
    decoder = NativeRollout(model("gemma4_text")).read()
    assert decoder.cache_bytes_per_token() == 2 * 2 * (8 + 16) * 4, "two layers own keys, with 2 heads of 8 and of 16"
    decoder = NativeRollout(model("mamba2")).read()
    assert decoder.cache_bytes_per_token() == 0
    assert decoder.cache_bytes_per_row == 2 * 4 * (8 * 8 * 8 + (64 + 2 * 2 * 8) * 4), "states and convolution inputs"


@pytest.mark.slow
def test_a_small_cache_runs_fewer_rows_at_once():
    module, sent = model("falcon_h1"), requests(seed=1)
    decoder = NativeRollout(module).read()
    row = decoder.cache_bytes_per_row + 40 * decoder.cache_bytes_per_token()
    engine = NativeRollout(module, cache_bytes=2 * row)
    assert largest_difference(module, sent, engine.generate(sent)) < BOUND
    with pytest.raises(ValueError, match=r"the KV cache has 1,000 bytes, but one row of \d+ tokens needs"):
        NativeRollout(module, cache_bytes=1000).generate(sent)


def test_prompts_of_a_model_with_states_are_computed_with_those_of_their_length():
    """Padding would change a state."""
    decoder = SimpleNamespace(layout=SimpleNamespace(has_states=True))
    assert [*ModuleDecoder._batches(decoder, [2, 3, 2, 5, 3])] == [[3], [1, 4], [0, 2]]


def test_attention_of_some_queries_at_a_time(monkeypatch):
    """Two query heads of a key head; with a softcap, which is too large to matter, it is not torch's function."""
    query, key, value = (torch.randn(3, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    options = attention.Scores(scaling=0.3, softcap=1e9)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    for scores in (1, 2 * 3 * 4 * 5, 1 << 20):  # one query, two, or all of them
        monkeypatch.setattr(attention, "_SCORES", scores)
        torch.testing.assert_close(attention.causal_attention(query, key, value, None, options), expected)


@pytest.mark.parametrize(
    ("kind", "reason"),
    {
        "bloom": "does not use transformers' AttentionInterface",
        "minimax": "a separate cache",
        "deepseek_v32": "cache more than keys and values",
        "bert": "bidirectional",
        "rwkv": "takes no cache",
        "bart": "takes no position_ids",
        "doge": "change the attention mask or add a position bias",
        "recurrent_gemma": "keep their states themselves",
    }.items(),
)
def test_refused_by_name_before_loading(kind, reason):
    config = AutoConfig.for_model(kind)
    name = AutoModelForCausalLM._model_mapping[type(config)].__name__
    with pytest.raises(ValueError, match=f"rollout.name=native does not support {name}: .*{reason}.*rollout.name=hf"):
        check_model([name], config.to_dict(), 1, False)


def test_settings_that_need_fused_layers_are_refused_by_name():
    sizes = AutoConfig.for_model("olmo3").to_dict()
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2 is not supported for Olmo3ForCausalLM"):
        check_model(["Olmo3ForCausalLM"], sizes, 2, False)
    with pytest.raises(ValueError, match=r"rollout.deterministic is not supported for Olmo3ForCausalLM"):
        check_model(["Olmo3ForCausalLM"], sizes, 1, True)
    with pytest.raises(ValueError, match=r"rollout.deterministic is not supported for Olmo3ForCausalLM"):
        NativeRollout(model("olmo3"), forward=object())
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM: its layers keep their states themselves"):
        NativeRollout(model("recurrent_gemma", num_hidden_layers=3, lru_width=32)).read()


@pytest.mark.parametrize("limit", [(0.0, 0.1), (0.01, math.inf), (0.01, 0.1)])
def test_step_sizes_have_limits(limit):
    """They are softplus(column + bias) of the last columns of a projection."""
    bias, columns = torch.tensor([0.5, -1.0]), torch.linspace(-9, 9, 40).reshape(1, 10, 4)
    module = SimpleNamespace(time_step_limit=limit, dt_bias=bias)
    found, softplus = _clamp_steps(module, None, (), columns), torch.nn.functional.softplus
    assert torch.equal(found[..., :2], columns[..., :2])
    torch.testing.assert_close(softplus(found[..., 2:] + bias), softplus(columns[..., 2:] + bias).clamp(*limit))
