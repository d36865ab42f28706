"""Small tasks that a model of 100k parameters learns in minutes on a CPU: generators and reward functions.

    reverse     abc=            cba         benchmark LB-1
    sort        cab=            abc         the same strings, harder
    countdown3  3,1,2:7=        1+2*3       benchmark LB-2: an expression of all three numbers that equals the target
    digit       2,4:3=          6,8,0       continue the sequence with equal steps, last digits only

python examples/quickstart/tasks.py reverse --out DIR --rows 4096

writes DIR/train.parquet and DIR/test.parquet (prompts for RL) and DIR/sft.parquet (prompts and responses).
Their reward function is `compute_score`:
reward.custom_reward_function.path=examples/quickstart/tasks.py
"""

import argparse
import ast
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import check_folder
from verl.trainer.startup.command_line import whole_number

LETTERS = "abcdefghij"
TEST_ROWS = 500
TEST_SEED = 0
#: between two lines of the commands at most
ALIVE_SECONDS = 10.0
#: options of the commands; the prompts of all steps are in memory
STEPS, SEED = whole_number(1, 100_000), whole_number(1, 2**31 - 1)


@dataclass(frozen=True)
class Example:
    """A prompt, a correct response, and the ground truth for the reward function."""

    prompt: str
    response: str
    ground_truth: str


@dataclass(frozen=True)
class Task:
    """draw: samples an example. score: (response, ground truth) -> reward in [0, 1]."""

    draw: Callable[[Random], Example]
    score: Callable[[str, str], float]


def _letters(random: Random) -> str:
    length = random.randint(3, 6)
    return "".join(random.choice(LETTERS) for _ in range(length))


def draw_reverse(random: Random) -> Example:
    text = _letters(random)
    return Example(f"{text}=", text[::-1], text[::-1])


def draw_sort(random: Random) -> Example:
    text = _letters(random)
    response = "".join(sorted(text))
    return Example(f"{text}=", response, response)


def score_match(response: str, ground_truth: str) -> float:
    return float(response == ground_truth)


def draw_countdown(random: Random) -> Example:
    """Three numbers 1-9, shuffled, and two of + - *; redrawn until the value is 1-99."""
    while True:
        numbers = [random.randint(1, 9) for _ in range(3)]
        order = random.sample(numbers, 3)
        operators = [random.choice("+-*") for _ in range(2)]
        expression = f"{order[0]}{operators[0]}{order[1]}{operators[1]}{order[2]}"
        target = _evaluate(ast.parse(expression, mode="eval").body, [])
        if 1 <= target <= 99:
            puzzle = f"{','.join(map(str, numbers))}:{target}"
            return Example(f"{puzzle}=", expression, puzzle)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}


def _evaluate(node: ast.expr, used: list[int]) -> int:
    """Evaluate an expression of integers with + - *, and append its numbers to `used`.

    Raises ValueError for anything else: model output is never executed.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, used), _evaluate(node.right, used))
    raise ValueError(f"expected an expression of integers with + - *, found {ast.dump(node)}")


def score_countdown(response: str, ground_truth: str) -> float:
    """1 if the response is an expression that uses each number of "a,b,c:target" once and equals the target."""
    numbers, target = ground_truth.split(":")
    used: list[int] = []
    try:
        value = _evaluate(ast.parse(response, mode="eval").body, used)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: brackets nested too deeply
        return 0.0
    return float(sorted(used) == sorted(map(int, numbers.split(","))) and value == int(target))


def draw_digits(random: Random) -> Example:
    """Two digits and a count from 1 to 5: continue with the same step, last digit of each number."""
    first, second, count = random.randint(0, 9), random.randint(0, 9), random.randint(1, 5)
    step = second - first
    response = ",".join(str((second + step * k) % 10) for k in range(1, count + 1))
    return Example(f"{first},{second}:{count}=", response, response)


def score_digits(response: str, ground_truth: str) -> float:
    """Fraction of correct digits before the first incorrect one; surplus digits are subtracted."""
    expected, digits = ground_truth.split(","), response.split(",")
    correct = next((k for k, (e, f) in enumerate(zip(expected, digits)) if e != f), min(len(expected), len(digits)))
    surplus = max(len(digits) - len(expected), 0)
    return max(correct - surplus, 0) / len(expected)


TASKS = {
    "reverse": Task(draw_reverse, score_match),
    "sort": Task(draw_sort, score_match),
    "countdown3": Task(draw_countdown, score_countdown),
    "digit": Task(draw_digits, score_digits),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Reward function: the reward of one response, in [0, 1]. `data_source` is the name of the task."""
    return TASKS[data_source].score(solution_str, ground_truth)


def held_out_examples(name: str) -> list[Example]:
    """The 500 test examples, from seed 0."""
    random = Random(TEST_SEED)
    return [TASKS[name].draw(random) for _ in range(TEST_ROWS)]


def train_stream(name: str, seed: int) -> Iterator[Example]:
    """Endless training examples, without those of the test set."""
    if seed == TEST_SEED:
        raise ValueError(f"seed {TEST_SEED} is reserved for the test examples; choose another one")
    test_prompts = {example.prompt for example in held_out_examples(name)}
    random = Random(seed)
    while True:
        example = TASKS[name].draw(random)
        if example.prompt not in test_prompts:
            yield example


def train_examples(name: str, count: int, seed: int) -> list[Example]:
    """The first `count` training examples of a seed."""
    stream = train_stream(name, seed)
    return [next(stream) for _ in range(count)]


def as_rl_rows(name: str, examples: list[Example]) -> list[dict[str, Any]]:
    """Rows for `RLHFDataset`."""
    return [
        {
            "data_source": name,
            "prompt": example.prompt,
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
            "extra_info": {"index": i},
        }
        for i, example in enumerate(examples)
    ]


def as_sft_rows(examples: list[Example]) -> list[dict[str, str]]:
    """Rows for `SFTDataset`."""
    return [{"prompt": example.prompt, "response": example.response} for example in examples]


def check_output_folder(parser: argparse.ArgumentParser, out: Path, written: set[str]) -> None:
    """End the program with an error if `--out` cannot be written or has files other than those named in `written`."""
    try:
        check_folder("--out", out)
    except ValueError as error:
        parser.error(str(error))
    unknown = sorted({path.name for path in out.glob("*")} - written)
    if unknown:
        parser.error(f"--out: {out} contains other files ({', '.join(unknown[:3])}): choose a new folder")


def next_steps(config: Any, model: Path, run: Path) -> list[str]:
    """Lines with commands for the trained model, and for the folder of its run."""
    from verl.trainer.output.run_log import next_lines, serve_command  # not for the reward function

    commands = [*serve_command(config, model), f"verl report {run}"]
    if shutil.which("verl") is None:
        commands.insert(0, f"source {Path(sys.prefix, 'bin', 'activate')}")
    return [*next_lines(commands), "Your own task: docs/tutorial.md"]


def write_task(name: str, out_dir: str | Path, rows: int, *, sft_rows: int = 0, seed: int = 1) -> Path:
    """Write train.parquet (`rows` prompts), test.parquet (500) and, with `sft_rows`, sft.parquet. Returns the folder.

    SFT examples follow the RL prompts in the stream of the seed. Raises ValueError if the task is unknown.
    """
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}: known: {', '.join(TASKS)}")
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn = train_examples(name, rows + sft_rows, seed)
    pq.write_table(pa.Table.from_pylist(as_rl_rows(name, drawn[:rows])), out_dir / "train.parquet")
    pq.write_table(pa.Table.from_pylist(as_rl_rows(name, held_out_examples(name))), out_dir / "test.parquet")
    if sft_rows:
        pq.write_table(pa.Table.from_pylist(as_sft_rows(drawn[rows:])), out_dir / "sft.parquet")
    return out_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--rows", type=int, default=4096, help="prompts for RL")
    parser.add_argument("--sft-rows", type=int, default=12800, help="examples with responses")
    parser.add_argument(
        "--seed", type=int, default=1, help=f"seed of the training examples; {TEST_SEED} is reserved for the test"
    )
    args = parser.parse_args()
    try:
        out = write_task(args.task, args.out, args.rows, sft_rows=args.sft_rows, seed=args.seed)
    except (ValueError, OSError) as error:
        sys.exit(f"tasks: {error}")
    print(f"wrote {args.rows:,} prompts, {TEST_ROWS} test prompts and {args.sft_rows:,} examples to {out}")


if __name__ == "__main__":
    main()
