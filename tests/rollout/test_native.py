"""The native engine's schedule: nothing is lost, cut or repeated, and a row's answer is its own."""

import gc
import random
import weakref

import pytest
import torch
from transformers import Qwen2ForCausalLM

from tests.rollout.contract import draw
from tests.rollout.test_continuous import VOCAB, at_once, make_engine, make_module, mixed_requests
from verl.rollout.native.decoder import Decoder, padded_width
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import read_decoder
from verl.rollout.request import Request, SamplingParams, make_requests
from verl.utils.coroutines import run_coroutine


@pytest.fixture(scope="module")
def module():
    return make_module()


def one_by_one(module, prompts, params, sample_ids, limits):
    """The answer of each row alone, by the module's own forward pass and no cache."""
    found = []
    for prompt, sample_id, limit in zip(prompts, sample_ids, limits):
        ids, reason = list(prompt), "length"
        for position in range(limit):
            with torch.no_grad():
                logits = module(torch.tensor([ids], device=module.device)).logits[:, -1]
            token, _ = draw(logits, params, torch.tensor([sample_id], device=module.device), position)
            ids.append(int(token))
            if ids[-1] in params.stop_token_ids and not params.ignore_eos:
                reason = "stop"
                break
        found.append((ids[len(prompt) :], reason))
    return found


@pytest.mark.fast("3")
@pytest.mark.parametrize("case", range(4))
def test_rows_are_what_they_are_alone_whatever_the_cache_holds(module, case):
    rng = random.Random(case)
    distinct = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(5)]
    prompts = [rng.choice(distinct) for _ in range(14)]
    limits = [rng.randrange(1, 40) for _ in prompts]
    sample_ids = rng.sample(range(1000), len(prompts))
    params = SamplingParams(40, (3, 7), seed=case, temperature=1.3, ignore_eos=case == 3)
    expected = one_by_one(module, prompts, params, sample_ids, limits)
    per_token = read_decoder(module).cache_bytes_per_token()
    for slots in (1, 3, 14):
        longest = max(len(p) + limit - 1 for p, limit in zip(prompts, limits))
        engine = NativeRollout(module, cache_bytes=slots * longest * per_token)
        answers = engine.generate(make_requests(prompts, params, sample_ids, limits))
        assert [(a.token_ids, a.finish_reason) for a in answers] == expected
        assert all(len(a.log_probs) == len(a.token_ids) for a in answers)
        assert engine.stats.tokens == sum(len(a.token_ids) for a in answers)
        steps, seconds = engine.stats.steps, engine.stats.seconds
        assert seconds > 0
        assert engine.generate(make_requests(prompts, params, sample_ids, limits)) == answers, (
            "a used cache must not show"
        )
        # those of the last call
        assert engine.stats.seconds not in (0, seconds)
        assert engine.stats.steps == steps > 0 and engine.stats.tokens == sum(len(a.token_ids) for a in answers)


def test_training_continues_with_the_parameters_that_generate(module):
    torch.manual_seed(1)
    trained = Qwen2ForCausalLM(module.config)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    engine = NativeRollout(trained)
    params = SamplingParams(6, (), temperature=0)
    parameters = {name: id(p) for name, p in trained.named_parameters()}
    before = engine.generate(make_requests([[1, 2, 3]], params))
    for _ in range(3):
        trained(torch.tensor([[1, 2, 3, 4, 4, 4, 4]]), labels=torch.tensor([[1, 2, 3, 4, 4, 4, 4]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = engine.generate(make_requests([[1, 2, 3]], params))
    fresh = Qwen2ForCausalLM(module.config)
    fresh.load_state_dict(trained.state_dict())
    assert before != after
    assert after == NativeRollout(fresh).generate(make_requests([[1, 2, 3]], params))
    assert parameters == {name: id(p) for name, p in trained.named_parameters()}


def test_joint_products_share_the_parameters_memory_also_after_they_moved(module):
    attention = module.model.layers[0].self_attn
    for _ in range(2):
        qkv = read_decoder(module, transpose_limit=0).layers[0].qkv.matrix.t()
        assert qkv.data_ptr() == attention.q_proj.weight.data_ptr()
        assert qkv.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
        with torch.no_grad():
            attention.v_proj.weight[-1, -1] += 1
        assert qkv[-1, -1] == attention.v_proj.weight[-1, -1]
        attention.k_proj.weight.data = attention.k_proj.weight.data.clone()  # what .to() and offloading do


def test_rows_of_matrices_do_not_compete_for_cache_lines():
    """At a distance of a multiple of 1 KiB, they have few of its sets."""
    widths = {width: padded_width(width) for width in range(1, 2049)}
    assert all(padded % 256 and width <= padded < width + 64 for width, padded in widths.items())


def test_a_saved_model_is_whole(module, tmp_path):
    NativeRollout(module).generate(make_requests([[1]], SamplingParams(1, ())))
    module.save_pretrained(tmp_path)
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(module.named_parameters(), loaded.named_parameters()):
        assert torch.equal(a, b), name


def test_weights_that_are_not_finite_end_with_the_name_of_the_row(module):
    torch.manual_seed(1)
    broken = Qwen2ForCausalLM(module.config)
    engine = NativeRollout(broken)
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = float("nan")
    for max_tokens in (1, 50):
        with pytest.raises(ValueError, match=r"row 1 \(sample id 70\).*not finite"):
            engine.generate(make_requests([[1, 2], [1, 5]], SamplingParams(max_tokens, ()), [60, 70], [1, max_tokens]))
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = 1.0
    answers = engine.generate(make_requests([[1, 2], [1, 5]], SamplingParams(50, ())))
    assert torch.tensor([a.log_probs for a in answers]).isfinite().all(), "the cache kept what broken weights left"


def test_every_prompt_needs_a_sample_id(module):
    with pytest.raises(ValueError, match=r"as many sample_ids as prompts \(1\), found 2"):
        make_requests([[1]], SamplingParams(5, ()), sample_ids=[6, 7])


def test_requests_that_cannot_share_a_batch_are_batches_of_their_own(module):
    params = [SamplingParams(12, (3,), temperature=t, seed=s) for t, s in ((1.0, 1), (0.5, 1), (1.0, 2), (0.0, 1))]
    requests = [Request([1, 2, i], params[i % 4], sample_id=i) for i in range(10)]
    engine = NativeRollout(module)
    together = engine.generate(requests)
    for request, found in zip(requests, together):
        (alone,) = engine.generate([request])
        assert found.token_ids == alone.token_ids


def test_too_little_memory_for_one_row_is_said_before_work_begins(module):
    with pytest.raises(ValueError, match=r"has 100 bytes, but one row of 5 tokens needs 1,280"):
        NativeRollout(module, cache_bytes=100).generate(make_requests([[1, 2]], SamplingParams(4, ())))


def test_no_prompts_no_responses(module):
    assert NativeRollout(module).generate(make_requests([], SamplingParams(4, ()))) == []


def test_new_tokens_are_passed_on_while_a_response_is_generated(module):
    """After every 8 steps: the token of the prefill and those of the steps, each once."""
    chunks, log_probs = [], []

    def on_tokens(ids: list[int], values: list[float]) -> None:
        chunks.append(ids)
        log_probs.extend(values)

    request = Request([1, 2], SamplingParams(30, (), ignore_eos=True), 0, on_tokens=on_tokens)
    found = run_coroutine(NativeRollout(module).generate_one(request))
    assert [len(chunk) for chunk in chunks] == [9, 8, 8]
    assert [token for chunk in chunks for token in chunk] == found.token_ids[:25] and log_probs == found.log_probs[:25]


def test_sleep_frees_the_copy_of_the_weights(monkeypatch):
    engine = make_engine("native", dtype=torch.bfloat16)  # another dtype than that of the parameters: a copy
    copies = []

    def read(*given, **options) -> Decoder:
        copies.append(read_decoder(*given, **options))
        return copies[-1]

    monkeypatch.setattr("verl.rollout.native.engine.read_decoder", read)
    at_once(engine, mixed_requests(0, 3))
    found = [weakref.ref(copy) for copy in copies]
    copies.clear()
    assert found
    engine.sleep()
    gc.collect()
    assert [ref() for ref in found] == [None] * len(found)
