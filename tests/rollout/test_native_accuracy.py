"""The native engine in float32 is as accurate as transformers, measured against float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.rollout.float64 import float64_logits
from verl.rollout.native.kv_cache import SlotCache
from verl.rollout.native.model import TRANSPOSE_LIMIT, read_decoder
from verl.rollout.native.torch_decoder import TorchDecoder

PROMPT, LENGTH, VOCAB = 4, 12, 64


@pytest.fixture(scope="module", params=["residual", "bias"])
def module(request):
    """What a matmul is added to is much larger than the matmul: the residual stream, or the biases of the values."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=6, vocab_size=VOCAB)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    config = (LlamaConfig if request.param == "residual" else Qwen2Config)(**sizes, **heads)
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.06)
        if request.param == "residual":
            module.model.embed_tokens.weight.normal_(0, 300)
        else:
            for layer in module.model.layers:
                layer.self_attn.v_proj.bias.normal_(0, 300)
    return module


@torch.inference_mode()
def native_log_probs(module, sequences: list[list[int]], transpose_limit: int) -> torch.Tensor:
    """Of the tokens after a prefill of PROMPT tokens, and after each decode step: (B, T, V)."""
    decoder = read_decoder(module, transpose_limit=transpose_limit)
    rows = TorchDecoder(decoder, SlotCache(decoder, len(sequences), LENGTH), LENGTH)
    logits = [rows.prefill([ids[:PROMPT] for ids in sequences], [[slot] for slot in range(len(sequences))])]
    rows.start_step_at(torch.full((len(sequences),), PROMPT))
    logits += [rows.step(torch.tensor([ids[at] for ids in sequences])) for at in range(PROMPT, LENGTH)]
    return torch.stack(logits, 1).log_softmax(-1)


@pytest.mark.fast("bias-1-transposed", "residual-8-parameters")
@pytest.mark.parametrize("transpose_limit", [TRANSPOSE_LIMIT, 0], ids=["transposed", "parameters"])
@pytest.mark.parametrize("batch", [1, 8])
def test_errors_are_those_of_transformers(module, batch, transpose_limit):
    ids = torch.randint(VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = torch.stack([float64_logits(module, row.tolist())[PROMPT - 1 :].log_softmax(-1) for row in ids])
    with torch.no_grad():
        expected = torch.cat([module(row[None]).logits[:, PROMPT - 1 :].log_softmax(-1) for row in ids])
    found = torch.cat([native_log_probs(module, rows.tolist(), transpose_limit) for rows in ids.split(batch)])
    native, transformers = ((each - exact).square().mean().sqrt() for each in (found, expected))
    assert 0 < native < 2 * transformers < 1e-4
