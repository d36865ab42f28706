"""How asynchronous runs end: signals in every phase, rewards that do not differ, and the return to a checkpoint."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable
from random import Random

import pytest
import torch

from tests.trainer.runs import steps_in
from tests.trainer.test_asynchronous import (
    GRPO,
    ROLLOUT,
    VERSIONS,
    SlowTrainer,
    ThreadCluster,
    check_spans,
    make,
    no_thread_remains,  # noqa: F401 (used by all tests)
    once,
)
from tests.trainer.test_dynamic_sampling import Scripted
from tests.trainer.version_engine import VersionEngine
from tests.waiting import wait_until
from verl.dataflow import HOLD, DataFlow, Operator
from verl.protocol import DataProto
from verl.rollout.base import register_rollout_engine
from verl.rollout.request import Completion, Request
from verl.single_controller.worker_group import WorkerDied
from verl.trainer.asynchronous.generation import FilterGroups
from verl.trainer.guards.operator_watch import OperatorTimeout
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.startup.launch import run as launch
from verl.utils.rng import fork_seed

FILTER = ["algorithm.filter_groups.enable=true"]


@pytest.fixture
def saved(settings) -> list[str]:
    """Settings of a run that saves when it is interrupted."""
    return [s for s in settings if not s.startswith("trainer.save_at_end")]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def call_once(owner: object, name: str, function: Callable[[], None], before: bool = False) -> None:
    """Call a function once: after the next call of a method of `owner`, or before it."""
    method = getattr(owner, name)

    def called(*args, **kwargs):
        setattr(owner, name, method)
        if before:
            function()
        found = method(*args, **kwargs)
        if not before:
            function()
        return found

    setattr(owner, name, called)


# ---- rewards that do not differ -------------------------------------------------------------------------------------


@pytest.fixture
def equal(settings, paid_by) -> list[str]:
    """Settings of a run whose rewards are all 1."""
    return [*settings, *FILTER, paid_by("return 1.0"), "trainer.save_at_end=true"]


@pytest.mark.slow
def test_rewards_without_a_difference_end_the_run(equal, caplog):
    trainer, reports = make(equal, "algorithm.filter_groups.max_empty_gen_batches=6", kind=PPOTrainer)
    with pytest.raises(ValueError, match=r"none among the last \d+ prompts \(\d+ generations of 4") as caught:
        trainer.fit()
    assert "raised in operator 'filter_groups'" in caught.value.__notes__
    assert "max_empty_gen_batches=6 sets the limit (0: no limit)" in str(caught.value)
    (warning,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("dynamic sampling: expected")]
    assert "(5 generations of 4 in a row; mean reward of this step 1)" in warning
    assert not reports and VersionEngine.requests <= 2 * 4 * (6 + 3), "generation ends with the run"


def test_a_signal_ends_a_run_whose_rewards_do_not_differ(equal, tmp_path, capsys):
    trainer, reports = make(equal, "algorithm.filter_groups.max_empty_gen_batches=0", kind=SlowTrainer)
    filtering, groups = trainer.runner._filter.sampling, []

    def count(batch):
        groups.append(len(batch) // 2)
        if len(groups) == 10:
            terminate()
        return type(filtering).count(filtering, batch)

    filtering.count = count
    assert launch(lambda: trainer) == 143
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("stopped by SIGTERM before the first step; no checkpoint was saved")
    assert sum(groups[10:]) <= 2 * 2 * 4, "more groups were generated than those that were in flight"
    assert not reports and steps_in(tmp_path / "run") == []


def test_the_limit_of_generations_is_that_of_each_training_batch():
    """While an update takes long, groups of several steps are filtered: together they may be more than the limit."""
    sampling = Scripted(lambda i: False, groups=4, size=4, limit=4).pipeline.operators[4].func
    filtering = FilterGroups(sampling)

    def arrive(kept: bool) -> object:
        return filtering(DataProto.from_dict(non_tensors={"uid": ["a", "a"], "reward_acc": [0.0, float(kept)]}))

    for i in range(60):
        assert (arrive(i % 3 == 2) is HOLD) == (i % 3 != 2)  # 20 groups of 60: 12 of 16 are enough for one batch
    for _ in range(15):
        assert arrive(False) is HOLD
    with pytest.raises(ValueError, match=r"only 0 of 4 groups .* after 16 prompts"):
        arrive(False)


# ---- signals --------------------------------------------------------------------------------------------------------

PHASES = {
    "the rollout generates and training waits": lambda run: call_once(run.runner.buffer, "_choose", terminate),
    "a group arrives": lambda run: call_once(run.runner.buffer, "settle", terminate),
    "prompts are sent": lambda run: call_once(run.runner.generation, "send", terminate, before=True),
    "the policy is updated": lambda run: call_once(run.runner.buffer, "take", terminate),
    "weights are pushed": lambda run: call_once(run.rollout_weights, "push", terminate, before=True),
    "the push has ended": lambda run: call_once(run.runner.buffer, "set_version", terminate),
    "a validation generates": lambda run: call_once(run, "_validate_now", terminate, before=True),
    "a checkpoint is written": lambda run: call_once(run.checkpointer, "save", terminate, before=True),
}


FAST = "weights are pushed"


@pytest.mark.parametrize("phase", [p if p == FAST else pytest.param(p, marks=pytest.mark.slow) for p in PHASES])
def test_a_signal_ends_the_run_and_no_prompt_is_lost(phase, saved, tmp_path, capsys):
    more = ["trainer.test_freq=2", "trainer.save_freq=2"]
    trainer, first = make(saved, *more, k=2, kind=SlowTrainer)
    trainer.on_step.append(lambda report: report.step == 1 and PHASES[phase](trainer))
    assert launch(lambda: trainer) == 143
    shown, done = capsys.readouterr().err.splitlines()[-1], [report.step for report in first]
    assert done in ([1], [1, 2], [1, 2, 3]) and steps_in(tmp_path / "run")[-1] == done[-1]
    where = f"the same command resumes from {tmp_path / 'run'}/global_step_{done[-1]}"
    assert shown == f"stopped by SIGTERM after step {done[-1]} of 6; {where}"
    again, rest = make(saved, *more, k=2, kind=SlowTrainer)
    again.fit()
    assert [report.step for report in (*first, *rest)] == [1, 2, 3, 4, 5, 6]
    assert once([*first, *rest])
    assert all(check_spans(report, 2) for report in (*first, *rest))


# ---- validation -----------------------------------------------------------------------------------------------------


class Hangs:
    """A reward function that returns, until the training loop has taken a batch; then it waits for `end`."""

    def __init__(self) -> None:
        self.begun, self.end, self.armed = threading.Event(), threading.Event(), False

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None) -> float:
        if self.armed:
            self.begun.set()
            self.end.wait(120)
        return float(len(solution_str) % 2)


def test_a_validation_does_not_wait_for_a_reward_that_hangs_without_end(settings):
    reward = Hangs()

    class Watched(PPOTrainer):
        def validate(self) -> dict[str, float]:
            reward.armed = True
            assert reward.begun.wait(120), "nothing is scored although weights were pushed"
            return super().validate()

        def shutdown(self) -> None:
            reward.end.set()
            super().shutdown()

    chosen = [s for s in settings if not s.startswith("reward.custom_reward_function")]
    more = ["trainer.test_freq=1", "trainer.wait_minimum=1", "trainer.wait_factor=2", "reward.timeout=null"]
    more.append("trainer.total_training_steps=4")
    trainer = Watched(
        overrides=[*chosen, *GRPO, *VERSIONS, "trainer.async.max_staleness=1", *more],
        cluster=ThreadCluster(),
        reward=reward,
    )
    with pytest.raises(OperatorTimeout, match=r"no group of responses has arrived .* a reward function hangs") as error:
        trainer.fit()
    assert "self.end.wait(120)" in str(error.value)


def test_training_continues_after_a_validation_that_failed(settings, monkeypatch):
    """In a custom loop: the responses that the validation interrupted are continued."""
    monkeypatch.setattr(VersionEngine, "hold", 60.0)
    trainer, _ = make(settings, kind=PPOTrainer)
    buffer = trainer.runner.buffer

    def fail() -> None:
        raise KeyError("no such field")

    with trainer:
        trainer.step()
        call_once(trainer.validation, "run", fail, before=True)
        with pytest.raises(KeyError, match="no such field"):
            trainer.validate()
        wait_until(lambda: not (buffer.room() or buffer.in_flight), 30)
        assert trainer.step().step == 2


# ---- the return to a checkpoint -------------------------------------------------------------------------------------


class WeightEngine(VersionEngine):
    """Its tokens depend on the bits of the weights and on the sample. Responses end at once, or wait for `open`."""

    open = threading.Event()
    #: number of the weights that it has: the sum of their bits
    weights = 0

    async def generate_one(self, request: Request) -> Completion:
        aborted = self._aborted
        while not self.open.is_set() and self._aborted == aborted:
            await asyncio.sleep(0.001)
        if self._aborted != aborted:
            return Completion([], [], "abort")
        draw = Random(fork_seed(request.sample_id, self.weights))
        tokens = [draw.randrange(8, 32) for _ in range(request.params.max_tokens)]
        return Completion(tokens, [-2.0] * len(tokens), "length")

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights = sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for _, tensor in weights) % 2**31


@register_rollout_engine("weights")
def make_weight_engine(config, model, env, train_engine=None) -> WeightEngine:
    return WeightEngine()


class InStep(PPOTrainer):
    """A trainer that updates only when all prompts that may be admitted are in the buffer: it is reproducible."""

    def build_flow(self) -> DataFlow:
        return super().build_flow().insert_before("update_actor", Operator("wait", self._wait))

    def _wait(self, batch: DataProto) -> None:
        buffer = self.runner.buffer
        wait_until(lambda: not WeightEngine.open.is_set() or not (buffer.room() or buffer.in_flight), 120)


def steps_of(trainer: PPOTrainer, count: int) -> list[tuple]:
    """Train some steps. Returns what must be equal, bit for bit."""
    found = []
    for _ in range(count):
        batch = trainer.step().batch
        columns = (batch.batch[name] for name in ("responses", "advantages", "weight_version"))
        weights = trainer.roles["actor"].worker.engine.module.state_dict().values()
        state = [tensor.clone() for tensor in (*columns, *weights)]
        found.append((trainer.global_step, list(batch.non_tensor_batch["uid"]), state))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rewind_gives_the_steps_of_a_fresh_resume(k, settings, tmp_path):
    more = [f"{ROLLOUT}.name=weights", "imports=[tests.trainer.test_asynchronous_ends]"]
    WeightEngine.open.set()
    trainer, _ = make(settings, *more, k=k, steps=8, kind=InStep)
    steps_of(trainer, 2)
    trainer.save()
    undone, buffer = steps_of(trainer, 1), trainer.runner.buffer
    wait_until(lambda: not (buffer.room() or buffer.in_flight), 120)
    WeightEngine.open.clear()
    undone += steps_of(trainer, 1)
    wait_until(lambda: not buffer.room(), 120)
    assert buffer.in_flight and buffer._finished, "samples of later steps are generated and in flight"
    shutil.copytree(tmp_path / "run", tmp_path / "fresh")
    trainer.rewind()
    assert trainer.global_step == 2
    WeightEngine.open.set()
    again = steps_of(trainer, 4)
    fresh, _ = make(settings, *more, f"trainer.default_local_dir={tmp_path / 'fresh'}", k=k, steps=8, kind=InStep)
    expected = steps_of(fresh, 4)
    trainer.shutdown()
    fresh.shutdown()
    for (step, uids, state), (other_step, other_uids, other_state) in zip(again, expected, strict=True):
        assert (step, uids) == (other_step, other_uids)
        assert all(torch.equal(a, b) for a, b in zip(state, other_state, strict=True))
    assert [step for step, *_ in again] == [3, 4, 5, 6]
    assert set(undone[0][1]) == set(again[0][1]), "the prompts of the steps that are undone come first"


@pytest.mark.slow
def test_a_restart_neither_loses_nor_repeats_a_prompt(saved, monkeypatch, caplog):
    lost = WorkerDied("the rollout was lost", "rollout", "collect_finished", 0)
    monkeypatch.setattr(VersionEngine, "fail_at", (30, lost))
    trainer, reports = make(saved, "trainer.max_restarts=1", "trainer.save_freq=2", k=2, kind=SlowTrainer)
    trainer.fit()
    assert "restart 1 of 1 after an error in step" in caplog.text
    last = {report.step: report for report in reports}  # steps after the checkpoint are trained again
    assert sorted(last) == [1, 2, 3, 4, 5, 6]
    assert once(list(last.values()))
