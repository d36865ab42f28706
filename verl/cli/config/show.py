"""`verl config show` and `verl config diff`."""

import json
from pathlib import Path
from typing import Any

from verl.cli.config.explain import schema_of
from verl.config import dump_config, load_config, to_flat_dict
from verl.config.fields import Schema, flatten
from verl.config.presets import PRESETS
from verl.registry import did_you_mean
from verl.tracking.runs import read_about
from verl.trainer.startup.command_line import USER_ERRORS, print_error, user_errors
from verl.trainer.startup.torchrun import launcher_settings
from verl.utils.paths import expanded
from verl.utils.redaction import redacted

_UNSET = "(not set)"


@user_errors()
def show(path: str | None, overrides: list[str], program: str, changed: bool) -> None:
    """Print the resolved configuration as YAML.

    Args:
        path: a YAML file.
        overrides: `key=value`.
        program: a name of `SCHEMAS`.
        changed: only the keys that differ from their defaults.
    """
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
    presets = PRESETS if program == "ppo" else None
    return load_config(path, overrides, base=launcher_settings(), presets=presets, schema=schema)


def _text(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else _UNSET
