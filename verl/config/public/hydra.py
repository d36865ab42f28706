"""Hydra's syntax on the command line and in files: configurations by name, config groups, defaults lists.

The built-in configurations and group options of public verl are the defaults of this schema, so they need no file. Any
other name is a file: `--config-path DIR --config-name NAME` is DIR/NAME.yaml, and the option OPTION of a group is
DIR/GROUP/OPTION.yaml. An option that selects a feature that is not supported is an error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.errors import ConfigError, Problem
from verl.config.public.upstream import upstream_configs, upstream_groups, upstream_selections
from verl.config.sources import REMOVED, Layer, Setting, read_text, read_yaml
from verl.utils.paths import expanded, resolved

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_SELF = "_self_"

#: the override that selects a configuration of public verl: the empty group
CONFIGURATION = "@"
#: the folder of public verl's configurations, which scripts name relative to its programs
_BUILT_IN_FOLDER = "verl/trainer/config"


def find_config(name: str | None, directories: list[str]) -> Path | None:
    """The file of `--config-name`, from `--config-path` and `--config-dir`.

    Returns:
        The file; None for a configuration of public verl, whose values are the defaults of this schema.

    Raises:
        ConfigError: there is no such configuration, or it selects an engine that is not supported.
    """
    config_name = name or "ppo_trainer"
    path = _find(config_name, [expanded(directory) for directory in directories])
    known = (*upstream_configs(), *upstream_selections()[""])
    of_public_verl = all(f"verl/trainer/{Path(folder)}".endswith(_BUILT_IN_FOLDER) for folder in directories)
    of_public_verl &= not any(map(os.path.exists, directories))
    built_in = name or of_public_verl
    if path or (config_name.removesuffix(".yaml") in known and built_in):
        return path
    if name is None:
        message = "the folder has no ppo_trainer.yaml: set --config-name to the name of the file"
    else:
        folders = " or ".join(str(resolved(directory)) for directory in directories)
        file = config_name if config_name.endswith((".yaml", ".yml")) else f"{config_name}.yaml"
        message = f"there is no {file} in {folders or 'any --config-path'} (built in: {' or '.join(known)})"
    raise ConfigError([Problem("--config-name" if name else "--config-path", message)])


def read_file(path: str | Path, included_by: tuple[Path, ...] = ()) -> list[Layer]:
    """The settings of a YAML file and of the files in its defaults list, lowest precedence first.

    Args:
        included_by: the files whose defaults lists led to this one, outermost first.

    Raises:
        ConfigError: a file cannot be read or includes itself, or the list selects something that is not supported.
    """
    chain = (*included_by, resolved(path))
    if chain[-1] in included_by:
        message = f"a file includes itself: {' -> '.join(map(str, chain[included_by.index(chain[-1]) :]))}"
        raise ConfigError([Problem("defaults", message)])
    layer = read_yaml(path)
    listed = layer.pop("defaults", None)
    if listed is None or not isinstance(listed.value, list):
        return [layer] if listed is None else [{"defaults": listed, **layer}]
    search = layer.get("hydra.searchpath")
    paths = search.value if search and isinstance(search.value, list) else []
    local = [expanded(each.removeprefix("file://")) for each in paths if str(each).startswith("file://")]
    directories, layers, has_self = [expanded(path).parent, *local], [], False
    for group, option, package in _entries(listed.value):
        if option == _SELF:
            layers.append(layer)
            has_self = True
        else:
            layers += _selected(group, option, package, directories, listed, chain)
    return layers if has_self else [*layers, layer]


def select_groups(overrides: Layer, path: str | Path | None) -> tuple[list[Layer], Layer, list[Problem]]:
    """Split `group=option` and `group@package=option` from the overrides.

    Args:
        overrides: the command line.
        path: the configuration file; its folder is searched for groups.

    Returns:
        The settings of the selected files, the other overrides, and a problem for each option that is not supported.
    """
    directories = [expanded(path).parent] if path else []
    layers: list[Layer] = []
    rest: Layer = {}
    problems: list[Problem] = []
    for key, setting in overrides.items():
        group, at, package = key.partition("@")
        known = group in upstream_groups() or any(os.path.isdir(folder / group) for folder in directories)
        if isinstance(setting.value, str) and setting.value != REMOVED and (at or (known and "." not in key)):
            if key == CONFIGURATION:
                setting = replace(setting, location=f"--config-name={setting.value}")
            try:
                layers += _selected(group, setting.value, package, directories, setting)
            except ConfigError as error:
                problems += error.problems
        else:
            rest[key] = setting
    return layers, rest, problems


def _entries(listed: list[Any]) -> Iterator[tuple[str, str, str]]:
    """(group, option, package) of every entry of a defaults list; the group of a file is empty."""
    engines = [entry["model_engine"] for entry in listed if isinstance(entry, Mapping) and "model_engine" in entry]
    engine = engines[0] if engines else "dp"
    for entry in listed:
        for key, options in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            parts = key.split()
            group, _, package = (parts[-1] if parts else "").partition("@")
            if group.startswith("hydra/"):
                continue
            for option in options if isinstance(options, list) else [options]:
                if option is not None:
                    name, _, option_package = str(option).replace("${model_engine}", engine).partition("@")
                    yield group.strip("/"), name.strip("/"), package or option_package


def _selected(
    group: str, option: str, package: str, directories: list[Path], setting: Setting, chain: tuple[Path, ...] = ()
) -> list[Layer]:
    """The settings of an option of a group; none if its values are the defaults of this schema."""
    file = _find(f"{group}/{option}" if group else option, directories)
    if file is not None:
        header = _PACKAGE.search(read_text(file))
        location = package or (header[1] if header else group.replace("/", "."))
        prefix = "" if location in ("", "_global_") else f"{location}."
        return [
            {prefix + key: replace(setting, key=prefix + key) for key, setting in layer.items()}
            for layer in read_file(file, chain)
        ]
    builtin = upstream_groups().get(group, []) if group else upstream_configs()
    if option in builtin:
        return []
    if (selection := upstream_selections().get(group, {}).get(option)) is not None:
        return [{key: replace(setting, key=key, value=value) for key, value in selection.items()}]
    name = f"{group}={option}" if group else option
    message = f"{name} is not known" if builtin else f"there is no group {group!r}"
    if builtin:
        message += f": use {' or '.join(builtin)}"
    if directories:
        folders = " or ".join(map(str, directories))
        message += f" (no {group + '/' if group else ''}{option}.yaml in {folders})"
    raise ConfigError([Problem(setting.key, message, setting.location)])


def _find(name: str, directories: list[Path]) -> Path | None:
    names = [name] if name.endswith((".yaml", ".yml")) else [f"{name}.yaml", f"{name}.yml"]
    return next((file for folder in directories for each in names if os.path.isfile(file := folder / each)), None)
