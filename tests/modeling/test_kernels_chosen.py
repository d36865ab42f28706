"""Which kernels compute the layers, as settings and device say; and rows that go one by one through attention."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config.schema.model import ModelConfig
from verl.engines.loading import choose_kernels
from verl.modeling import attention
from verl.modeling.layers import use_kernels
from verl.modeling.linear import WeightCache
from verl.modeling.model_types import LLAMA_LIKE, MIXTURES
from verl.modeling.packing import Packing

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NARROW = torch.bfloat16


def test_kernels_by_device_and_settings():
    model, liger = ModelConfig(), ModelConfig(use_liger=True)
    assert choose_kernels(model, CPU, torch.float32) == "fused"
    assert choose_kernels(model, CPU, NARROW) == "plain"
    assert choose_kernels(model, GPU, NARROW) == "fused"
    assert choose_kernels(model, GPU, torch.float64) == "plain"
    if importlib.util.find_spec("liger_kernel") is not None:
        assert choose_kernels(liger, GPU, NARROW) == "liger"
    with pytest.raises(ValueError, match=r"model\.use_liger.*need a GPU"):
        choose_kernels(liger, CPU, torch.float32)


@pytest.mark.parametrize("kind", (*LLAMA_LIKE, *MIXTURES))
def test_every_layer_of_a_known_family_is_fused(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for activation, fused in (("silu", True), ("gelu", False)):
        config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=32, hidden_act=activation)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        layer = type(module.base_model.layers[0])
        use_kernels(module, "fused", WeightCache())
        children = {name: child for name, child in module.named_modules() if "forward" in vars(child)}
        norms = [name for name, child in module.named_modules() if type(child).__name__.endswith("RMSNorm")]
        assert len(norms) >= 5
        expected = {*norms, "lm_head", "model.embed_tokens", *(f"model.layers.{i}.self_attn" for i in range(2))}
        mlps = {f"model.layers.{i}.mlp" for i in range(2)}
        mlps |= {f"{name}.experts" for name in mlps} if kind in MIXTURES else set()
        assert set(children) == expected | (mlps if fused else set())
        for found in module.base_model.layers:
            assert type(found).__bases__ == (layer,)
            assert type(found).__name__ == layer.__name__  # by which layers are found that are to be sharded


def test_rows_one_by_one_are_the_rows_together():
    torch.manual_seed(0)
    packing = Packing.from_lengths(torch.tensor([3, 70, 1, 33]))
    shapes = [(1, heads, 107, 16) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    found = []
    for out in (
        attention._attend_each_row(q, k, v, packing, None),
        attention._attend(q, k, v, packing, None, None, None),
    ):
        assert out.shape == (1, 107, 4, 16)
        found.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    for ours, expected in zip(*found):
        assert torch.allclose(ours, expected, atol=1e-5)


def test_a_row_is_filled_up_to_one_of_few_lengths(monkeypatch):
    """Eight lengths per power of two, and multiples of 16: CUDA chooses and compiles kernels for few shapes."""
    filled = {}

    def attend(query, key, value, **settings):
        filled[length] = query.shape[2]
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    for length in (1, 16, 17, 255, 256, *range(4096, 8193, 64)):
        rows = torch.zeros(1, 1, length, 1)
        attention._attend_each_row(rows, rows, rows, Packing.from_lengths(torch.tensor([length])), None)
    assert [filled[n] for n in (1, 16, 17, 255, 256)] == [16, 16, 32, 256, 256]
    assert {filled[n] for n in filled if n >= 4096} == {4096, *range(4608, 8193, 512)}
