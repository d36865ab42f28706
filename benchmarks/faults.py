"""Faults of a run, for `make chaos` and for tests: a guard that injects them (docs/internals/trust.md).

    trainer.guards.append(Faults("kill@7", "nan-grad@4"))

A fault is injected once, at the start of its step. One that is armed replaces a function of the trainer's process until
its next call; the replaced code knows nothing of it.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.rewards.sandbox.pool import ProcessPool
from verl.tracking.trackers import TRACKER_REGISTRY
from verl.trainer.guards.base import Guard
from verl.trainer.ppo.weights import RolloutWeights
from verl.trainer.view import RunView
from verl.weight_sync import SyncReport
from verl.workers import policy
from verl.workers.engine_worker import EngineWorker

#: fault -> what it does
FAULTS = {
    "kill-reward": "the process of a reward call is killed; needs reward.isolation=process",
    "hang-reward": "a reward call does not return; needs reward.isolation=process",
    "nan-grad": "the gradient of an actor update is not finite; needs an actor in the trainer's process",
    "nan-weight": "a weight of the actor becomes NaN after its updates; needs an actor in the trainer's process",
    "corrupt-ckpt": "a byte of the newest checkpoint changes",
    "kill": "the trainer's process is killed",
    "stop-rank": "the process of the last actor rank is stopped; needs worker processes of this host",
    "tracker-hang": "a call of a tracker does not return; needs a tracker that runs in a thread",
    "stale-weights": "weight pushes report success, but the rollout keeps its weights; needs rollout devices",
}


class Faults(Guard):
    """Injects faults, each a text NAME@STEP. Raises ValueError for an unknown one."""

    def __init__(self, *faults: str):
        for fault in faults:
            name, _, step = fault.partition("@")
            if name not in FAULTS or not step.isdecimal():
                raise ValueError(f"expected NAME@STEP with one of {', '.join(FAULTS)}, found {fault!r}")
        self.pending = sorted(faults, key=lambda fault: fault.startswith("kill@"))  # a kill is the last one of its step

    def before_step(self, view: RunView) -> None:
        """Inject the faults of the step that follows."""
        for fault in [fault for fault in self.pending if fault.endswith(f"@{view.step + 1}")]:
            self.pending.remove(fault)
            print(f"injecting {fault}", flush=True)
            inject(fault.partition("@")[0], view)

    def at_end(self, view: RunView) -> None:
        disarm()


def inject(name: str, view: RunView) -> None:
    """Inject a fault into a run. Raises ValueError if it would have no effect."""
    actor = view.roles["actor"].processes
    if name in ("nan-grad", "nan-weight") and actor is not None:
        raise ValueError(f"{name}: the actor runs in other processes")
    if name in _REPLACED:
        arm(name)
    elif name == "stop-rank":
        os.kill(actor._ranks[-1].process.pid, signal.SIGSTOP)
    elif name == "corrupt-ckpt":
        corrupt(view.checkpointer.store.newest())
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def corrupt(checkpoint: Path) -> None:
    """Change a byte in the middle of the largest file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


_armed: dict[str, list[tuple[Any, str, Any]]] = {}
"""Armed faults -> (owner, attribute, function) that they have replaced."""


def arm(name: str) -> None:
    """Inject a fault where its function is called next."""
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
    with original(worker, *args, **kwargs) as update:
        yield update
        worker.engine.optimizer.param_groups[0]["params"][0].detach().view(-1)[0] = float("nan")


#: fault -> owners of the function that it replaces, its name, and the replacement
_REPLACED: dict[str, tuple[Callable[[], Sequence[Any]], str, Callable[..., Any]]] = {
    **dict.fromkeys(("kill-reward", "hang-reward"), (lambda: [ProcessPool], "map", _replace_reward)),
    "nan-weight": (lambda: [EngineWorker], "update_pass", _spoil_update),
    "nan-grad": (lambda: [policy], "policy_objective", _spoil_gradient),
    "stale-weights": (lambda: [RolloutWeights], "_push", _push_nothing),
    "tracker-hang": (lambda: [kind for kind in TRACKER_REGISTRY.values() if kind.background], "log", _hang_tracker),
}
