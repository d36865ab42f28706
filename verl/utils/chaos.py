"""Fault injection, `verl train --chaos kill@7,nan-grad@4` (docs/trust.md).

A fault is injected at the start of its step, once for each folder of a run: `chaos.jsonl` records it, so that the same
command resumes without it. Some faults are armed in the process that they are for, and taken there.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

logger = logging.getLogger("verl.trainer")

#: fault -> its effect
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
#: faults that are armed in the process of the trainer
_IN_TRAINER = {"kill-reward", "hang-reward", "tracker-hang", "stale-weights"}
RECORD = "chaos.jsonl"

_armed: set[str] = set()  # faults that are armed in this process


def read_faults(texts: Sequence[str]) -> list[str]:
    """The faults of `trainer.chaos`, NAME@STEP, also several in one text. Raises ValueError."""
    faults = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for fault in faults:
        name, _, step = fault.partition("@")
        if name not in FAULTS or not (step.isascii() and step.isdigit() and int(step) > 0):
            raise ValueError(f"trainer.chaos: expected NAME@STEP with one of {', '.join(FAULTS)}, found {fault!r}")
    return faults


class Chaos:
    """The faults of one run.

    Args:
        faults: `trainer.chaos`.
        folder: of the run.
    """

    def __init__(self, faults: Sequence[str], folder: Path):
        self.faults = read_faults(faults)
        self._record = folder / RECORD

    def start(self) -> None:
        """At the start of workers: log which faults will be injected, and disarm those of an earlier run."""
        _armed.clear()
        if left := self._left():
            logger.warning("FAULTS ARE INJECTED INTO THIS RUN (trainer.chaos): %s", ", ".join(left))
        elif self.faults:
            logger.warning("all faults of trainer.chaos have been injected before: see %s", self._record)

    def inject(self, step: int, actor: Any, newest: Callable[[], Path | None]) -> None:
        """Inject the faults of a step, a kill last.

        Args:
            actor: worker group of the actor.
            newest: finds the newest checkpoint, if there is one.
        """
        due = [fault for fault in self._left() if fault.endswith(f"@{step}")] if self.faults else []
        for fault in sorted(due, key=lambda fault: fault.startswith("kill@")):
            name = fault.partition("@")[0]
            if name == "corrupt-ckpt" and (checkpoint := newest()) is None:
                logger.error("chaos: %s is not injected: there is no checkpoint yet", fault)
                continue
            logger.error("chaos: injecting %s: %s", fault, FAULTS[name])
            self._add_to_record(fault)
            if name in _IN_WORKERS:
                actor.arm_fault(name)
            elif name in _IN_TRAINER:
                arm(name)
            elif name == "corrupt-ckpt":
                corrupt(checkpoint)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def _left(self) -> list[str]:
        """The faults that are not injected yet."""
        if not os.path.lexists(self._record):
            return self.faults
        try:
            if not self._record.is_file():
                raise ValueError("no regular file")
            done = [json.loads(line)["fault"] for line in self._record.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f'{self._record}: expected lines such as {{"fault": "kill@2"}}, found {error}: delete the file, '
                "and all faults are injected again"
            ) from None
        return [fault for fault in self.faults if fault not in done]

    def _add_to_record(self, fault: str) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with self._record.open("a", encoding="utf-8") as file:
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


def arm(name: str) -> None:
    """Inject a fault where it is taken next in this process."""
    _armed.add(name)


def is_armed(name: str) -> bool:
    return name in _armed


def take(name: str) -> bool:
    """Whether a fault is armed; it is disarmed."""
    try:
        _armed.remove(name)
    except KeyError:
        return False
    return True


def hang_tracker() -> None:
    """Do not return if tracker-hang is armed."""
    if take("tracker-hang"):
        threading.Event().wait()


def replace_reward(calls: list[Any]) -> list[Any]:
    """The calls of a reward function in other processes; the first one is replaced if a fault is armed."""
    for name, function in (("kill-reward", _end_process), ("hang-reward", _never_return)):
        if calls and take(name):
            calls[0] = replace(calls[0], address=(__name__, __file__, function.__name__), arguments={})
    return calls


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _never_return() -> None:
    threading.Event().wait()


def spoil_gradient(objective: Any) -> Any:
    """An `Objective`; if nan-grad is armed, one with the same loss, whose gradient is not finite."""
    if not take("nan-grad"):
        return objective

    def loss(outputs: Mapping[str, Any], columns: Mapping[str, Any]) -> tuple[Any, Any]:
        value, metrics = objective.loss(outputs, columns)
        zero = outputs["log_probs"] - outputs["log_probs"].detach()
        return value + zero.sqrt().sum(), metrics  # 0, with an infinite slope

    return replace(objective, loss=loss)


def spoil_weight(engine: Any) -> None:
    """Make one weight NaN in the shard of this rank, if nan-weight is armed."""
    if not take("nan-weight"):
        return
    for parameter in engine.optimizer.param_groups[0]["params"]:
        shard = getattr(parameter, "to_local", lambda parameter=parameter: parameter)().detach()
        if shard.numel():
            shard.view(-1)[0] = float("nan")
            return


def stop_last_rank(rank: int, world_size: int) -> None:
    """Stop this process if stop-rank is armed and this is the last rank."""
    if take("stop-rank") and rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
