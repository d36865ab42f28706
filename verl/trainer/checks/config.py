"""Checks of the settings with what is registered, of the folders of a run and of its devices."""

import logging
from collections.abc import Iterator
from pathlib import Path

from verl.checkpoints.atomic import check_folder
from verl.config import Problem, check_registered, schema
from verl.config.fields import Schema
from verl.data.rlhf_dataset import RLHFDataset
from verl.engines.base import ENGINES
from verl.rollout.base import ROLLOUT_ENGINES
from verl.tracking.tracking import check_trackers
from verl.trainer.checks.agents import agent_loop_names
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.inputs import dataset_class
from verl.trainer.startup.roles import idle_warning

logger = logging.getLogger("verl.trainer")

_OUTPUT_FOLDERS = ("default_local_dir", "rollout_data_dir", "validation_data_dir")


def check_engines(config: Schema) -> list[Problem]:
    """Engines, agent loops and tool parsers are registered under the configured names."""
    names = {"rollout.name": ROLLOUT_ENGINES, "strategy": ENGINES}
    if isinstance(config, schema.Config):
        rollout = config.actor_rollout_ref.rollout
        names["rollout.agent.default_agent_loop"] = agent_loop_names(rollout)
        if rollout.multi_turn.format != type(rollout.multi_turn)().format:
            from verl.agents.tools.parsers import TOOL_PARSERS

            names["rollout.multi_turn.format"] = TOOL_PARSERS
    return check_registered(config, names)


def check_tracker_names(config: Schema) -> None:
    """The trackers are known, and their packages installed."""
    check_trackers(config.trainer.logger)


def check_output_folders(config: Schema) -> None:
    """All output folders are writable, also that of weight_sync=disk."""
    folders = {f"trainer.{name}": config.trainer.get(name) for name in _OUTPUT_FOLDERS}
    if isinstance(config, schema.Config):
        folders["actor_rollout_ref.rollout.weight_sync_dir"] = config.actor_rollout_ref.rollout.weight_sync_dir
    for key, path in folders.items():
        if path:
            check_folder(key, Path(path))


def check_reward_model(config: schema.Config) -> Iterator[Problem]:
    """An enabled reward model has a path."""
    key, section = "reward.reward_model", config.reward.reward_model
    if section.enable and not section.model_path:
        yield Problem(f"{key}.model_path", f"null, but {key}.enable is true: set it to the reward model")


def check_placement(config: schema.Config) -> None:
    """Roles are placed on existing devices, and share all devices with another role or none. Warn of idle devices."""
    if warning := idle_warning(config):
        logger.warning(warning)


def check_dataset_class(config: Schema) -> None:
    """The class of `data.custom_cls` can be imported."""
    dataset_class(config, RLHFDataset)


def check_cluster(run: Run) -> None:
    """The cluster can run the settings."""
    run.cluster.check(run.config)


def check_saving(config: Schema) -> None:
    """save_best and early stopping have validations. Warn if the run saves nothing."""
    trainer = config.trainer
    settings = {"save_best": trainer.save_best, "early_stopping.patience": trainer.early_stopping.patience}
    for name, value in settings.items():
        if value and trainer.test_freq in (-1, 0):
            raise ValueError(
                f"trainer.{name} is set, but trainer.test_freq is {trainer.test_freq}: set trainer.test_freq"
            )
    if trainer.save_freq in (-1, 0) and not (trainer.save_at_end or trainer.save_best or trainer.val_only):
        logger.warning("the trained model will not be saved, because trainer.save_at_end is false")
