"""Rows of every kind of layer: their log-probs and gradients do not depend on what else is in the forward pass."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    Qwen3NextConfig,
    RobertaConfig,
    StableLmConfig,
)

from tests.engines.ranks import SIZES, make_engine, run_on_ranks, save_model
from verl.config.schema import OptimConfig
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, Objective
from verl.engines.loading import log_padding
from verl.engines.micro_batch import plan_micro_batches
from verl.modeling.huggingface import read_config
from verl.protocol import DataProto

SMALL = {**SIZES, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
#: kind of layer -> (whether rows are packed, config)
KINDS = {
    "gated delta net, shared expert": (
        False,
        Qwen3NextConfig(
            **SMALL,
            **EXPERTS,
            **LINEAR,
            shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "state space": (False, MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "short convolution": (
        False,
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    ),
    "chunks": (
        False,
        Llama4TextConfig(
            **SMALL,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=4,
            layer_types=["chunked_attention", "full_attention"],
        ),
    ),
    "ALiBi": (False, MptConfig(vocab_size=32, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)),
    "positions from the ids": (
        False,
        RobertaConfig(**SIZES, is_decoder=True, pad_token_id=0, hidden_dropout_prob=0.1),
    ),
    "packing not passed on": (False, StableLmConfig(**SIZES)),
    "sinks, windows": (
        True,
        GptOssConfig(
            **SMALL,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "scaled logits": (
        True,
        GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=3.0, tie_word_embeddings=False),
    ),
    "scaled logits, tied": (True, CohereConfig(**SIZES, logit_scale=0.25)),
    "learned positions": (True, OPTConfig(**(SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}))),
}
PROMPTS = [[1, 2, 3, 4, 5, 6]] * 3 + [[7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
RESPONSES = [[3, 4, 5, 6, 7], [8], [20, 21, 22, 23, 24, 25, 26], [9, 10, 11], [12, 13]]
NO_UPDATE = OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9)


def make_batch() -> DataProto:
    return DataProto.from_dict(build_sequences(PROMPTS, RESPONSES, pad_token_id=0))


def alone(path: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each response by a forward pass of transformers over its row, and the gradient of their sum."""
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    log_probs = []
    for prompt, response in zip(PROMPTS, RESPONSES):
        logits = module(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs.append(logits.log_softmax(-1)[range(len(response)), response])
    torch.cat(log_probs).sum().backward()
    return log_probs, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def gradients(engine) -> dict[str, torch.Tensor]:
    """The gradient of the sum of all log-probs."""
    collected = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: collected.update(
            {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}
        )
    )
    objective = Objective(lambda outputs, _: (outputs["log_probs"].sum(), {}))
    engine.train_batch(make_batch(), objective, MicroBatching(rows=3))
    return collected


@pytest.mark.parametrize("kind", KINDS)
def test_rows_together_are_the_rows_alone(kind, tmp_path, caplog):
    packs, config = KINDS[kind]
    path = save_model(config, tmp_path)
    expected, expected_gradients = alone(path)
    for setting in (True, False) if packs else (True,):
        engine = make_engine(path, NO_UPDATE, use_remove_padding=setting)
        assert engine.packs == (packs and setting)
        for micro in (MicroBatching(), MicroBatching(rows=2), MicroBatching(tokens=20)):
            computed = engine.infer(make_batch(), ("log_probs",), micro)["log_probs"]
            for row, values in enumerate(expected):
                assert torch.allclose(computed[row, : len(values)], values, atol=2e-5), (row, micro)
        for name, gradient in gradients(engine).items():
            scale = expected_gradients[name].abs().max() + 1e-3
            assert (gradient - expected_gradients[name]).abs().max() < 1e-4 * scale, name


def test_a_padded_model_says_so_once_and_why(tmp_path, caplog):
    path = save_model(KINDS["short convolution"][1], tmp_path)
    log_padding.cache_clear()
    with caplog.at_level(logging.INFO, "verl.engines"):
        make_engine(path), make_engine(path)
    (line,) = [line for line in caplog.messages if "padded" in line]
    assert line.startswith("Lfm2ForCausalLM: rows are padded") and line.endswith("it has layers of the types conv")


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    path = save_model(BertConfig(**SIZES, is_decoder=False, pad_token_id=0), tmp_path)
    with pytest.raises(ValueError, match=r"BertLMHeadModel: padded rows get other logits.*it is not causal"):
        make_engine(path)


def test_padding_counts_in_the_budget_and_rows_of_similar_length_share_a_micro_batch():
    lengths = [3, 10, 4, 9, 2]
    chunks = plan_micro_batches(lengths, MicroBatching(tokens=20), padded=True)
    assert chunks == [[1, 3], [0, 2, 4]]  # 2 x 10 and 3 x 4 tokens
    assert plan_micro_batches(lengths, MicroBatching(rows=2), padded=True) == [[1, 3], [0, 2], [4]]
    with pytest.raises(ValueError, match="row 1 has 10 tokens"):
        plan_micro_batches(lengths, MicroBatching(tokens=9), padded=True)


# ---- a head of its own in the files of a model whose config ties it -------------------------------------------------


@pytest.fixture
def separate_head(tmp_path) -> str:
    """A model with a head of its own, and a config that says that it is the embedding."""
    path = save_model(KINDS["scaled logits"][1], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return path


def test_a_head_of_its_own_is_not_tied(separate_head, tmp_path):
    assert read_config(separate_head, {}).tie_word_embeddings is False
    engine = make_engine(separate_head)
    head = engine.module.lm_head.weight
    assert torch.equal(head, load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    engine.save(tmp_path / "saved", ("model",))
    assert json.loads((tmp_path / "saved/huggingface/config.json").read_text())["tie_word_embeddings"] is False
    assert read_config(separate_head, {"tie_word_embeddings": True}).tie_word_embeddings is True


def test_a_copy_of_the_embedding_is_tied(separate_head, tmp_path):
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_config(separate_head, {}).tie_word_embeddings is True
    module = make_engine(separate_head).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


# ---- two processes --------------------------------------------------------------------------------------------------


def _on_ranks(paths: list[str]) -> list[tuple[torch.Tensor, float]]:
    results = []
    for path in paths:
        engine = make_engine(path, NO_UPDATE, sharded=True)
        log_probs = engine.infer(make_batch(), ("log_probs",), MicroBatching(rows=2))["log_probs"]
        objective = Objective(lambda outputs, _: (outputs["log_probs"].sum() / 2, {}))  # both ranks have all rows
        results.append((log_probs, engine.train_batch(make_batch(), objective, MicroBatching(rows=3))["grad_norm"]))
    return results


@pytest.mark.slow
def test_two_processes_are_one(separate_head, tmp_path):
    kinds = ("gated delta net, shared expert", "state space", "sinks, windows", "positions from the ids")
    paths = [separate_head] + [save_model(KINDS[kind][1], tmp_path / kind) for kind in kinds]
    ranks = run_on_ranks(2, _on_ranks, paths)
    for path, *results in zip(paths, *ranks):
        engine = make_engine(path, NO_UPDATE)
        expected = engine.infer(make_batch(), ("log_probs",), MicroBatching(rows=2))["log_probs"]
        objective = Objective(lambda outputs, _: (outputs["log_probs"].sum(), {}))
        norm = engine.train_batch(make_batch(), objective, MicroBatching(rows=3))["grad_norm"]
        for log_probs, sharded_norm in results:
            assert torch.allclose(log_probs, expected, atol=2e-5)
            assert sharded_norm == pytest.approx(norm, rel=1e-4)
