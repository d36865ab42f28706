"""Settings that have no effect with the values of others, as one table."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.errors import format_value
from verl.config.fields import Schema, differences, flatten

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
    *(f"override_transformer_config.account_for_{name}_in_pipeline_split" for name in ("embedding", "loss")),
)
_OF_FSDP = (
    *("model_dtype", "dtype", "use_torch_compile", "param_offload", "optimizer_offload", "offload_policy"),
    *("reshard_after_forward", "fsdp_size", "ulysses_sequence_parallel_size", "tensor_parallel_size"),
    "expert_parallel_size",
)

_SHARED = ("dtype", "param_offload", "optimizer_offload")
"""Keys of `engine` that `engine.megatron` inherits."""

NO_EFFECT: dict[tuple, tuple[str, ...]] = {
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
    ("recompute_granularity", None): (".recompute_modules", ".recompute_method", ".recompute_num_layers"),
    ("recompute_granularity", "full"): (".recompute_modules",),
    ("recompute_granularity", "selective"): (".recompute_method", ".recompute_num_layers"),
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
        for name in (
            *("max_assistant_turns", "max_user_turns", "interaction_config_path", "format", "max_parallel_calls"),
            *("max_tool_response_length", "tool_response_truncate_side"),
            *("tool_timeout", "tool_isolation", "tool_processes"),
        )
    ),
    **{
        ("rollout.mode", mode): (
            *(f"rollout.server.agent.{name}" for name in ("path", "name", "command")),
            *(f"rollout.server.{name}" for name in ("model_name", "timeout", "max_concurrency")),
            *(f"rollout.server.{name}" for name in ("on_new_conversation", "failure_score")),
        )
        for mode in ("async", "sync")
    },
    ("trainer.backend", "local"): ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"),
    ("reward.reward_model.enable", False): (
        *(".model_path", ".tokenizer_path", ".custom_chat_template", ".trust_remote_code", ".use_remove_padding"),
        *(".micro_batch_size_per_gpu", ".use_dynamic_bsz", ".forward_max_token_len_per_gpu"),
        *(f".fsdp.{key}" for key in _OF_FSDP),
    ),
    ("reward.on_error", "raise"): (".failure_score", ".max_failure_rate"),
    ("reward.on_error", "quarantine"): (".failure_score",),
    ("sandbox_fusion.url", None): (".max_concurrent", ".memory_limit_mb"),
    ("trainer.resume_mode", "auto"): (".resume_from_path",),
    ("trainer.resume_mode", "disable"): (".resume_from_path", ".allow_change"),
    ("trainer.async.max_staleness", 0): (".partial_rollout",),
    ("trainer.max_restarts", 0): (".allow_smaller",),
    ("trainer.wait_factor", None): (".wait_minimum",),
    ("early_stopping.patience", None): (".metric", ".min_delta", ".mode"),
    (("trainer.save_best", False), (".early_stopping.patience", None)): (".save_best_mode",),
    ("custom_cls.path", None): (".kwargs",),
    ("rollout.nnodes", 0): (".n_gpus_per_node",),
    ("rollout.temperature", 0): (".top_k", ".top_p", ".min_p"),
    ("val_kwargs.do_sample", False): (".top_k", ".top_p"),
    ("multi_turn.tool_isolation", "none"): (".tool_processes",),
    ("algorithm.use_kl_in_reward", False): (
        *(".kl_penalty", ".kl_ctrl.type", ".kl_ctrl.kl_coef", ".kl_ctrl.horizon", ".kl_ctrl.target_kl"),
    ),
    ("kl_ctrl.type", "fixed"): (".horizon", ".target_kl"),
    ("filter_groups.enable", False): (".metric", ".max_num_gen_batches", ".max_empty_gen_batches", ".at_limit"),
    ("filter_groups.max_num_gen_batches", 0): (".at_limit",),
    ("filter_groups.max_num_gen_batches", lambda limit: limit > 0): (".max_empty_gen_batches",),
    ("rollout_correction.bypass_mode", False): (".loss_type",),
    ("algorithm.use_pf_ppo", False): (".pf_ppo.reweight_method", ".pf_ppo.weight_pow"),
    ("actor.use_kl_loss", False): (".kl_loss_coef", ".kl_loss_type"),
    ("loss_agg_mode", lambda mode: mode != "seq-mean-token-sum-norm"): (".loss_scale_factor",),
    ("shuffle", False): (".data_loader_seed",),
    # one of the two sizes of a micro-batch
    ("use_dynamic_bsz", True): (
        *(".ppo_micro_batch_size_per_gpu", ".micro_batch_size_per_gpu", ".forward_micro_batch_size_per_gpu"),
    ),
    ("log_prob_use_dynamic_bsz", True): (".log_prob_micro_batch_size_per_gpu",),
    (("ppo_micro_batch_size_per_gpu", bool), (".use_dynamic_bsz", False)): (".ppo_max_token_len_per_gpu",),
    (("forward_micro_batch_size_per_gpu", bool), (".use_dynamic_bsz", False)): (".forward_max_token_len_per_gpu",),
    (("log_prob_micro_batch_size_per_gpu", bool), (".log_prob_use_dynamic_bsz", False)): (
        ".log_prob_max_token_len_per_gpu",
    ),
    (("micro_batch_size_per_gpu", bool), (".use_dynamic_bsz", False)): (
        *(".max_token_len_per_gpu", ".forward_max_token_len_per_gpu"),
    ),
    ("model.lora_rank", 0): (".lora_alpha",),
    (("model.lora_rank", 0), (".lora_adapter_path", None)): (".target_modules", ".exclude_modules"),
    ("megatron.pipeline_model_parallel_size", 1): tuple(
        f".override_transformer_config.account_for_{name}_in_pipeline_split" for name in ("embedding", "loss")
    ),
    ("optim.lr_scheduler_type", "constant"): (".min_lr_ratio", ".num_cycles"),
    **{
        (("optim.lr_scheduler_type", "constant"), warmup): (".total_training_steps",)
        for warmup in ((".lr_warmup_steps_ratio", 0), (".lr_warmup_steps", lambda steps: steps > 0))
    },
    ("optim.lr_warmup_steps", lambda steps: steps > 0): (".lr_warmup_steps_ratio",),
}
"""A condition -> the keys that have no effect if it holds.

A condition is (end of a key, its value), or several of them. The value may be a predicate. A key that begins with "."
is in the section of the first key of the condition; otherwise it is the end of a key.
"""

_EXCEPTIONS = {"rollout.agent.default_agent_loop": ", except for rows with the column agent_name"}
"""The key of a condition -> where the settings have an effect nevertheless."""


def matches(key: str, end: str) -> bool:
    """Whether a dotted key is `end`, or ends in it."""
    return key.endswith(end) and (len(key) == len(end) or key[-len(end) - 1] == ".")


def settings_without_effect(config: Schema) -> list[str]:
    """Fields that were changed from their default and have no effect, each as "key: value has no effect with ...".

    The fields that the chosen estimator and loss do not read are found from their signatures, by the trainer.
    """
    chosen, flat = differences(config), flatten(config.model_dump(), type(config))
    modes = [key for key in chosen if matches(key, "rollout.mode") and flat[key] == "sync"]
    notes = {key: f"{key}: sync is the same as async" for key in modes}
    by_name: dict[str, list[str]] = {}
    for key in flat:
        by_name.setdefault(_name(key), []).append(key)
    for condition, ends in NO_EFFECT.items():
        for section, reason in _reasons(condition, flat, by_name):
            unused = [key for key in chosen if any(_is_named(key, end, section) for end in ends)]
            notes |= {key: f"{key}: {_plain(flat[key])} has no effect with {reason}" for key in unused}
    return list(notes.values())


def _reasons(condition: tuple, flat: Mapping[str, Any], by_name: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The section of the first key for which a condition holds, and the condition in words.

    Args:
        condition: One of `NO_EFFECT`.
        flat: Dotted key -> value.
        by_name: Last part of a key -> the keys of `flat` that end in it.
    """
    (end, value), *others = condition if isinstance(condition[0], tuple) else (condition,)
    for key in by_name.get(_name(end), ()):
        if not matches(key, end) or not _holds(flat[key], value):
            continue
        section = key.rpartition(".")[0]
        further = {section + other: wanted for other, wanted in others}
        if all(k in flat and _holds(flat[k], further[k]) for k in further):
            yield section, " and ".join(f"{k}={_plain(flat[k])}" for k in (key, *further)) + _EXCEPTIONS.get(end, "")


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _holds(given: Any, value: Any) -> bool:
    return bool(value(given)) if callable(value) else given == value


def _is_named(key: str, end: str, section: str) -> bool:
    return key == section + end if end.startswith(".") else matches(key, end)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else format_value(value)
