"""Arithmetic for a small language model: sums of two-digit numbers, with one solved example.

    23 + 45 = 68
    37 + 48 =               85

python examples/quickstart/arithmetic.py --out DIR --rows 4096

writes DIR/train.jsonl and DIR/test.jsonl. No question of the test set is in the training set, in either order of its
numbers. Their reward function is `compute_score`:
reward.custom_reward_function.path=examples/quickstart/arithmetic.py
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

#: the prompt is a text, not a chat: a few tokens, and the response continues it
PROMPT_FORMAT = "text"
EXAMPLE = "23 + 45 = 68\n"
#: a space and three digits
RESPONSE_TOKENS = 4
TEST_ROWS = 200
TEST_SEED = 1000
#: of the questions on which the settings were chosen
VALIDATION_SEED = 0
NUMBER = re.compile(r"-?\d+")
#: draws an expression and its value, which is at least 0
Draw = Callable[[Random], tuple[str, int]]


def draw(random: Random) -> tuple[str, int]:
    """A sum of two numbers, 10 to 99, and its value."""
    a, b = random.randint(10, 99), random.randint(10, 99)
    return f"{a} + {b}", a + b


def held_out(count: int = TEST_ROWS, seed: int = TEST_SEED, draw: Draw = draw) -> dict[str, int]:
    """`count` different expressions with their values: the test set, or that of another seed."""
    random, problems = Random(seed), {}
    while len(problems) < count:
        expression, value = draw(random)
        problems[expression] = value
    return problems


def train_stream(seed: int, test_seed: int = TEST_SEED, draw: Draw = draw) -> Iterator[tuple[str, int]]:
    """Endless training expressions, without those of the test set, whatever the order of their numbers."""
    test, random = {_unordered(expression) for expression in held_out(seed=test_seed, draw=draw)}, Random(seed)
    while True:
        expression, value = draw(random)
        if _unordered(expression) not in test:
            yield expression, value


def _unordered(expression: str) -> tuple[str, ...]:
    return tuple(sorted(expression.split()))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """1 if the first line of the response is the number and nothing else; 0.5 if it is the last one of a longer line.

    Another number with nothing else scores 0.1, and up to 0.3 more for correct digits. acc: 1 or 0, the exact match.
    """
    response = solution_str.strip().split("\n")[0].strip().removesuffix(".")
    if response == ground_truth:
        return {"score": 1.0, "acc": 1.0}
    if not NUMBER.fullmatch(response):
        return {"score": 0.5 * (NUMBER.findall(response)[-1:] == [ground_truth]), "acc": 0.0}
    correct = sum(a == b for a, b in zip(response, ground_truth)) if len(response) == len(ground_truth) else 0
    return {"score": 0.1 + 0.3 * correct / len(ground_truth), "acc": 0.0}


def prompt_of(expression: str) -> str:
    """The prompt of a question: the solved example, and the question."""
    return f"{EXAMPLE}{expression} ="


def question_in(prompt: str) -> str:
    """The question without the solved example."""
    return prompt.removeprefix(EXAMPLE)


def row(prompt: list[dict[str, str]] | str, value: int) -> dict[str, Any]:
    """A row of the dataset."""
    ground_truth = {"style": "rule", "ground_truth": str(value)}
    return {"data_source": "arithmetic", "prompt": prompt, "reward_model": ground_truth}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_arithmetic(folder: str | Path, rows: int, test_rows: int = TEST_ROWS, seed: int = 1) -> Path:
    """Write train.jsonl and test.jsonl into `folder`, and return it."""
    stream = train_stream(seed)
    write_jsonl(Path(folder, "train.jsonl"), [row(prompt_of(e), v) for e, v in (next(stream) for _ in range(rows))])
    write_jsonl(Path(folder, "test.jsonl"), [row(prompt_of(e), v) for e, v in held_out(test_rows).items()])
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(write_arithmetic(args.out, args.rows, seed=args.seed))


if __name__ == "__main__":
    main()
