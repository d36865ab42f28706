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
from verl.registry import did_you_mean

SCHEMAS: dict[str, type[Schema]] = {
    "ppo": Config,
    "sft": SFTConfig,
    "generation": GenerationConfig,
    "evaluation": EvalConfig,
}


def schema_of(program: str) -> type[Schema]:
    """The schema of a program. Raises ValueError if there is none of that name."""
    if program not in SCHEMAS:
        raise ValueError(f"--of {program}: {did_you_mean(program, SCHEMAS)}")
    return SCHEMAS[program]


def select(table: str, terms: list[str]) -> str:
    """The lines of a Markdown table that contain all words, with its header. Empty if there are none."""
    head, rule, *rows = table.splitlines()
    matches = [row for row in rows if all(word.lower() in row.lower() for word in terms)]
    return "\n".join([head, rule, *matches]) + "\n" if matches else ""


@command_output()
def main(arguments: list[str] | None = None, program: str = "python -m verl.cli.config") -> int:
    """Print the table; returns the exit status. `program` is the name in --help."""
    parser = argparse.ArgumentParser(prog=program, description="Every key of a configuration.")
    parser.add_argument("--of", choices=list(SCHEMAS), default="ppo", help="which program's keys (default: ppo)")
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only the keys whose line contains every word")
    options = parser.parse_args(arguments)
    table = reference_table(SCHEMAS[options.of])
    matches = select(table, options.words)
    if not matches:
        print(f"error: {_no_match_message(table, options.of, options.words)}", file=sys.stderr)
        return 1
    last_names = {key.rpartition(".")[2] for key in fields_of(SCHEMAS[options.of])}
    for word in options.words:
        if (meant := key_of(word, SCHEMAS[options.of].upstream)) and word not in last_names:
            print(f"no key is called {word!r}: did you mean {meant}?", file=sys.stderr)
    print(matches.rstrip("\n"))
    return 0


def _no_match_message(table: str, program: str, terms: list[str]) -> str:
    """The word that no line of a program's table contains, and the key that was probably meant."""
    missing = [word for word in terms if not select(table, [word])]
    if not missing:
        return f"no key of {program} has {' and '.join(map(repr, terms))} in one line"
    word, schema = missing[0], SCHEMAS[program]
    message = f"no key of {program} has {word!r} in its line"
    key = schema.aliases.resolve(word)
    if key != word:
        return f"{message}: it is an alias of {key}"
    known = upstream_key(key, schema.upstream)
    if known:
        status = "has no effect here" if known.ignored else "is not supported"
        return f"{message}: it {status}: {known.instead}"
    meant = key_of(word.rpartition(".")[2], schema.upstream)
    if meant:
        return f"{message}: did you mean {meant}?"
    near = nearest_key(word, [*fields_of(schema), *schema.aliases.names()])
    return f"{message}: did you mean {near}?" if near else message
