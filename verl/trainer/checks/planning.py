"""The planner for a run: settings as a job, its estimate, the memory check of the preflight, and `placement: auto`."""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import required_columns
from verl.config import schema
from verl.config.load import with_overrides
from verl.engines.token_budget import MAX_AUTO_TOKENS
from verl.engines.traits import built_in_strategies, strategy_traits
from verl.modeling.vision import is_vision_config, language_model_of, tower_of, tower_sizes
from verl.planner.devices import Device, host_profile
from verl.planner.placement import Plan, plan_groups
from verl.planner.search import MEGATRON_SECTION, Change, first_that_fits, preferred, smallest_change
from verl.planner.shapes import ModelShape, VisionShape, built_in
from verl.planner.workload import Job, Layout, Role
from verl.rollout.loading import auto_class
from verl.rollout.traits import engine_traits
from verl.trainer.checks.models import readable_config
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.roles import roles_of
from verl.utils.device import resolve_device

if TYPE_CHECKING:
    from verl.planner.search import Search

logger = logging.getLogger("verl.trainer")

#: a run is refused if its estimate exceeds the memory by more than the error of the model
REFUSED_FROM = 1.1
#: roles with the engine settings of the reference
_FROZEN = ("ref", "teacher")


def shape_of(path: str, model: schema.ModelConfig | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a model, of which only the config is read, or of a built-in size, such as 7B."""
    if path and not Path(path).is_dir() and "/" not in path:
        return built_in(path)
    overrides = model.override_config if model is not None else {}
    trust = model.trust_remote_code if model is not None else trust_remote_code
    return shape_of_config(readable_config(path, overrides, trust), path)


def shape_of_config(hf: Any, name: str) -> ModelShape:
    """The shape of a model, from its HuggingFace config. name: in errors and tables."""
    config = {**hf.get_text_config().to_dict(), "tie_word_embeddings": hf.tie_word_embeddings}
    shape = ModelShape.from_config(config, name)
    return replace(shape, vision=_vision_of(hf)) if is_vision_config(hf) else shape


def _vision_of(hf: Any) -> VisionShape:
    """The vision tower of a model, which is built without weights. Raises ValueError for one that is not known."""
    with torch.device("meta"):
        module = auto_class(hf).from_config(hf)
    inside = sum(p.numel() for p in language_model_of(module).parameters())
    head = 0 if hf.tie_word_embeddings else module.get_output_embeddings().weight.numel()
    sizes = tower_sizes(hf)
    if sizes is None:
        raise ValueError(f"the planner does not model the vision tower of {hf.model_type}")
    outside = sum(p.numel() for p in module.parameters()) - inside - head
    vision = hf.vision_config.to_dict()
    values = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    return VisionShape(outside, sum(p.numel() for p in tower_of(module)[1].parameters()), *sizes, values)


def shapes_of(config: schema.Config, names: Sequence[str]) -> dict[str, ModelShape]:
    policy, reward = config.actor_rollout_ref.model, config.reward.reward_model
    policy_shape = functools.cache(lambda: shape_of(policy.path, policy))  # of several roles
    shapes = {}
    for name in names:
        if name == "critic":
            shapes[name] = shape_of(config.critic.model.path, config.critic.model)
        elif name == "reward":
            shapes[name] = shape_of(reward.model_path, trust_remote_code=reward.trust_remote_code)
        elif name == "teacher":
            teacher, *others = config.distillation.local_teachers.values()
            if others:
                raise ValueError("the planner does not model several teachers")
            shapes[name] = shape_of(teacher.model_path, trust_remote_code=teacher.trust_remote_code)
        else:
            shapes[name] = policy_shape()
    return shapes


def estimate(config: schema.Config, names: Sequence[str], device: Device | None = None) -> Plan:
    """Memory and time of a configuration.

    Args:
        names: its roles with separate workers. Those of placement.local_roles have a device of their own.
        device: None: that of this host.

    Raises:
        ValueError: a model or an engine that the planner does not model.
    """
    device = device or host_profile(resolve_device(config.trainer.device))
    job = job_of(config, shapes_of(config, names), names, device.kind == "cuda")
    groups = [(roles, len(numbers)) for roles, numbers in _placed(config, names)]
    concurrent = config.trainer.overlap or len(groups) == 1
    return plan_groups(job, device, groups, concurrent)


def _placed(config: schema.Config, names: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """[(roles, devices)] of the placement of a configuration."""
    local = tuple(name for name in names if name in config.placement.local_roles)
    groups = groups_of(config.placement.devices, [name for name in names if name not in local], _devices(config))
    return [*groups, *([(local, (0,))] if local else [])]


def describe_estimate(config: schema.Config, names: Sequence[str], device: Device | None = None) -> str:
    """The lines that `verl plan` adds to the plan of a run. Arguments as of `estimate`."""
    from verl.planner import report

    try:
        plan = estimate(config, names, device)
    except ValueError as error:
        return f"no estimate of memory and time: {error}"
    lines = [*report.memory_lines(plan), *report.time_lines(plan)]
    if not plan.fits:
        lines.append(report.describe_change(smallest_change(plan)) + describe_methods(config, plan.device))
    if plan.devices > 1:
        total = _devices(config)
        configured = replace(plan, placed=[numbers for _, numbers in _placed(config, names)])
        plans = _search(config, plan).plans(total)
        lines += ["", *report.choice_lines(preferred(plans) if plans else None, total, configured)]
    return "\n".join(lines)


def check_memory(run: Run) -> None:
    """Raise ValueError if the run needs more memory than there is; warn if it may. On Ray, devices are not known here.
    Models and engines that are not modelled are not checked."""
    if run.backend == "ray":
        return
    try:
        plan = estimate(run.config, roles_of(run.config))
    except ValueError as error:
        logger.debug("memory is not checked: %s", error)
        return
    if plan.fits:
        return
    from verl.planner.report import describe_change, gib

    group = max(plan.groups, key=lambda group: group.peak[1])
    message = (
        f"{group.peak[0]} needs about {gib(plan.peak)} GiB per device, but there are {gib(plan.available)} GiB "
        f"({plan.device.name}); {describe_change(smallest_change(plan))}; `verl plan` prints the table"
        f"{describe_methods(run.config, plan.device)}"
    )
    if plan.peak > REFUSED_FROM * plan.available:
        raise ValueError(f"memory: {message}")
    logger.warning("memory: %s", message)


_LORA = {("actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"): 32}
#: methods whose results differ, and their settings; the second key is that of the critic
_METHODS = {
    "the 8-bit optimizer": {("actor_rollout_ref.actor.optim.optimizer", "critic.optim.optimizer"): "AdamW8bit"},
    "LoRA": _LORA,
    "QLoRA": _LORA | {("actor_rollout_ref.model.quantization", "critic.model.quantization"): "nf4"},
}


def describe_methods(config: schema.Config, device: Device) -> str:
    """The other methods with which a run fits, one a line: "LoRA also fits (9.1 GiB): a=1"; "" without any."""
    from verl.planner.report import gib

    text, trained = "", 1 + ("critic" in roles_of(config))
    for name, values in _METHODS.items():
        settings = {key: value for keys, value in values.items() for key in keys[:trained]}
        try:
            changed = with_overrides(config, settings)
            plan = estimate(changed, roles_of(changed), device)
        except ValueError:
            continue  # not possible with the other settings
        if plan.fits:
            set_text = " ".join(f"{key}={value}" for key, value in settings.items())
            text += f"\n  {name} also fits ({gib(plan.peak)} GiB): {set_text}"
    return text


# ---- placement: auto ------------------------------------------------------------------------------------------------


def _devices(config: schema.Config) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _search(config: schema.Config, plan: Plan) -> "Search":
    from verl.planner.search import MEGATRON_SIZES, ROLLOUT_SIZES, Search

    rollout, policy = config.actor_rollout_ref.rollout, config.actor_rollout_ref
    job = replace(plan.job, roles=tuple(role for role in plan.job.roles if role.name != "rollout"))
    fixed = policy.model.has_adapters or not job.traits.tensor_parallel or rollout.deterministic
    sizes = (rollout.tensor_model_parallel_size,) if fixed else ROLLOUT_SIZES
    models = None
    if job.model_parallel:  # the sizes of the settings, and those of the search
        now = job.role("actor").layout
        free = () if policy.actor.megatron.virtual_pipeline_model_parallel_size else MEGATRON_SIZES
        models = tuple(dict.fromkeys(((now.tensor, now.pipeline), *free)))
    return Search(job, plan.device, sizes, models, same_sizes=True)


def _nothing_fits(config: schema.Config, plan: Plan) -> str:
    """Why no placement is possible, and what to change."""
    from verl.planner.report import describe_change

    total, k = _devices(config), config.trainer.max_staleness
    if k and total == 1:
        return (
            f"trainer.async.max_staleness={k} needs a rollout on separate devices, but there is one device: use "
            "trainer.n_gpus_per_node=2 or more, or trainer.async.max_staleness=0"
        )

    def plan_of(change: Change) -> Plan | None:
        changed = replace(plan, job=change.apply(plan.job))
        plans = _search(config, changed).plans(total * change.factor, 1)
        return plans[0] if plans else None

    separate = f" with a rollout on separate devices, which trainer.async.max_staleness={k} needs," if k else ""
    change_text = describe_change(first_that_fits(plan.job, plan.device, plan_of))
    change_text += "; or use trainer.async.max_staleness=0" if k else ""
    change_text += describe_methods(config, plan.device)
    return f"no placement on {total} device{'s' * (total > 1)}{separate} fits; {change_text}"


def apply_auto_placement(config: schema.Config, device: Device | None = None) -> schema.Config:
    """The configuration of `placement: auto` with the devices of the best plan, or of the simplest within 5 % of it,
    which is logged. device: as in `estimate`. Raises ValueError if devices are set too, a model is not modelled, or
    nothing fits."""
    from verl.planner.report import format_placement

    set_keys = [key for key, value in config.placement.devices.items() if value is not None]
    if set_keys:
        raise ValueError(f"placement.auto chooses the devices, but placement.{set_keys[0]} is set: remove one of them")
    try:
        plan = estimate(config, roles_of(config), device)
    except ValueError as error:
        raise ValueError(f"placement=auto is not possible: {error}; set placement.*_devices, or remove it") from error
    plans = _search(config, plan).plans(_devices(config))
    if not plans:
        raise ValueError(f"placement=auto: {_nothing_fits(config, plan)}")
    best = preferred(plans)
    overrides = overrides_of(best, _devices(config))
    fewer = f"; more of the {_devices(config)} devices gain less than 5 %, or do not divide the batch"
    logger.info(
        "placement=auto: %s, about %.3g s per step (rates: %s%s); sets %s",
        format_placement(best),
        best.seconds,
        best.device.source,
        fewer if best.devices < _devices(config) else "",
        " ".join(f"{key}={value}" for key, value in overrides.items()).replace(", ", ","),
    )
    return with_overrides(config, overrides)


# ---- settings and plans ----------------------------------------------------------------------------------------------

_BYTES = {"fp64": 8, "float64": 8, "fp32": 4, "float32": 4}


def _bytes(name: str, automatic: int) -> int:
    return automatic if name == "auto" else _BYTES.get(name, 2)


def job_of(config: schema.Config, shapes: Mapping[str, ModelShape], names: Sequence[str], on_gpu: bool) -> Job:
    """The job that a configuration describes. Every response counts with its maximum length.

    Args:
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

    read = required_columns(get_adv_estimator_fn(config.algorithm.adv_estimator), config.algorithm.settings)
    return Job(
        tuple(_role(config, name, shapes[name], on_gpu) for name in names),
        prompts=config.data.train_batch_size,
        samples=rollout.n,
        prompt_tokens=rollout.prompt_length,
        response_tokens=rollout.response_length,
        old_log_probs=old or rollout.multi_turn.enable,
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
        overlaps=config.trainer.max_staleness > 0,
    )


def _engine_of(config: schema.Config, name: str) -> tuple[str, schema.EngineConfig | schema.MegatronConfig]:
    """(strategy, its section) of a role."""
    policy = config.actor_rollout_ref
    if name == "reward":
        return "fsdp", config.reward.reward_model.fsdp
    section = config.critic if name == "critic" else policy.ref if name in _FROZEN else policy.actor
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
    """The attributes of a role that a section of FSDP sets. liger: `model.use_liger`. adapters: whether the weights are
    frozen, so that they have the dtype of the computation."""
    compute_bytes = _bytes(section.dtype, 2 if on_gpu else 4)
    return {
        "weight_bytes": _bytes(section.model_dtype, compute_bytes if adapters else 4),
        "compute_bytes": compute_bytes,
        "fuses_layers": not (on_gpu and liger),
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
        section = policy.ref if name in _FROZEN else policy.rollout
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
        is_quantized=model.quantization == "nf4",
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
