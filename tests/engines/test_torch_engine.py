"""The engine on one device: its log-probs, and a gradient that does not depend on the micro-batches."""

import copy
import re
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    dynamic_module_utils,
)

from tests.engines.ranks import FLOAT64, SIZES, make_engine, objective_of, save_model, train
from verl.config.schema import ModelConfig, OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, Objective
from verl.engines.checkpoint import load_weights
from verl.engines.loading import ModelSpec
from verl.modeling import log_probs
from verl.protocol import DataProto

SMALL = {**SIZES, "head_dim": 8}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=4),
    "gemma2": Gemma2Config(**SMALL, sliding_window=4, query_pre_attn_scalar=8),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], [3, 3, 3, 3]]
WHOLE = MicroBatching()
RESPONSES = [[3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13], [14, 15], [2]]


def make_batch() -> DataProto:
    columns = build_sequences(PROMPTS, RESPONSES, pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    shape = columns["responses"].shape
    names = ("old_log_probs", "advantages", "ref_log_prob", "values", "returns")
    noise = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in names}
    noise["old_log_probs"] = noise["old_log_probs"] * 0.1 - 3.4
    noise["ref_log_prob"] = noise["ref_log_prob"] * 0.1 - 3.4
    return DataProto.from_dict(columns | noise)


def expected_log_probs(path: str, temperature: float) -> torch.Tensor:
    """Row by row, one token after another, with the model's own logits and nothing of ours."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    found = torch.zeros(len(PROMPTS), max(map(len, RESPONSES)), dtype=torch.float64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        logits = model(torch.tensor([prompt + response])).logits[0].detach().double() / temperature
        for t, token in enumerate(response):
            found[row, t] = logits[len(prompt) + t - 1].log_softmax(-1)[token]
    return found


@pytest.mark.fast("True-qwen2", "False-qwen3", "True-gemma2", "False-mistral", "False-llama")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_equal_the_model_row_by_row(family, packed, tmp_path):
    path = save_model(FAMILIES[family], tmp_path)
    engine = make_engine(path, use_remove_padding=packed)
    for micro in (MicroBatching(), MicroBatching(rows=2), MicroBatching(tokens=9)):
        found = engine.infer(make_batch(), ("log_probs",), micro, temperature=0.7)["log_probs"]
        assert torch.allclose(found.double(), expected_log_probs(path, 0.7), atol=2e-5)


def test_rows_of_a_prompt_compute_it_once_if_they_are_packed(tmp_path):
    """4 rows of 2 tokens after a prompt of 8: 16 tokens fit into the budget, or padded one row of 10."""
    path = save_model(FAMILIES["llama"], tmp_path)
    batch = DataProto.from_dict(build_sequences([list(range(1, 9))] * 4, [[9, n] for n in range(4)], pad_token_id=0))
    for packed, expected in ((True, [(1, 16)]), (False, [(1, 10)] * 4)):
        engine, found = make_engine(path, use_remove_padding=packed), []
        engine.model.register_forward_pre_hook(lambda _, args, found=found: found.append(args[0].input_ids.shape))
        engine.infer(batch, ("log_probs",), MicroBatching(tokens=16))
        assert found == expected


def test_entropy_and_sum_pi_squared_by_definition(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    found = make_engine(path).infer(make_batch(), ("entropys", "sum_pi_squared"), MicroBatching(rows=3))
    model = AutoModelForCausalLM.from_pretrained(path)
    probs = model(torch.tensor([PROMPTS[0] + RESPONSES[0]])).logits[0].detach().double().softmax(-1)
    for t in range(len(RESPONSES[0])):
        p = probs[len(PROMPTS[0]) + t - 1]
        assert found["entropys"][0, t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)
        assert found["sum_pi_squared"][0, t].item() == pytest.approx((p * p).sum().item(), abs=1e-5)
    assert found["entropys"][1, 1:].abs().sum() == 0  # padding


def gradients(
    path: str, micro: MicroBatching = WHOLE, *, kind: str = "causal_lm", mode: str = "token-mean", clip=1e9, **keys: Any
) -> dict[str, torch.Tensor]:
    """Parameters after one step of plain descent direction: AdamW is replaced by SGD, so the step is the gradient."""
    engine = make_engine(path, OptimConfig(clip_grad=clip), kind=kind, **FLOAT64, **keys)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    before = copy.deepcopy(engine.module.state_dict())
    batch = make_batch()
    engine.train_batch(batch, objective_of(engine, batch, mode, scale_factor=6.0), micro)
    return {name: before[name] - value for name, value in engine.module.state_dict().items()}


@pytest.mark.fast("causal_lm-seq-mean-token-sum-norm", "value-token-mean")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_the_gradient_does_not_depend_on_the_cut_the_padding_or_recomputation(mode, kind, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path, kind)
    whole = gradients(path, kind=kind, mode=mode)
    assert max(g.abs().max().item() for g in whole.values()) > 1e-3
    for keys in ({}, {"use_remove_padding": False}, {"enable_gradient_checkpointing": True}):
        for micro in (MicroBatching(rows=1), MicroBatching(rows=3), WHOLE, MicroBatching(tokens=11)):
            cut = gradients(path, micro, kind=kind, mode=mode, **keys)
            for name in whole:
                assert torch.allclose(whole[name], cut[name], rtol=1e-6, atol=1e-9), (keys, micro, name)


def test_a_gradient_is_scaled_to_the_largest_norm(tmp_path):
    """AdamW would hide it: its first step hardly depends on the scale."""
    path = save_model(FAMILIES["llama"], tmp_path)
    whole = gradients(path)
    norm = sum(float(gradient.square().sum()) for gradient in whole.values()) ** 0.5
    for share in (0.25, 4.0):
        clipped = gradients(path, clip=share * norm)
        for name, gradient in whole.items():
            torch.testing.assert_close(clipped[name], min(share, 1.0) * gradient, rtol=1e-4, atol=1e-12)


def test_metrics_do_not_depend_on_the_cut_either(tmp_path):
    path, found = save_model(FAMILIES["llama"], tmp_path), []
    for micro in (MicroBatching(), MicroBatching(rows=2), MicroBatching(tokens=9)):
        metrics = train(make_engine(path, OptimConfig()), make_batch(), micro, steps=1)
        found.append({k: v[0] / v[1] if isinstance(v, tuple) else v for k, v in metrics.items()})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kept", [0, 2**29], ids=["recomputed", "kept"])
def test_chunked_log_probs_have_the_gradient_of_whole_ones(kept, tmp_path, monkeypatch):
    path = save_model(FAMILIES["qwen2"], tmp_path)
    whole = gradients(path)
    monkeypatch.setitem(log_probs.CHUNK_ELEMENTS, "cpu", 3 * 32)
    monkeypatch.setattr(log_probs, "KEPT_BYTES", kept)
    cut = gradients(path)
    assert all(torch.allclose(whole[name], cut[name], rtol=1e-9, atol=1e-12) for name in whole)


def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so(tmp_path, caplog):
    path = save_model(FAMILIES["llama"], tmp_path)
    engine = make_engine(path, OptimConfig(lr=0.1))
    before = copy.deepcopy(engine.module.state_dict())
    batch = make_batch()
    batch.batch["advantages"][0, 0] = float("inf")
    assert train(engine, batch, MicroBatching(), steps=1)["grad_skipped"] == 1.0
    assert "skipping this update" in caplog.text
    caplog.clear()
    batch.batch["advantages"][0, 0] = 1e30  # the squares of the gradient are too large for float32, not the loss
    for micro in (MicroBatching(), MicroBatching(rows=2)):
        assert train(engine, batch, micro, steps=1)["grad_skipped"] == 1.0
    one, several = (float(re.search(r"the loss (\S+):", line)[1]) for line in caplog.messages)
    assert several == pytest.approx(one, rel=1e-5) and abs(one) > 1e25
    assert all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_model(FAMILIES["llama"], tmp_path / "a")
    other = LlamaConfig(**{**SMALL, "hidden_size": 16})
    module = AutoModelForCausalLM.from_config(other)
    with pytest.raises(ValueError, match="a different model"):
        load_weights(module, tmp_path / "a")
    with pytest.raises(ValueError, match="no weights"):
        load_weights(module, tmp_path)


def test_what_a_model_does_to_its_logits_afterwards_is_in_the_log_probs(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    original = model.forward

    def scaled(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled
    engine = make_engine(path, use_remove_padding=False, module=model)
    found = engine.infer(make_batch(), ("log_probs",), MicroBatching(), temperature=0.7)["log_probs"]
    assert torch.allclose(found.double(), expected_log_probs(path, 1.4), atol=2e-5)


def test_a_critic_from_a_language_model_starts_with_values_of_zero(tmp_path):
    path = save_model(FAMILIES["qwen2"], tmp_path)
    engine = make_engine(path, OptimConfig(), kind="value")
    assert engine.infer(make_batch(), ("values",), MicroBatching())["values"].abs().max() == 0


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL),
        GPTNeoXConfig(**SIZES),  # its head is called `classifier`, as those of the next two
        GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=2, n_head=4, n_positions=64),
        BloomConfig(vocab_size=SIZES["vocab_size"], hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=lambda config: config.model_type,
)
def test_a_critic_computes_the_values_of_its_model(config, tmp_path):
    """Saved and loaded again, too: the head keeps its name and its weights."""
    path = save_model(config, tmp_path / "model", "value")
    engine = make_engine(path, OptimConfig(), kind="value")
    engine.save(tmp_path / "saved", ("hf_model",))
    other = make_engine(tmp_path / "saved" / "huggingface", OptimConfig(), kind="value")
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1).eval()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        expected = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, 0]
        for each in (engine, other):
            found = each.infer(make_batch(), ("values",), MicroBatching())["values"][row, : len(response)]
            torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)


def test_a_folder_that_does_not_exist_is_no_model(tmp_path):
    with pytest.raises(ValueError, match="no HuggingFace model"):
        make_engine(tmp_path / "nowhere")


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}')
    code = "from transformers import PretrainedConfig\nclass MineConfig(PretrainedConfig):\n    model_type = 'mine'\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = {"path": str(tmp_path)}
    trusted = ModelSpec(ModelConfig(**given, trust_remote_code=True))
    assert type(trusted.hf_config).__name__ == "MineConfig"
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.trust_remote_code=true"):
        _ = ModelSpec(ModelConfig(**given)).hf_config


def test_a_metric_that_is_a_number_is_weighted_by_the_rows_of_its_micro_batch(tmp_path):
    """5 rows as 2 + 2 + 1: the mean over the rows of the number of rows beside them is 9 / 5, not 5 / 3."""
    engine = make_engine(save_model(FAMILIES["llama"], tmp_path), OptimConfig())
    objective = Objective(lambda outputs, columns: (outputs["log_probs"].sum(), {"rows": len(columns["responses"])}))
    total, count = engine.train_batch(make_batch(), objective, MicroBatching(rows=2))["rows"]
    assert total / count == 9 / 5


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_losses_get_float32_and_those_of_float64_models_are_not_rounded(dtype, kind, tmp_path):
    path, dtypes = save_model(FAMILIES["qwen2"], tmp_path), set()
    engine = make_engine(path, kind=kind, model_dtype=dtype, dtype=dtype)
    engine.model.register_forward_hook(lambda model, args, outputs: dtypes.update(v.dtype for v in outputs.values()))
    engine.infer(make_batch(), ("log_probs",) if kind == "causal_lm" else ("values",), MicroBatching())
    assert dtypes == {torch.float64 if dtype == "fp64" else torch.float32}


def test_bf16_computes_in_bf16_and_keeps_float32_masters(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    engine = make_engine(path, OptimConfig(), dtype="bf16")
    assert all(p.dtype == torch.float32 for _, p in engine.weights())
    found = engine.infer(make_batch(), ("log_probs",), MicroBatching())["log_probs"].double()
    exact = expected_log_probs(path, 1.0)
    gap = (found - exact).abs()[make_batch().batch["response_mask"].bool()]
    assert 1e-5 < gap.max() < 0.5


def test_further_arguments_reach_the_optimizer_and_unknown_ones_are_refused(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    engine = make_engine(path, OptimConfig(override_optimizer_config={"amsgrad": True, "eps": 1e-5}))
    (group,) = engine.optimizer.param_groups
    assert (group["amsgrad"], group["eps"]) == (True, 1e-5)
    for name in ("momentum", "lr"):
        with pytest.raises(
            ValueError, match=rf"override_optimizer_config: \['{name}'\] .*expected some of \['amsgrad'"
        ):
            make_engine(path, OptimConfig(override_optimizer_config={name: 0.9}))
