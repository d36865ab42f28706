"""Arithmetic word problems for a small instruction-tuned model with the calculator: train.parquet and
test.parquet.

    python examples/tools/gsm8k_rows.py --out ~/data/calculator

The problems are in the form of GSM8K, with numbers that a small model cannot multiply.
"""

import argparse
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo"]
THINGS = ["apples", "books", "pencils", "tickets", "cookies", "marbles", "flowers", "stickers"]
FORMS = [
    ("{p} has {a} boxes with {b} {t} each and finds {c} more. How many {t} does {p} have?", "{a}*{b}+{c}"),
    ("{p} packs {a} bags of {b} {t} and loses {c} of them. How many {t} are left?", "{a}*{b}-{c}"),
    ("{p} buys {a} {t} for ${b} each and pays ${c} for delivery. How many dollars does {p} pay?", "{a}*{b}+{c}"),
    ("{p} has {c} {t}, and then gets {a} packs of {b}. How many {t} is that in total?", "{c}+{a}*{b}"),
]
SYSTEM = (
    "Solve the problem with the calculator: write one call, such as "
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3+4"}}</tool_call>, and wait for its result. '
    "Then answer with the number only."
)


def row(random: Random) -> dict[str, Any]:
    """One problem."""
    text, expression = random.choice(FORMS)
    numbers = {"a": random.randint(12, 99), "b": random.randint(12, 99), "c": random.randint(2, 99)}
    problem = text.format(p=random.choice(NAMES), t=random.choice(THINGS), **numbers)
    return {
        "data_source": "calculator",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}],
        "reward_model": {"style": "rule", "ground_truth": str(eval(expression.format(**numbers)))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, seed, rows in (("train", 1, 8192), ("test", 0, 256)):
        random = Random(seed)
        table = pyarrow.Table.from_pylist([row(random) for _ in range(rows)])
        pyarrow.parquet.write_table(table, args.out / f"{name}.parquet")


if __name__ == "__main__":
    main()
