"""python -m verl.cli.config [--of ppo|sft|generation|evaluation] [WORD ...]: every key, its type, default and meaning.

With words: only the keys whose line holds all of them, in any case. The table is Markdown.
"""

import argparse
import sys

from verl.config import Config, reference_table
from verl.config.errors import nearest_key
from verl.config.node import Tree, leaves
from verl.config.tree_offline import EvalConfig, GenerationConfig
from verl.config.tree_sft import SFTConfig

TREES: dict[str, type[Tree]] = {
    "ppo": Config,
    "sft": SFTConfig,
    "generation": GenerationConfig,
    "evaluation": EvalConfig,
}


def select(table: str, words: list[str]) -> str:
    """The lines of a Markdown table that hold all the words, under its head. Empty when no line does."""
    head, rule, *rows = table.splitlines()
    found = [row for row in rows if all(word.lower() in row.lower() for word in words)]
    return "\n".join([head, rule, *found]) + "\n" if found else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl.cli.config", description="Every key of a configuration.")
    parser.add_argument("--of", choices=list(TREES), default="ppo", help="which program's keys (default: ppo)")
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only the keys whose line holds every word")
    given = parser.parse_args(arguments)
    table = select(reference_table(TREES[given.of]), given.words)
    if not table:
        wanted = " ".join(given.words)
        near = nearest_key(wanted, leaves(TREES[given.of]))
        hint = f": did you mean {near}?" if near else ""
        print(f"error: no key of {given.of} has {wanted!r} in its line{hint}", file=sys.stderr)
        return 1
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
