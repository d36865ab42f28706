"""Between a configuration and the planner: settings -> job and groups; a plan -> settings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import required_columns
from verl.config import schema
from verl.engines.token_budget import MAX_AUTO_TOKENS
from verl.engines.traits import built_in_strategies, strategy_traits
from verl.planner.placement import Plan
from verl.planner.search import MEGATRON_SECTION
from verl.planner.shapes import ModelShape
from verl.planner.workload import Job, Layout, Role
from verl.rollout.traits import engine_traits

_BYTES = {"fp64": 8, "float64": 8, "fp32": 4, "float32": 4}


def _bytes(name: str, automatic: int) -> int:
    return automatic if name == "auto" else _BYTES.get(name, 2)


def job_of(config: schema.Config, shapes: Mapping[str, ModelShape], names: Sequence[str], on_gpu: bool) -> Job:
    """The job that a configuration describes. Every response counts with its maximum length.

    Args:
        config: the configuration.
        shapes: role -> its model, of the roles in `names`.
        names: roles with separate workers, the actor first.
        on_gpu: whether it runs on GPUs, which decides dtypes.

    Raises:
        ValueError: a training engine is a custom one, or only some roles use megatron.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    strategies = {name: _engine_of(config, name)[0] for name in names if name != "rollout"}
    if unknown := [strategy for strategy in strategies.values() if strategy not in built_in_strategies()]:
        known = ", ".join(built_in_strategies())
        raise ValueError(f"the planner does not model the engine {unknown[0]!r}, only {known}")
    if len({strategy_traits(strategy).model_parallel for strategy in strategies.values()}) > 1:
        used = ", ".join(f"{name}: {strategy}" for name, strategy in strategies.items())
        raise ValueError(f"the planner does not model megatron for some roles only ({used})")
    correction = config.algorithm.rollout_correction
    updates = max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    several = updates > 1 or actor.ppo_epochs > 1 or actor.old_log_prob_pass == "always"
    old = (several or config.algorithm.use_kl_in_reward) and not correction.bypass_mode
    multi = config.actor_rollout_ref.rollout.multi_turn.enable
    threads = config.data.dataloader_num_workers
    if threads is None and config.data.custom_cls.path:
        threads = 0  # as in `reading_threads`
    read = required_columns(get_adv_estimator_fn(config.algorithm.adv_estimator), config.algorithm.settings)
    return Job(
        tuple(_role(config, name, shapes[name], on_gpu) for name in names),
        prompts=config.data.train_batch_size,
        samples=rollout.n,
        prompt_tokens=rollout.prompt_length,
        response_tokens=rollout.response_length,
        old_log_probs=old or multi,
        engine=rollout.name,
        rollout_tensor=rollout.tensor_model_parallel_size,
        memory_share=rollout.gpu_memory_utilization,
        max_rows=rollout.max_num_seqs,
        eager=rollout.enforce_eager or engine_traits(rollout.name).cuda_graphs is False,
        sleeps=rollout.free_cache_engine,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
        replays=actor.router_replay.mode != "disabled",
        model_parallel=isinstance(actor.engine, schema.MegatronConfig),
        generations=2 if "reward_baselines" in read else 1,  # of greedy responses
        reads_ahead=threads != 0,
        overlaps=config.trainer.max_staleness > 0,
    )


def _engine_of(config: schema.Config, name: str) -> tuple[str, schema.EngineConfig | schema.MegatronConfig]:
    """(strategy, its section) of a role."""
    policy = config.actor_rollout_ref
    if name == "reward":
        return "fsdp", config.reward.reward_model.fsdp
    section = config.critic if name == "critic" else policy.ref if name == "ref" else policy.actor
    return section.strategy, section.engine


def _megatron(section: schema.MegatronConfig, checkpointing: bool | str, on_gpu: bool) -> dict[str, Any]:
    """The attributes of a role that the section `megatron` sets. Without a size, micro-batches have 16384 tokens."""
    values, recompute = section.model_dump(), section.override_transformer_config.recompute_granularity
    size = _bytes(section.dtype, 2 if on_gpu else 4)
    return {
        "weight_bytes": size,
        "compute_bytes": size,
        # selective recomputation frees attention, which keeps no scores here
        "checkpointing": recompute == "full" or (recompute is None and checkpointing),
        "sequence_parallel": section.sequence_parallel,
        "sharded_optimizer": section.use_distributed_optimizer,
        "param_offload": values.get("param_offload", False),
        "optimizer_offload": values.get("optimizer_offload", False),
        "layout": Layout(
            section.ranks_with_same_rows,
            tensor=section.tensor_model_parallel_size,
            pipeline=section.pipeline_model_parallel_size,
            sequence=section.context_parallel_size,
            expert=values.get("expert_model_parallel_size") or 1,
            expert_tensor=values.get("expert_tensor_parallel_size"),
        ),
    }


def _sharded(section: schema.EngineConfig, liger: bool, on_gpu: bool, adapters: bool = False) -> dict[str, Any]:
    """The attributes of a role that a section of FSDP sets.

    Args:
        liger: `model.use_liger`.
        adapters: whether the weights are frozen, so that they have the dtype of the computation.
    """
    compute_bytes = _bytes(section.dtype, 2 if on_gpu else 4)
    return {
        "weight_bytes": _bytes(section.model_dtype, compute_bytes if adapters else 4),
        "compute_bytes": compute_bytes,
        "fuses_layers": not on_gpu or not (liger or section.use_torch_compile),
        "spreads_experts": section.expert_parallel_size > 1,
        "param_offload": section.param_offload,
        "optimizer_offload": section.optimizer_offload,
        "layout": Layout(
            1,
            tensor=section.tensor_parallel_size,
            sequence=section.ulysses_sequence_parallel_size,
            shard=section.fsdp_size,
        ),
    }


def _role(config: schema.Config, name: str, shape: ModelShape, on_gpu: bool) -> Role:
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward.reward_model
    length = policy.rollout.prompt_length + policy.rollout.response_length
    engine = _engine_of(config, name)[1]
    if name == "critic":
        model, update = critic.model, critic
        infer = (critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu)
    elif name == "reward":
        model, update = None, None
        infer = (reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu)
    else:
        section = policy.ref if name == "ref" else policy.rollout
        model, update = policy.model, policy.actor if name == "actor" else None
        infer = (
            section.log_prob_micro_batch_size_per_gpu,
            section.log_prob_use_dynamic_bsz,
            section.log_prob_max_token_len_per_gpu,
        )
    role = Role(name, shape, value_head=name in ("critic", "reward"), infer_tokens=_tokens(*infer, length))
    checkpointing = model.enable_gradient_checkpointing if update is not None else "auto"
    if isinstance(engine, schema.MegatronConfig):
        role = replace(role, **_megatron(engine, checkpointing, on_gpu))
    else:
        liger = model is not None and model.use_liger
        adapters = update is not None and model.has_adapters
        role = replace(role, **_sharded(engine, liger, on_gpu, adapters), checkpointing=checkpointing)
    if update is None:
        return role
    tokens = _tokens(
        update.ppo_micro_batch_size_per_gpu, update.use_dynamic_bsz, update.ppo_max_token_len_per_gpu, length
    )
    if tokens is None and isinstance(engine, schema.MegatronConfig):
        tokens = max(MAX_AUTO_TOKENS, length)
    return replace(
        role,
        trains=True,
        lora_rank=model.lora_rank if model.has_adapters else 0,
        adapts_experts=bool(model.target_parameters),
        is_quantized=model.quantization is not None,
        has_8bit_optimizer=update.optim.optimizer == "AdamW8bit",
        checkpointing=True if model.target_parameters and on_gpu else role.checkpointing,
        freezes_tower=model.freeze_vision_tower,
        update_tokens=tokens,
        updates=max(1, config.data.train_batch_size // update.ppo_mini_batch_size),
        epochs=update.ppo_epochs,
    )


def _tokens(rows: int | None, dynamic: bool, tokens: int | None, length: int) -> int | None:
    """Tokens of a micro-batch; None: chosen by the engine."""
    return tokens if dynamic or rows is None else rows * length


def groups_of(
    placement: Mapping[str, Sequence[int] | None], names: Sequence[str], devices: int
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """[(roles, their devices)] of the `placement` section; a role without devices is with the actor."""
    shared = placement.get("actor_devices") or range(devices)
    groups: dict[frozenset[int], list[str]] = {}
    for name in names:
        groups.setdefault(frozenset(placement.get(f"{name}_devices") or shared), []).append(name)
    return [(tuple(members), tuple(sorted(numbers))) for numbers, members in groups.items()]


def overrides_of(plan: Plan, devices: int) -> dict[str, Any]:
    """The settings that select a plan: keys that a user would set. devices: of the run, not all of which it may use."""
    settings: dict[str, Any] = {"placement.auto": False}
    if len(plan.groups) > 1 or plan.devices < devices:
        for group, numbers in zip(plan.groups, plan.numbers):
            settings |= {f"placement.{name}_devices": list(numbers) for name in group.names}
    if plan.overlaps_roles:
        settings["trainer.overlap"] = True
    settings["actor_rollout_ref.rollout.tensor_model_parallel_size"] = plan.job.rollout_tensor
    for role in (role for group in plan.groups for role in group.roles):
        if plan.job.model_parallel and role.name in MEGATRON_SECTION:
            settings[f"{MEGATRON_SECTION[role.name]}.tensor_model_parallel_size"] = role.layout.tensor
            settings[f"{MEGATRON_SECTION[role.name]}.pipeline_model_parallel_size"] = role.layout.pipeline
    return settings
