"""Rows that are padded, models that are refused, and heads of their own; tests/models compares rows with each alone."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GraniteConfig, Lfm2Config

from tests.engines.ranks import SIZES, make_engine, run_on_ranks, save_model
from verl.engines.base import MicroBatching
from verl.engines.loading import log_padding
from verl.engines.micro_batch import plan_micro_batches
from verl.modeling.huggingface import read_config

SCALED = GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=3.0, tie_word_embeddings=False)


def test_a_padded_model_says_so_once_and_why(tmp_path, caplog):
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    path = save_model(config, tmp_path)
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
    path = save_model(SCALED, tmp_path)
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


def weights_on_rank(path: str) -> dict[str, torch.Tensor]:
    return dict(make_engine(path, sharded=True).weights())


@pytest.mark.slow
def test_two_processes_have_a_head_of_its_own_too(separate_head, tmp_path):
    expected = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert all(
        torch.equal(rank["lm_head.weight"], expected) for rank in run_on_ranks(2, weights_on_rank, separate_head)
    )
