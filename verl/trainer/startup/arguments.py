"""Reads the arguments of a trainer: settings, and rows, rewards and models that are Python objects instead of files.

Datasets and rewards stay in this process, whatever the cluster. A model object is written to a folder, from which the
workers load it; the object itself is not changed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config import load_config, schema
from verl.config.fields import Schema, flatten
from verl.config.sources import Overrides
from verl.registry import did_you_mean
from verl.single_controller.cluster import CLUSTERS, Cluster, make_cluster
from verl.trainer.checks.preflight import CONFIG, Recipe, Run, Settings, open_run, run_checks
from verl.trainer.startup.inputs import files_of_datasets
from verl.utils.log import setup_logging

#: folder of a model that was given as an object, in trainer.default_local_dir
_MODEL_FOLDER = "initial_model"


def prepare_run(
    config: Settings,
    config_path: str | Path | None,
    overrides: Overrides,
    recipe: Recipe,
    *,
    train_dataset: Any = None,
    val_dataset: Any = None,
    rewards: Mapping[str, Any] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    backend: str | None = None,
) -> Run:
    """Read the arguments of a trainer, choose the cluster, and run the checks up to CONFIG.

    Args:
        rewards: argument name -> reward, at most one that is not None.
        settings: further settings; None is not set.
        backend: of the cluster that is chosen; None: `trainer.backend`. Other arguments as of `PPOTrainer`.

    Raises:
        ValueError: two arguments exclude each other, or one is not supported.
        TypeError: a config or overrides of another type.
    """
    config = _read_config(config, config_path, overrides, recipe.schema)
    rewards = {name: reward for name, reward in (rewards or {}).items() if reward is not None}
    if len(rewards) > 1:
        raise ValueError(f"{' and '.join(rewards)} are the same argument: give one of them")
    reward = next(iter(rewards.values()), None)
    further = {key: value for key, value in (settings or {}).items() if value is not None}
    if isinstance(reward, str):
        further["reward.reward_function"], reward = reward, None
    files = {"data.train_files": _paths(train_dataset), "data.val_files": _paths(val_dataset)}
    overrides = with_settings(overrides, further | {key: paths for key, paths in files.items() if paths is not None})
    if model is not None:
        overrides = with_settings(overrides, _write_model(config, overrides, recipe.schema, model, tokenizer))
    train, val = (data if paths is None else None for data, paths in zip((train_dataset, val_dataset), files.values()))
    run = open_run(config, overrides, recipe, base=files_of_datasets(train, val), rows_given=train is not None)
    run.train_dataset, run.val_dataset, run.reward = train, val, reward
    _choose_cluster(run, cluster, backend)
    run_checks(run, CONFIG)
    return run


def with_settings(overrides: Overrides, settings: Mapping[str, Any]) -> Overrides:
    """Overrides with further ones, in the form of the ones so far: a dictionary, or "key=value" strings."""
    if not settings:
        return overrides
    if isinstance(overrides, Mapping):
        return {**flatten(overrides), **settings}
    return [*overrides, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]


def _choose_cluster(run: Run, cluster: Cluster | None, backend: str | None) -> None:
    if isinstance(run.config, schema.Config) and run.config.placement.auto:
        from verl.trainer.checks.planning import apply_auto_placement

        run.config = apply_auto_placement(run.config)
    trainer = run.config.trainer
    if trainer.log_level is not None:
        setup_logging(trainer.log_level)
    run.backend = backend or trainer.backend
    if run.backend not in CLUSTERS:
        raise ValueError(f"no backend is called {run.backend!r}: {did_you_mean(run.backend, CLUSTERS)}")
    run.cluster = cluster or make_cluster(run.config, run.backend)


def _read_config(config: Any, config_path: Any, overrides: Any, expected: type[Schema]) -> Settings:
    """The settings of `config` or `config_path`. Refuses what would be ignored, and other types."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list, found the string {overrides!r}: use overrides=[{overrides!r}]")
    if config is not None and config_path is not None:
        raise ValueError("config and config_path are the same argument: give one of them")
    if isinstance(config, str) and "=" in config:
        raise TypeError(f"config: expected a file, found {config!r}: for keys, use overrides=[{config!r}]")
    if config is None or isinstance(config, str | Path | Mapping):
        return config_path if config is None else config
    if not isinstance(config.config if isinstance(config, Run) else config, expected):
        raise TypeError(
            f"config: expected a {expected.__name__}, a dict or the path of a YAML file, found {type(config).__name__}"
        )
    return config


def _paths(dataset: Any) -> list[str] | None:
    """The paths of a dataset that is given as files; None if it is an object."""
    if isinstance(dataset, str | Path):
        return [str(dataset)]
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(item, str | Path) for item in dataset):
        return [str(item) for item in dataset]
    return None


def _write_model(
    config: Settings, overrides: Overrides, expected: type[Schema], model: Any, tokenizer: Any
) -> dict[str, str]:
    """Write a model and its tokenizer to a folder of the run. Returns the setting of its path."""
    is_sft = issubclass(expected, schema.SFTConfig)
    key = "model.path" if is_sft else "actor_rollout_ref.model.path"
    if tokenizer is None:
        raise ValueError(f"model: a model object needs its tokenizer: give tokenizer=, or {key} instead of model")
    for name, value, kind in (("model", model, "a model object"), ("tokenizer", tokenizer, "its tokenizer")):
        if not callable(getattr(value, "save_pretrained", None)):
            raise ValueError(
                f"{name}: expected {kind} of transformers, found {type(value).__name__}; for a folder or a name of "
                f"the hub, set {key}"
            )
    if not isinstance(config, Schema):
        config = load_config(config, overrides, schema=expected)
    elif overrides:
        config = config.with_overrides(overrides)
    section = config.model if is_sft else config.actor_rollout_ref.model
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
    return {key: str(folder)}
