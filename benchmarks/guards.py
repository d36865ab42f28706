"""The cost of the guards of docs/internals/trust.md, as a share of a training step.

    python benchmarks/guards.py                      # CPU: 100,000 parameters; GPU: 0.5B
    python benchmarks/guards.py --suite cpu --pairs 100 --prompts 16     # smaller steps

One run in one process: checks of columns, gradients, weights and optimizer state for values that are not finite,
checks of sampled tokens and log-probs, checksums of weight pushes, the canary, and the gate on failed rewards are
switched on and off between steps. The model has random weights, every response has the same length, and the rollout
has a copy of the weights, as with several GPUs, so that pushes are verified. Two figures:

- `share`: the time inside of the guards, per step, by the median time of a step without them. The canary, which is
  checked every `rollout.check_every` steps, counts with a tenth.
- `paired_share`: the median difference between two neighboring steps with and without guards, in random order, by the
  same. Without the canary. On a shared machine, this figure is the noisier one.

Times are processor seconds on a CPU, and seconds with a synchronized device on a GPU. `once` has the seconds of
fingerprints (at the first save and when a run resumes) and of the check before a save.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from grpo_step import Work, make_inputs, task_overrides  # noqa: E402

SUITES = {
    "cpu": Work(64, 128, 2, 4, 2, 300, False, prompts=64, samples=8, prompt=16, new=8),  # the shapes of the quickstart
    "gpu": Work(896, 4864, 24, 14, 2, 151936, True, prompts=64, samples=8, prompt=128, new=512),  # Qwen2.5-0.5B
}
CHECK_EVERY = 10
Clock = Callable[[], float]


class Guards:
    """Switches the guards of this process, and measures the time inside of them.

    Attributes:
        on: whether they run.
        inside: name -> seconds.
    """

    def __init__(self, clock: Clock, launch_clock: Clock):
        """clock: waits for the device. launch_clock: does not."""
        self.clock, self.launch_clock = clock, launch_clock
        self.on = True
        self.inside: Counter[str] = Counter()
        self._depth = 0

    def add(
        self,
        name: str,
        owner: Any,
        attribute: str,
        off: Callable[..., Any],
        begin: Clock | None = None,
        end: Clock | None = None,
    ) -> None:
        """Replace a function of a module or class by one that calls `off` instead if the guards are off.

        begin, end: clocks; by default they wait for the device.
        """
        original = getattr(owner, attribute)
        begin, end = begin or self.clock, end or self.clock

        def switched(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return off(*args, **kwargs)
            if self._depth:
                return original(*args, **kwargs)
            self._depth, start = 1, begin()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth = 0
                self.inside[name] += end() - start

        setattr(owner, attribute, switched)

    def add_all(self) -> None:
        from verl.engines.torch_engine import TorchEngine
        from verl.rewards import managers
        from verl.rollout import sampling
        from verl.trainer.guards.restarts import BadSteps
        from verl.trainer.ppo import operators
        from verl.trainer.ppo.canary import Canary
        from verl.weight_sync import verify
        from verl.workers import engine_worker

        def nothing(*args: Any, **kwargs: Any) -> None:
            """Of a guard that raises or returns nothing."""

        self.add("columns", engine_worker, "find_bad_values", lambda tensors: [])
        self.add("gradient", TorchEngine, "_is_bad", lambda *args: False)
        self.add("weights", engine_worker.UpdatePass, "check_weights", nothing)
        self.add("step", BadSteps, "after_step", nothing)
        self.add("tokens", operators, "check_vocabulary", nothing)
        self.add("log-probs", sampling, "check_finite", nothing)
        self.add("rewards", managers, "check_failure_rate", nothing)
        # To wait for the device at each of hundreds of tensors would take longer than the checksums. So the kernels
        # that `add` launches are in the time of the next `finish` or `_verify`, with those that copy weights.
        launched = self.launch_clock
        self.add("checksums", verify.Loading, "_add", nothing, launched)
        self.add("checksums", verify.Loading, "_check_stored", nothing, launched)
        self.add("canary", Canary, "check", lambda *args: {})


def clocks_of(gpu: bool) -> tuple[Clock, Clock]:
    """A clock that waits for the device, and one that does not."""
    if not gpu:
        return time.process_time, time.process_time
    import torch

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now, time.perf_counter


def make_trainer(work: Work, folder: Path) -> Any:
    from verl.engines.torch_engine import TorchEngine
    from verl.trainer.local_trainer import LocalPPOTrainer

    TorchEngine.shared_module = lambda self: None  # so that the rollout has a copy, to which weights are pushed
    make_inputs(work, folder, rows=4 * work.prompts)
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    return LocalPPOTrainer(
        overrides=[
            *task_overrides(work, folder),
            f"{rollout}check_every={CHECK_EVERY}",
            f"{actor}ppo_mini_batch_size={work.prompts // 2}",
            f"{actor}optim.lr=1e-6",
            f"reward.custom_reward_function.path={ROOT / 'benchmarks/grpo_step.py'}",
            "reward.isolation=none",
            "trainer.total_training_steps=100000",
            f"trainer.default_local_dir={folder / 'run'}",
            "trainer.logger=[]",
        ]
    )


def measure(trainer: Any, guards: Guards, pairs: int) -> dict[str, Any]:
    """Steps with and without guards, in pairs of random order."""
    from verl.trainer.guards.base import ask

    draw, seconds, canaries = random.Random(0), {True: [], False: []}, []
    guards.inside.clear()
    for pair in range(pairs):
        for guards.on in draw.sample((True, False), 2):
            start, canary = guards.clock(), guards.inside["canary"]
            ask(trainer.guards, trainer.view, "after_step", trainer.step())
            took, canary = guards.clock() - start, guards.inside["canary"] - canary
            seconds[guards.on].append(took - canary)
            canaries += [canary] * (canary > 0)
        if pair % 10 == 9:
            print(f"{pair + 1} of {pairs} pairs", file=sys.stderr, flush=True)
    step = statistics.median(seconds[False])
    inside = {name: total / pairs for name, total in guards.inside.items() if name != "canary"}
    if canaries:
        inside["canary"] = statistics.median(canaries) / CHECK_EVERY
    paired = statistics.median(on - off for on, off in zip(seconds[True], seconds[False], strict=True))
    return {
        "pairs": pairs,
        "step_seconds": round(step, 5),
        "inside_ms": {name: round(1e3 * value, 4) for name, value in sorted(inside.items())},
        "share": round(sum(inside.values()) / step, 5),
        "paired_share": round(paired / step, 5),
    }


def once(trainer: Any, clock: Clock) -> dict[str, float]:
    """Seconds of what is not done in every step."""
    from verl.trainer.state.identity import Identity

    seconds_by_guard = {}
    start = clock()
    Identity(trainer.config, trainer.run.working_dir).state()
    seconds_by_guard["fingerprints"] = clock() - start
    start = clock()
    trainer.checkpointer.require_finite("actor", trainer.global_step)
    seconds_by_guard["before_a_save"] = clock() - start
    return {name: round(seconds, 5) for name, seconds in seconds_by_guard.items()}


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="gpu" if gpu else "cpu")
    parser.add_argument("--pairs", type=int, default=20 if gpu else 150)
    parser.add_argument("--prompts", type=int, help="prompts of a step")
    parser.add_argument("--warm-up", type=int, default=3, help="steps")
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    args = parser.parse_args()
    work, clocks = SUITES[args.suite], clocks_of(gpu and args.suite == "gpu")
    work = work if args.prompts is None else replace(work, prompts=args.prompts)
    guards = Guards(*clocks)
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        trainer = make_trainer(work, Path(folder))
        guards.add_all()
        with trainer:
            for _ in range(args.warm_up):
                trainer.step()
            results = measure(trainer, guards, args.pairs)
            guards.on = True
            line = {
                "benchmark": "guards",
                "suite": args.suite,
                **asdict(work),
                **results,
                "once": once(trainer, clocks[0]),
            }
    device = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} cores, shared with other programs"
    line |= {"device": device, "python": platform.python_version(), "torch": torch.__version__}
    text = json.dumps(line | {"command": " ".join(["python", *sys.argv])})
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
