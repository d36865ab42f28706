"""Workers of a run and their devices, independent of the cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.config import schema
from verl.rollout.request import stop_strings
from verl.single_controller import WorkerSpec
from verl.single_controller.cluster import ResourcePool, format_devices, place_roles
from verl.trainer.ppo.flow import needs_critic, needs_reference

#: of trainer.worker_timeout, for a pause of the rollout: its error names what it waits for
_PAUSE_SHARE = 0.9


def roles_of(config: schema.Config) -> list[str]:
    """The roles with separate workers. Without `placement.rollout_devices`, the actor's workers generate."""
    enabled = {
        "rollout": config.rollout_is_separate,
        "ref": needs_reference(config) and not config.actor_rollout_ref.model.has_adapters,
        "critic": needs_critic(config),
        "reward": config.reward.reward_model.enable,
        "teacher": bool(config.distillation.local_teachers),
    }
    return ["actor", *(role for role, is_enabled in enabled.items() if is_enabled)]


def worker_specs(
    config: schema.Config, *, total_steps: int, tokenizer: Any, stop_token_ids: tuple[int, ...]
) -> dict[str, WorkerSpec]:
    """role -> its worker, for the roles of `roles_of`. Their modules are imported here, with the engines."""
    from verl.workers.policy import ActorWorker, RefWorker

    policy, device = config.actor_rollout_ref, config.trainer.device
    common = {"device": device, "timeout": policy.nccl_timeout}
    roles = roles_of(config)
    generation = {
        "device": device,
        "pad_token_id": tokenizer.pad_token_id,
        "stop_token_ids": stop_token_ids,
        "stop": stop_strings(policy.rollout.stop, tokenizer),
        "tokenizer": tokenizer,  # for agent loops, which samples select
    }
    actor = {
        "config": policy,
        "correction": config.algorithm.rollout_correction,
        "distillation": config.distillation.loss_settings,
        "total_training_steps": total_steps,
        "hosts_rollout": "rollout" not in roles,
    }
    specs = {"actor": WorkerSpec(ActorWorker, actor | generation)}
    if "rollout" in roles:
        from verl.workers.rollout.worker import RolloutWorker

        rollout = {"model": policy.model, "rollout": policy.rollout, "train_dtype": policy.actor.engine.dtype}
        rollout["pause_limit"] = _PAUSE_SHARE * config.trainer.worker_timeout
        specs["rollout"] = WorkerSpec(RolloutWorker, rollout | generation | {"timeout": policy.nccl_timeout})
    if "ref" in roles:
        specs["ref"] = WorkerSpec(RefWorker, {"config": policy, "device": device})
    if "critic" in roles:
        from verl.workers.critic import CriticWorker

        kwargs = {"config": config.critic, "total_training_steps": total_steps, **common}
        specs["critic"] = WorkerSpec(CriticWorker, kwargs)
    if "reward" in roles:
        from verl.workers.reward_model import RewardModelWorker

        kwargs = {"config": config.reward.reward_model, "policy_tokenizer": tokenizer, **common}
        specs["reward"] = WorkerSpec(RewardModelWorker, kwargs)
    if "teacher" in roles:
        from verl.workers.policy import TeacherWorker

        models = {key: teacher.model for key, teacher in config.distillation.local_teachers.items()}
        specs["teacher"] = WorkerSpec(TeacherWorker, {"config": policy, "models": models, "device": device})
    return specs


def roles_hosted_by_actor(config: schema.Config) -> tuple[str, ...]:
    """Roles hosted by the actor's workers: the rollout and, with LoRA, the reference policy."""
    hosts_reference = needs_reference(config) and config.actor_rollout_ref.model.has_adapters
    hosted = {"rollout": not config.rollout_is_separate, "ref": hosts_reference}
    return tuple(role for role, is_hosted in hosted.items() if is_hosted)


def pools_of(config: schema.Config, roles: list[str]) -> dict[str, list[tuple[str, ResourcePool]]]:
    """Pool name -> (role, pool) of its roles. Roles without devices share those of the actor."""
    trainer, placement = config.trainer, config.placement.devices
    if not config.rollout_is_separate:  # named, but the actor's
        placement["rollout_devices"] = None
    local_roles = config.placement.local_roles
    placed = place_roles(roles, placement, trainer.nnodes, trainer.n_gpus_per_node, local_roles)
    pools: dict[str, list[tuple[str, ResourcePool]]] = {}
    for role, pool in placed.items():
        pools.setdefault(pool.name, []).append((role, pool))
    return pools


def placement_words(pools: Mapping[str, Sequence[tuple[str, ResourcePool]]]) -> str:
    """Description of the placement: "actor, ref on devices 0, 1; critic on device 2"."""
    descriptions = []
    for placed in pools.values():
        pool = placed[0][1]
        numbers = pool.devices if pool.devices is not None else range(pool.world_size)
        location = "in this process" if pool.is_local else f"on {format_devices(numbers)}"
        descriptions.append(f"{', '.join(role for role, _ in placed)} {location}")
    return "; ".join(descriptions)
