"""Keys of verl that this project knows and does not have: what verl's default is, and what to do instead.

Scripts often set a key to the default that it has anyway. That is accepted and changes nothing. Any other value is
refused by name, with the advice of this table, because a setting that is ignored in silence costs weeks. `also` holds
further values that are accepted because they ask for what happens here in any case.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl.config import known_features as features

_ARR = "actor_rollout_ref."
_ACTOR, _REF, _ROLLOUT = _ARR + "actor.", _ARR + "ref.", _ARR + "rollout."


@dataclass(frozen=True)
class Known:
    """default: verl's. instead: what to do here. also: other values that change nothing either.

    free: no value changes anything, because the switch that gives it a meaning is itself refused.
    """

    default: Any
    instead: str
    also: tuple[Any, ...] = ()
    free: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether a value asks for nothing that is missing here. True is not 1, and 0 is not false."""
        if self.free:
            return True
        accepted = (self.default, *self.also)
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in accepted)


def _block(prefixes: str | tuple[str, ...], instead: str, defaults: Mapping[str, Any]) -> dict[str, Known]:
    """Keys that share their advice; a value that is a Known already brings its own."""
    starts = (prefixes,) if isinstance(prefixes, str) else prefixes
    return {
        start + name: value if isinstance(value, Known) else Known(value, instead)
        for start in starts
        for name, value in defaults.items()
    }


def _under(prefixes: tuple[str, ...], keys: Mapping[str, Known]) -> dict[str, Known]:
    return {prefix + name: known for prefix in prefixes for name, known in keys.items()}


def _any(default: Any, *also: Any, instead: str = "leave it out") -> Known:
    return Known(default, instead, also)


_CHUNKED = "the entropy is always computed in chunks: leave it out"
_LAYERS = "every decoder layer is a unit of its own, as the model names its class: leave it out"
_FULL_SUMS = "gradients are summed in fp32, and buffers keep the dtype that the model gives them: leave it out"
_SEED = "one seed makes a run: use trainer.seed"
_TEXT_ONLY = "only text is supported: leave it out"
_NO_TOOLS = "answers of one turn without tools are what there is: leave it out"
_NO_PROFILER = "the log has the time of every operator; for more run under py-spy or torch.profiler"

KNOWN: dict[str, Known] = {}
"""Dotted key -> what is known of it."""

# ----------------------------------------------------------------------------- the parts that are used more than once
OPTIM_KEYS = _block(
    "",
    "the optimizer is AdamW of torch: leave it out",
    {"optimizer": "AdamW", "optimizer_impl": "torch.optim", "zero_indexed_step": True},
)
ENGINE_KEYS = {
    **_block(
        "",
        "leave it out",
        {
            "wrap_policy.min_num_params": Known(0, _LAYERS),
            "wrap_policy.transformer_layer_cls_to_wrap": Known(None, _LAYERS),
            "wrap_policy.disable": Known(False, _LAYERS),
            "sharding_strategy": Known(
                "FULL_SHARD", "use reshard_after_forward=false (SHARD_GRAD_OP), fsdp_size (HYBRID_SHARD), or both"
            ),
            "cpu_offload": Known(False, "use offload_policy"),
            "offload_params": Known(False, "use param_offload or offload_policy"),
            "grad_offload": Known(False, "use offload_policy=true, which keeps gradients in host memory as well"),
            "forward_prefetch": _any(False, True),
            "use_orig_params": _any(False, True),
            "seed": Known(42, _SEED),
            "full_determinism": Known(False, "a run on one device is reproducible by trainer.seed: use false"),
            "entropy_from_logits_with_chunking": Known(False, _CHUNKED, (True,)),
            "entropy_from_logits_chunk_size": Known(2048, _CHUNKED),
            "entropy_checkpointing": Known(False, _CHUNKED, (True,)),
            "use_no_sync_for_gradient_accumulation": _any(False, True),
            "pad_to_length": False,
            "pad_to_length_bucket": 1024,
            "forward_only": _any(False, True),
            "mixed_precision": Known(None, "use model_dtype and dtype of this section"),
            "mixed_precision.reduce_dtype": Known("fp32", _FULL_SUMS, ("float32", None)),
            "mixed_precision.buffer_dtype": Known("fp32", _FULL_SUMS, ("float32", None)),
        },
    ),
    **_block("turbo_config.distributed.", "use strategy fsdp or fsdp2", features.TURBO),
    **_block("qat.", "training is not quantised: leave it out", features.QAT),
}
MODEL_KEYS = {
    **_block(
        "",
        "leave it out",
        {
            "hf_config_path": Known(None, "use model.path and, for single values, model.override_config"),
            "use_shm": False,
            "enable_activation_offload": False,
            "use_fused_kernels": Known(False, "log-probs and entropy are always fused: leave it out", (True,)),
            "fused_kernel_options.impl_backend": _any("torch", None),
            "tiled_mlp.enabled": False,
            "tiled_mlp.num_shards": 4,
        },
    ),
    **_block("mtp.", "multi-token prediction is not supported: leave it out", features.MTP),
    **_block(
        "lora.",
        "these are Megatron's adapters; use lora_rank, lora_alpha and target_modules of the model section",
        features.MEGATRON_LORA,
    ),
}

# ---------------------------------------------------------------------------------------- actor, reference and critic
KNOWN |= _under((_ACTOR + "optim.", "critic.optim."), OPTIM_KEYS)
KNOWN |= _under((_ACTOR + "fsdp_config.", _REF + "fsdp_config.", "critic.fsdp."), ENGINE_KEYS)
KNOWN |= _under((_ARR + "model.", "critic.model."), MODEL_KEYS)
KNOWN |= _block(
    (_ACTOR, _REF),
    "leave it out",
    {
        "entropy_from_logits_with_chunking": Known(False, _CHUNKED, (True,)),
        "entropy_from_logits_chunk_size": Known(2048, _CHUNKED),
        "entropy_checkpointing": Known(False, _CHUNKED, (True,)),
        "pad_to_length": False,
    },
)
KNOWN |= _block(_ACTOR + "qat.", "training is not quantised: leave it out", features.QAT)
KNOWN |= {
    _ACTOR + "calculate_entropy": Known(False, "the entropy is always measured: leave it out", (True,)),
    _ACTOR + "freeze_vision_tower": Known(False, _TEXT_ONLY),
    _ACTOR + "use_prefix_grouper": Known(False, "prompts are computed with every answer: use false"),
    _ACTOR + "checkpoint.strict": _any(True),
    "critic.checkpoint.strict": _any(True),
}
KNOWN |= _block(
    (_ACTOR + "megatron.", _REF + "megatron.", "critic.megatron."),
    "use strategy fsdp and its fsdp_config",
    features.MEGATRON,
)

# -------------------------------------------------------------------------------------------------------------- rollout
_ENGINE_OF_RAY = "generation runs in the training processes: leave it out"
KNOWN |= _block(
    _ROLLOUT,
    "leave it out",
    {
        "mode": _any("async", "sync"),
        "nnodes": Known(0, _ENGINE_OF_RAY),
        "n_gpus_per_node": Known(8, _ENGINE_OF_RAY, (1,)),
        "full_determinism": Known(False, "a row's answer depends on its seed alone: use false"),
        "cudagraph_capture_sizes": None,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "logprobs_mode": Known("processed_logprobs", "log-probs are those of the distribution sampled from"),
        "scheduling_policy": "fcfs",
        "load_format": _any("dummy", "auto", "safetensors", "dummy_dtensor", instead="weights come from the trainer"),
        "layered_summon": _any(False, True),
        "disable_log_stats": _any(True, False),
        "calculate_log_probs": _any(True, False, instead="they are always kept: leave it out"),
        "do_sample": Known(True, "training needs different answers to compare: use true"),
        "over_sample_rate": 0,
        "multi_stage_wake_up": _any(False, True),
        "router_config_path": None,
        "skip_tokenizer_init": _any(True, False),
        "enable_rollout_routing_replay": False,
        "moe_load_balance_metrics_interval": 0,
        "quantization": None,
        "quantization_config_file": None,
        "mtp": None,
        **{f"mtp.{name}": value for name, value in features.MTP.items()},
        "qat": None,
        **{f"qat.{name}": value for name, value in features.QAT.items()},
    },
)
KNOWN |= _block(
    _ROLLOUT + "multi_turn.",
    _NO_TOOLS,
    features.MULTI_TURN,
)
KNOWN |= _block(
    _ROLLOUT + "agent.",
    _NO_TOOLS,
    features.AGENT,
)
KNOWN |= _block(
    _ROLLOUT,
    "rollout and trainer share their weights in one process: leave it out",
    {
        "checkpoint_engine.backend": "naive",
        "checkpoint_engine.update_weights_bucket_megabytes": 2048,
        "checkpoint_engine.engine_kwargs": {},
        "checkpoint_engine.custom_backend_module": None,
        "disaggregation.enabled": False,
        "disaggregation.prefill_replicas": 1,
        "disaggregation.decode_replicas": 1,
        "disaggregation.decode_tensor_model_parallel_size": None,
        "disaggregation.transfer_backend": "nixl",
        "disaggregation.bootstrap_port": None,
        "disaggregation.ib_device": None,
    },
)
KNOWN |= _block(
    _ROLLOUT,
    "use trainer.rollout_data_dir and trainer.logger",
    {
        "trace.project_name": Known(None, "", free=True),
        "trace.experiment_name": Known(None, "", free=True),
        "trace.backend": None,
        "trace.token2text": False,
        "trace.max_samples_per_step_per_worker": None,
        "prometheus.enable": False,
        "prometheus.port": Known(9090, "", free=True),
        "prometheus.file": Known(None, "", free=True),
        "prometheus.served_model_name": Known(None, "", free=True),
    },
)

# ----------------------------------------------------------------------------------------------------- data and rewards
KNOWN |= _block(
    "data.",
    "leave it out",
    {
        "use_shm": False,
        "tool_config_path": Known(None, _NO_TOOLS),
        "function_tool_path": Known(None, _NO_TOOLS),
        "return_raw_input_ids": _any(False, True),
        "return_raw_chat": _any(True, False),
        "return_full_prompt": _any(False, True),
        "dataloader_num_workers": _any(8, 0, instead="prompts are read in the training process: leave it out"),
        "filter_overlong_prompts_workers": Known(1, "prompts are filtered in the training process: leave it out"),
        "image_patch_size": Known(14, _TEXT_ONLY),
        "image_key": Known("images", _TEXT_ONLY),
        "video_key": Known("videos", _TEXT_ONLY),
        "audio_key": Known("audios", _TEXT_ONLY),
        "return_multi_modal_inputs": Known(True, _TEXT_ONLY, (False,)),
        "mm_processor_kwargs": Known({}, _TEXT_ONLY),
    },
)
KNOWN |= _block(
    ("reward.reward_model.", "reward_model."),
    "placement.reward_devices gives the reward model devices of its own: leave it out",
    {
        "enable_resource_pool": _any(False, None),
        "n_gpus_per_node": _any(8, None, 0),
        "nnodes": _any(0, None),
    },
)
KNOWN |= {"reward.num_workers": Known(8, "use reward.reward_manager.name=prime, which scores in processes", (0, None))}
_REWARD_ROLLOUT = "the reward model classifies, it does not generate: leave it out"
KNOWN |= _block(
    "reward.reward_model.rollout.",
    _REWARD_ROLLOUT,
    {
        "name": None,
        "enforce_eager": True,
        "max_num_seqs": 1024,
        "load_format": "auto",
        "prompt_length": 2048,
        "response_length": 2048,
        "skip_tokenizer_init": False,
        "limit_images": None,
    },
)
KNOWN |= _block(
    "reward_model.",
    "leave it out",
    {
        "model.external_lib": Known(None, "use imports"),
        "launch_reward_fn_async": _any(False, True),
        "strategy": _any(None, "fsdp", "fsdp2"),
    },
)

# ------------------------------------------------------------------------------------------------ algorithm and trainer
KNOWN |= {
    "algorithm.filter_groups.max_inflight_gen_batches": Known(1, "one batch is generated at a time: use 1"),
}
KNOWN |= _block(
    "distillation.",
    "distillation from a teacher is not supported: leave it out",
    features.DISTILLATION,
)
KNOWN |= _block(
    "transfer_queue.",
    "batches travel as DataProto: leave it out",
    features.TRANSFER_QUEUE,
)
KNOWN |= _block(
    "trainer.",
    "leave it out",
    {
        "esi_redundant_time": 0,
        "checkpoint_callback_class": Known(None, "override Trainer.save"),
        "default_hdfs_dir": Known(None, "checkpoints are local: use trainer.default_local_dir"),
        "del_local_ckpt_after_load": Known(False, "use trainer.max_actor_ckpt_to_keep"),
        "ray_wait_register_center_timeout": _any(300),
        "use_v1": _any(True, False),
        "v1.trainer_mode": Known("sync", "every step generates, then trains: use sync"),
        "v1.sync": {},
    },
)
KNOWN |= _block("trainer.v1.", "every step generates, then trains: leave it out", features.ASYNC_TRAINER)
KNOWN |= _block(
    "global_profiler.",
    _NO_PROFILER,
    features.PROFILER,
)
KNOWN |= _block(
    ("skip.rollout.", "skip.rollout_tq.", "skip.async_rollout."),
    "answers are not replayed from a cache: leave it out",
    {"enable": False, "dump_dir": "~/.verl/rollout_dump", "steps": [], "action": "cache"},
)
KNOWN |= {"model_engine": Known("dp", f"name the engine by {_ACTOR}strategy")}

# ------------------------------------------------------------------------------------------ supervised fine-tuning
SFT_KNOWN: dict[str, Known] = {
    **_under(("optim.",), OPTIM_KEYS),
    **_under(("engine.",), ENGINE_KEYS),
    **_under(("model.",), MODEL_KEYS),
    **_block(
        "data.",
        "leave it out",
        {
            "tools_key": Known("tools", _NO_TOOLS),
            "enable_thinking_key": Known("enable_thinking", "use data.apply_chat_template_kwargs", (None,)),
            "enable_thinking_default": Known(None, "use data.apply_chat_template_kwargs"),
            "pad_mode": Known("no_padding", "rows are packed: use no_padding"),
            "balance_dp_token": False,
            "use_shm": False,
            "num_workers": _any(8, 0, instead="rows are read in the training process: leave it out"),
            "ignore_input_ids_mismatch": Known(False, "a row whose tokens do not agree is an error"),
        },
    ),
    **_block(
        "trainer.",
        "leave it out",
        {
            "default_hdfs_dir": Known(None, "checkpoints are local: use trainer.default_local_dir"),
            "balance_batch": _any(True, False),
            "profile_interval": Known([-1, -1], _NO_PROFILER),
        },
    ),
}

# --------------------------------------------------------------------------------------- generation and evaluation
_NO_RAY = "Ray does not run here: leave it out"
GENERATION_KNOWN: dict[str, Known] = {
    **_under(("model.",), MODEL_KEYS),
    "rollout.mode": _any("async", "sync"),
    "rollout.n": Known(1, "use data.n_samples"),
    "rollout.do_sample": Known(True, "use rollout.temperature=0 for greedy answers"),
    "ray_kwargs.ray_init.num_cpus": Known(None, _NO_RAY),
}
EVAL_KNOWN: dict[str, Known] = {"ray_kwargs.ray_init.num_cpus": Known(None, _NO_RAY)}

WHOLE_SECTIONS: dict[str, str] = {
    "*.profiler.*": _NO_PROFILER,
    "profiler.*": _NO_PROFILER,
    "global_profiler.*": _NO_PROFILER,
    "*.optim.muon_*": "the optimizer is AdamW of torch: leave it out",
    "reward_model.rollout.*": _REWARD_ROLLOUT,
    "reward_model.model.input_tokenizer": "the tokenizers of policy and reward model are compared: leave it out",
    "reward_model.model.*": "use reward.reward_model.model_path",
    "reward.reward_model.rollout.*": _REWARD_ROLLOUT,
    "distillation.*": "distillation from a teacher is not supported: leave it out",
    "*.megatron.*": "use strategy fsdp and its fsdp_config",
    "*.veomni.*": "use strategy fsdp and its fsdp_config",
    "*.torchtitan.*": "use strategy fsdp and its fsdp_config",
    "hydra.*": "there is no Hydra here: logs and checkpoints go to trainer.default_local_dir",
    "defaults": "there is no Hydra here: put all keys into one file",
}
"""Patterns of keys without a table of defaults: null, false and empty values are accepted, all others refused."""

_OFF = (None, False, [], {})


def known_key(key: str, table: Mapping[str, Known]) -> Known | None:
    """What is known of a key of verl that the tree does not have; None when nothing is."""
    names = key.split(".")
    for depth in range(len(names), 0, -1):
        known = table.get(".".join(names[:depth]))
        if known:
            return known
    for pattern, instead in WHOLE_SECTIONS.items():
        if fnmatchcase(key, pattern):
            return Known(_OFF[0], instead, _OFF[1:])
    return None
