"""Cancelled coroutines of `generate_one` leave the batch, and nothing is computed for them."""

import asyncio

from tests.rollout.test_continuous import make_engine
from verl.rollout.request import Completion, Request, SamplingParams, make_requests
from verl.utils.coroutines import run_coroutine


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
