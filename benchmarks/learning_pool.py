"""Many runs of benchmarks/learning.py at a time, one process and one thread each, as a plan says.

    export PYTHONPATH=. OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
    python benchmarks/learning_pool.py --plan benchmarks/learning_plan.txt --processes 60 --minutes 9

A line of a plan: TASK ALGORITHMS SEEDS, and after these, if wanted, `shuffled`, `as=NAME` and settings (key=value):

    countdown3 grpo,ppo,dapo 1-5
    reverse    all           1     shuffled
    reverse    online_dpo    1,2   as=online_dpo_sharp dpo.beta=0.5

Blocks of lines, parted by empty lines, are begun one after another; within a block the longest runs come first. Each
finished run is in OUT/runs.jsonl at once, and what stands there, or in a file that --have names, is not run again: the
same command goes on where one was killed. --minutes: no run is begun that would not end in time, and what still runs
then is ended. What a run says goes to OUT/<task>-<algorithm>-seed<N>.log.
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
from verl.algorithms.presets import PRESETS
from verl.registry import did_you_mean

#: CPU seconds of a run of grpo, measured with one thread, and how much more (or less) others take
SECONDS = {"reverse": 25, "sort": 25, "countdown3": 170, "digit": 28}
MORE = {"ppo": 1.5, "dapo": 1.5, "prime_filtered": 4}
MORE_OF_ALL_PRIME = 2.0


@dataclass(frozen=True)
class Planned:
    """A run that is wanted. algorithm: one of benchmarks/learning.py; name: what its results are called."""

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
        """What it takes about, on the machine that SECONDS were measured on."""
        more = MORE.get(self.algorithm, MORE_OF_ALL_PRIME if self.algorithm.startswith("prime") else 1.0)
        return SECONDS[self.task] * more


def read_plan(text: str) -> list[Planned]:
    """The runs of a plan, those of a block longest first. Raises ValueError that names the line."""
    planned, block = {}, 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        block += not line.strip()
        if words:
            try:
                found = _runs_of(words, block)
            except ValueError as error:
                raise ValueError(f"line {number} of the plan: {error}: {line.strip()!r}") from None
            for one in found:
                planned.setdefault(one.curve.key, one)
    return sorted(planned.values(), key=lambda one: (one.block, -one.seconds))


def _runs_of(words: Sequence[str], block: int) -> list[Planned]:
    if len(words) < 3:
        raise ValueError("expected TASK ALGORITHMS SEEDS ...")
    task, algorithms, seeds, *more = words
    known = sorted({*PRESETS, *RECIPES})
    names = known if algorithms == "all" else algorithms.split(",")
    for name, of in ((task, TASKS), *((name, known) for name in names)):
        if name not in of:
            raise ValueError(f"{name!r} is unknown: {did_you_mean(name, of)}")
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
    """Runs `work(job)` of each job in a process of its own, `size` of them at a time, until the deadline.

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
        """All of them, in their order. `failed` and `left` say afterwards which have no result."""
        waiting = list(jobs)
        # A server that has imported everything once, from which each process is forked: it starts in milliseconds.
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
            rest = self.deadline - time.monotonic()
            ended = wait(list(self.running), timeout=max(rest, 0)) if self.running else []
            for sentinel in ended:
                self._note_end(*self.running.pop(sentinel))
            if rest <= 0:
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
    """In the process: everything that it prints goes to its log."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    work(job)


@dataclass(frozen=True)
class Work:
    """What a process does, in a form that travels to it."""

    out: Path

    def __call__(self, job: Planned) -> None:
        run(job.curve, method_of(job.algorithm), self.out, STEPS[job.task], job.settings)


@dataclass(frozen=True)
class MakeStart:
    """Makes the start model of a job's task."""

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
    parser.add_argument("--have", type=Path, nargs="*", default=[], metavar="RUNS", help="runs that are there already")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    done = {curve.key for path in (args.out / "runs.jsonl", *args.have) for curve in read_runs(path)}
    jobs = [job for job in read_plan(args.plan.read_text()) if job.curve.key not in done]
    seconds = sum(job.seconds for job in jobs)
    print(f"{len(done)} runs are there; {len(jobs)} to do, about {seconds:.0f} CPU seconds", flush=True)
    making = Pool(MakeStart(args.out), lambda job: args.out / f"{job.task}-start.log", args.processes, deadline)
    making.run(list({job.task: job for job in jobs}.values()))
    pool = Pool(Work(args.out), lambda job: log_of(args.out, job), args.processes, deadline)
    pool.run([job for job in jobs if job.task not in {failed.task for failed in making.failed}])
    for what, found in {"failed": [*making.failed, *pool.failed], "left for another time": pool.left}.items():
        if found:
            print(f"{what}: {', '.join(f'{job.curve.title} seed {job.seed}' for job in found)}")
    sys.exit(1 if making.failed or pool.failed else 0)


if __name__ == "__main__":
    main()
