"""The Bradley-Terry reward model as a flow of offline preferences: rows -> update."""

from collections.abc import Iterator

from verl.algorithms.preference import PreferenceLoss
from verl.config import Problem
from verl.config.schema import RMConfig
from verl.config.schema.model import is_model_parallel
from verl.recipe.dpo.offline import PreferenceTrainer, check_data_settings, check_form
from verl.trainer.checks.preflight import Recipe

_LOSS = "bradley_terry"


def check_settings(config: RMConfig) -> Iterator[Problem]:
    """Settings that are invalid for a reward model."""
    yield from check_data_settings(config)
    if is_model_parallel(config.engine.strategy):
        yield Problem("engine.strategy", f"{config.engine.strategy} does not train reward models: use fsdp")


class RMTrainer(PreferenceTrainer):
    """A reward model that learns from the pairs of a file, on one host. Arguments as for `SFTTrainer`.

    >>> RMTrainer(overrides=["data.train_files=pairs.jsonl", "model.path=my-model"]).fit()
    """

    recipe = Recipe(
        "reward model",
        None,
        RMConfig,
        check_settings,
        lambda config, inputs: check_form(PreferenceLoss(_LOSS), inputs),
    )
    is_reward_model = True

    @property
    def loss(self) -> PreferenceLoss:
        return PreferenceLoss(_LOSS, self.config.rm.model_dump())
