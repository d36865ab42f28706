"""Runs many benchmarks/learning.py runs in parallel, one process and one thread each, from a plan.

    export PYTHONPATH=. OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
    python benchmarks/learning_pool.py --plan benchmarks/learning_plan.txt --processes 60 --minutes 9

A line of a plan: TASK ALGORITHMS SEEDS, optionally followed by `shuffled`, `as=NAME` and overrides (key=value):

    countdown3 grpo,ppo,dapo 1-5
    reverse    all           1     shuffled
    reverse    online_dpo    1,2   as=online_dpo_sharp dpo.beta=0.5

Blocks of lines are separated by empty lines and started in order; within a block, the longest runs come first. A
finished run is appended to OUT/runs.jsonl immediately. Runs in that file, or in a file given by --have, are skipped, so
the same command resumes after a kill. --minutes: runs that would not finish in time are not started, and those still
running then are killed. The output of a run goes to OUT/<task>-<algorithm>-seed<N>.log.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.learning import RECIPES, STEPS, Curve, method_of, read_runs, run, start_model
from examples.quickstart.tasks import TASKS
from verl.config.presets import PRESETS
from verl.registry import did_you_mean

#: CPU seconds of a grpo run, measured with one thread, and factors for other algorithms
SECONDS = {"reverse": 25, "sort": 25, "countdown3": 170, "digit": 28}
MORE = {"ppo": 1.5, "dapo": 1.5, "prime_filtered": 4}
MORE_OF_ALL_PRIME = 2.0


@dataclass(frozen=True)
class Planned:
    """A planned run. algorithm: one of benchmarks/learning.py; name: label of its results."""

    task: str
    algorithm: str
    name: str
    seed: int
    shuffled: bool
    block: int
    settings: tuple[str, ...] = ()

    @property
    def curve(self) -> Curve:
        return Curve(self.task, self.name, self.seed, self.shuffled)

    @property
    def seconds(self) -> float:
        """Estimated seconds, on the machine that SECONDS were measured on."""
        more = MORE.get(self.algorithm, MORE_OF_ALL_PRIME if self.algorithm.startswith("prime") else 1.0)
        return SECONDS[self.task] * more


def read_plan(text: str) -> list[Planned]:
    """Read the runs of a plan, longest first within a block. Raises ValueError with the line."""
    planned, block = {}, 0
    for number, line in enumerate(text.splitlines(), 1):
        tokens = line.split("#")[0].split()
        block += not line.strip()
        if tokens:
            try:
                runs = _runs_of(tokens, block)
            except ValueError as error:
                raise ValueError(f"line {number} of the plan: {error}: {line.strip()!r}") from None
            for planned_run in runs:
                planned.setdefault(planned_run.curve.key, planned_run)
    return sorted(planned.values(), key=lambda planned_run: (planned_run.block, -planned_run.seconds))


def _runs_of(tokens: Sequence[str], block: int) -> list[Planned]:
    if len(tokens) < 3:
        raise ValueError("expected TASK ALGORITHMS SEEDS ...")
    task, algorithms, seeds, *more = tokens
    known = sorted({*PRESETS, *RECIPES})
    names = known if algorithms == "all" else algorithms.split(",")
    for name, valid_names in ((task, TASKS), *((name, known) for name in names)):
        if name not in valid_names:
            raise ValueError(f"{name!r} is unknown: {did_you_mean(name, valid_names)}")
    renamed = [word.removeprefix("as=") for word in more if word.startswith("as=")]
    settings = tuple(word for word in more if word != "shuffled" and not word.startswith("as="))
    return [
        Planned(task, name, *(renamed or [name]), seed, "shuffled" in more, block, settings)
        for name in names
        for seed in _seeds(seeds)
    ]


def _seeds(text: str) -> list[int]:
    """1-3 or 1,2,5"""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


@dataclass
class Pool:
    """Runs `work(job)` of each job in a separate process, `size` of them at a time, until the deadline.

    logs: job -> where stdout and stderr of its process go. deadline: by time.monotonic.
    """

    work: Callable[[Planned], None]
    logs: Callable[[Planned], Path]
    size: int
    deadline: float
    running: dict[int, tuple[BaseProcess, Planned, float]] = field(default_factory=dict)
    #: seconds taken / seconds expected, of the runs that have ended
    slowness: list[float] = field(default_factory=list)
    failed: list[Planned] = field(default_factory=list)
    left: list[Planned] = field(default_factory=list)

    def run(self, jobs: Sequence[Planned]) -> None:
        """Run all jobs in order. Afterwards, `failed` and `left` list those without a result."""
        waiting = list(jobs)
        # a server that has imported everything, from which processes are forked in milliseconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.learning"])
        while waiting or self.running:
            while waiting and len(self.running) < self.size:
                job = waiting.pop(0)
                if time.monotonic() + job.seconds * (median(self.slowness) if self.slowness else 1) > self.deadline:
                    self.left.append(job)
                    continue
                process = context.Process(target=_logged, args=(self.work, job, self.logs(job)))
                process.start()
                self.running[process.sentinel] = (process, job, time.monotonic())
            remaining = self.deadline - time.monotonic()
            ended = wait(list(self.running), timeout=max(remaining, 0)) if self.running else []
            for sentinel in ended:
                self._note_end(*self.running.pop(sentinel))
            if remaining <= 0:
                self._end_all()

    def _note_end(self, process: BaseProcess, job: Planned, start: float) -> None:
        process.join()
        took = time.monotonic() - start
        print(f"{self.logs(job).stem}: {took:.0f} s, exit {process.exitcode}", flush=True)
        if process.exitcode:
            self.failed.append(job)
        else:
            self.slowness.append(took / job.seconds)

    def _end_all(self) -> None:
        for process, job, _ in self.running.values():
            process.kill()
            process.join()
            self.left.append(job)
        self.running.clear()


def _logged(work: Callable[[Planned], None], job: Planned, log: Path) -> None:
    """Runs in the process; redirects its output to the log."""
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    work(job)


@dataclass(frozen=True)
class Work:
    """The work of a process, in picklable form."""

    out: Path

    def __call__(self, job: Planned) -> None:
        run(job.curve, method_of(job.algorithm), self.out, STEPS[job.task], job.settings)


@dataclass(frozen=True)
class MakeStart:
    """Creates the start model of a job's task."""

    out: Path

    def __call__(self, job: Planned) -> None:
        start_model(job.task, self.out)


def log_of(out: Path, job: Planned) -> Path:
    return out / f"{job.curve.title}-seed{job.seed}.log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--have", type=Path, nargs="*", default=[], metavar="RUNS", help="files of finished runs")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    done = {curve.key for path in (args.out / "runs.jsonl", *args.have) for curve in read_runs(path)}
    jobs = [job for job in read_plan(args.plan.read_text(encoding="utf-8")) if job.curve.key not in done]
    seconds = sum(job.seconds for job in jobs)
    print(f"{len(done)} runs finished; {len(jobs)} to run, about {seconds:.0f} CPU seconds", flush=True)
    making = Pool(MakeStart(args.out), lambda job: args.out / f"{job.task}-start.log", args.processes, deadline)
    making.run(list({job.task: job for job in jobs}.values()))
    pool = Pool(Work(args.out), lambda job: log_of(args.out, job), args.processes, deadline)
    pool.run([job for job in jobs if job.task not in {failed.task for failed in making.failed}])
    for state, labels in {"failed": [*making.failed, *pool.failed], "left for another time": pool.left}.items():
        if labels:
            print(f"{state}: {', '.join(f'{job.curve.title} seed {job.seed}' for job in labels)}")
    sys.exit(1 if making.failed or pool.failed else 0)


if __name__ == "__main__":
    main()
