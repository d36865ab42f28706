"""`verl config convert`: a configuration of public verl or TRL as YAML or overrides of this project."""

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from verl.cli.config.explain import SCHEMAS
from verl.config.fields import unflatten
from verl.config.presets import PRESETS
from verl.config.public.convert import Conversion, convert, read_source
from verl.config.schema import Config
from verl.registry import did_you_mean
from verl.trainer.startup.command_line import USER_ERRORS, print_error


def main(path: Path, source: str, of: str, gpus: int, overrides: bool) -> int:
    """Print the converted configuration. Returns the exit status.

    Args:
        path: the file.
        source: `auto` or one of `verl.config.public.convert.KINDS`.
        of: the program of a verl configuration, a name of `SCHEMAS`.
        gpus: GPUs of a TRL run.
        overrides: print `key=value` lines instead of YAML.
    """
    try:
        if of not in SCHEMAS:
            raise ValueError(f"--of {of}: {did_you_mean(of, SCHEMAS)}")
        layer, remarks = read_source(path)
        found = convert(layer, source, SCHEMAS[of], gpus)
        found.remarks += remarks
        found.check(PRESETS if found.schema is Config else {})
    except USER_ERRORS as error:
        return print_error(error)
    print(as_text(found, str(path), overrides))
    return 0


def as_text(found: Conversion, name: str, overrides: bool) -> str:
    """YAML or override lines, with a comment for every remark."""
    command = "verl train" if found.schema is Config else "verl sft"
    head = [f"# converted from {name}; use with {command}"]
    remarks = [f"# {' '.join(remark.split())}" for remark in found.remarks]
    if overrides:
        body = [shlex.quote(f"{key}={_as_override(value)}") for key, value in found.values.items()]
    else:
        body = yaml.safe_dump(unflatten(found.values), sort_keys=False, allow_unicode=True).splitlines()
    return "\n".join([*head, *body, *remarks])


def _as_override(value: Any) -> str:
    """The value as an override spells it: YAML on one line."""
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
