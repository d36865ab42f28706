"""What `verl config` prints: explain, show, diff and convert. The commands are declared in `verl.cli.app`."""

import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from verl.config import Config, dump_config, load_config, reference_table, to_flat_dict
from verl.config.errors import nearest_key
from verl.config.fields import Schema, fields_of, flatten, unflatten
from verl.config.presets import PRESETS
from verl.config.public.convert import Conversion, convert, read_source
from verl.config.public.trl import key_of
from verl.config.public.upstream import upstream_key
from verl.config.schema.offline import EvalConfig, GenerationConfig
from verl.config.schema.sft import DPOConfig, RMConfig, SFTConfig
from verl.registry import did_you_mean
from verl.tracking.runs import read_about
from verl.trainer.startup.command_line import USER_ERRORS, print_error, user_errors
from verl.trainer.startup.torchrun import launcher_settings
from verl.utils.paths import expanded
from verl.utils.redaction import redacted

SCHEMAS: dict[str, type[Schema]] = {
    "ppo": Config,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
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


def explain(terms: list[str], program: str) -> int:
    """Print the table of all keys as Markdown, or the lines with all words, ignoring case. Returns the exit status."""
    try:
        schema = schema_of(program)
    except USER_ERRORS as error:
        return print_error(error)
    table = reference_table(schema)
    matches = select(table, terms)
    if not matches:
        print(f"error: {_no_match_message(table, program, terms)}", file=sys.stderr)
        return 1
    last_names = {key.rpartition(".")[2] for key in fields_of(schema)}
    for word in terms:
        if (meant := key_of(word, schema.upstream)) and word not in last_names:
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


# ---- show and diff --------------------------------------------------------------------------------------------------

_UNSET = "(not set)"


@user_errors()
def show(path: str | None, overrides: list[str], program: str, changed: bool) -> None:
    """Print the resolved configuration as YAML. The arguments are those of the command in `verl.cli.app`."""
    print(dump_config(_load(path, overrides, program), everything=not changed, redact=True).rstrip("\n"))


def diff(a: str, b: str, program: str) -> int:
    """Print the keys whose values differ. Returns 0 if there are none, 1 if there are some, 2 after an error."""
    try:
        first, second = values_of(a, program), values_of(b, program)
    except USER_ERRORS as error:
        return print_error(error) + 1
    keys = [key for key in {**first, **second} if first.get(key, _UNSET) != second.get(key, _UNSET)]
    if not keys:
        print(f"{a} and {b} are equal")
        return 0
    first, second = redacted(first), redacted(second)
    rows = [("key", a, b), *((key, _text(first, key), _text(second, key)) for key in keys)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print("\n".join(f"{key:<{widths[0]}}  {left:<{widths[1]}}  {right}" for key, left, right in rows))
    return 1


def values_of(name: str, program: str) -> dict[str, Any]:
    """Dotted key -> value of a configuration.

    Args:
        name: a YAML file, the folder of a run or of a checkpoint, an algorithm, or `defaults`.
        program: a name of `SCHEMAS`.

    Raises:
        ValueError: there is no such configuration, or it is invalid.
    """
    path = expanded(name)
    if path.is_dir():
        return _values_of_run(path, program)
    if path.is_file():
        return to_flat_dict(_load(str(path), [], program))
    if name == "defaults":
        return to_flat_dict(schema_of(program)())
    if name in PRESETS and program == "ppo":
        return to_flat_dict(_load(None, [f"algorithm.name={name}"], program))
    names = ["defaults", *(PRESETS if program == "ppo" else ())]
    raise ValueError(f"there is no file, folder or algorithm {name!r}: {did_you_mean(name, names)}")


def _values_of_run(folder: Path, program: str) -> dict[str, Any]:
    """The configuration in a run's folder: run.json, or config.yaml of its newest checkpoint."""
    if config := read_about(folder).get("config"):
        return flatten(config, schema_of(program))
    steps = sorted(folder.glob("global_step_*/config.yaml"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    file = folder / "config.yaml" if (folder / "config.yaml").is_file() else steps[-1] if steps else None
    if file is None:
        raise ValueError(f"{folder} has no run.json, config.yaml or global_step_N: expected the folder of a run")
    return to_flat_dict(_load(str(file), [], program))


def _load(path: str | None, overrides: list[str], program: str) -> Schema:
    schema = schema_of(program)
    if program == "evaluation":
        return load_config(path, overrides, schema=schema)
    return load_config(path, overrides, base=launcher_settings(), schema=schema)


def _text(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else _UNSET


# ---- conversion -----------------------------------------------------------------------------------------------------


def print_converted(path: Path, source: str, program: str, gpus: int, overrides: bool) -> int:
    """Print the converted configuration. Returns the exit status. The arguments are those of the command."""
    try:
        schema = schema_of(program)
        layer, remarks = read_source(path)
        conversion = convert(layer, source, schema, gpus)
        conversion.remarks += remarks
        conversion.check()
    except USER_ERRORS as error:
        return print_error(error)
    print(as_text(conversion, str(path), overrides))
    return 0


def as_text(conversion: Conversion, name: str, overrides: bool) -> str:
    """YAML or override lines, with a comment for every remark."""
    command = "verl train" if conversion.schema is Config else "verl sft"
    head = [f"# converted from {name}; use with {command}"]
    remarks = [f"# {' '.join(remark.split())}" for remark in conversion.remarks]
    if overrides:
        body = [shlex.quote(f"{key}={_as_override(value)}") for key, value in conversion.values.items()]
    else:
        body = yaml.safe_dump(unflatten(conversion.values), sort_keys=False, allow_unicode=True).splitlines()
    return "\n".join([*head, *body, *remarks])


def _as_override(value: Any) -> str:
    """The value as an override spells it: YAML on one line."""
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":  # `verl config`
    sys.argv.insert(1, "config")
    runpy.run_module("verl", run_name="__main__")
