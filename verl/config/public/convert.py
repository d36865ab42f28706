"""Convert the configuration of another project: public verl's keys, or TRL's arguments, to this schema.

Nothing is dropped silently: what has no counterpart, no effect or no support here is a remark.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.checks.run import check_built_in
from verl.config.errors import ConfigError
from verl.config.fields import Schema, derived_fields, to_flat_dict
from verl.config.load import check_combinations, read_config
from verl.config.public.trl import DEFAULTS, TABLES, kind_of, rules_of
from verl.config.public.upstream import upstream_defaults, upstream_key
from verl.config.reader import Reader
from verl.config.schema import Config, SFTConfig
from verl.config.sources import Layer, read_overrides, read_text, read_yaml

KINDS = ("verl", "trl-grpo", "trl-sft")


@dataclass
class Conversion:
    """A converted configuration.

    Attributes:
        schema: the schema of `values`.
        values: dotted key -> value.
        remarks: what is not in `values`, and what is wrong with them, one line each.
    """

    schema: type[Schema]
    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Add a remark for every value that is not accepted here."""
        try:
            checks = [check_combinations, *((check_built_in,) if self.schema is Config else ())]
            read_config(base=self.values, schema=self.schema, checks=checks)
        except ConfigError as error:
            self.remarks += [f"problem: {problem.key}: {problem.message}" for problem in error.problems]


def read_source(path: Path) -> tuple[Layer, list[str]]:
    """Read a YAML or JSON file, or the words `key=value` of another text file, such as a script.

    Returns:
        The settings, and remarks on words that are not settings.

    Raises:
        ConfigError: there is no such file, or it is not valid.
        ValueError: the file has no setting, or the script an unclosed quote.
    """
    if path.suffix in (".yaml", ".yml", ".json") or not os.path.isfile(path):
        layer, remarks = read_yaml(path), []
    else:
        layer, remarks = _read_words(path)
    if not layer:
        raise ValueError(
            f"{path}: expected a configuration to convert, found no setting: give a YAML or JSON file with keys, or a "
            "script with key=value words"
        )
    return layer, remarks


def _read_words(path: Path) -> tuple[Layer, list[str]]:
    """The words `key=value` of a script."""
    arguments = shlex.split(read_text(path).replace("\\\n", " "), comments=True)
    settings = [word for word in arguments if "=" in word and "." in word.partition("=")[0]]
    layer, problems, repeated = read_overrides(settings)
    others = [word for word in arguments if word not in settings and ("=" in word or word.startswith("--"))]
    remarks = repeated + [f"not converted: {problem}" for problem in problems]
    remarks += [f"not a setting: {', '.join(others)}"] if others else []
    variables = [key for key, setting in layer.items() if "$" in str(setting.value).replace("${", "")]
    remarks += [f"shell variables, replace them with values: {', '.join(variables)}"] if variables else []
    return layer, remarks


def convert(layer: Layer, source: str, schema: type[Schema], gpus: int) -> Conversion:
    """Convert settings.

    Args:
        layer: settings with their origin.
        source: one of `KINDS`, or auto.
        schema: of a configuration of public verl.
        gpus: GPUs of the TRL run.

    Raises:
        ValueError: `source` is none of these, or the settings are those of TRL's PPOConfig.
    """
    arguments = {key: setting.value for key, setting in layer.items()}
    if source == "auto":
        source = kind_of(arguments) or "verl"
    if source not in KINDS:
        raise ValueError(f"--from {source}: expected auto, {', '.join(KINDS)}")
    return _from_verl(layer, schema) if source == "verl" else _from_trl(arguments, source, gpus)


# ---- TRL ------------------------------------------------------------------------------------------------------------


def _from_trl(arguments: Mapping[str, Any], kind: str, gpus: int) -> Conversion:
    result = Conversion(SFTConfig if kind == "trl-sft" else Config)
    if kind == "trl-grpo":
        result.values["algorithm.name"] = "grpo"
    set_here = {name: value for name, value in arguments.items() if value is not None}
    effective = DEFAULTS[kind] | set_here
    rules, table = rules_of(kind, gpus), TABLES[kind]
    for name, value in effective.items():
        origin = "" if name in set_here else " (TRL's default)"
        rule = rules.get(name)
        if rule is None and name not in table:
            result.remarks.append(f"no counterpart: {name}: {value}")
            continue
        try:
            values = {table[name]: value} if rule is None else rule(value, effective)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            values = str(error)
        if isinstance(values, str):
            result.remarks.append(f"not converted: {name}: {value}{origin}: {values}")
        else:
            result.values |= values
    defaults = [f"{name}={DEFAULTS[kind][name]}" for name in DEFAULTS[kind] if name not in set_here]
    result.remarks += [f"TRL's defaults, not in the file: {', '.join(defaults)}"] if defaults else []
    empty = [name for name in arguments if name not in set_here]
    result.remarks += [f"null in the file: {', '.join(empty)}"] if empty else []
    return result


# ---- public verl ----------------------------------------------------------------------------------------------------


def _from_verl(layer: Layer, schema: type[Schema]) -> Conversion:
    result = Conversion(schema)
    reader = Reader(schema, [layer])
    settings = reader.read()
    plain, derived = to_flat_dict(schema()), derived_fields(schema)
    for key, setting in settings.items():
        if key in derived or key not in plain or setting.value != plain[key]:
            result.values[key] = setting.value
    same = len(settings) - len(result.values)
    refused = {problem.spelled or problem.key: problem.message for problem in reader.problems}
    result.remarks += [f"not converted: {key}: {message}" for key, message in refused.items()]
    used = {setting.key for setting in settings.values()} | refused.keys()
    for spelled, setting in layer.items():
        if spelled not in used:
            result.remarks.append(f"{_why_unused(spelled, setting.value, schema)}: {spelled}: {setting.value}")
    result.remarks += [note for note in reader.notes if " sets " in note]
    result.remarks += [f"equal to the default here: {same} keys"] if same else []
    result.remarks += _other_defaults(settings, schema)
    return result


def _why_unused(spelled: str, value: Any, schema: type[Schema]) -> str:
    key = schema.aliases.resolve(spelled)
    if key in schema.aliases.computed:
        return "read with another key"
    if value is None:
        return "null in the file"
    known = upstream_key(key, schema.upstream)
    if known is None:
        return "no counterpart"
    effect = "no effect here" if known.ignored else "off in the file, and not supported here"
    return f"{effect} ({known.instead})"


def _other_defaults(settings: Layer, schema: type[Schema]) -> list[str]:
    """A remark on numbers that the file does not set and that have another default in public verl."""
    ours = to_flat_dict(schema())
    theirs = upstream_defaults(schema.upstream) if schema.upstream else {}
    differ = [
        f"{key}={value} (here {ours[key]})"
        for key, value in theirs.items()
        if key in ours and key not in settings and isinstance(value, int | float) and value != ours[key] is not None
    ]
    return [f"verl's defaults, not in the file: {', '.join(differ)}"] if differ else []
