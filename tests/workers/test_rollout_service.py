"""Generation in the background: interrupted responses continue with the new weights, and errors reach the caller."""

import asyncio
import concurrent.futures
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.waiting import wait_until
from verl.agents import Prompt, SingleTurn, Trajectory
from verl.rollout import engine_thread
from verl.rollout.base import RolloutEngine
from verl.rollout.request import Completion, Request, SamplingParams
from verl.rollout.stop_strings import StopStrings
from verl.utils.coroutines import GENERATION_CLOCK
from verl.workers.rollout import service as service_module
from verl.workers.rollout.service import FollowingService, GenerationService, continuation, extend

PARAMS = SamplingParams(max_tokens=12, stop_token_ids=())


class VersionEngine(RolloutEngine):
    """Every token is the version of the weights that sampled it. One token takes 5 ms."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted = False
        self.running = 0
        self.with_tokens = 0  # running requests with at least one token

    async def generate_one(self, request: Request) -> Completion:
        self.requests.append(request)
        self.aborted, tokens = False, []
        self.running += 1
        try:
            for _ in range(request.params.max_tokens):
                await asyncio.sleep(0.005)
                if self.aborted:
                    return Completion(tokens, [-1.0] * len(tokens), "abort")
                tokens.append(self.weight_version)
                self.with_tokens += len(tokens) == 1
        finally:
            self.running -= 1
            self.with_tokens -= bool(tokens)
        return Completion(tokens, [-1.0] * len(tokens), "length")

    def abort(self, request_ids=None) -> None:
        self.aborted = True


@pytest.fixture
def serve():
    """A function that makes a service and resumes it. It ends with the test."""
    services = []

    def serve(engine: VersionEngine, run=None, complete=None, **limits) -> GenerationService:
        run, complete = run or SingleTurn().run, complete or engine.generate_one
        services.append(GenerationService(engine, complete, run, torch.device("cpu"), **limits))
        services[-1].resume()
        return services[-1]

    yield serve
    for service in services:
        service.close()
        assert not service._thread.is_alive()


@pytest.fixture
def service(serve):
    engine = VersionEngine()
    return serve(engine), engine


def prompts(count: int, tokens: int = 12) -> list[Prompt]:
    return [Prompt([1, 2], replace(PARAMS, max_tokens=tokens), i) for i in range(count)]


def collect(service: GenerationService, groups: int) -> dict:
    found, deadline = {}, time.monotonic() + 20
    while len(found) < groups:
        found |= dict(service.collect(0.05))
        assert time.monotonic() < deadline
    return found


def started(engine: VersionEngine, requests: int, with_tokens: int = 0) -> None:
    wait_until(lambda: engine.running >= requests and engine.with_tokens >= with_tokens)


def test_groups_are_returned_as_they_end(service):
    service, _ = service
    service.submit("long", prompts(2, 12))
    service.submit("short", prompts(3, 1))
    first = service.collect(5.0)
    assert [(uid, len(trajectories)) for uid, trajectories in first] == [("short", 3)]
    assert [t.prompt.sample_id for t in collect(service, 1)["long"]] == [0, 1]
    assert service.collect(0.0) == []


def test_an_interrupted_response_continues_with_the_new_weights(service):
    service, engine = service
    service.submit("a", prompts(3))
    for version in (1, 2):
        started(engine, 3, with_tokens=3)
        service.pause(partial=True)
        assert engine.running == 0, "weights may be replaced only while nothing runs"
        engine.weight_version = version
        service.resume()
    for trajectory in collect(service, 1)["a"]:
        tokens, spans = trajectory.token_ids, trajectory.weight_versions
        assert len(tokens) == 12 and trajectory.finish_reason == "length" and trajectory.turns == 1
        assert [version for _, version in spans] == sorted(set(tokens)) and tokens[-1] == 2
        ends = [first for first, _ in spans[1:]] + [12]
        assert [t for (first, v), end in zip(spans, ends) for t in [v] * (end - first)] == tokens
    # a continuation has the tokens so far in its prompt, and other random numbers
    last = [r for r in engine.requests if len(r.prompt_ids) > 2]
    assert all(r.params.max_tokens + len(r.prompt_ids) - 2 == 12 for r in last)
    assert not {r.sample_id for r in last} & {0, 1, 2} and len({r.sample_id for r in last}) == len(last)


def test_a_pause_may_wait_for_the_trajectories_that_run(service):
    service, engine = service
    service.submit("a", prompts(2))
    started(engine, 2)
    service.pause(partial=False)
    engine.weight_version = 1
    service.submit("b", prompts(1))
    assert [t.weight_versions for t in collect(service, 1)["a"]] == [[(0, 0)], [(0, 0)]]
    assert service.collect(0.05) == [] and engine.running == 0
    service.resume()
    assert collect(service, 1)["b"][0].weight_versions == [(0, 1)]


def test_a_pause_waits_for_requests_whose_trajectories_have_ended(serve):
    """Nor does one start during the pause, such as the next one of a task that nobody waits for."""
    engine, tasks = VersionEngine(), []

    async def run(prompt: Prompt, generate) -> Trajectory:
        async def two_requests() -> None:
            await generate(Request([3], prompt.params, 9))
            await asyncio.sleep(0.05)
            await generate(Request([4], prompt.params, 9))

        tasks.append(asyncio.ensure_future(two_requests()))
        while not engine.running:
            await asyncio.sleep(0)
        return Trajectory(prompt)

    service = serve(engine, run)
    service.submit("a", prompts(1, 20))
    collect(service, 1)
    assert engine.running == 1
    service.pause(partial=False)
    assert engine.running == 0
    time.sleep(0.2)
    assert len(engine.requests) == 1
    service.resume()
    started(engine, 1)
    assert len(engine.requests) == 2


def test_a_time_limit_of_the_engine_is_an_error(serve):
    engine = VersionEngine()

    def fails():
        raise TimeoutError("the other ranks do not answer")

    engine.leading = fails
    with pytest.raises(TimeoutError, match="do not answer"):
        serve(engine)


@pytest.mark.parametrize("partial", [True, False])
def test_the_clock_of_trajectories_stands_still_while_they_are_interrupted(partial, serve):
    """A pause that waits for trajectories needs their limits of time."""
    engine, clocks = VersionEngine(), []

    async def run(prompt: Prompt, generate) -> Trajectory:
        clock = GENERATION_CLOCK.get()
        first, start = clock(), time.monotonic()
        trajectory = await SingleTurn().run(prompt, generate)
        clocks.append((clock() - first, time.monotonic() - start))
        return trajectory

    service = serve(engine, run)
    service.submit("a", prompts(1, 80))
    started(engine, 1)
    service.pause(partial)
    time.sleep(0.5)
    service.resume()
    collect(service, 1)
    ((counted, passed),) = clocks
    assert passed - counted == pytest.approx(0.5 if partial else 0.0, abs=0.1)
    assert GENERATION_CLOCK.get() is time.monotonic


def test_what_is_submitted_during_a_pause_waits(service):
    service, engine = service
    service.pause(partial=True)
    service.submit("a", prompts(1, 2))
    assert service.collect(0.05) == [] and not engine.requests
    service.resume()
    collect(service, 1)


@pytest.mark.parametrize("error", [KeyError("cause"), SystemExit(3)])
def test_an_error_of_the_engine_is_raised_by_every_call(error, serve):
    engine = VersionEngine()

    async def fails(request: Request) -> Completion:
        await asyncio.sleep(0.01)
        raise error

    service = serve(engine, complete=fails)
    service.submit("a", prompts(2))
    calls = (lambda: service.collect(5.0), lambda: service.pause(True), service.resume)
    for call in (*calls, lambda: service.submit("b", prompts(1))):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


def test_a_trajectory_that_is_cancelled_ends_the_run(serve):
    async def cancels(prompt: Prompt, generate) -> None:
        raise asyncio.CancelledError

    engine = VersionEngine()
    service = serve(engine, cancels)
    service.submit("a", prompts(2))
    with pytest.raises(RuntimeError, match="a trajectory of the group a was cancelled"):
        service.collect(5.0)


def test_an_abort_of_the_engine_itself_is_not_continued(service):
    service, engine = service
    service.submit("a", prompts(1))
    started(engine, 1)
    engine.abort()
    (trajectory,) = collect(service, 1)["a"]
    assert trajectory.finish_reason == "abort" and len(trajectory) < 12


def test_a_stop_string_across_the_interruption_ends_the_response():
    stop = StopStrings(("bc",), lambda ids: "".join(chr(97 + i) for i in ids))
    request = Request([5], replace(PARAMS, stop=stop), 7)
    whole = Completion([], [], "abort")
    extend(whole, Completion([0, 1], [-1.0, -2.0], "abort"), 0, request)
    again = continuation(request, whole)
    assert again.prompt_ids == [5, 0, 1] and again.params.max_tokens == 10 and again.sample_id != 7
    extend(whole, Completion([2, 0, 0], [-3.0] * 3, "length"), 1, request)
    assert whole == Completion([0, 1, 2], [-1.0, -2.0, -3.0], "stop", [(0, 0), (2, 1)])


def test_an_abort_after_the_last_token_ends_the_response():
    whole = Completion([], [], "abort")
    extend(whole, Completion([3] * 12, [-1.0] * 12, "abort"), 4, Request([5], PARAMS, 7))
    assert whole.finish_reason == "length" and whole.weight_versions == [(0, 4)]


# ---- limits and ends ------------------------------------------------------------------------------------------------


class Endless(VersionEngine):
    """Its requests run until `end` is set, whatever is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    async def generate_one(self, request: Request) -> Completion:
        self.running += 1
        while not self.end.is_set():
            await asyncio.sleep(0.005)
        self.running -= 1
        return Completion([1], [-1.0], "length")

    def follow(self) -> None:
        self.end.wait()


@pytest.mark.parametrize("partial", [True, False])
def test_a_pause_that_does_not_end_names_its_requests(partial, monkeypatch, caplog, serve):
    monkeypatch.setattr(service_module, "_REPORT_SECONDS", 0.2)
    engine = Endless()
    service = serve(engine, pause_limit=0.5)
    service.submit("a", prompts(7))
    started(engine, 7)
    trajectories = "" if partial else ", 7 trajectories that have started"
    message = rf"within 0\.5 s, still waits for 7 requests .* \(sample ids 0, .* 4 and 2 more\){trajectories} \("
    with caplog.at_level("WARNING"), pytest.raises(TimeoutError, match=message):
        service.pause(partial)
    assert len(caplog.messages) == 2 and all("still waits for 7 requests" in text for text in caplog.messages)
    engine.end.set()
    service.pause(partial)


def test_a_pause_whose_event_loop_is_blocked_names_the_function(monkeypatch, serve):
    monkeypatch.setattr(engine_thread, "_GRACE_SECONDS", 0.1)
    engine = Endless()
    engine.abort = engine.follow  # blocks
    service = serve(engine, pause_limit=0.3)
    with pytest.raises(TimeoutError, match=r"event loop within 0\.3 s, found thread 'rollout service' in .*follow \("):
        service.pause(True)
    engine.end.set()


def test_a_rank_that_follows_for_ever_names_the_function(monkeypatch, caplog):
    monkeypatch.setattr(service_module, "_REPORT_SECONDS", 0.2)
    monkeypatch.setattr(service_module, "_JOIN_SECONDS", 0.1)
    engine = Endless()
    service = FollowingService(engine, torch.device("cpu"), pause_limit=0.5)
    service.resume()
    message = r"rank 0 .* end a pause within 0\.5 s, .* follows it: thread 'rollout service' in .*follow \(.*wait \("
    with caplog.at_level("WARNING"), pytest.raises(TimeoutError, match=message):
        service.pause(True)
    assert len(caplog.messages) == 2
    with caplog.at_level("WARNING"):
        service.close()
    assert "rank 0 has not ended generation: thread" in caplog.messages[-1]
    engine.end.set()
    service._thread._thread.join(20)
    assert not service._thread.is_alive(), "the thread ends with the call of follow"


def test_an_error_of_the_end_of_leading_is_raised_by_close(serve):
    engine = Endless()

    @contextmanager
    def leading():
        yield
        raise OSError("the other ranks are gone")

    engine.leading = leading
    service = serve(engine)
    service.submit("a", prompts(1))  # dropped, which is no error
    started(engine, 1)
    with pytest.raises(OSError, match="the other ranks are gone"):
        service.close()
    service.close()  # once


def test_an_error_of_following_is_raised_by_close_unless_a_call_has():
    engine = VersionEngine()

    def follow():
        raise OSError("the other ranks are gone")

    engine.follow = follow
    for calls in (False, True):
        service = FollowingService(engine, torch.device("cpu"))
        service.resume()
        concurrent.futures.wait([service._following], 20)
        with pytest.raises(OSError, match="the other ranks are gone"):
            service.collect(0.0) if calls else service.close()
        service.close()
