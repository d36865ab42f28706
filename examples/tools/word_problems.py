"""Arithmetic word problems for a small instruction-tuned model with the calculator.

    python examples/tools/word_problems.py --out ~/data/calculator

Writes train.parquet and test.parquet, the problems of RL, and demonstrations.parquet, chats for the warm-up with SFT.
The problems have two operations on numbers that a small model cannot multiply. Most demonstrations have one operation:
they show how to call the tool, and leave the expression to RL.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo"]
THINGS = ["apples", "books", "pencils", "tickets", "cookies", "marbles", "flowers", "stickers"]
TWO_OPERATIONS = [
    ("{p} has {a} boxes with {b} {t} each and finds {c} more. How many {t} does {p} have?", "{a}*{b}+{c}"),
    ("{p} packs {a} bags of {b} {t} and loses {c} of them. How many {t} are left?", "{a}*{b}-{c}"),
    ("{p} buys {a} {t} for ${b} each and pays ${c} for delivery. How many dollars does {p} pay?", "{a}*{b}+{c}"),
    ("{p} has {c} {t}, and then gets {a} packs of {b}. How many {t} is that in total?", "{c}+{a}*{b}"),
]
ONE_OPERATION = [
    ("{p} has {a} {t} and finds {c} more. How many {t} does {p} have?", "{a}+{c}"),
    ("{p} had {a} {t} and lost {c} of them. How many {t} are left?", "{a}-{c}"),
    ("{p} fills {a} boxes with {b} {t} each. How many {t} is that?", "{a}*{b}"),
    ("{p} buys {a} {t} for ${b} each. How many dollars does {p} pay?", "{a}*{b}"),
]
#: fraction of the demonstrations with the problems of RL
TWO_OPERATIONS_SHOWN = 0.3
SYSTEM = (
    "Solve the problem with the calculator: write one call, such as "
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3+4"}}</tool_call>, and wait for its result. '
    "Then answer with the number only."
)


def problem(random: Random, forms: list[tuple[str, str]]) -> tuple[list[dict[str, str]], str]:
    """The prompt and the expression of a problem."""
    text, expression = random.choice(forms)
    numbers = {"a": random.randint(12, 99), "b": random.randint(12, 99), "c": random.randint(2, 99)}
    text = text.format(p=random.choice(NAMES), t=random.choice(THINGS), **numbers)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], expression.format(**numbers)


def row(random: Random) -> dict[str, Any]:
    """One problem of RL."""
    prompt, expression = problem(random, TWO_OPERATIONS)
    return {
        "data_source": "calculator",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": str(eval(expression))},
    }


def demonstration(random: Random) -> dict[str, Any]:
    """One chat of the warm-up: a problem, the call, its result and the answer."""
    shows_two = random.random() < TWO_OPERATIONS_SHOWN
    prompt, expression = problem(random, TWO_OPERATIONS if shows_two else ONE_OPERATION)
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    result = str(eval(expression))
    return {
        "messages": [
            *prompt,
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, seed, rows, make in (
        ("train", 1, 8192, row),
        ("test", 0, 256, row),
        ("demonstrations", 2, 512, demonstration),
    ):
        random = Random(seed)
        table = pyarrow.Table.from_pylist([make(random) for _ in range(rows)])
        pyarrow.parquet.write_table(table, args.out / f"{name}.parquet")


if __name__ == "__main__":
    main()
