"""Checks of the critic: whether there is one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.errors import Problem

if TYPE_CHECKING:
    from verl.config.schema.ppo import Config

_WITHOUT_VALUES = {
    *("analytic_passk", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline"),
    *("prime", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized", "sppo"),
    "tir_optimal_token_baseline",
}
"""Built-in advantage estimators that read no values."""


def may_have_critic(config: "Config") -> bool:
    """Whether the run may train a critic, as far as is known before the estimators are imported."""
    enable = config.critic.enable
    return config.algorithm.adv_estimator not in _WITHOUT_VALUES if enable is None else enable


def check_critic(config: "Config", needed: bool) -> Iterator[Problem]:
    """`critic.enable` must match the advantage estimator.

    Args:
        needed: whether the estimator reads values.
    """
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    if enable is False and needed:
        yield Problem(
            "critic.enable",
            f"false, but algorithm.adv_estimator={estimator} reads values: use null, or an estimator "
            "without a critic, such as algorithm.adv_estimator=grpo with actor_rollout_ref.rollout.n=8",
        )
    if enable is True and not needed:
        yield Problem("critic.enable", f"true, but algorithm.adv_estimator={estimator} does not read values: use null")
    warmup = config.trainer.critic_warmup
    if warmup and not needed:
        what = f"{warmup}, but algorithm.adv_estimator={estimator} has no critic, so nothing would be trained: use 0"
        yield Problem("trainer.critic_warmup", what)
