"""The settings of Safe RLHF."""

from collections.abc import Iterator

from verl.config import Problem, schema
from verl.config.fields import Section, field, section
from verl.config.schema.ppo import Config


class SafeRLHFSection(Section):
    """`safe_rlhf`: the cost of a response, and its limit."""

    cost_limit: float = field(0.0, "the mean cost of a response that the policy may have")
    lambda_init: float = field(1.0, "multiplier of the first step", gt=0)
    lambda_lr: float = field(0.1, "learning rate of its logarithm; 0: a constant multiplier", ge=0)
    lambda_gain: float = field(
        0.0, "the multiplier of a step is also scaled by exp(gain * (mean cost - limit)), against oscillations", ge=0
    )
    lambda_max: float = field(100.0, "upper bound of the multiplier", gt=0)
    cost_model: schema.RewardModelConfig = section(
        schema.RewardModelConfig, "model that gives the cost; not enabled: the value `cost` of the reward function"
    )


class SafeRLHFConfig(Config):
    """The root of a Safe RLHF configuration."""

    safe_rlhf: SafeRLHFSection = section(SafeRLHFSection, "cost and multiplier")


def check_settings(config: SafeRLHFConfig) -> Iterator[Problem]:
    """Settings that are invalid for Safe RLHF."""
    estimator, model = config.algorithm.adv_estimator, config.safe_rlhf.cost_model
    if estimator in ("remax", "prime"):
        problem = f"{estimator} has a baseline of the rewards, which is none of the costs: use gae, grpo or another"
        yield Problem("algorithm.adv_estimator", problem)
    if model.enable and model.model_path is None:
        yield Problem("safe_rlhf.cost_model.model_path", "missing: set it to a sequence-classification model")
