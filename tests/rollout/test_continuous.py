"""generate_one: many coroutines share one batch, and each response is what `generate` gives."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import schema
from verl.engines.loading import ModelSpec, TokenModel
from verl.modeling.batch_invariant import model as batch_invariant
from verl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, make_requests, run_coroutine
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import read_decoder
from verl.rollout.stop_strings import StopStrings

VOCAB = 29
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
)
STOP = StopStrings(("ab", "xyz", "q"), lambda ids: "".join(chr(97 + i % 26) for i in ids))


def make_module(attention: str = "sdpa") -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    module = Qwen2ForCausalLM(Qwen2Config(**SHAPE, attn_implementation=attention)).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(8 if p.dim() > 1 else 1)
    return module


def make_engine(kind: str, **options) -> RolloutEngine:
    if kind == "hf":
        return HFRollout(make_module(), pad_token_id=0)
    if kind == "native":
        return NativeRollout(make_module(), **options)
    module = make_module(batch_invariant.NAME)
    batch_invariant.use_batch_invariant(module)
    compute = torch.bfloat16 if kind == "batch_invariant, bf16" else torch.float32
    model = TokenModel(module, ModelSpec(schema.ModelConfig(), compute_dtype=compute, kernels="batch_invariant"))
    return NativeRollout(module, forward=batch_invariant.BatchInvariantForward(model), **options)


def mixed_requests(seed: int, count: int = 18) -> list[Request]:
    """Of different lengths, limits, seeds and stop strings; some prompts more than once."""
    draw = random.Random(seed)
    distinct = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 14))] for _ in range(6)]
    base = SamplingParams(30, (3, 7), temperature=1.2)
    return [
        Request(
            draw.choice(distinct),
            replace(base, max_tokens=draw.randrange(1, 40), seed=draw.randrange(3), stop=draw.choice([None, STOP])),
            sample_id=draw.randrange(1000),
            request_id=f"r{i}",
        )
        for i in range(count)
    ]


def at_once(engine: RolloutEngine, requests: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate_one(request) for request in requests))

    return run_coroutine(run())


def staggered(engine: RolloutEngine, requests: list[Request], seed: int) -> list[Completion]:
    """The requests arrive at random times, while others are at work."""
    draw = random.Random(seed)

    async def later(request: Request, yields: int) -> Completion:
        for _ in range(yields):
            await asyncio.sleep(0)
        return await engine.generate_one(request)

    async def run() -> list[Completion]:
        return await asyncio.gather(*(later(request, draw.randrange(60)) for request in requests))

    return run_coroutine(run())


@pytest.mark.parametrize("kind", ["native", "batch_invariant", "batch_invariant, bf16", "hf"])
def test_requests_that_arrive_together_are_generated_as_one_batch_to_the_bit(kind):
    requests, engine = mixed_requests(1), make_engine(kind)
    expected = engine.generate(requests)
    assert {completion.finish_reason for completion in expected} == {"stop", "length"}
    assert at_once(engine, requests) == expected
    assert engine.stats.tokens == sum(len(completion.token_ids) for completion in expected)
    assert engine.generate(requests) == expected, "the engine's cache must not show what was before"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [None, 3])
def test_requests_that_arrive_one_after_another_have_the_same_tokens(seed, slots):
    requests = mixed_requests(seed)
    row = read_decoder(make_module()).cache_bytes_per_token() * 54
    engine = make_engine("native", cache_bytes=None if slots is None else slots * row)
    expected, found = engine.generate(requests), staggered(engine, requests, seed)
    for request, a, b in zip(requests, found, expected):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), request.request_id
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_arrival_changes_no_bit_in_batch_invariant_mode(seed):
    requests, engine = mixed_requests(seed), make_engine("batch_invariant", max_rows=5)
    expected = engine.generate(requests)
    assert staggered(engine, requests, seed) == expected


def test_the_cache_grows_with_the_requests():
    engine, params = make_engine("native"), SamplingParams(6, ())
    requests = make_requests([[1], [2, 3], [4] * 20, [5] * 40, [6] * 60, *([[7, i] for i in range(20)])], params)
    requests[3] = replace(requests[3], params=replace(params, max_tokens=30))

    async def run() -> list[Completion]:
        tasks = []
        for request in requests:
            tasks.append(asyncio.ensure_future(engine.generate_one(request)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    found, expected = run_coroutine(run()), engine.generate(requests)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_steps_are_shared():
    """16 requests of 30 tokens that arrive over 30 steps take about 60 steps, not 16 * 30."""
    engine = make_engine("native")
    staggered(engine, make_requests([[i] for i in range(16)], SamplingParams(30, (), ignore_eos=True)), 0)
    assert engine.stats.steps < 130


def test_other_sampling_parameters_wait_for_a_batch_of_their_own():
    base = SamplingParams(12, (3,))
    params = [base, replace(base, temperature=0.5), replace(base, temperature=0), replace(base, top_k=3)]
    requests = [Request([i], params[i % 4], i) for i in range(12)]
    engine = make_engine("native")
    found, expected = staggered(engine, requests, 3), engine.generate(requests)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize("kind", ["native", "batch_invariant"])
def test_abort_by_name_keeps_the_tokens_and_leaves_the_others_alone(kind):
    engine = make_engine(kind, max_rows=4)
    params = SamplingParams(60, (), ignore_eos=True, seed=2)
    requests = [Request([i + 1], params, i, f"r{i}") for i in range(6)]  # two of them wait
    expected = engine.generate(requests)

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate_one(request)) for request in requests]
        for _ in range(12):
            await asyncio.sleep(0)
        engine.abort(["r1", "r5", "unknown"])
        return await asyncio.gather(*tasks)

    found = run_coroutine(run())
    assert found[1].finish_reason == found[5].finish_reason == "abort"
    assert 0 < len(found[1].token_ids) < 60 and found[5] == Completion([], [], "abort")
    assert found[1].token_ids == expected[1].token_ids[: len(found[1].token_ids)]
    assert len(found[1].log_probs) == len(found[1].token_ids)
    for i in (0, 2, 3, 4):
        assert (found[i].token_ids, found[i].finish_reason) == (expected[i].token_ids, "length")
    assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in expected]


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_abort_all(kind):
    engine = make_engine(kind)
    requests = make_requests([[1], [2]], SamplingParams(60, (), ignore_eos=True))

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate_one(request)) for request in requests]
        await asyncio.sleep(0)
        engine.abort()
        return await asyncio.gather(*tasks)

    assert [c.finish_reason for c in run_coroutine(run())] == ["abort"] * 2


def test_a_cancelled_coroutine_leaves_the_batch():
    engine = make_engine("native")
    requests = make_requests([[1], [2]], SamplingParams(40, (), ignore_eos=True))
    expected = engine.generate(requests)

    async def run() -> Completion:
        first, second = (asyncio.ensure_future(engine.generate_one(request)) for request in requests)
        for _ in range(8):
            await asyncio.sleep(0)
        first.cancel()
        return await second

    assert run_coroutine(run()).token_ids == expected[1].token_ids


def test_a_bad_request_fails_alone():
    engine = make_engine("native")
    good, bad = make_requests([[1, 2], [VOCAB]], SamplingParams(5, ()))

    async def run() -> list:
        return await asyncio.gather(engine.generate_one(good), engine.generate_one(bad), return_exceptions=True)

    found, error = run_coroutine(run())
    assert found.token_ids == engine.generate([good])[0].token_ids
    assert isinstance(error, ValueError) and "outside the vocabulary" in str(error)


def test_broken_weights_reach_every_coroutine():
    engine = make_engine("native")
    with torch.no_grad():
        engine.module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        at_once(engine, make_requests([[1], [2]], SamplingParams(5, ())))
    with torch.no_grad():
        engine.module.lm_head.weight.normal_()
    assert len(at_once(engine, make_requests([[1]], SamplingParams(5, (), ignore_eos=True)))[0].token_ids) == 5


def test_generate_is_refused_while_requests_are_under_way():
    engine = make_engine("native")

    async def run() -> None:
        task = asyncio.ensure_future(engine.generate_one(Request([1], SamplingParams(50, ()), 0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="are running"):
            engine.generate(make_requests([[1]], SamplingParams(5, ())))
        await task

    run_coroutine(run())


class OneByOne(RolloutEngine):
    """A user's engine that defines generate_one alone."""

    async def generate_one(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        return Completion(request.prompt_ids[: request.params.max_tokens], [0.0], "length")


def test_an_engine_defines_one_of_the_two():
    requests = make_requests([[1], [2]], SamplingParams(1, ()))
    assert [c.token_ids for c in OneByOne().generate(requests)] == [[1], [2]]

    async def inside_a_loop() -> list[Completion]:
        return OneByOne().generate(requests)  # as in a notebook cell

    assert len(run_coroutine(inside_a_loop())) == 2
    with pytest.raises(TypeError, match="neither generate"):
        type("Nothing", (RolloutEngine,), {})
