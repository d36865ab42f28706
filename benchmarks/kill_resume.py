"""Kill runs at random moments, resume them, and compare them with runs that were not killed.

    python benchmarks/kill_resume.py                             # 1,000 kills over all kinds, more than an hour
    python benchmarks/kill_resume.py --kinds sync agents --kills 20

A run is killed with SIGKILL, with its whole process group, at a random time or up to 60 ms after it has begun to write
a checkpoint. The same command is started again, and killed again, until the run ends by itself. Its last checkpoint
(weights, optimizer, trainer) and the metrics of all steps are then compared with those of an undisturbed run, bit for
bit; of `ranks`, which resumes with 1 or 2 processes at random, the weights to 1e-7 and one step of float32.
Asynchronous training depends on time: of `async`, each prompt of an epoch must be trained once, the staleness be within
its bound, and all weights be finite. No process may be left after a kill.

This process imports everything once, and starts runs as forks of itself; those on Ray are started as a user would.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tiny_job import adopt_processes, ended, fork_run, left_processes, make_job, settings, warm_up  # noqa: E402

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TWO = ["trainer.n_gpus_per_node=2"]
LAST = 12  # steps of a run: two epochs of 48 prompts
ASYNC_SAVE = f"{ACTOR}.checkpoint.async_save=true"
RAY = [*TWO, "trainer.backend=ray", "ray_kwargs.ray_init.num_cpus=3", "ray_kwargs.ray_init.address=local"]
#: with several ranks, the full weights are not saved by default
FULL = f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
#: Adam divides by the size of a gradient: with its own eps, a rounding error becomes a whole step where that is 0
SMOOTH = f"{ACTOR}.optim.override_optimizer_config.eps=1e-2"
CRITIC = [
    *("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
    *("algorithm.kl_ctrl.horizon=100", f"{ACTOR}.shuffle=true", f"{ACTOR}.ppo_epochs=2", "critic.optim.lr=1e-3"),
    *(f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.total_training_steps=12"),
]


@dataclass(frozen=True)
class Kind:
    """One kind of run.

    Attributes:
        kills: how often by default.
        overrides: its settings.
        agent: with tools.
        compare: (undisturbed run, killed run) -> differences.
        command: whether runs are started by a command instead of a fork.
        ranks: numbers of processes, one is drawn for each start; empty: as the settings say.
    """

    kills: int
    overrides: list[str]
    compare: Callable[[Path, Path], list[str]]
    agent: bool = False
    command: bool = False
    ranks: tuple[int, ...] = ()


@dataclass
class Record:
    """What was seen of one kind."""

    kind: str
    kills: int = 0
    while_writing: int = 0
    finished_runs: int = 0
    resumes: int = 0
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_processes: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0


def logged_steps(run: Path, file: str) -> Counter:
    """(step, whether it is a training step) -> number of lines."""
    records = [json.loads(line) for line in (run / file).read_text(encoding="utf-8").splitlines()]
    return Counter((record["step"], "training/global_step" in record) for record in records)


def steps_once(straight: Path, killed: Path) -> list[str]:
    """Steps that are missing from the logs, or there twice."""
    wrong = []
    for file in ("metrics.jsonl", "steps.jsonl"):
        expected, actual = logged_steps(straight, file), logged_steps(killed, file)
        wrong += [f"{file}: {actual[k]} lines of step {k[0]}" for k in {*expected, *actual} if expected[k] != actual[k]]
    return wrong


def bit_for_bit(straight: Path, killed: Path) -> list[str]:
    from resumed_runs import differences_of_runs

    return [*steps_once(straight, killed), *differences_of_runs(straight, killed, LAST)]


def weights(run: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(run / f"global_step_{LAST}/actor/huggingface/model.safetensors")


def to_rounding(straight: Path, killed: Path) -> list[str]:
    """The weights to 1e-7, and one step of float32, which is larger for weights above 1."""
    resumed, wrong = weights(killed), steps_once(straight, killed)
    for name, value in weights(straight).items():
        gaps = (resumed[name].double() - value.double()).abs()
        if (gaps > 1e-7 + 2**-23 * value.double().abs()).any():
            wrong.append(f"{name} differs by {gaps.max():.3g}")
    return wrong


def prompts_once(straight: Path, killed: Path) -> list[str]:
    """Of asynchronous training, in place of bits: prompts, staleness, finite weights."""
    wrong = steps_once(straight, killed)
    trained: Counter = Counter()
    for step in range(1, LAST + 1):
        lines = (killed / f"samples/{step}.jsonl").read_text(encoding="utf-8").splitlines()
        trained.update(json.loads(line)["uid"] for line in lines)
    rows = 48
    expected = {f"{epoch}:{row}" for epoch in range(LAST * 8 // rows) for row in range(rows)}
    wrong += [f"{uid} was trained {trained[uid] // 2} times" for uid in expected if trained[uid] != 2]
    wrong += [f"unexpected prompt {uid}" for uid in trained if uid not in expected]
    for line in (killed / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if not 0 <= record["async/staleness_max"] <= 1:
            wrong.append(f"step {record['step']}: staleness {record['async/staleness_max']}")
    return wrong + [f"{name} is not finite" for name, value in weights(killed).items() if not value.isfinite().all()]


SYNC = ["algorithm.name=grpo", "trainer.test_freq=5"]
KINDS = {
    "sync": Kind(500, SYNC, bit_for_bit),
    "async_save": Kind(230, [*SYNC, ASYNC_SAVE], bit_for_bit),
    "critic": Kind(160, [*CRITIC, ASYNC_SAVE, "critic.checkpoint.async_save=true"], bit_for_bit),
    "agents": Kind(120, ["algorithm.name=grpo", f"{ROLLOUT}.deterministic=true"], bit_for_bit, agent=True),
    "processes": Kind(30, [*SYNC, *TWO, ASYNC_SAVE], bit_for_bit),
    "async": Kind(
        20,
        [
            *("algorithm.name=grpo", *TWO, "placement.actor_devices=[0]", "placement.rollout_devices=[1]"),
            *("trainer.async.max_staleness=1", "trainer.rollout_data_dir={run}/samples"),
        ],
        prompts_once,
    ),
    "ranks": Kind(12, ["algorithm.name=grpo", SMOOTH, FULL], to_rounding, ranks=(1, 2)),
    "ray": Kind(8, [*SYNC, *RAY], bit_for_bit, command=True),
}


class Killer:
    """Starts and kills the runs of one kind.

    Args:
        kind: what runs.
        job: the folder of `make_job`.
        log: output of the runs.
        draw: for the moments of kills.

    Attributes:
        startup, whole: seconds of an undisturbed run until its first step was done, and to its end.
        started: when the last run was started, by `time.time`.
    """

    def __init__(self, kind: Kind, job: Path, log: Path, draw: random.Random):
        self.kind, self.job, self.log, self.draw = kind, job, log, draw
        self.startup = self.whole = self.started = 0.0

    def start(self, run: Path) -> int:
        """Start or resume the run in a folder. Returns the process id."""
        kind = self.kind
        fixed = [f"trainer.total_training_steps={LAST}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
        more = [text.replace("{run}", str(run)) for text in kind.overrides]
        if kind.ranks:
            more.append(f"trainer.n_gpus_per_node={self.draw.choice(kind.ranks)}")
        arguments = settings(self.job, run, *fixed, *more, agent=kind.agent)
        if not kind.command:
            return fork_run(arguments, self.log)
        with self.log.open("a", encoding="utf-8") as output:
            command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
            env["RAY_raylet_start_wait_time_s"] = "300"  # a busy machine
            options = {"stdout": output, "stderr": output, "start_new_session": True, "cwd": ROOT, "env": env}
            return subprocess.Popen(command, **options).pid

    def finish(self, run: Path) -> int:
        """Run to the end. Returns the exit status."""
        start = time.monotonic()
        pid = self.start(run)
        while not (run / "metrics.jsonl").exists() and time.monotonic() - start < 120:
            time.sleep(0.01)
        first = time.monotonic() - start
        while (status := ended(pid)) is None:
            time.sleep(0.01)
        if not self.startup:
            self.startup, self.whole = first, time.monotonic() - start
        return status

    def kill(self, run: Path) -> int | None:
        """Start the run and kill it. Returns its exit status if it ended before."""
        self.started = time.time()
        pid, start = self.start(run), time.monotonic()
        at_write = self.draw.random() < 0.6
        delay = self.draw.uniform(0.2 * self.startup, self.startup + (self.whole - self.startup) / 2)
        skipped, before = self.draw.choice((0, 1, 1, 2, 3)), False
        while (status := ended(pid)) is None:
            if at_write:
                writing = is_writing(run, self.started)
                skipped -= writing and not before
                before = writing
                if writing and skipped < 0:
                    time.sleep(self.draw.uniform(0.0, 0.06))
                    break
            elif time.monotonic() - start > delay:
                break
            time.sleep(0.002)
        else:
            return status
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while (status := ended(pid)) is None:
            time.sleep(0.002)
        return None if status == -signal.SIGKILL else status


def is_writing(run: Path, since: float) -> bool:
    """Whether there is a folder of an unfinished checkpoint that is newer than a time: a kill may have left others."""
    with suppress(FileNotFoundError):
        return any(folder.stat().st_mtime > since for folder in run.glob(".writing_*"))
    return False


def measure(name: str, args: argparse.Namespace, folder: Path, save: Callable[[Record], None]) -> None:
    """Kill and resume runs of one kind until there are enough kills, or time is up, and the last run has ended."""
    kind, record, start = KINDS[name], Record(name), time.monotonic()
    kills = kind.kills if args.kills is None else args.kills
    log, straight = folder / f"{name}.log", folder / f"{name}_straight"
    killer = Killer(kind, folder / "job", log, random.Random(f"{name} {args.seed}"))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    for run in (straight, folder / f"{name}_again"):
        if status := killer.finish(run):
            raise RuntimeError(f"an undisturbed run ended with status {status}, see {log}")
    record.differences += [f"without a kill: {text}" for text in kind.compare(straight, folder / f"{name}_again")]
    left_processes()
    number, end = 0, time.monotonic() + (float("inf") if args.seconds is None else args.seconds)

    def kills_again() -> bool:
        return record.kills < kills and time.monotonic() < end

    save(record)
    while kills_again() and len(record.failures) < 10:
        number += 1
        run = folder / f"{name}_{number}"
        run_to_end(killer, run, straight, record, kills_again)
        if not record.failures and not record.differences:
            shutil.rmtree(run)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record.cpu_seconds = round(after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, 1)
        record.seconds = round(time.monotonic() - start, 1)
        save(record)


def run_to_end(killer: Killer, run: Path, straight: Path, record: Record, kills_again: Callable[[], bool]) -> None:
    """One run: killed and resumed until it ends by itself, then compared. kills_again: whether to kill it again."""
    resumed = False
    while True:
        status = killer.kill(run) if kills_again() else killer.finish(run)
        record.resumes += resumed
        if status is None:
            record.kills += 1
            record.while_writing += is_writing(run, killer.started)
        if status is None or killer.kind.command or status != 0:
            left = left_processes()
            record.left_processes += len(left)
            record.failures += left
        if status == 0:
            record.finished_runs += 1
            record.differences += [f"{run.name}: {text}" for text in killer.kind.compare(straight, run)]
            return
        if status is not None:
            tail = killer.log.read_text(errors="replace", encoding="utf-8")[-1500:]
            record.failures.append(f"{run.name} ended with exit status {status}: {tail}")
            return
        resumed = any(run.glob("global_step_*"))


def machine() -> dict[str, object]:
    import torch

    python = platform.python_version()
    return {"cores": os.cpu_count(), "python": python, "torch": torch.__version__, "system": platform.system()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kills", type=int, help="kills of each kind; default: 1,000 over all kinds")
    parser.add_argument(
        "--seconds", type=float, help="no more kills of a kind this long after its undisturbed runs; default: no limit"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("kill_resume.json"), help="kinds in it are replaced")
    parser.add_argument("--folder", type=Path, help="keep logs and differing runs here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_processes()
    records = (
        {r["kind"]: r for r in json.loads(args.out.read_text(encoding="utf-8"))["kinds"]} if args.out.exists() else {}
    )

    def save(record: Record) -> None:
        records[record.kind] = asdict(record)
        ordered = [records[name] for name in KINDS if name in records]
        args.out.write_text(
            json.dumps({"machine": machine(), "steps": LAST, "kinds": ordered}, indent=1) + "\n", encoding="utf-8"
        )

    with tempfile.TemporaryDirectory(prefix="kill-resume-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        warm_up(make_job(folder / "job"))
        for name in args.kinds:
            measure(name, args, folder, save)
            print(json.dumps(records.get(name)), flush=True)
    return 1 if any(r["differences"] or r["failures"] for r in records.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
