"""Checks of the estimator and the loss."""

import logging
from collections.abc import Iterator

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import check_settings, parameter_names
from verl.algorithms.policy_losses import SELECTS_PER_MICRO_BATCH, get_policy_loss_fn
from verl.config import Problem, check_critic, schema
from verl.registry import location_of
from verl.single_controller.local.cluster import ProcessCluster
from verl.trainer.checks.preflight import Run
from verl.trainer.ppo.flow import needs_critic

logger = logging.getLogger("verl.trainer")

_ACTOR = "actor_rollout_ref.actor"


def check_critic_settings(config: schema.Config) -> Iterator[Problem]:
    """`critic.enable` matches the estimator."""
    return check_critic(config, needs_critic(config))


def check_required_settings(config: schema.Config) -> None:
    """Estimator and loss are registered and have a value for every required setting; the loss can be aggregated."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    name = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    check_settings(name, estimator, algorithm.settings, "algorithm.adv_kwargs", algorithm.adv_kwargs)
    loss, name = get_policy_loss_fn(actor.policy_loss.loss_mode), f"policy_loss.loss_mode={actor.policy_loss.loss_mode}"
    settings = {**actor.loss_settings, **algorithm.rollout_correction.model_dump()}
    check_settings(name, loss, settings, f"{_ACTOR}.policy_loss.loss_kwargs", actor.policy_loss.loss_kwargs)
    if not {"log_prob", "loss_agg_mode"} <= (parameters := parameter_names(loss)) and "columns" not in parameters:
        raise ValueError(
            f"{name}: expected the parameters log_prob and loss_agg_mode, found {sorted(parameters)} (**kwargs "
            "receives nothing): take loss_agg_mode and return agg_loss(losses, response_mask, loss_agg_mode), so that "
            "the gradient does not depend on the micro-batch size"
        )


def check_group_size(config: schema.Config) -> None:
    """Estimators that compare the responses to one prompt have several of them."""
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    least = getattr(get_adv_estimator_fn(name), "min_group_size", 1)
    if n < least:
        raise ValueError(
            f"algorithm.adv_estimator={name} compares the responses to one prompt: actor_rollout_ref.rollout.n must be "
            f"at least {least}, found {n}"
        )


def check_micro_batch_losses(config: schema.Config) -> None:
    """Warn of a loss that selects among the tokens of one micro-batch if a mini-batch has several of them."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    actor, loss = policy.actor, policy.actor.policy_loss
    if loss.loss_mode not in SELECTS_PER_MICRO_BATCH:
        return
    size = actor.ppo_mini_batch_size * policy.rollout.n // (trainer.nnodes * trainer.n_gpus_per_node)
    single = actor.ppo_micro_batch_size_per_gpu is not None and actor.ppo_micro_batch_size_per_gpu >= size
    if actor.use_dynamic_bsz or not single:
        logger.warning(
            "actor.policy_loss.loss_mode=%s selects among the tokens of one micro-batch, so its gradient depends on "
            "the micro-batch size; for one micro-batch per mini-batch set actor.ppo_micro_batch_size_per_gpu=%d and "
            "actor.use_dynamic_bsz=false",
            loss.loss_mode,
            size,
        )


def check_worker_code(run: Run) -> None:
    """The loss is defined where workers in other processes can import it."""
    name = run.config.actor_rollout_ref.actor.policy_loss.loss_mode
    loss = get_policy_loss_fn(name)
    if loss.__module__ == "__main__" and (run.backend == "ray" or isinstance(run.cluster, ProcessCluster)):
        raise ValueError(
            f"policy_loss.loss_mode={name}: {location_of(loss)} is defined in the main script or a notebook, which the "
            "worker processes do not run: move it to a file, and set imports=[file.py]. (With one process, "
            "trainer.n_gpus_per_node=1, it can stay. Estimators, rewards, operators and datasets can stay anyway: they "
            "run in this process)"
        )
