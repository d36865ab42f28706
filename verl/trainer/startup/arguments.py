"""Reads the arguments of a trainer: settings, and rows, rewards and models that are Python objects instead of files.

Datasets and rewards stay in this process, whatever the cluster. A model object is written to a folder, from which the
workers load it; the object itself is not changed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import load_config, schema
from verl.config.fields import Schema, flatten
from verl.config.sources import Overrides

ConfigSource = Schema | Mapping[str, Any] | str | Path | None
"""A configuration object, a dictionary with nested or dotted keys, or a YAML file."""

#: folder of a model that was given as an object, in trainer.default_local_dir
_MODEL_FOLDER = "initial_model"


@dataclass
class TrainerArguments:
    """Configuration, datasets and reward as `prepare_run` and `load_inputs` take them.

    Attributes:
        config: a configuration object; None: read from `path` and `overrides`.
        path: a file, or a dictionary.
        overrides: settings above those of the file.
        train_dataset, val_dataset: None if they are files, which are then settings.
        reward: a reward function or manager; None if it is named by a setting.
    """

    config: Schema | None
    path: Mapping[str, Any] | str | Path | None
    overrides: Overrides
    train_dataset: Any = None
    val_dataset: Any = None
    reward: Any = None

    def add(self, settings: Mapping[str, Any]) -> None:
        """Add settings above all others."""
        if not settings:
            return
        if self.config is not None:
            self.config = self.config.with_overrides(settings)
        elif isinstance(self.overrides, Mapping):
            self.overrides = {**flatten(self.overrides), **settings}
        else:
            self.overrides = [*self.overrides, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]


def read_arguments(
    config: ConfigSource,
    config_path: str | Path | None,
    overrides: Overrides,
    expected: type[Schema],
    *,
    train_dataset: Any = None,
    val_dataset: Any = None,
    rewards: Mapping[str, Any] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainerArguments:
    """Read the arguments of a trainer.

    Args:
        config: a configuration of the class `expected`, a dictionary or a file.
        config_path: a file; the same as `config`.
        overrides: "key=value" strings or a dictionary.
        expected: class of the configuration.
        train_dataset, val_dataset: rows, a dataset, or a path or a list of paths.
        rewards: argument name -> reward, at most one that is not None. A string names a registered reward function.
        model: a model object of transformers; requires `tokenizer`.
        settings: further settings; None is not set.

    Raises:
        ValueError: two arguments exclude each other, or one is not supported.
        TypeError: a config or overrides of another type.
    """
    given = _read_config(config, config_path, overrides, expected)
    given.add({key: value for key, value in (settings or {}).items() if value is not None})
    for name, key in (("train_dataset", "data.train_files"), ("val_dataset", "data.val_files")):
        dataset = {"train_dataset": train_dataset, "val_dataset": val_dataset}[name]
        if (paths := _paths(dataset)) is None:
            setattr(given, name, dataset)
        else:
            given.add({key: paths})
    chosen = {name: reward for name, reward in (rewards or {}).items() if reward is not None}
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are the same argument: give one of them")
    given.reward = next(iter(chosen.values()), None)
    if isinstance(given.reward, str):
        given.add({"reward.reward_function": given.reward})
        given.reward = None
    if model is not None:
        _write_model(given, expected, model, tokenizer)
    return given


def _read_config(config: Any, config_path: Any, overrides: Any, expected: type[Schema]) -> TrainerArguments:
    """Settings from `config` or `config_path`, and overrides. Refuses what would be ignored, and other types."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list, found the string {overrides!r}: use overrides=[{overrides!r}]")
    if config is not None and config_path is not None:
        raise ValueError("config and config_path are the same argument: give one of them")
    if isinstance(config, str) and "=" in config:
        raise TypeError(f"config: expected a file, found {config!r}: for keys, use overrides=[{config!r}]")
    if config is None or isinstance(config, str | Path | Mapping):
        return TrainerArguments(None, config_path if config is None else config, overrides)
    if not isinstance(config, expected):
        raise TypeError(
            f"config: expected a {expected.__name__}, a dict or the path of a YAML file, found {type(config).__name__}"
        )
    return TrainerArguments(config.with_overrides(overrides) if overrides else config, None, ())


def _paths(dataset: Any) -> list[str] | None:
    """The paths of a dataset that is given as files; None if it is an object."""
    if isinstance(dataset, str | Path):
        return [str(dataset)]
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(one, str | Path) for one in dataset):
        return [str(one) for one in dataset]
    return None


def _write_model(given: TrainerArguments, expected: type[Schema], model: Any, tokenizer: Any) -> None:
    """Write a model and its tokenizer to a folder of the run, and set the path of the model to it."""
    key = "model.path" if expected is schema.SFTConfig else "actor_rollout_ref.model.path"
    if tokenizer is None:
        raise ValueError(f"model: a model object needs its tokenizer: give tokenizer=, or {key} instead of model")
    for name, found, kind in (("model", model, "a model object"), ("tokenizer", tokenizer, "its tokenizer")):
        if not callable(getattr(found, "save_pretrained", None)):
            raise ValueError(
                f"{name}: expected {kind} of transformers, found {type(found).__name__}; for a folder or a name of "
                f"the hub, set {key}"
            )
    config = given.config
    if config is None:
        config = load_config(given.path, given.overrides, schema=expected)
    section = config.model if expected is schema.SFTConfig else config.actor_rollout_ref.model
    if section.path:
        raise ValueError(f"give model or {key} ({section.path}), not both")
    if config.trainer.nnodes > 1:
        raise ValueError(
            f"model: an object is written to this host, but trainer.nnodes is {config.trainer.nnodes}: save "
            f"it where all hosts can read it, and set {key}"
        )
    folder = Path(config.trainer.default_local_dir).absolute() / _MODEL_FOLDER
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given.add({key: str(folder)})
