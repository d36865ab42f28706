"""verl config explain [--of ppo|sft|generation|evaluation] [WORD ...]: every key, its type, default and help.

With words: only the keys whose line contains all of them, ignoring case. The table is Markdown.
"""

import argparse
import sys

from verl.config import Config, reference_table
from verl.config.errors import nearest_key
from verl.config.fields import Schema, fields_of
from verl.config.public.trl import key_of
from verl.config.public.upstream import upstream_key
from verl.config.schema.offline import EvalConfig, GenerationConfig
from verl.config.schema.sft import SFTConfig
from verl.processes.streams import command_output

SCHEMAS: dict[str, type[Schema]] = {
    "ppo": Config,
    "sft": SFTConfig,
    "generation": GenerationConfig,
    "evaluation": EvalConfig,
}


def select(table: str, words: list[str]) -> str:
    """The lines of a Markdown table that contain all words, with its header. Empty if there are none."""
    head, rule, *rows = table.splitlines()
    found = [row for row in rows if all(word.lower() in row.lower() for word in words)]
    return "\n".join([head, rule, *found]) + "\n" if found else ""


@command_output()
def main(arguments: list[str] | None = None, program: str = "python -m verl.cli.config") -> int:
    """Print the table; returns the exit status. `program` is the name in --help."""
    parser = argparse.ArgumentParser(prog=program, description="Every key of a configuration.")
    parser.add_argument("--of", choices=list(SCHEMAS), default="ppo", help="which program's keys (default: ppo)")
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only the keys whose line contains every word")
    given = parser.parse_args(arguments)
    table = reference_table(SCHEMAS[given.of])
    found = select(table, given.words)
    if not found:
        print(f"error: {_nothing_found(table, given.of, given.words)}", file=sys.stderr)
        return 1
    last_names = {key.rpartition(".")[2] for key in fields_of(SCHEMAS[given.of])}
    for word in given.words:
        if (meant := key_of(word, SCHEMAS[given.of].upstream)) and word not in last_names:
            print(f"no key is called {word!r}: did you mean {meant}?", file=sys.stderr)
    print(found.rstrip("\n"))
    return 0


def _nothing_found(table: str, of: str, words: list[str]) -> str:
    """The word that no line of a program's table contains, and the key that was probably meant."""
    missing = [word for word in words if not select(table, [word])]
    if not missing:
        return f"no key of {of} has {' and '.join(map(repr, words))} in one line"
    word, schema = missing[0], SCHEMAS[of]
    message = f"no key of {of} has {word!r} in its line"
    key = schema.aliases.resolve(word)
    if key != word:
        return f"{message}: it is an alias of {key}"
    known = upstream_key(key, schema.upstream)
    if known:
        what = "has no effect here" if known.ignored else "is not supported"
        return f"{message}: it {what}: {known.instead}"
    meant = key_of(word.rpartition(".")[2], schema.upstream)
    if meant:
        return f"{message}: did you mean {meant}?"
    near = nearest_key(word, [*fields_of(schema), *schema.aliases.names()])
    return f"{message}: did you mean {near}?" if near else message
