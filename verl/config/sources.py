"""Sources of settings: a YAML file, overrides on the command line, a dictionary. Every value keeps its origin."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.errors import ConfigError, Problem, format_value
from verl.config.fields import flatten
from verl.utils.paths import expanded, resolved
from verl.utils.paths import read_text as read_user_text

_FILE = "the configuration file"

_MOST_VALUES = 100_000

_KEY = re.compile(r"""("[^"]*"|'[^']*')|((?<!\$)[{,]\s*[\w./-]+):(?!//|\s)""")
"""In a mapping on the command line, a key whose colon has no space after it; or a quoted string, which stays."""
_PLAIN_TEXT = re.compile(r"[%*@?][\w/\\+.$%*@?|:= -]*")
"""What is text for Hydra, and not valid in YAML without quotes."""

REMOVED = "<removed>"
"""The value of a key that `~key` removes from earlier sources."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with other scalars: 1e-6 is a float; 010, 0x10, 1:30 and dates are strings, which a numeric field
    converts, so 010 is 10. Duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
        return super().construct_mapping(node, deep)


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE])|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _NUMBERS and not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list("-+.0123456789"))


def _read(text: str) -> Any:
    """The value of a YAML document. Interpolations are checked for their syntax and not resolved. Raises YAMLError if
    the text is not valid, or an anchor contains itself, OmegaConfBaseException for an invalid interpolation."""
    try:
        value = yaml.load(text, _Loader)
        _check_size(value)
        return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)["value"]
    except RecursionError as error:
        raise yaml.YAMLError("an anchor contains itself, or sections are nested too deeply") from error
    except OmegaConfBaseException:
        raise
    except ValueError as error:  # a number of more than 4,300 digits
        raise yaml.YAMLError(str(error)) from error


def _read_override(text: str) -> Any:
    """A value of the command line. As in Hydra, {a:1} needs no space, and @file and *.parquet no quotes."""
    try:
        return _read(text)
    except yaml.YAMLError:
        spaced = _KEY.sub(lambda match: match[1] or f"{match[2]}: ", text)
        if spaced == text and not _PLAIN_TEXT.fullmatch(text):
            raise
        return text if spaced == text else _read(spaced)


def _check_size(value: Any) -> None:
    """Raise YAMLError for more than _MOST_VALUES values: aliases of aliases multiply, and their expansion is slow; and
    for {a:1}, a key without a value."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise yaml.YAMLError(f"an anchor contains itself, or there are more than {_MOST_VALUES:,} values")
        if isinstance(item, dict) and (keys := [key for key in item if item[key] is None and ":" in str(key)]):
            raise yaml.YAMLError(f"the key {keys[0]!r} is null: write a space after the colon, or quote the value")
        if isinstance(item, dict | list):
            left.extend(item.values() if isinstance(item, dict) else item)


@dataclass(frozen=True)
class Setting:
    """One value and its origin.

    Attributes:
        key: the key as spelled by the user.
        value: the value as YAML reads it.
        location: the line of the file, or the override.
        text: the value as written, before YAML inferred a type; None where that is not known.
        added: the key was written with a leading `+`, as Hydra adds a key.
    """

    key: str
    value: Any
    location: str
    text: str | None = None
    added: bool = False

    def with_value(self, value: Any) -> "Setting":
        """The same origin with another value."""
        return replace(self, value=value, text=None)


Layer = dict[str, Setting]

Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` strings, or a dictionary with nested or dotted keys."""


def read_text(file: Path) -> str:
    """The text of a configuration file. Raises ConfigError if it is not a text file in UTF-8."""
    try:
        return read_user_text(file)
    except ValueError as error:
        raise ConfigError([Problem(_FILE, str(error))]) from error


def read_yaml(path: str | Path) -> Layer:
    """The settings of a YAML file, interpolations unresolved. Raises ConfigError if the file cannot be read."""
    file = expanded(path)
    if not os.path.isfile(file):
        raise ConfigError([Problem(_FILE, f"there is no file {str(path)!r} (looked at {resolved(file)})")])
    text = read_text(file)
    try:
        content = _read(text)
        marks = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError([Problem(_FILE, f"{path} is not valid YAML: {error}")]) from error
    if content in ({}, None):
        return {}
    if not isinstance(content, dict):
        raise ConfigError([Problem(_FILE, f"{path}: found {type(content).__name__}, expected a mapping of keys")])
    written = _written(marks, "")
    layer = {}
    for key, value in flatten(content).items():
        line, scalar = written.get(key, (None, None))
        layer[key] = Setting(key, value, f"{file.name} line {line}" if line else file.name, scalar)
    return layer


def _written(node: yaml.Node | None, prefix: str) -> dict[str, tuple[int, str | None]]:
    """Dotted key -> (line, text of an unquoted scalar) of every key of a YAML mapping."""
    origins: dict[str, tuple[int, str | None]] = {}
    if not isinstance(node, yaml.MappingNode):
        return origins
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        plain = isinstance(value, yaml.ScalarNode) and value.style is None
        origins[dotted] = (key.start_mark.line + 1, value.value if plain else None)
        origins |= _written(value, f"{dotted}.")
    return origins


def read_mapping(values: Mapping[str, Any], location: str) -> Layer:
    """The settings of a dictionary with nested or dotted keys, with or without a leading `+`."""
    layer: Layer = {}
    for spelled, value in flatten(values).items():
        key, plain = spelled.lstrip("+"), _without_python_types(value)
        layer.pop(key, None)
        layer[key] = Setting(key, plain, location, added=key != spelled)
    return layer


def _without_python_types(value: Any) -> Any:
    """The value with strings for paths and lists for tuples, as a YAML file has them."""
    if isinstance(value, Path):
        return str(value)
    return [_without_python_types(item) for item in value] if isinstance(value, list | tuple) else value


def read_overrides(overrides: "Overrides") -> tuple[Layer, list[Problem], list[str]]:
    """`key=value` from the command line, with or without a leading `--` or `+`; the last of equal keys wins.

    In Python, overrides may also be a dictionary with nested or dotted keys.

    Values are YAML: `null`, `true`, `1e-6`, `[a,b]`, `{a: 1}`, quoted strings. `~key` removes a key from earlier
    sources: its default applies.

    Returns:
        The settings, a problem for every override that cannot be read, and a note on keys that are given more than
        twice with different values. A script sets a key and its caller overrides it: twice needs no note.
    """
    if isinstance(overrides, Mapping):
        return read_mapping(overrides, "overrides"), [], []
    layer: Layer = {}
    problems: list[Problem] = []
    values_of: dict[str, list[Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip().removeprefix("--")
        name, added = name.lstrip("+").strip(), name.startswith("+")
        location = f"override {override!r}"
        if name.startswith("~") and len(name) > 1:
            layer[name[1:]] = Setting(name[1:], REMOVED, location)
        elif not equals or not name:
            message = "expected key=value, such as data.train_batch_size=64"
            problems.append(Problem(override, message, location))
        else:
            try:
                value = _read_override(text)
            except (yaml.YAMLError, OmegaConfBaseException) as error:
                reason = str(error).splitlines()[0]
                message = f"the value is not valid YAML ({reason}); quote special characters: {name}='\"...\"'"
                problems.append(Problem(override, message))
                continue
            values = flatten({name: value}) if isinstance(value, Mapping) else {name: value}
            for key, item in values.items():
                layer.pop(key, None)
                layer[key] = Setting(key, item, location, text.strip() if key == name else None, added)
                values_of.setdefault(key, []).append(item)
    return layer, problems, _repeated(values_of)


def _repeated(values_of: Mapping[str, Sequence[Any]]) -> list[str]:
    repeated = [
        f"{key} ({', then '.join(map(format_value, values))})"
        for key, values in values_of.items()
        if len(values) > 2 and any(value != values[-1] for value in values[1:])
    ]
    note = f"overrides that are given several times; the last value is used: {'; '.join(repeated)}"
    return [note] if repeated else []


def has_interpolation(value: Any) -> bool:
    """Whether a value, or an item inside it, refers to another key or to the environment."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, list):
        return any(map(has_interpolation, value))
    return False
