"""Overhead of calling a reward function, in microseconds per sample. Prints one JSON line.

    python benchmarks/rewards.py [--samples 512] [--repeats 20]
    python benchmarks/rewards.py --code [--samples 40]     # milliseconds per program of `code`, by form of tests

Medians for a function that compares two strings: `none` calls it in the trainer's process (reward.isolation=none),
`process` in a worker process (reward.isolation=process, the default). `prime` calls it in a pool of --processes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.rewards import default_compute_score, load_reward_manager
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.outcome import Sample

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


def microseconds(manager: NaiveRewardManager, samples: Sequence[Sample]) -> float:
    """Elapsed time per sample of one call for all samples."""
    start = time.perf_counter()
    values = [outcome.value for *_, outcome in manager.outcomes(samples)]
    seconds = time.perf_counter() - start
    assert sum(values) == len(samples) // 2, "expected every second sample to be right"
    return seconds / len(samples) * 1e6


PROGRAM = (
    "Here it is:\n```python\ndef f(x):\n    return x + 1\nif __name__ == '__main__':\n    print(f(int(input())))\n```"
)
TESTS = {
    "stdin": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
    "calls": json.dumps({"fn_name": "f", "inputs": [[n] for n in range(20)], "outputs": list(range(1, 21))}),
    "asserts": [f"assert f({n}) == {n + 1}" for n in range(20)],
}


def code_milliseconds(samples: int) -> dict[str, float]:
    """Median elapsed time of one program with each form of tests; programs run one after the other."""
    results = {}
    for form, tests in TESTS.items():
        seconds = []
        for _ in range(samples):
            start = time.perf_counter()
            assert default_compute_score("apps", PROGRAM, tests)["score"] == 1.0
            seconds.append(time.perf_counter() - start)
        results[form] = round(statistics.median(seconds) * 1e3, 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--code", action="store_true")
    options = parser.parse_args()
    if options.code:
        print(json.dumps({"samples": options.samples, **code_milliseconds(options.samples)}))
        return
    text = "The answer is forty-two. " * 20
    samples = [
        Sample("task", text, text if i % 2 else "43", {"index": i, "split": "train"}, i, options.samples)
        for i in range(options.samples)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reward.py")
        path.write_text(FUNCTION, encoding="utf-8")
        settings = {
            "none": {"manager_kwargs": {"isolation": "none"}},
            "process": {"manager_kwargs": {"isolation": "process"}},
            "prime": {"manager": "prime", "manager_kwargs": {"num_processes": options.processes}},
        }
        managers = {
            name: load_reward_manager(None, function_path=str(path), **keywords) for name, keywords in settings.items()
        }
        for manager in managers.values():
            microseconds(manager, samples)  # starts the processes
        results = {
            name: statistics.median(microseconds(manager, samples) for _ in range(options.repeats))
            for name, manager in managers.items()
        }
    print(json.dumps({"samples": options.samples, **{name: round(value, 1) for name, value in results.items()}}))


if __name__ == "__main__":
    main()
