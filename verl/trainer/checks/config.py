"""Checks of the settings with what is registered, of the folders of a run and of its devices; of the estimator and the
loss, and the settings that they do not read."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.algorithms.binding import check_settings, parameter_names
from verl.algorithms.policy_losses import (
    FIXED_AGG_MODE,
    POLICY_LOSS_REGISTRY,
    SELECTS_PER_MICRO_BATCH,
    get_policy_loss_fn,
)
from verl.checkpoints.atomic import check_folder
from verl.config import Problem, check_critic, check_registered, differences, schema, settings_without_effect
from verl.config.fields import Schema, derived_fields
from verl.data.rlhf_dataset import RLHFDataset
from verl.engines.base import ENGINES
from verl.registry import Registry, location_of
from verl.rollout.base import ROLLOUT_ENGINES
from verl.single_controller.cluster import format_devices, idle_devices
from verl.single_controller.local.cluster import ProcessCluster
from verl.tracking.tracking import check_trackers
from verl.trainer.checks.agents import agent_loop_names, policy_of
from verl.trainer.checks.preflight import Run
from verl.trainer.ppo.flow import needs_critic, needs_reference
from verl.trainer.startup.inputs import dataset_class
from verl.trainer.startup.roles import pools_of, roles_of

logger = logging.getLogger("verl.trainer")

_OUTPUT_FOLDERS = ("default_local_dir", "rollout_data_dir", "validation_data_dir")


def check_engines(config: Schema) -> list[Problem]:
    """Engines, agent loops and tool parsers are registered under the configured names."""
    names = {"rollout.name": ROLLOUT_ENGINES, "strategy": ENGINES}
    if isinstance(config, schema.Config | schema.GenerationConfig):
        rollout = policy_of(config)[1].rollout
        names["rollout.agent.default_agent_loop"] = agent_loop_names(rollout)
        if rollout.multi_turn.format != type(rollout.multi_turn)().format:
            from verl.agents.tools.parsers import TOOL_PARSERS

            names["rollout.multi_turn.format"] = TOOL_PARSERS
    return check_registered(config, names)


def check_tracker_names(config: Schema) -> None:
    """The trackers are known, and their packages installed."""
    check_trackers(config.trainer.logger)


def check_output_folders(config: Schema) -> None:
    """All output folders are writable."""
    for name in _OUTPUT_FOLDERS:
        if path := config.trainer.get(name):
            check_folder(f"trainer.{name}", Path(path))


def check_reward_model(config: schema.Config) -> Iterator[Problem]:
    """An enabled reward model has a path."""
    key, section = "reward.reward_model", config.reward.reward_model
    if section.enable and not section.model_path:
        yield Problem(f"{key}.model_path", f"null, but {key}.enable is true: set it to the reward model")


def check_placement(config: schema.Config) -> None:
    """Roles are placed on existing devices, and share all devices with another role or none. Warn of idle devices."""
    trainer, pools = config.trainer, pools_of(config, roles_of(config)).values()
    devices = [pool for placed in pools for _, pool in placed]
    if idle := idle_devices(devices, trainer.nnodes, trainer.n_gpus_per_node):
        logger.warning(
            "placement: no role uses %s of %d: add them to placement.*_devices, or use fewer devices",
            format_devices(idle),
            trainer.nnodes * trainer.n_gpus_per_node,
        )


def check_dataset_class(config: Schema) -> None:
    """The class of `data.custom_cls` can be imported."""
    dataset_class(config.data, RLHFDataset)


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
    if trainer.save_freq not in (-1, 0) or trainer.val_only:
        return
    if trainer.save_at_end:
        logger.info("trainer.save_freq=%s: saved at the end; nothing with trainer.save_at_end=false", trainer.save_freq)
    elif not trainer.save_best:
        logger.warning("the trained model will not be saved, because trainer.save_at_end is false")


# ---- the estimator and the loss -------------------------------------------------------------------------------------

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"


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
    if (distillation := config.distillation.loss_settings) and distillation["use_policy_gradient"]:
        loss, key = get_policy_loss_fn(distillation["policy_loss_mode"]), "distillation.distillation_loss"
        check_settings(f"policy_loss_mode={distillation['policy_loss_mode']}", loss, distillation, key, {})


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


def warn_of_unused_settings(config: Schema) -> None:
    """Warn once of each setting without effect."""
    notes = settings_without_effect(config)
    if isinstance(config, schema.Config):
        notes += unused_settings(config)
    for note in notes:
        logger.warning(note)


def unused_settings(config: schema.Config) -> list[str]:
    """What was set, differs from its default, and is not read by the selected algorithm: key, value and reason. A
    setting belongs to the estimators and losses whose signatures have it as a parameter: `algorithm.lam` with `grpo`,
    which has no lambda, was meant for another algorithm."""
    changed = differences(config)
    return [f"{key}: {changed[key]} has no effect with {reason}" for key, reason in _unused(config, list(changed))]


def _unused(config: schema.Config, changed: list[str]) -> Iterator[tuple[str, str]]:
    loss, correction = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.rollout_correction
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    others = _parameters_of_others(ADV_ESTIMATOR_REGISTRY, config.algorithm.adv_estimator)
    yield from ((key, estimator) for key in _in_section(changed, "algorithm") if _name(key) in others)

    others = _parameters_of_others(POLICY_LOSS_REGISTRY, loss)
    for key in (*_in_section(changed, _ACTOR), *_in_section(changed, f"{_ACTOR}.policy_loss")):
        if _name(key) in others:
            yield key, f"actor.policy_loss.loss_mode={loss}"
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if loss in FIXED_AGG_MODE and mode not in (None, "seq-mean-token-mean"):
        yield f"{_ACTOR}.loss_agg_mode", f"actor.policy_loss.loss_mode={loss}, which is always seq-mean-token-mean"
    for kind in ("rollout_is", "rollout_rs"):
        if correction.model_dump()[kind] is None:
            for key in _in_section(changed, _CORRECTION):
                if _name(key).startswith(kind + "_") and _name(key) in others:
                    yield key, f"{_CORRECTION}.{kind}=null and actor.policy_loss.loss_mode={loss}"
    if not needs_critic(config):
        critic = ("critic.", "trainer.max_critic_ckpt_to_keep")
        yield from ((key, f"{estimator}, which has no critic") for key in changed if key.startswith(critic))
    if not needs_reference(config) and not config.distillation.local_teachers:
        yield from ((key, "no KL to a reference") for key in changed if key.startswith("actor_rollout_ref.ref."))


def _parameters_of_others(registry: Registry[Callable], name: str) -> set[str]:
    """Parameters of other registered functions that the selected one does not have; empty if it takes all settings."""
    names = parameter_names(registry[name])
    if "config" in names:
        return set()
    # a function with the parameter clip_ratio_low is reached by clip_ratio, which is its default
    defaults = {
        _name(default.strip("${}")) for key, default in derived_fields(schema.Config).items() if _name(key) in names
    }
    return set().union(*(_parameters(registered) for _, registered in registry.items())) - names - defaults


def _parameters(registered: Callable) -> set[str]:
    """The parameter names; none of a function whose signature is invalid, which is an error only if it is selected."""
    try:
        return parameter_names(registered)
    except (TypeError, ValueError):
        return set()


def _in_section(changed: list[str], section: str) -> list[str]:
    """The keys of a section itself, without those of its subsections."""
    return [key for key in changed if key.rpartition(".")[0] == section]


def _name(key: str) -> str:
    return key.rpartition(".")[2]
