"""Configs and weights of HuggingFace models are read strictly: nothing is silently random, dropped or ignored."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
)

from tests.engines.ranks import SIZES, save_model
from verl.modeling.huggingface import load_pretrained, read_config


@pytest.fixture
def path(tmp_path) -> str:
    return save_model(LlamaConfig(**SIZES), tmp_path)


def load(path, auto=AutoModelForCausalLM, new_prefix=None, **overrides):
    config = read_config(str(path), overrides)
    if auto is not AutoModelForCausalLM:
        config.num_labels = 1
    return load_pretrained(auto, str(path), config, torch.float32, new_prefix)


def add(path, **tensors):
    """Add weights to the files; `__` in a name stands for a dot."""
    weights = load_file(f"{path}/model.safetensors")
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"hidden_size": "abc"}, "override_config.hidden_size: LlamaConfig rejects 'abc': .*expected int"),
        ({"hidden_act": "silo"}, "override_config.hidden_act: there is no activation 'silo': did you mean 'silu'?"),
        ({"attn_implementation": "sdpa"}, "attention over packed sequences has its own kernels: remove the key"),
        ({"dtype": "int8"}, "override_config.dtype: not supported: use model_dtype"),
        ({"torch_dtype": "float64"}, "override_config.torch_dtype: not supported: use model_dtype"),
        ({"model_type": "qwen2"}, "override_config.model_type: not supported: the architecture is that of the files"),
        ({"num_hidden_layers": 1}, r"does not use: \[model.layers.1.*and 4 more.* override_config.num_hidden_layers"),
        ({"num_hidden_layers": 3}, r"lacks weights of LlamaForCausalLM.*missing \[model.layers.2"),
        ({"vocab_size": 5}, r"another shape \[lm_head.weight \(files: \[32, 32\], model: \[5, 32\]\), model.embed_tok"),
    ],
)
def test_an_override_that_is_rejected_without_effect_or_does_not_fit_the_weights(path, override, message):
    with pytest.raises(ValueError, match=message):
        load(path, **override)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp__layers__0__weight", r"\[mtp.layers.0.weight\].*multi-token prediction, remove them from the files"),
        ("lm_head__bias", r"does not use: \[lm_head.bias\]"),  # of a head that the model has
    ],
)
def test_weights_that_the_model_does_not_use_are_refused(path, name, message):
    add(path, **{name: torch.zeros(32)})
    with pytest.raises(ValueError, match=message):
        load(path)


def test_constants_of_older_files_are_skipped(path):
    add(
        path,
        model__rotary_emb__inv_freq=torch.ones(4),
        model__layers__0__self_attn__rotary_emb__cos_cached=torch.ones(4),
    )
    load(path)


def test_the_head_of_another_kind_of_model_is_skipped(path, tmp_path):
    module, new = load(path, AutoModelForTokenClassification, "score.")
    assert new == {"score.weight", "score.bias"}
    for auto in (AutoModelForTokenClassification, AutoModelForSequenceClassification):
        folder = tmp_path / auto.__name__
        module = auto.from_config(read_config(path, {}))
        module.save_pretrained(folder)
        add(folder, lm_head__weight=torch.ones(32, 32))  # without it, the language model would have a random head
        assert load(folder)[0].lm_head.weight.eq(1).all()
        # and the value model ignores the head of the language model
        load(folder, auto)
    add(path, v_head__summary__weight=torch.ones(1, 32))
    load(path)


@pytest.mark.parametrize("text", ["7", "[]", "null", "{"])
def test_a_config_that_is_no_configuration(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_config(str(tmp_path), {})
