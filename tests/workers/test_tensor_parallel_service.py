"""Generation in the background over tensor-parallel groups: rank 0 generates and answers, and the others follow it."""

import asyncio
import math
import queue
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from tests.waiting import wait_until
from verl.config import schema
from verl.protocol import DataProto
from verl.rollout.base import ROLLOUT_ENGINES, RolloutEngine, RolloutEnv
from verl.rollout.request import Completion, Request
from verl.single_controller.dispatch import Layout, registered_methods
from verl.single_controller.worker import RankEnv
from verl.trainer.asynchronous.generation import Generation
from verl.workers.rollout.methods import rollout_env
from verl.workers.rollout.role import Rollout
from verl.workers.rollout.worker import RolloutWorker

METHODS = registered_methods(RolloutWorker)


class Linked(RolloutEngine):
    """Rank 0 sends every token to the other rank of its group. A token is 1 + the version of the weights."""

    supports_tensor_parallel = True
    samples_policy = False

    def __init__(self, env: RolloutEnv, links: list[queue.Queue]):
        self.env, self.link = env, links[env.tp_group]
        self.sessions: list[list[int]] = []  # of `follow`: the tokens
        self.leads = self.follows = self.aborted = False
        self.running = 0

    async def generate_one(self, request: Request) -> Completion:
        assert self.leads, "a request runs outside of leading()"
        self.aborted, tokens = False, []
        self.running += 1
        try:
            while len(tokens) < request.params.max_tokens and not self.aborted:
                await asyncio.sleep(0.002)
                tokens.append(1 + self.weight_version)
                self.link.put(tokens[-1])
        finally:
            self.running -= 1
        return Completion(tokens, [-1.0] * len(tokens), "abort" if self.aborted else "length")

    def abort(self, request_ids=None) -> None:
        self.aborted = True

    @contextmanager
    def leading(self):
        assert not self.leads and not self.running
        self.leads = True
        try:
            yield
        finally:
            assert not self.running, "the other ranks stop to follow a request that runs"
            self.leads = False
            self.link.put(None)

    def follow(self) -> None:
        assert not self.follows
        self.follows = True
        self.sessions.append([])
        while (token := self.link.get(timeout=30)) is not None:
            if isinstance(token, BaseException):
                raise token
            self.sessions[-1].append(token)
        time.sleep(0.05)  # the last step of this rank
        self.follows = False


class Group:
    """Four workers in this process, as two tensor-parallel groups, or one worker. Called like a worker group."""

    def __init__(self, ranks: int = 4, size: int = 2):
        links = [queue.Queue() for _ in range(ranks)]
        ROLLOUT_ENGINES._entries["linked"] = lambda config, model, env, train_engine=None: Linked(env, links)
        config = schema.RolloutConfig(name="linked", tensor_model_parallel_size=size, response_length=40)
        self.workers = [RolloutWorker.__new__(RolloutWorker) for _ in range(ranks)]
        for rank, worker in enumerate(self.workers):
            worker.rank_env = RankEnv(rank, ranks, rank, ranks)
            env = rollout_env(worker, config, torch.device("cpu"), 0, None)
            worker.rollout = Rollout(config, schema.ModelConfig(path="none"), env, stop_token_ids=())
            worker._service, worker._is_paused, worker._pause_limit = None, False, math.inf
        self.engines = [worker.rollout.engine for worker in self.workers]

    def layout(self, mesh: str | None = None) -> Layout:
        return Layout(tuple(worker.layout(mesh) for worker in self.workers))

    def __getattr__(self, name: str):
        def call(*args):
            layout = self.layout("rollout")
            calls = METHODS[name].dispatch(layout, args, {})
            results = [c.finish(getattr(w, name)(*c.args, **c.kwargs)) for w, c in zip(self.workers, calls)]
            return METHODS[name].collect(layout, results)

        return call

    def collect(self, groups: int) -> list[dict]:
        """The groups of samples that each tensor-parallel group returns, by uid."""
        found = [{} for _ in range(self.layout("rollout").dp_size)]
        deadline = time.monotonic() + 20
        while sum(map(len, found)) < groups:
            assert time.monotonic() < deadline
            for own, batches in zip(found, self.collect_finished(0.01), strict=True):
                own |= {batch.non_tensor_batch["uid"][0]: batch for batch in batches}
        return found

    def wait_until_running(self, requests: int) -> None:
        wait_until(lambda: sum(engine.running for engine in self.engines) >= requests)

    def close(self) -> None:
        for worker in self.workers:
            if worker._service is not None:
                worker._service.close()


def service_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rollout service"}


@pytest.fixture
def group():
    others = service_threads()  # of services of other tests in this process
    group = Group()
    yield group
    group.close()
    assert not service_threads() - others


def batch_of(*uids: str) -> DataProto:
    columns = {"prompt_ids": [[1, 2]] * len(uids), "uid": list(uids), "sample_index": [0] * len(uids)}
    return DataProto.from_dict({}, columns)


def test_only_rank_0_of_a_group_has_the_prompts_and_answers(group):
    group.submit_prompts([batch_of("a", "b"), batch_of("c")])
    first, second = group.collect(3)
    assert set(first) == {"a", "b"} and set(second) == {"c"}
    assert [type(worker._service).__name__ for worker in group.workers] == [
        *("GenerationService", "FollowingService", "GenerationService", "FollowingService")
    ]
    group.pause_generation(True)
    zero, one, two, three = group.engines
    assert zero.sessions == two.sessions == []
    assert one.sessions == [[1] * 80] and three.sessions == [[1] * 40]


def test_the_other_ranks_follow_until_the_pause_and_again_afterwards(group):
    group.submit_prompts([batch_of("a"), batch_of("b")])
    wait_until(lambda: all(engine.sessions and engine.sessions[-1] for engine in group.engines[1::2]))
    group.pause_generation(True)
    for engine in group.engines:
        engine.weight_version = 1
    assert not any(engine.leads or engine.follows for engine in group.engines)
    # in the foreground, as for validation or the canary: nobody follows in the background
    prompts = batch_of("v", "w").copy()
    prompts.meta_info["sampling"] = "train"
    for worker in group.workers:
        worker.max_over_ranks = lambda values: [2.0, 40.0]
    assert group.generate_sequences(prompts).batch["responses"].tolist() == [[2] * 40] * 2
    group.resume_generation()
    group.resume_generation()  # no effect
    for own in group.collect(2):
        (batch,) = own.values()
        ((_, old), (first, new)) = batch.non_tensor_batch["weight_versions"][0]
        assert batch.batch["responses"].tolist() == [[1] * first + [2] * (40 - first)] and (old, new) == (0, 1)
    group.pause_generation(True)
    for engine in (group.engines[1], group.engines[3]):
        before, foreground, after = engine.sessions
        assert len(before) + len(after) == 40 and {*before} == {1} and {*after} == {2} and foreground == [2] * 40


def test_a_pause_without_interruption_waits_with_all_ranks(group):
    group.submit_prompts([batch_of("a"), batch_of("b")])
    group.wait_until_running(2)
    group.pause_generation(False)
    assert [len(engine.sessions) for engine in group.engines] == [0, 1, 0, 1]
    assert all(engine.sessions == [[1] * 40] for engine in group.engines[1::2])
    assert sum(map(len, group.collect(2))) == 2


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_prompts_of_a_rank_wait_for_the_end_of_a_pause(size):
    """A group that had no prompts before a push gets some during it."""
    group = Group(2, size)
    groups = 2 // size
    group.pause_generation(True)
    group.submit_prompts([batch_of(f"{i}") for i in range(groups)])
    assert group.collect_finished(0.05) == [[]] * groups
    assert not any(engine.leads or engine.sessions for engine in group.engines)
    for engine in group.engines:
        engine.weight_version = 1
    group.resume_generation()
    for own in group.collect(groups):
        assert [batch.batch["weight_version"].tolist() for batch in own.values()] == [[1]]
    group.close()


def test_the_first_prompts_of_a_rank_after_a_pause_start_at_once(group):
    group.pause_generation(True)
    group.resume_generation()
    group.submit_prompts([batch_of("a"), batch_of("b")])
    assert [set(own) for own in group.collect(2)] == [{"a"}, {"b"}]


def test_an_error_of_a_following_rank_is_raised_by_every_call(group):
    group.submit_prompts([batch_of("a"), None])
    group.wait_until_running(1)
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    group.engines[1].link.put(error)
    follower = group.workers[1]
    wait_until(lambda: follower._service._thread.error is not None)
    calls = [
        lambda: follower.collect_finished(0.01),
        lambda: follower.pause_generation(True),
        follower.resume_generation,
        lambda: follower.submit_prompts(batch_of("b")),
    ]
    for call in calls:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            call()
        assert caught.value is error


def test_the_other_ranks_do_not_follow_a_service_that_is_closed():
    others, group = service_threads(), Group()
    group.submit_prompts([batch_of("a"), batch_of("b")])
    group.wait_until_running(2)
    start = time.monotonic()
    for worker in group.workers:
        worker._service.close()
    assert time.monotonic() - start < 30  # not until a timeout
    assert [len(engine.sessions) for engine in group.engines] == [0, 1, 0, 1]
    assert not any(engine.follows for engine in group.engines)
    assert not service_threads() - others


def test_groups_of_samples_are_sent_to_one_tensor_parallel_group_after_another():
    sent = []

    class Recorded(Group):
        def submit_prompts(self, batches):
            sent.append([None if b is None else list(dict.fromkeys(b.non_tensor_batch["uid"])) for b in batches])

    generation = Generation({"rollout": Recorded()}, with_columns=False, partial=True)
    for uids in (["a", "a", "b", "b", "c", "c"], ["d", "d"]):
        generation(batch_of(*uids))
        generation.send()
    assert sent == [[["a", "c"], ["b"]], [None, ["d"]]]
