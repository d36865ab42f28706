"""Fault injection, `verl train --chaos kill@7,nan-grad@4` (docs/trust.md).

A fault is injected at the start of its step, once for each folder of a run: `chaos.jsonl` records it, so that the same
command resumes without it. A fault that is armed replaces a function, in the process that it is for, until its next
call; the replaced code knows nothing of it.
"""

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.schema import Config, MegatronConfig
from verl.rewards.sandbox.pool import ProcessPool
from verl.tracking.trackers import TRACKER_REGISTRY
from verl.trainer.guards.base import Guard
from verl.trainer.ppo.weights import RolloutWeights
from verl.trainer.view import RunView
from verl.weight_sync import SyncReport
from verl.workers import policy
from verl.workers.engine_worker import EngineWorker

logger = logging.getLogger("verl.trainer")

#: fault -> what it does
FAULTS = {
    "kill-reward": "the process of a reward call is killed",
    "hang-reward": "a reward call does not return",
    "nan-grad": "the gradient of an actor update is not finite",
    "nan-weight": "a weight of the actor becomes NaN after its updates",
    "corrupt-ckpt": "a byte of the newest checkpoint changes",
    "kill": "the trainer's process is killed",
    "stop-rank": "the process of the last actor rank is stopped",
    "tracker-hang": "a call of a tracker does not return",
    "stale-weights": "weight pushes report success, but the rollout keeps its weights",
}
#: faults that are armed in the workers of the actor
_IN_WORKERS = {"nan-grad", "nan-weight", "stop-rank"}
RECORD = "chaos.jsonl"


def read_faults(texts: Sequence[str]) -> list[str]:
    """The faults of `trainer.chaos`, NAME@STEP, also several in one text. Raises ValueError."""
    faults = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for fault in faults:
        name, _, step = fault.partition("@")
        if name not in FAULTS or not (step.isascii() and step.isdigit() and int(step) > 0):
            raise ValueError(f"trainer.chaos: expected NAME@STEP with one of {', '.join(FAULTS)}, found {fault!r}")
    return faults


def check_faults(config: Config) -> None:
    """Raise ValueError for an unknown fault, or one that would have no effect with these settings."""
    trainer, reward, policy = config.trainer, config.reward, config.actor_rollout_ref
    in_processes = trainer.backend == "ray" or trainer.nnodes * trainer.n_gpus_per_node > 1
    in_thread = any(TRACKER_REGISTRY[name].background for name in trainer.logger)
    isolated = reward.isolation == "process"
    conditions = {
        "kill-reward": (isolated, "reward.isolation=process"),
        "hang-reward": (isolated and reward.timeout, "reward.isolation=process and a reward.timeout"),
        "nan-weight": (
            not isinstance(policy.actor.engine, MegatronConfig),
            f"another actor.strategy than {policy.actor.strategy}",
        ),
        "stop-rank": (in_processes, "worker processes: trainer.n_gpus_per_node of at least 2, or trainer.backend=ray"),
        "tracker-hang": (in_thread, "a tracker that runs in a thread in trainer.logger, such as wandb"),
        "stale-weights": (
            config.rollout_is_separate and policy.rollout.check_every,
            "placement.rollout_devices and rollout.check_every",
        ),
    }
    names = dict.fromkeys(fault.partition("@")[0] for fault in read_faults(trainer.chaos))
    unmet = {name: need for name, (is_met, need) in conditions.items() if name in names and not is_met}
    if unmet:
        raise ValueError(f"trainer.chaos: {'; '.join(f'{name} needs {need}' for name, need in unmet.items())}")


class Faults(Guard):
    """Injects the faults of one run: `trainer.chaos`."""

    def __init__(self, config: Config):
        self.faults = read_faults(config.trainer.chaos)

    def at_start(self, view: RunView) -> None:
        """Log which faults will be injected."""
        if left := self._left(view.folder / RECORD):
            logger.warning("FAULTS ARE INJECTED INTO THIS RUN (trainer.chaos): %s", ", ".join(left))
        else:
            logger.warning("all faults of trainer.chaos have been injected before: see %s", view.folder / RECORD)

    def before_step(self, view: RunView) -> None:
        """Inject the faults of the step that follows, a kill last."""
        due = [fault for fault in self._left(view.folder / RECORD) if fault.endswith(f"@{view.step + 1}")]
        for fault in sorted(due, key=lambda fault: fault.startswith("kill@")):
            name = fault.partition("@")[0]
            if name == "corrupt-ckpt" and (checkpoint := view.checkpointer.store.newest()) is None:
                logger.error("chaos: %s is not injected: there is no checkpoint yet", fault)
                continue
            logger.error("chaos: injecting %s: %s", fault, FAULTS[name])
            _add_to_record(view.folder / RECORD, fault)
            if name in _IN_WORKERS:
                view.roles["actor"].arm_fault(name)
            elif name in _REPLACED:
                arm(name)
            elif name == "corrupt-ckpt":
                corrupt(checkpoint)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def at_end(self, view: RunView) -> None:
        disarm()

    def _left(self, record: Path) -> list[str]:
        if not os.path.lexists(record):
            return self.faults
        try:
            if not record.is_file():
                raise ValueError("no regular file")
            done = [json.loads(line)["fault"] for line in record.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f'{record}: expected lines such as {{"fault": "kill@2"}}, found {error}: delete the file, '
                "and all faults are injected again"
            ) from None
        return [fault for fault in self.faults if fault not in done]


def _add_to_record(record: Path, fault: str) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"fault": fault, "time": time.time()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def corrupt(checkpoint: Path) -> None:
    """Change a byte in the middle of the largest file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


# ---- in the process of the fault ------------------------------------------------------------------------------------

_armed: dict[str, list[tuple[Any, str, Any]]] = {}
"""Armed faults of this process -> (owner, attribute, function) that they have replaced."""


def arm(name: str) -> None:
    """Inject a fault where its function is called next in this process."""
    disarm(name)
    owners, attribute, replacement = _REPLACED[name]
    _armed[name] = [(owner, attribute, getattr(owner, attribute)) for owner in owners()]
    for owner, _, original in _armed[name]:
        setattr(owner, attribute, lambda *args, f=original, **kwargs: replacement(name, f, *args, **kwargs))


def disarm(*names: str) -> None:
    """Put back what these faults have replaced, or all of them."""
    for name in names or tuple(_armed):
        for owner, attribute, original in _armed.pop(name, ()):
            setattr(owner, attribute, original)


def _replace_reward(name: str, original: Callable, pool: ProcessPool, calls: list[Any], limits: Any) -> Any:
    if calls:
        disarm(name)
        kill = {"args": "kill -KILL $PPID", "shell": True}  # the process of the reward function
        address, arguments = {
            "kill-reward": (("subprocess", subprocess.__file__, "run"), kill),
            "hang-reward": (("signal", signal.__file__, "pause"), {}),
        }[name]
        calls = [replace(calls[0], address=address, arguments=arguments), *calls[1:]]
    return original(pool, calls, limits)


def _hang_tracker(name: str, original: Callable, *args: Any) -> None:
    disarm(name)
    threading.Event().wait()


def _push_nothing(name: str, original: Callable, weights: RolloutWeights, version: int) -> list[SyncReport]:
    """All pushes, until the run ends."""
    return [SyncReport(version, 0, 0.0)]


def _spoil_gradient(name: str, original: Callable, *args: Any) -> Any:
    """The objective of one update has the same loss, and a gradient that is not finite."""
    disarm(name)
    objective = original(*args)

    def loss(outputs: Mapping[str, Any], columns: Mapping[str, Any]) -> tuple[Any, Any]:
        value, metrics = objective.loss(outputs, columns)
        zero = outputs["log_probs"] - outputs["log_probs"].detach()
        return value + zero.sqrt().sum(), metrics  # 0, with an infinite slope

    return replace(objective, loss=loss)


@contextmanager
def _spoil_update(name: str, original: Callable, worker: EngineWorker, *args: Any, **kwargs: Any) -> Iterator[Any]:
    disarm(name)
    if name == "stop-rank" and worker.rank == worker.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with original(worker, *args, **kwargs) as update:
        yield update
        if name == "nan-weight":
            for parameter in worker.engine.optimizer.param_groups[0]["params"]:
                shard = getattr(parameter, "to_local", parameter.detach)().detach()
                if shard.numel():
                    shard.view(-1)[0] = float("nan")
                    break


#: fault -> owners of the function that it replaces, its name, and the replacement
_REPLACED: dict[str, tuple[Callable[[], Sequence[Any]], str, Callable[..., Any]]] = {
    **dict.fromkeys(("kill-reward", "hang-reward"), (lambda: [ProcessPool], "map", _replace_reward)),
    **dict.fromkeys(("nan-weight", "stop-rank"), (lambda: [EngineWorker], "update_pass", _spoil_update)),
    "nan-grad": (lambda: [policy], "policy_objective", _spoil_gradient),
    "stale-weights": (lambda: [RolloutWeights], "_push", _push_nothing),
    "tracker-hang": (lambda: [kind for kind in TRACKER_REGISTRY.values() if kind.background], "log", _hang_tracker),
}
