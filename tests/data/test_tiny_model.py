"""Tiny models: sizes, the same weights for a seed, tokenizers that come back as they were made."""

import logging
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.data.tokenization import check_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "make_tiny_model.py"


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_family_loads_and_generates(tiny, tmp_path, kind):
    start = time.perf_counter()
    folder = tiny.tiny_model(kind, tmp_path / kind, seed=1)
    assert time.perf_counter() - start < 20
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == kind and model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    prompt = torch.tensor([tokenizer("abc=")["input_ids"]])
    made = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert made.shape[1] <= prompt.shape[1] + 3


def test_parameter_counts_by_hand(tiny, tmp_path):
    def count(folder):
        return AutoModelForCausalLM.from_pretrained(folder).num_parameters()

    # embeddings and head; per layer 4 attention matrices, 3 of the feed-forward part and 2 norms; a norm at the end
    tiny_size = 2 * 32 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 64
    mini_size = 2 * 32 * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96
    assert count(tiny.tiny_model("llama", tmp_path / "tiny")) == tiny_size == 103_232
    assert count(tiny.tiny_model("llama", tmp_path / "mini", size="mini")) == mini_size == 338_592


def test_the_same_seed_writes_the_same_files(tiny, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny.tiny_model("qwen2", tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random stream is left alone
    for file in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_tokenizer_that_the_family_would_replace_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"AutoTokenizer does not reload"):
        tiny.tiny_model("qwen2", tmp_path / "q", tokenizer="char")
    loaded = AutoTokenizer.from_pretrained(tiny.tiny_model("llama", tmp_path / "l", tokenizer="bpe"))
    check_tokenizer(loaded, ["Any  text,\n\tcafé €5"])


def test_a_tokenizer_trained_on_given_texts_is_shorter_on_them(tiny):
    text = "zyxwv qponm " * 40
    own, builtin = tiny.bpe_tokenizer([text] * 3), tiny.bpe_tokenizer()
    assert len(own(text)["input_ids"]) < len(builtin(text)["input_ids"]) / 3


def test_unknown_names(tiny, tmp_path):
    with pytest.raises(ValueError, match="no model family is called 'lama': did you mean 'llama'"):
        tiny.tiny_model("lama", tmp_path)
    with pytest.raises(ValueError, match="no size is called 'tny': did you mean 'tiny'"):
        tiny.tiny_model("llama", tmp_path, size="tny")
    with pytest.raises(ValueError, match="no tokenizer is called 'word'"):
        tiny.tiny_model("llama", tmp_path, tokenizer="word")


def test_the_command(tmp_path, monkeypatch, caplog):
    text = tmp_path / "text.txt"
    text.write_text("one line\nanother line\n")
    arguments = ["--like", "qwen2", "--out", str(tmp_path / "m"), "--seed", "2", "--text", str(text)]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with caplog.at_level(logging.INFO):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "a qwen2 of" in caplog.text and (tmp_path / "m" / "model.safetensors").is_file()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path / "m"), "--text", str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit, match=r"make_tiny_model: .*none\.txt"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
