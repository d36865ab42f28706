"""Inject each fault of `faults.py` into a tiny run, and compare what the run does with docs/internals/trust.md.

    make chaos
    python benchmarks/chaos.py --faults kill nan-weight

A run that its fault ends is started again, without it. Where a fault leaves the experiment unchanged, the
last checkpoint and the metrics of all steps must be those of an undisturbed run, bit for bit. Prints one line per
fault. Exit status 1 if one is not handled as expected.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tiny_job import adopt_processes, ended, fork_run, left_processes, make_job, settings, warm_up  # noqa: E402

LAST = 8  # steps of a run
LIMIT = 400.0  # seconds of a run that is not expected to hang
#: a tracker of a service
TRACKER = """
from verl.tracking.trackers import TRACKER_REGISTRY, Tracker


class Service(Tracker):
    def log(self, metrics, step):
        pass

    def log_samples(self, name, rows, step):
        pass

    def finish(self, failed):
        pass


TRACKER_REGISTRY["service"] = Service
"""
ONE = ["reward.isolation=process", "reward.on_error=count", "reward.retries=1", "reward.timeout=5"]
TWO = ["trainer.n_gpus_per_node=2"]
SEPARATE = [*TWO, "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
SEPARATE += ["actor_rollout_ref.rollout.check_every=1"]
PLACES = {"one process": ONE, "two processes": TWO, "separate rollout": SEPARATE}


@dataclass(frozen=True)
class Trial:
    """A fault, and what the run must do.

    Attributes:
        faults: those of `Faults`, separated by commas.
        says: what the log must contain.
        place: a key of PLACES.
        status: exit status of the run with the fault; negative: a signal.
        equal: whether the run must have the results of an undisturbed one.
        more: further settings.
    """

    faults: str
    says: str
    place: str = "one process"
    status: int = 0
    equal: bool = True
    more: tuple[str, ...] = ()


TRIALS = {
    "tracker-hang": Trial("tracker-hang@3", "tracker service did not finish", more=("trainer.logger=[jsonl,service]",)),
    "kill-reward": Trial("kill-reward@2", "ended its process, which was killed by SIGKILL"),
    "hang-reward": Trial("hang-reward@3", "did not end within 5 s and was stopped"),
    "nan-grad": Trial("nan-grad@4", r"step 4 is bad \(actor/grad_skipped 0.5\)", equal=False),
    "nan-weight": Trial("nan-weight@5", "step 5 is not saved: the actor contains NaN", status=1),
    "corrupt-ckpt": Trial("corrupt-ckpt@6,kill@6", "global_step_5 is damaged", status=-signal.SIGKILL),
    "kill": Trial("kill@7", "resumed from .*global_step_6", status=-signal.SIGKILL),
    "stop-rank": Trial("stop-rank@4", "is stopped", "two processes", 1),
    "stale-weights": Trial("stale-weights@4", "still generates with the weights of version 3", "separate rollout", 1),
}


class Runs:
    """Runs of the tiny job, and the undisturbed ones to compare with.

    Args:
        folder: for job, runs and logs.
        worker_timeout: seconds after which a stopped rank ends the run.
    """

    def __init__(self, folder: Path, worker_timeout: float):
        self.folder, self.worker_timeout = folder, worker_timeout
        self.job = make_job(folder / "job")
        (self.job / "tracker.py").write_text(TRACKER, encoding="utf-8")
        warm_up(self.job)
        self._undisturbed: dict[str, Path] = {}

    def start(self, name: str, place: str, *more: str, faults: Sequence[str] = ()) -> int:
        fixed = ["algorithm.name=grpo", f"trainer.total_training_steps={LAST}", "trainer.save_freq=1"]
        fixed += [f"imports=[{self.job / 'tracker.py'}]", f"trainer.worker_timeout={self.worker_timeout}"]
        arguments = settings(self.job, self.folder / name, *fixed, *PLACES[place], *more)
        return fork_run(arguments, self.folder / f"{name}.log", trainer_with(faults))

    def undisturbed(self, place: str) -> Path:
        if place not in self._undisturbed:
            name = place.replace(" ", "_")
            if status := wait(self.start(name, place)):
                raise RuntimeError(f"the undisturbed run ended with status {status}: see {self.folder / name}.log")
            self._undisturbed[place] = self.folder / name
        return self._undisturbed[place]

    def faults(self, name: str, trial: Trial, pid: int) -> Iterator[str]:
        """What a run does that it should not. pid: of the run with the fault; it is resumed here."""
        from resumed_runs import differences_of_runs

        status = wait(pid)
        if status != trial.status:
            yield f"ended with status {status}, expected {trial.status}"
        if left := left_processes():
            yield from left
        if trial.status and (status := wait(self.start(name, trial.place, *trial.more))):
            yield f"the resumed run ended with status {status}"
        log = (self.folder / f"{name}.log").read_text(errors="replace", encoding="utf-8")
        if not re.search(trial.says, log):
            yield f"the log does not say {trial.says!r}: {log[-300:]}"
        straight = self.undisturbed(trial.place)
        if not (self.folder / name / f"global_step_{LAST}").is_dir():
            yield "it did not reach its last step"
        elif trial.equal:
            yield from differences_of_runs(straight, self.folder / name, LAST)[:3]


def trainer_with(faults: Sequence[str]) -> type:
    """A PPOTrainer whose runs have these faults."""
    from faults import Faults

    from verl.trainer.ppo_trainer import PPOTrainer

    class Faulty(PPOTrainer):
        def fit(self) -> None:
            self.guards.append(Faults(*faults))
            super().fit()

    return Faulty


def wait(pid: int) -> int | str:
    """The exit status of a run; it is killed after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while (status := ended(pid)) is None:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            deadline += LIMIT
        time.sleep(0.05)
    return status


def did(trial: Trial) -> str:
    """What a run with this fault does, in words."""
    ends = {0: "continued", 1: "stopped with an error, resumed"}.get(trial.status, "was killed, resumed")
    return f"{ends}; {'results of an undisturbed run' if trial.equal else 'one update skipped'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--worker-timeout", type=float, default=60.0, help="seconds; more on a slow machine")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_processes()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        runs = Runs((args.folder or Path(temporary)).resolve(), args.worker_timeout)
        for place in dict.fromkeys(TRIALS[name].place for name in args.faults):
            runs.undisturbed(place)
        print(f"{'fault':<22} {'the run':<62} {'seconds':>7}  as expected", flush=True)
        wrong = 0
        for name in args.faults:
            trial, start = TRIALS[name], time.monotonic()
            pid = runs.start(name, trial.place, *trial.more, faults=trial.faults.split(","))
            problems = list(runs.faults(name, trial, pid))
            wrong += bool(problems)
            outcome, seconds = "; ".join(problems) or did(trial), time.monotonic() - start
            print(f"{trial.faults:<22} {outcome:<62} {seconds:7.1f}  {'NO' if problems else 'yes'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
