"""Arithmetic for a small language model: sums and differences of two-digit numbers, with one solved example.

    23 + 45 = 68
    37 + 48 =               85

python examples/quickstart/arithmetic.py --out DIR --rows 4096

writes DIR/train.jsonl and DIR/test.jsonl. No question of the test set is in the training set.
Their reward function is `compute_score`:
reward.custom_reward_function.path=examples/quickstart/arithmetic.py
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

#: the prompt is a text, not a chat: a few tokens, and the response continues it
PROMPT_FORMAT = "text"
EXAMPLE = "23 + 45 = 68\n"
#: a space, three digits, and the end of the line
RESPONSE_TOKENS = 5
TEST_ROWS = 200
TEST_SEED = 0
NUMBER = re.compile(r"-?\d+")


def draw(random: Random, low: int = 10, high: int = 99) -> tuple[str, int]:
    """An expression of two numbers, `low` to `high`, and its value, which is at least 0."""
    a, b = random.randint(low, high), random.randint(low, high)
    if random.random() < 0.5:
        return f"{a} + {b}", a + b
    a, b = max(a, b), min(a, b)
    return f"{a} - {b}", a - b


def held_out(low: int = 10, high: int = 99, count: int = TEST_ROWS) -> dict[str, int]:
    """`count` different expressions of the test set with their values, from seed 0."""
    random, found = Random(TEST_SEED), {}
    while len(found) < count:
        expression, value = draw(random, low, high)
        found[expression] = value
    return found


def train_stream(seed: int, low: int = 10, high: int = 99) -> Iterator[tuple[str, int]]:
    """Endless training expressions, without those of the test set."""
    test, random = held_out(low, high), Random(seed)
    while True:
        expression, value = draw(random, low, high)
        if expression not in test:
            yield expression, value


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
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def write_arithmetic(folder: str | Path, rows: int, test_rows: int = TEST_ROWS, seed: int = 1) -> Path:
    """Write train.jsonl and test.jsonl into `folder`, and return it."""
    stream = train_stream(seed)
    write_jsonl(Path(folder, "train.jsonl"), [row(prompt_of(e), v) for e, v in (next(stream) for _ in range(rows))])
    write_jsonl(Path(folder, "test.jsonl"), [row(prompt_of(e), v) for e, v in held_out(count=test_rows).items()])
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
