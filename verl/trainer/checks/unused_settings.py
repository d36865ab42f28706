"""Settings that have no effect with the chosen algorithm: each one that was set is logged once.

A setting belongs to the estimators and losses whose signatures have it as a parameter. So what the chosen ones do not
take, and others do, was meant for another algorithm: `algorithm.lam` with the estimator `grpo`, which has no lambda.
"""

import logging
from collections.abc import Callable, Iterator

from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.algorithms.binding import parameter_names
from verl.algorithms.policy_losses import FIXED_AGG_MODE, POLICY_LOSS_REGISTRY
from verl.config import differences, schema, settings_without_effect
from verl.config.fields import derived_fields
from verl.registry import Registry
from verl.trainer.checks.preflight import Run
from verl.trainer.ppo.flow import needs_critic, needs_reference

logger = logging.getLogger("verl.trainer")

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"


def warn_of_unused_settings(run: Run) -> None:
    """Warn once of each setting without effect."""
    notes = settings_without_effect(run.config)
    if isinstance(run.config, schema.Config):
        notes += unused_settings(run.config)
    for note in notes:
        logger.warning(note)


def unused_settings(config: schema.Config) -> list[str]:
    """What was set, differs from its default, and is not read by the chosen algorithm: key, value and reason."""
    given = differences(config)
    return [f"{key}: {given[key]} has no effect with {reason}" for key, reason in _unused(config, list(given))]


def _unused(config: schema.Config, given: list[str]) -> Iterator[tuple[str, str]]:
    loss, correction = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.rollout_correction
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    others = _parameters_of_others(ADV_ESTIMATOR_REGISTRY, config.algorithm.adv_estimator)
    yield from ((key, estimator) for key in _in_section(given, "algorithm") if _name(key) in others)

    others = _parameters_of_others(POLICY_LOSS_REGISTRY, loss)
    for key in (*_in_section(given, _ACTOR), *_in_section(given, _ACTOR + ".policy_loss")):
        if _name(key) in others:
            yield key, f"actor.policy_loss.loss_mode={loss}"
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if loss in FIXED_AGG_MODE and mode not in (None, "seq-mean-token-mean"):
        yield f"{_ACTOR}.loss_agg_mode", f"actor.policy_loss.loss_mode={loss}, which is always seq-mean-token-mean"
    for kind in ("rollout_is", "rollout_rs"):
        if correction.model_dump()[kind] is None:
            for key in _in_section(given, _CORRECTION):
                if _name(key).startswith(kind + "_") and _name(key) in others:
                    yield key, f"{_CORRECTION}.{kind}=null and actor.policy_loss.loss_mode={loss}"
    if not needs_critic(config):
        of_critic = ("critic.", "trainer.max_critic_ckpt_to_keep")
        yield from ((key, f"{estimator}, which has no critic") for key in given if key.startswith(of_critic))
    if not needs_reference(config):
        yield from ((key, "no KL to a reference") for key in given if key.startswith("actor_rollout_ref.ref."))


def _parameters_of_others(registry: Registry[Callable], chosen: str) -> set[str]:
    """Parameters of other registered functions that the selected one does not have; empty if it takes all settings."""
    own = parameter_names(registry[chosen])
    if "config" in own:
        return set()
    # a function with the parameter clip_ratio_low is reached by clip_ratio, which is its default
    defaults = {
        _name(key.strip("${}")) for key_of, key in derived_fields(schema.Config).items() if _name(key_of) in own
    }
    return set().union(*(_parameters(registered) for _, registered in registry.items())) - own - defaults


def _parameters(registered: Callable) -> set[str]:
    """The parameter names; none of a function whose signature is invalid, which is an error only if it is selected."""
    try:
        return parameter_names(registered)
    except (TypeError, ValueError):
        return set()


def _in_section(given: list[str], section: str) -> list[str]:
    """The keys of a section itself, without those of its subsections."""
    return [key for key in given if key.rpartition(".")[0] == section]


def _name(key: str) -> str:
    return key.rpartition(".")[2]
