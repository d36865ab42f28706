"""Rollout by transformers' generate: its batches, its limits and the module that it borrows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, GPT2Config, LlamaConfig

from tests.engines.ranks import make_engine
from tests.rollout.test_native_families import model
from verl.rollout.hf import HFRollout
from verl.rollout.native.continuous import prompt_log_probs
from verl.rollout.request import SamplingParams, make_requests

SMALL = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
#: a decoder that counts positions from the first column
BART = {"vocab_size": 24, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
BART |= {"max_position_embeddings": 64, "is_decoder": True, "pad_token_id": 0, "eos_token_id": 2}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], [1, 2, 3]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return make_engine(folder)


def test_the_modules_state_is_as_before(engine):
    implementation = engine.module.config._attn_implementation
    HFRollout(engine.module, pad_token_id=0).generate(
        make_requests(PROMPTS, SamplingParams(max_tokens=2, stop_token_ids=(0,)))
    )
    assert engine.module.config._attn_implementation == implementation
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        HFRollout(engine.module, pad_token_id=0).generate(
            make_requests([[1], []], SamplingParams(max_tokens=2, stop_token_ids=(0,)))
        )


def test_softcapped_attention_is_not_left_to_sdpa(monkeypatch):
    """As with the versions of transformers whose Gemma 2 offers SDPA, which has no softcap."""
    module = model("gemma2")
    monkeypatch.setattr(type(module), "_supports_sdpa", True)
    ids = [*PROMPTS[1], 21, 22, 23, 17, 18, 19]
    with torch.no_grad():
        expected = module(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = prompt_log_probs(module, ids, 1)[1:]
    assert [row[0][1] for row in entries] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-5
    )
    sampled = HFRollout(module, pad_token_id=0).generate(make_requests([ids], SamplingParams(1, ())))[0]
    assert sampled.log_probs[0] == pytest.approx(expected[-1, sampled.token_ids[0]].item(), abs=1e-5)


def test_a_sequence_longer_than_the_positions_is_refused(engine):
    params = SamplingParams(max_tokens=5, stop_token_ids=(0,))
    with pytest.raises(ValueError, match="prompt 1: 60 prompt and 5 response tokens exceed 64 positions"):
        HFRollout(engine.module, pad_token_id=0).generate(make_requests([[1], [1] * 60], params))


def test_a_long_prompt_and_a_long_response_do_not_share_a_call():
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=24, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    rollout, params = HFRollout(module, pad_token_id=0), SamplingParams(15, (), ignore_eos=True)
    requests = make_requests([[1] * 12, [2], [3] * 12], params, limits=[4, 15, 4])
    found = rollout.generate(requests)
    assert [len(completion.token_ids) for completion in found] == [4, 15, 4]
    assert [c.token_ids for c in found] == [rollout.generate([request])[0].token_ids for request in requests]


def test_broken_weights_are_named_by_row(engine):
    rollout = HFRollout(engine.module, pad_token_id=0)
    weight = engine.module.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(ValueError, match=r"row 0 .*not finite"):
            rollout.generate(make_requests(PROMPTS, SamplingParams(max_tokens=2, stop_token_ids=(0,))))
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize(
    ("config", "max_rows", "calls"),
    [(BartConfig(**BART), 9, 4), (LlamaConfig(**SMALL), 9, 1), (LlamaConfig(**SMALL), 3, 2)],
)
def test_prompts_of_different_lengths_do_not_share_a_call_where_the_model_counts_padding(config, max_rows, calls):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    rollout, widths = HFRollout(model, pad_token_id=0, max_rows=max_rows), []
    generate = rollout._generate
    rollout._generate = lambda requests: widths.append({len(r.prompt_ids) for r in requests}) or generate(requests)
    completions = rollout.generate(make_requests(PROMPTS, SamplingParams(max_tokens=5, stop_token_ids=(0,), seed=3)))
    assert len(widths) == calls
    for prompt, completion in zip(PROMPTS, completions):
        logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
