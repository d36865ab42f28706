"""`verl config convert`: a configuration of public verl or TRL as YAML or overrides of this project."""

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from verl.cli.config.explain import schema_of
from verl.config.fields import unflatten
from verl.config.presets import PRESETS
from verl.config.public.convert import Conversion, convert, read_source
from verl.config.schema import Config
from verl.trainer.startup.command_line import USER_ERRORS, print_error


def main(path: Path, source: str, program: str, gpus: int, overrides: bool) -> int:
    """Print the converted configuration. Returns the exit status.

    Args:
        path: the file.
        source: `auto` or one of `verl.config.public.convert.KINDS`.
        program: the program of a verl configuration, a name of `SCHEMAS`.
        gpus: GPUs of a TRL run.
        overrides: print `key=value` lines instead of YAML.
    """
    try:
        schema = schema_of(program)
        layer, remarks = read_source(path)
        conversion = convert(layer, source, schema, gpus)
        conversion.remarks += remarks
        conversion.check(PRESETS if conversion.schema is Config else {})
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
