"""Checks of the `megatron` sections: what model-parallel training does not support."""

from collections.abc import Iterator

from verl.config.checks.algorithm import may_have_critic
from verl.config.checks.run import ModelRole, model_roles
from verl.config.errors import Problem, format_value
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig

#: keys of `optim.override_optimizer_config` that say where the optimizer computes, which changes no result
OPTIMIZER_PLACEMENT = {
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
    *("use_precision_aware_optimizer", "chunked_optimizer_state_offload", "optimizer_state_offload_chunk_size_mb"),
}

_DTYPES = ("fp16", "float16", "fp64", "float64")
_FSDP = "use strategy=fsdp"


def check_megatron_settings(config: Config | SFTConfig) -> Iterator[Problem]:
    """Settings of the roles with strategy=megatron that it does not support."""
    reported: set[str] = set()
    policy = getattr(config, "actor_rollout_ref", None)
    if policy is not None and isinstance(policy.actor.engine, MegatronConfig) and policy.rollout.deterministic:
        message = f"true, but strategy=megatron does not support it: use false, or {_FSDP}"
        yield Problem("actor_rollout_ref.rollout.deterministic", message)
    for role in _roles(config):
        for problem in _unsupported(role):
            if problem.key not in reported:
                reported.add(problem.key)
                yield problem


def megatron_notes(config: Config | SFTConfig) -> Iterator[str]:
    """Settings that have no effect with strategy=megatron."""
    for role in _roles(config):
        if not role.model.use_remove_padding:
            key = f"{role.model_key}.use_remove_padding"
            yield f"{key}: false has no effect with strategy=megatron, which packs sequences"


def _roles(config: Config | SFTConfig) -> Iterator[ModelRole]:
    for role in model_roles(config):
        if isinstance(role.engine, MegatronConfig) and (role.name != "critic" or may_have_critic(config)):
            yield role


def _unsupported(role: ModelRole) -> Iterator[Problem]:
    model, model_key, engine, engine_key = role.model, role.model_key, role.engine, role.engine_key
    if model.has_adapters:
        name = "lora_rank" if model.lora_rank else "lora_adapter_path"
        message = f"{format_value(getattr(model, name))}, but strategy=megatron does not support LoRA adapters"
        yield Problem(f"{model_key}.{name}", f"{message}: {_FSDP}")
    if model.use_liger:
        message = f"true, but strategy=megatron does not support it: use false, or {_FSDP}"
        yield Problem(f"{model_key}.use_liger", message)
    if engine.dtype in _DTYPES:
        message = f"{format_value(engine.dtype)} is not supported by strategy=megatron: use bf16 or fp32, or {_FSDP}"
        yield Problem(f"{engine_key}.dtype", message)
    optim = role.section.get("optim")
    overrides = sorted(set(optim.override_optimizer_config or ()) - OPTIMIZER_PLACEMENT) if optim is not None else []
    if overrides:
        message = f"{overrides} are not supported by strategy=megatron: remove them, or {_FSDP}"
        yield Problem(f"{role.prefix}optim.override_optimizer_config", message)
