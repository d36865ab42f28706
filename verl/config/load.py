"""From files, overrides and dialects to the typed tree: `load_config`; and back to YAML: `dump_config`.

    defaults  <  preset of algorithm.name  <  base  <  YAML file  <  overrides

Values remember who gave them (sources.py); second names are translated (dialects.py) and interpolations resolved
(reader.py); keys of verl that are not here are answered (known_keys.py); what is left is typed (tree.py) and compared
with one another (checks.py). All that is wrong comes in one `ConfigError`, before any model is loaded.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from verl.config.checks import check_tree, notes_of
from verl.config.errors import ConfigError, Problem, in_words
from verl.config.fields import Tree, flatten, followers, leaves, unflatten
from verl.config.reader import Reader
from verl.config.schema.ppo import Config
from verl.config.sources import Layer, read_mapping, read_overrides, read_yaml
from verl.registry import did_you_mean

T = TypeVar("T", bound=Tree)
Check = Callable[[Any], Iterable[Problem]]
Presets = Mapping[str, Mapping[str, Any]]

log = logging.getLogger("verl.config")


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
    presets: Presets | None = None,
    tree: type[T] = Config,
    extra_checks: Iterable[Check] = (),
) -> T:
    """The typed configuration. Later sources win: defaults, preset, `base`, the file at `path`, `overrides`.

    path: a YAML file. overrides: `key=value`, with or without leading `--` or `+`. base: a dictionary, nested or with
    dotted keys. presets: name -> {dotted key: value}, what `algorithm.name` stands for. tree: which configuration.
    extra_checks: functions of the loaded tree that give further problems, reported together with the others.

    Raises ConfigError that holds everything that is wrong: the key, what was found, what is allowed, the nearest key,
    and the line or the override that said so.
    """
    layers = [read_mapping(base, "base")] if base else []
    if path is not None:
        layers.append(read_yaml(path))
    said, problems = read_overrides(overrides)
    reader = Reader(tree, [*layers, said])
    given = reader.read()
    problems += reader.problems
    values = {key: origin.value for key, origin in given.items()}
    if isinstance(values.get("algorithm.name"), str):
        try:
            values = apply_preset(values, presets or {}, tree)
        except ValueError as error:
            problems.append(Problem("algorithm.name", str(error)))
    config = _typed(tree, values, problems)
    if config is not None:
        problems += check_tree(config)
        problems += [problem for check in extra_checks for problem in check(config)]
    if problems:
        raise ConfigError(_placed(problem, given) for problem in problems)
    for note in (*reader.notes, *notes_of(config)):
        log.warning(note)
    return config


def apply_preset(given: Mapping[str, Any], presets: Presets, tree: type[Tree] = Config) -> dict[str, Any]:
    """Dotted keys with the preset of their `algorithm.name` under them: what is given explicitly wins.

    A key of the preset that follows a given key (clip_ratio_low follows clip_ratio) gives way to it as well.
    Raises ValueError when there is no preset of that name.
    """
    name = given.get("algorithm.name")
    if name is None:
        return dict(given)
    if name not in presets:
        raise ValueError(f"there is no algorithm {name!r}: {did_you_mean(str(name), presets)}")
    follow = followers(tree)
    gives_way = {key for key in follow if any(f"${{{other}}}" in follow[key] for other in given)}
    return {key: value for key, value in presets[name].items() if key not in gives_way} | dict(given)


def to_flat_dict(config: Tree) -> dict[str, Any]:
    """Dotted key -> value of everything, for trackers and for comparing two runs."""
    return flatten(config.model_dump(mode="json"), type(config))


def differences(config: Tree) -> dict[str, Any]:
    """Dotted key -> value of what differs from the defaults; what merely follows another key is not listed."""
    tree = type(config)
    flat, plain = to_flat_dict(config), to_flat_dict(tree())
    chosen = {key: value for key, value in flat.items() if key not in followers(tree) and value != plain[key]}
    for key in followers(tree):
        implied = to_flat_dict(tree.model_validate(unflatten(chosen)))
        if implied[key] != flat[key]:
            chosen[key] = flat[key]
    return {key: chosen[key] for key in flat if key in chosen}


def dump_config(config: Tree, *, everything: bool = False) -> str:
    """YAML that loads to the same configuration: only what differs from the defaults, or all of it."""
    chosen = to_flat_dict(config) if everything else differences(config)
    return yaml.safe_dump(unflatten(chosen), sort_keys=False, allow_unicode=True)


def _typed(tree: type[T], values: Mapping[str, Any], problems: list[Problem]) -> T | None:
    """The tree, or None and a problem for every value of a wrong type or out of range."""
    try:
        return tree.model_validate(unflatten(values))
    except ValidationError as error:
        known, wrong = leaves(tree), {}
        for detail in error.errors():
            key = _key_of(detail["loc"], known)
            wrong[key] = values.get(key, detail["input"])
        given = {key: found for key, found in wrong.items() if key in values or key not in followers(tree)}
        for key, found in (given or wrong).items():
            problems.append(
                Problem(key, f"found {in_words(found)}, expected {known[key].expected()}{_near(found, key, tree)}")
            )
        return None


def _key_of(location: tuple[Any, ...], known: Mapping[str, Any]) -> str:
    """The key of the tree that pydantic speaks of; it goes on into lists and alternatives of a type."""
    names = [str(name) for name in location]
    dotted = [".".join(names[:depth]) for depth in range(len(names), 0, -1)]
    return next((key for key in dotted if key in known), dotted[0])


def _near(found: Any, key: str, tree: type[Tree]) -> str:
    """The word that was probably meant, of a list the first that is none."""
    words = leaves(tree)[key].words()
    given = found if isinstance(found, list) else [found]
    wrong = next((word for word in given if isinstance(word, str) and word not in words), "")
    near = difflib.get_close_matches(wrong, words, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _placed(problem: Problem, given: Layer) -> Problem:
    """The problem, with the place where its key was given."""
    where = problem.where or (given[problem.key].where if problem.key in given else "")
    return Problem(problem.key, problem.what, where)
