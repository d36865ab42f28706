"""`verl export gguf`: files are read back by transformers, whose reader is written by others."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from typer.testing import CliRunner

from verl.cli.app import app

gguf = pytest.importorskip("gguf")

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=5000.0),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, head_dim=32),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),  # transformers reads no other head_dim from a file
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def make_tokenizer(split: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.train_from_iterator(["the sum of 12 and 30 is 42, don't they say"] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def write_model(folder, config, split=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are not all ones, and biases not zero
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    make_tokenizer(split or pre_tokenizers.ByteLevel(add_prefix_space=False)).save_pretrained(folder)
    return model.eval()


def export(*arguments) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", "gguf", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) * 13 % 300).logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_file_is_the_model(name, tmp_path):
    model = write_model(tmp_path / "model", CONFIGS[name])
    for kind in ("f32", "f16", "bf16", "q8_0"):
        status, text = export(tmp_path / "model", tmp_path / "out", "--type", kind)
        assert status == 0, text
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=f"model-{kind}.gguf", dtype="float32")
        if kind == "f32":
            torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-5)
        pairs = [(weight, read.get_parameter(key)) for key, weight in model.named_parameters()]
        assert all(torch.equal(before, after) for before, after in pairs if before.dim() == 1 or kind == "f32")
        errors = [(largest_error(before, kind) - (before - after).abs()).min() for before, after in pairs]
        assert min(errors) >= 0
        assert kind == "f32" or not all(torch.equal(before, after) for before, after in pairs)


def largest_error(weights, kind):
    """Half a unit in the last place; for q8_0, half of 1 / 127 of the block's largest, and the scale's own rounding."""
    if kind == "f32":
        return torch.zeros_like(weights)
    if kind == "q8_0" and weights.dim() > 1:
        largest = weights.reshape(-1, 32).abs().amax(-1, keepdim=True).expand(-1, 32).reshape(weights.shape)
        return largest * (0.5 / 127 + 2**-11 + 1e-6)
    return weights.abs() * {"f16": 2**-11, "bf16": 2**-8}.get(kind, 0) + 1e-7


def test_biases(tmp_path):
    """The rows of a query bias are in the order of llama.cpp: neighbours are rotated together."""
    write_model(tmp_path / "model", CONFIGS["llama-bias"])
    assert export(tmp_path / "model", tmp_path / "out", "--type", "f32")[0] == 0
    stored = {item.name: item.data for item in gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").tensors}
    bias = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.self_attn.q_proj.bias"].reshape(4, 32)
    for row in (0, 1, 15):  # rows i and i + 16 of a head of 32
        np.testing.assert_array_equal(stored["blk.1.attn_q.bias"].reshape(4, 32)[:, 2 * row], bias[:, row])
        np.testing.assert_array_equal(stored["blk.1.attn_q.bias"].reshape(4, 32)[:, 2 * row + 1], bias[:, row + 16])


def test_the_tokenizer_and_the_modelfile(tmp_path):
    write_model(tmp_path / "model", CONFIGS["llama"])
    assert export(tmp_path / "model", tmp_path / "out", "--type", "f16")[0] == 0
    before = AutoTokenizer.from_pretrained(tmp_path / "model")
    after = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model-f16.gguf")
    messages = [{"role": "user", "content": "the sum of 12\tand 30, don't; äöü 你好"}]
    text = before.apply_chat_template(messages, tokenize=False)
    assert after.apply_chat_template(messages, tokenize=False) == text
    assert after(text)["input_ids"] == before(text)["input_ids"] and after.eos_token == "<|im_end|>"
    fields = gguf.GGUFReader(tmp_path / "out" / "model-f16.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[:3] == [3, 3, 1] and types[-1] == 5  # control, control, normal; unused
    assert (tmp_path / "out" / "Modelfile").read_text() == (
        'FROM ./model-f16.gguf\nPARAMETER num_ctx 128\nPARAMETER stop "<|im_end|>"\n'
    )


def test_llama3_frequencies(tmp_path):
    """Divisors by hand: 1 for wavelengths below 8192 / 4, 8 above 8192, between them a mean weighted by frequency."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(**SIZES, rope_parameters=rope | {"original_max_position_embeddings": 8192})
    write_model(tmp_path / "model", config)
    assert export(tmp_path / "model", tmp_path / "out", "--type", "f32")[0] == 0
    stored = {item.name: item.data for item in gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").tensors}
    expected = []
    for index in range(8):
        wavelength = 2 * np.pi * 5e5 ** (index / 8)
        share = min(max((8192 / wavelength - 1) / 3, 0), 1)
        expected.append(1 / ((1 - share) / 8 + share))
    assert 1 in expected and 8 in expected
    np.testing.assert_allclose(stored["rope_freqs.weight"], expected, rtol=1e-5)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def test_pre_tokenizers(tmp_path):
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    rules = {"qwen2": split_by(QWEN2), "llama-bpe": split_by(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))}
    for name, split in {**rules, "smollm": pre_tokenizers.Sequence(digits)}.items():
        write_model(tmp_path / name, CONFIGS["llama"], split)
        assert export(tmp_path / name, tmp_path / "out")[0] == 0
        fields = gguf.GGUFReader(tmp_path / "out" / "model-f16.gguf").fields
        assert fields["tokenizer.ggml.pre"].contents() == name
    write_model(tmp_path / "other", CONFIGS["llama"], split_by(r"\w+"))
    status, text = export(tmp_path / "other", tmp_path / "out")
    assert status == 1 and "--pre-tokenizer" in text
    assert export(tmp_path / "other", tmp_path / "out", "--pre-tokenizer", "gpt-2")[0] == 0


def test_refusals(tmp_path):
    write_model(tmp_path / "model", CONFIGS["qwen2"])
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for change, arguments, message in (
        ({}, ("--type", "q4_k"), "--type q4_k"),
        ({"model_type": "gpt2"}, (), "expected one of llama"),
        ({"rope_parameters": yarn}, (), "rope_type 'yarn'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (), "sliding-window"),
        ({"vocab_size": 40}, (), "only 40 embeddings"),
    ):
        path.write_text(json.dumps(config | change))
        status, text = export(tmp_path / "model", tmp_path / "out", *arguments)
        assert status == 1 and message in text, text
    assert [*(tmp_path / "out").glob("*")] == []
    status, text = export(tmp_path, tmp_path / "out")
    assert status == 1 and "expected a checkpoint" in text
