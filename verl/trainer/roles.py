"""Which workers a run has, and where they live: the same answer for every executor."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.config import schema
from verl.engines.lora import has_adapters
from verl.single_controller import WorkerGroup, WorkerSpec
from verl.single_controller.placement import ResourcePool, place_roles
from verl.trainer.ppo_flow import needs_critic, needs_reference
from verl.workers.actor_rollout_ref import ActorRolloutWorker, RefWorker
from verl.workers.critic import CriticWorker
from verl.workers.reward_model import RewardModelWorker
from verl.workers.rollout_build import stop_strings


def roles_of(config: schema.Config) -> list[str]:
    """The roles that have workers. Actor and rollout are one, `actor`: it generates with the weights that it trains."""
    asked = {
        "ref": needs_reference(config) and not has_adapters(config.actor_rollout_ref.model),
        "critic": needs_critic(config),
        "reward": config.reward.reward_model.enable,
    }
    return ["actor", *(role for role, wanted in asked.items() if wanted)]


def worker_specs(
    config: schema.Config, *, total_steps: int, tokenizer: Any, stop_token_ids: tuple[int, ...]
) -> dict[str, WorkerSpec]:
    """role -> its worker, for the roles of `roles_of`."""
    policy, device = config.actor_rollout_ref, config.trainer.device
    common = {"device": device, "timeout": policy.nccl_timeout}
    specs = {
        "actor": WorkerSpec(
            ActorRolloutWorker,
            {
                "config": policy,
                "correction": config.algorithm.rollout_correction,
                "imports": tuple(config.imports),
                "device": device,
                "total_training_steps": total_steps,
                "response_length": policy.rollout.response_length,
                "pad_token_id": tokenizer.pad_token_id,
                "stop_token_ids": stop_token_ids,
                "stop": stop_strings(policy.rollout, tokenizer),
            },
        )
    }
    roles = roles_of(config)
    if "ref" in roles:
        specs["ref"] = WorkerSpec(RefWorker, {"config": policy, "device": device})
    if "critic" in roles:
        kwargs = {"config": config.critic, "total_training_steps": total_steps, **common}
        specs["critic"] = WorkerSpec(CriticWorker, kwargs)
    if "reward" in roles:
        kwargs = {"config": config.reward.reward_model, "policy_tokenizer": tokenizer, **common}
        specs["reward"] = WorkerSpec(RewardModelWorker, kwargs)
    return specs


def roles_of_actor(config: schema.Config) -> tuple[str, ...]:
    """The other roles that the actor's workers have: they generate, and with adapters they are the reference too."""
    shares = needs_reference(config) and has_adapters(config.actor_rollout_ref.model)
    return ("rollout", "ref") if shares else ("rollout",)


def pools_of(config: schema.Config, roles: list[str]) -> dict[str, list[tuple[str, ResourcePool]]]:
    """Pool name -> the roles that live in it, with the pool: roles without devices of their own are with the actor."""
    trainer = config.trainer
    placed = place_roles(roles, config.placement.model_dump(), trainer.nnodes, trainer.n_gpus_per_node)
    pools: dict[str, list[tuple[str, ResourcePool]]] = {}
    for role, pool in placed.items():
        pools.setdefault(pool.name, []).append((role, pool))
    return pools


def placement_words(pools: Mapping[str, Sequence[tuple[str, ResourcePool]]]) -> str:
    """Which roles live on which devices, in words: "actor, ref on devices 0, 1; critic on device 2"."""
    words = []
    for placed in pools.values():
        pool = placed[0][1]
        numbers = pool.devices if pool.devices is not None else range(pool.world_size)
        where = "device" if len(numbers) == 1 else "devices"
        words.append(f"{', '.join(role for role, _ in placed)} on {where} {', '.join(map(str, numbers))}")
    return "; ".join(words)


def start_pools(
    pools: Mapping[str, list[tuple[str, ResourcePool]]],
    specs: Mapping[str, WorkerSpec],
    start: Callable[[dict[str, WorkerSpec], ResourcePool], Mapping[str, WorkerGroup]],
) -> dict[str, WorkerGroup]:
    """The worker group of every role; the pools start at the same time, since each takes seconds to import and load.

    start: makes the groups of the roles of one pool. Raises the error of the first pool that failed, and ends the
    others.
    """
    wanted = [({role: specs[role] for role, _ in placed}, placed[0][1]) for placed in pools.values()]
    if len(wanted) == 1:  # in this thread, where a breakpoint in a worker's constructor is one of this program
        return dict(start(*wanted[0]))
    with ThreadPoolExecutor(len(wanted)) as threads:
        starting = [threads.submit(start, *one) for one in wanted]
    errors = [future.exception() for future in starting if future.exception() is not None]
    groups = {role: group for f in starting if f.exception() is None for role, group in f.result().items()}
    if errors:
        for group in groups.values():
            group.shutdown()
        raise errors[0]
    return groups
