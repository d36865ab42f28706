"""The settings of SPIN, with the names of public verl's recipe where it has them."""

from collections.abc import Iterator
from typing import Literal

from verl.config import Problem
from verl.config.fields import Section, field, section
from verl.config.schema import AlgorithmConfig, TrainerConfig
from verl.config.schema.ppo import Config


class SPINAlgorithmConfig(AlgorithmConfig):
    """`algorithm`, with the loss."""

    dpo_beta: float = field(0.1, "strength of the KL constraint to the reference", gt=0)
    dpo_loss_type: Literal["sigmoid", "ipo"] = field("sigmoid", "DPO, or IPO (a squared error)")


class SPINTrainerConfig(TrainerConfig):
    """`trainer`, with the update of the reference."""

    ref_update_freq: int = field(-1, "steps after which the reference becomes the policy; -1: never", ge=-1)


class SPINSection(Section):
    """`spin`: which response is better."""

    preferred: Literal["data", "reward"] = field("data", "data: the response of the data; reward: the better of two")
    response_key: str = field("response", "data: the column of the response", active_when=("preferred", "data"))


class SPINConfig(Config):
    """The root of a SPIN configuration."""

    algorithm: SPINAlgorithmConfig = section(SPINAlgorithmConfig, "the loss")
    trainer: SPINTrainerConfig = section(SPINTrainerConfig, "the run")
    spin: SPINSection = section(SPINSection, "self-play")


def check_settings(config: SPINConfig) -> Iterator[Problem]:
    """Settings that are invalid for SPIN."""
    policy, preferred, responses = config.actor_rollout_ref, config.spin.preferred, config.actor_rollout_ref.rollout.n
    rules = {
        "actor_rollout_ref.rollout.n": (
            responses != 1 if preferred == "data" else responses < 2,
            f"found {responses}: use 1 with spin.preferred=data, at least 2 with spin.preferred=reward",
        ),
        "actor_rollout_ref.ref.enable": (not policy.ref.enable, "SPIN needs the reference: use true"),
        "actor_rollout_ref.model.lora_rank": (
            policy.model.has_adapters and config.trainer.ref_update_freq > 0,
            "the reference of a LoRA run is the base model, which is not updated: use trainer.ref_update_freq=-1",
        ),
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator != "reinforce_plus_plus",
            "SPIN does not compute advantages: leave it at reinforce_plus_plus, whose operator is removed",
        ),
        "algorithm.use_kl_in_reward": (
            config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss,
            "true here or in actor.use_kl_loss, but SPIN limits the KL by algorithm.dpo_beta: use false",
        ),
        "algorithm.filter_groups.enable": (
            config.algorithm.filter_groups.enable and preferred == "data",
            "true, but there are no rewards with spin.preferred=data: use false",
        ),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)
