"""generate_one: many coroutines share one batch, and each response is what `generate` gives."""

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import schema
from verl.engines.loading import ModelSpec, TokenModel
from verl.modeling.batch_invariant import model as batch_invariant
from verl.rollout.base import RolloutEngine
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import read_decoder
from verl.rollout.native.scheduler import SlotScheduler
from verl.rollout.request import Completion, Request, SamplingParams, StopStrings, make_requests
from verl.utils.coroutines import run_coroutine

VOCAB = 29
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=96)
STOP = StopStrings(("ab", "xyz", "q"), lambda ids: "".join(chr(97 + i % 26) for i in ids))


def make_module(attention: str = "sdpa", **sizes: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    module = Qwen2ForCausalLM(Qwen2Config(**SHAPE | sizes, attn_implementation=attention)).eval()
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


def mixed_requests(
    seed: int, count: int = 18, lengths: Sequence[int] = range(1, 14), most_tokens: int = 40
) -> list[Request]:
    """Of different lengths, limits, seeds and stop strings; some prompts more than once."""
    draw = random.Random(seed)
    distinct = [[draw.randrange(VOCAB) for _ in range(draw.choice(lengths))] for _ in range(6)]
    base = SamplingParams(30, (3, 7), temperature=1.2)
    return [
        Request(
            draw.choice(distinct),
            replace(
                base, max_tokens=draw.randrange(1, most_tokens), seed=draw.randrange(3), stop=draw.choice([None, STOP])
            ),
            sample_id=draw.randrange(1000),
            request_id=f"r{i}",
        )
        for i in range(count)
    ]


def at_once(engine: RolloutEngine, requests: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate_one(request) for request in requests))

    return run_coroutine(run())


def staggered(engine: RolloutEngine, requests: list[Request], seed: int, most_yields: int = 59) -> list[Completion]:
    """The requests arrive at random times, while others are at work."""
    draw = random.Random(seed)

    async def later(request: Request, yields: int) -> Completion:
        for _ in range(yields):
            await asyncio.sleep(0)
        return await engine.generate_one(request)

    async def run() -> list[Completion]:
        return await asyncio.gather(*(later(request, draw.randrange(most_yields + 1)) for request in requests))

    return run_coroutine(run())


@pytest.mark.parametrize("kind", ["native", "batch_invariant", "batch_invariant, bf16", "hf"])
def test_requests_that_arrive_together_are_generated_as_one_batch_to_the_bit(kind):
    requests, engine = mixed_requests(1), make_engine(kind)
    expected = engine.generate(requests)
    assert {completion.finish_reason for completion in expected} == {"stop", "length"}
    assert at_once(engine, requests) == expected
    assert engine.stats.tokens == sum(len(completion.token_ids) for completion in expected)
    assert engine.generate(requests) == expected, "the engine's cache must not show what was before"


@pytest.mark.fast("3-1", "3-3")
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


def test_arrival_changes_no_bit_in_batch_invariant_mode():
    requests, engine = mixed_requests(0), make_engine("batch_invariant", max_rows=5)
    expected = engine.generate(requests)
    assert staggered(engine, requests, 0) == expected


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


def test_the_cache_has_a_quarter_of_the_memory_that_is_available(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=404))
    with pytest.raises(ValueError, match="the KV cache has 101 bytes, but one row"):
        make_engine("native").generate(mixed_requests(0))


def test_steps_are_shared():
    """16 requests of 30 tokens that arrive over 30 steps take about 60 steps, not 16 * 30."""
    engine = make_engine("native")
    staggered(engine, make_requests([[i] for i in range(16)], SamplingParams(30, (), ignore_eos=True)), 0)
    assert engine.stats.steps < 130
    at_once(engine, make_requests([[1], [2]], SamplingParams(8, (), ignore_eos=True)))
    assert engine.stats.steps == 7  # the first token is that of the prefill


def test_requests_that_arrive_together_join_a_running_batch():
    """Seven requests of 30 tokens a few steps after the first: about 35 steps, not 30 more for some of them."""
    engine, requests = (
        make_engine("native"),
        make_requests([[i] for i in range(8)], SamplingParams(30, (), ignore_eos=True)),
    )

    async def run() -> None:
        first = asyncio.ensure_future(engine.generate_one(requests[0]))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.gather(first, *map(engine.generate_one, requests[1:]))

    run_coroutine(run())
    assert engine.stats.steps < 50


def test_other_sampling_parameters_wait_for_a_batch_of_their_own():
    base = SamplingParams(12, (3,))
    params = [base, replace(base, temperature=0.5), replace(base, temperature=0), replace(base, top_k=3)]
    requests = [Request([i], params[i % 4], i) for i in range(12)]
    engine = make_engine("native")
    found, expected = staggered(engine, requests, 3), engine.generate(requests)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", "batch_invariant"])
def test_abort_by_name_keeps_the_tokens_and_leaves_the_others_alone(kind):
    check_abort(make_engine(kind, max_rows=4), 30, yields=12)


def check_abort(engine: RolloutEngine, tokens: int, yields: int) -> None:
    """Of an engine for four rows."""
    params = SamplingParams(tokens, (), ignore_eos=True, seed=2)
    requests = [Request([i + 1], params, i, f"r{i}") for i in range(6)]  # two of them wait
    expected = engine.generate(requests)

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate_one(request)) for request in requests]
        for _ in range(yields):
            await asyncio.sleep(0)
        engine.abort(["r1", "r5", "unknown"])
        return await asyncio.gather(*tasks)

    found = run_coroutine(run())
    assert found[1].finish_reason == found[5].finish_reason == "abort"
    assert 0 < len(found[1].token_ids) < tokens and found[5] == Completion([], [], "abort")
    assert found[1].token_ids == expected[1].token_ids[: len(found[1].token_ids)]
    assert len(found[1].log_probs) == len(found[1].token_ids)
    for i in (0, 2, 3, 4):
        assert (found[i].token_ids, found[i].finish_reason) == (expected[i].token_ids, "length")
    assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in expected]


LONG = SamplingParams(12, ())
BAD_REQUESTS = {
    "no prompt": (Request([], LONG, 0), "has no tokens"),
    "token too large": (Request([VOCAB], LONG, 0), "a token outside the vocabulary of 29"),
    "negative token": (Request([1, -1], LONG, 0), "a token outside the vocabulary of 29"),
    "float token": (Request([1, 1.0], LONG, 0), r"prompt_ids: expected a list of integers, found \[1, 1.0\]"),
    "None as prompt": (Request(None, LONG, 0), "prompt_ids: expected a list of integers, found None"),
    "too long": (Request([1] * 90, LONG, 0), "90 prompt and 12 response tokens exceed 96 positions"),
    "stop token": (Request([1], replace(LONG, stop_token_ids=(VOCAB,)), 0), "stop_token_ids: .* 29, found"),
    "negative stop token": (Request([1], replace(LONG, stop_token_ids=(-1,)), 0), "stop_token_ids: .* 29, found"),
    "stop token list": (Request([1], replace(LONG, stop_token_ids=[3]), 0), "stop_token_ids: .* tuple, found a list"),
    "str sample_id": (Request([1], LONG, "x"), "sample_id: expected a 64-bit signed integer, found 'x'"),
    "large sample_id": (Request([1], LONG, 2**70), "sample_id: expected a 64-bit signed integer, found 118"),
    "large seed": (Request([1], replace(LONG, seed=2**64), 0), "seed: expected a 64-bit signed integer, found 184"),
    "float max_tokens": (Request([1], replace(LONG, max_tokens=2.5), 0), "max_tokens: expected a 64-bit"),
    "images": (Request([1], LONG, 0, multi_modal_data={"image": 1}), "expected text, found images"),
}


@pytest.mark.parametrize("kind", ["native", "hf"])
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_fails_alone(kind, case):
    (bad, message), engine, good = BAD_REQUESTS[case], make_engine(kind), Request([1, 2], LONG, 3)

    async def run() -> list:
        return await asyncio.gather(engine.generate_one(bad), engine.generate_one(good), return_exceptions=True)

    error, found = run_coroutine(run())
    with pytest.raises(ValueError, match=message):
        raise error
    assert found == engine.generate([good])[0]
    with pytest.raises(ValueError, match=f"prompt 1.*{message}"):
        engine.generate([good, bad])


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_a_bad_request_that_arrives_later_leaves_the_batch_alone(kind):
    engine, good = make_engine(kind), Request([1, 2], SamplingParams(12, (), ignore_eos=True), 3)

    async def run() -> Completion:
        running = asyncio.ensure_future(engine.generate_one(good))
        for _ in range(4):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="has no tokens"):
            await engine.generate_one(replace(good, prompt_ids=[]))
        return await running

    assert run_coroutine(run()) == engine.generate([good])[0]


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


def in_time(coroutine: Coroutine):
    """The result of a coroutine that may hang."""
    found = concurrent.futures.Future()

    def work() -> None:
        try:
            found.set_result(asyncio.run(coroutine))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found.result(timeout=20)


def run_iterations(loop: asyncio.AbstractEventLoop, count: int) -> None:
    for _ in range(count):
        loop.call_soon(loop.stop)
        loop.run_forever()


def test_generate_refuses_other_calls_while_it_runs():
    running, finish = threading.Event(), threading.Event()

    def decode(ids: list[int]) -> str:
        running.set()
        finish.wait(20)
        return ""

    engine, params = make_engine("native"), SamplingParams(20, (), stop=StopStrings(("x",), decode))
    requests, other, found = make_requests([[1], [2]], params), Request([3], SamplingParams(4, ()), 0), []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(requests)), daemon=True)
    thread.start()
    assert running.wait(20)
    try:
        with pytest.raises(ValueError, match=r"generate_one\(\) was called while generate\(\) is running"):
            in_time(asyncio.wait_for(engine.generate_one(other), 10))
        with pytest.raises(ValueError, match=r"generate\(\) was called while generate\(\) is running"):
            engine.generate([other])
        with pytest.raises(ValueError, match=r"sleep\(\) was called while requests are running"):
            engine.sleep()
    finally:
        finish.set()
        thread.join(20)
    assert found == engine.generate(requests)
    assert in_time(engine.generate_one(other)) == engine.generate([other])[0]


@pytest.mark.parametrize("kind", ["native", "batch_invariant, bf16"])
def test_sleep_is_refused_while_requests_are_running(kind):
    engine, requests = make_engine(kind), make_requests([[1], [2, 3]], SamplingParams(12, (), ignore_eos=True))
    expected = engine.generate(requests)

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate_one(request)) for request in requests]
        for _ in range(6):
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="wait for them or abort them"):
                engine.sleep()
        return await asyncio.gather(*tasks)

    assert in_time(run()) == expected

    async def one_after_another() -> list[Completion]:
        found = []
        for request in requests:
            found.append(await engine.generate_one(request))
            engine.sleep()  # nothing is running
            assert engine.generate([request]) == found[-1:]
        return found

    assert [c.token_ids for c in in_time(one_after_another())] == [c.token_ids for c in expected]


@pytest.mark.parametrize("kind", ["native", "batch_invariant, bf16", "hf"])
@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("method", ["generate", "generate_one", "sleep"])
def test_an_event_loop_that_was_closed_does_not_block_the_engine(kind, iterations, method):
    engine, request = make_engine(kind), Request([1, 2], SamplingParams(12, (), ignore_eos=True), 0)
    expected, loop = engine.generate([request]), asyncio.new_event_loop()
    task = loop.create_task(engine.generate_one(request))
    run_iterations(loop, iterations)
    loop.close()
    if method == "sleep":
        engine.sleep()
    if method == "generate_one":
        assert in_time(engine.generate_one(request)) == expected[0]
    assert engine.generate([request]) == expected
    assert kind == "hf" or not task.done()


def test_a_second_event_loop_is_refused_while_the_first_has_requests():
    engine, requests = make_engine("native"), make_requests([[1], [2]], SamplingParams(30, (), ignore_eos=True))
    expected, loop = engine.generate(requests), asyncio.new_event_loop()
    task = loop.create_task(engine.generate_one(requests[0]))
    for iterations in (1, 5):
        run_iterations(loop, iterations)
        with pytest.raises(ValueError, match="in a second event loop while requests of the first are running"):
            run_coroutine(asyncio.wait_for(engine.generate_one(requests[1]), 10))
    found = loop.run_until_complete(task)
    assert found.token_ids == expected[0].token_ids  # the batch has another size, which changes the rounding
    assert found.log_probs == pytest.approx(expected[0].log_probs, abs=1e-4)
    loop.close()
    assert in_time(engine.generate_one(requests[1])).token_ids == expected[1].token_ids


def test_event_loops_take_turns_with_the_default_generate_one():
    engine, requests = make_engine("hf"), make_requests([[1], [2]], SamplingParams(5, ()))
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate_one(requests[0]))
    run_iterations(loop, 1)  # it is waiting for the others of its batch
    second = run_coroutine(asyncio.wait_for(engine.generate_one(requests[1]), 10))
    assert [loop.run_until_complete(task), second] == [engine.generate([request])[0] for request in requests]
    loop.close()


def test_abort_by_name_ends_a_request_of_a_batch(monkeypatch):
    engine, advance = make_engine("native"), SlotScheduler.advance
    requests = [Request([i + 1], SamplingParams(20, (), ignore_eos=True), i, f"r{i}") for i in range(2)]

    def aborted(self: SlotScheduler) -> None:
        if self.steps == 3:
            engine.abort(["r1"])
        advance(self)

    monkeypatch.setattr(SlotScheduler, "advance", aborted)
    found = engine.generate(requests)
    assert [(len(c.token_ids), c.finish_reason) for c in found] == [(20, "length"), (5, "abort")]


@pytest.mark.parametrize("kind, iterations", [("native", 1), ("native", 6), ("hf", 1)])
def test_abort_from_another_thread(kind, iterations):
    engine, request = make_engine(kind), Request([1], SamplingParams(60, (), ignore_eos=True), 0)

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.generate_one(request))
        for _ in range(iterations):
            await asyncio.sleep(0)
        thread = threading.Thread(target=engine.abort)
        thread.start()
        thread.join()
        return await task

    asyncio_debug = asyncio.new_event_loop()  # raises if a future is resolved by another thread
    asyncio_debug.set_debug(True)
    found = asyncio_debug.run_until_complete(asyncio.wait_for(run(), 10))
    asyncio_debug.close()
    assert found.finish_reason == "abort" and len(found.token_ids) < 60


# ---- cancelled coroutines leave the batch, and nothing is computed for them -----------------------------------------


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


class AbortsLater:
    """A scheduler that ends aborted rows in its next iteration, as the one for GPUs does."""

    def __init__(self, scheduler):
        self.scheduler, self.matches, self.iterations = scheduler, [], 0

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)

    def abort(self, matches) -> None:
        self.matches.append(matches)

    def advance(self) -> None:
        self.iterations += 1
        while self.matches:
            self.scheduler.abort(self.matches.pop())
        if self.scheduler.is_busy:
            self.scheduler.advance()


def test_nothing_is_computed_for_requests_that_are_all_cancelled():
    """Otherwise the engine would compute while the weights are replaced."""
    engine, started, ends = make_engine("native"), [], []
    requests = make_requests([[1], [2]], SamplingParams(40, (), ignore_eos=True))
    expected, start = engine.generate(requests), engine.start
    engine.start = lambda *args: started.append(AbortsLater(start(*args))) or started[-1]

    async def cancelled(request: Request) -> None:
        try:
            await engine.generate_one(request)
        finally:
            ends.append(started[0].iterations)

    async def run() -> list[Completion]:
        tasks = [asyncio.ensure_future(cancelled(request)) for request in requests]
        for _ in range(8):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(8):
            await asyncio.sleep(0)
        ends.append(started[0].iterations)
        return await asyncio.gather(*(engine.generate_one(request) for request in requests))

    assert run_coroutine(run()) == expected and len(started) == 2
    assert ends[-1] == ends[-2] > 0
