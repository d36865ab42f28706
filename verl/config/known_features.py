"""Whole features of verl that are not here, as facts: the name of each key, and verl's default."""

from typing import Any

TURBO: dict[str, Any] = {
    "fully_shard_parallel_size": 16,
    "tensor_parallel_size": 1,
    "expert_parallel_size": 1,
    "expert_fully_shard_parallel_size": 1,
    "ulysses_parallel_size": 1,
    "fsdp_plan.param_dtype": "bf16",
    "fsdp_plan.reduce_dtype": "fp32",
    "fsdp_plan.output_dtype": "bf16",
    "fsdp_plan.fsdp_implementation": "native",
    "fsdp_plan.num_to_forward_prefetch": 1,
    "fsdp_plan.num_to_backward_prefetch": 1,
}
"""The turbo backend of FSDP."""

QAT: dict[str, Any] = {
    "enable": False,
    "mode": "w4a16",
    "group_size": 16,
    "ignore_patterns": ["lm_head", "embed_tokens", "re:.*mlp.gate$"],
    "activation_observer": "static_minmax",
    "quantization_config_path": None,
}
"""Quantisation-aware training."""

MEGATRON: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "param_offload": False,
    "optimizer_offload": False,
    "grad_offload": False,
    "use_dist_checkpointing": False,
    "dist_checkpointing_path": None,
    "dist_checkpointing_prefix": "",
    "dist_ckpt_optim_fully_reshardable": False,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "dynamic_context_parallel": False,
    "max_seqlen_per_dp_cp_rank": None,
    "entropy_from_logits_with_chunking": False,
    "entropy_from_logits_chunk_size": 2048,
    "seed": 42,
    "override_ddp_config": {},
    "override_transformer_config.recompute_granularity": None,
    "override_transformer_config.recompute_modules": ["core_attn"],
    "override_transformer_config.recompute_method": None,
    "override_transformer_config.recompute_num_layers": None,
    "override_transformer_config.attention_backend": "flash",
    "override_mcore_model_config": {},
    "use_mbridge": True,
    "vanilla_mbridge": False,
    "use_remove_padding": True,
    "pad_bshd_to_minibatch_max": True,
    "pad_to_length": False,
    "pad_to_length_bucket": 512,
    "use_megatron_fsdp": False,
    "forward_only": False,
    "dtype": "bfloat16",
    "router_replay.mode": "disabled",
    "router_replay.record_file": None,
    "router_replay.replay_file": None,
}
"""The Megatron engine."""

MTP: dict[str, Any] = {
    "enable": False,
    "enable_train": False,
    "enable_rollout": False,
    "detach_encoder": False,
    "mtp_loss_scaling_factor": 0.1,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "method": "mtp",
    "num_speculative_tokens": 1,
}
"""Multi-token prediction."""

MEGATRON_LORA: dict[str, Any] = {
    "type": "lora",
    "merge": False,
    "rank": 0,
    "alpha": 32,
    "dropout": 0.0,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "dtype": None,
    "adapter_path": None,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
    "freeze_language_model": True,
}
"""LoRA of the Megatron engine."""

DISTILLATION: dict[str, Any] = {
    "enabled": False,
    "distillation_loss.loss_mode": "k3",
    "distillation_loss.topk": 32,
    "distillation_loss.use_task_rewards": True,
    "distillation_loss.distillation_loss_coef": 1.0,
    "distillation_loss.loss_max_clamp": None,
    "distillation_loss.log_prob_min_clamp": None,
    "distillation_loss.use_policy_gradient": False,
    "distillation_loss.policy_loss_mode": "vanilla",
    "distillation_loss.clip_ratio": 0.2,
    "distillation_loss.clip_ratio_low": 0.2,
    "distillation_loss.clip_ratio_high": 0.2,
    "n_gpus_per_node": 8,
    "nnodes": 0,
    "teacher_models.teacher_model.key": None,
    "teacher_models.teacher_model.model_path": None,
    "teacher_models.teacher_model.num_replicas": 0,
    "teacher_key": "data_source",
}
"""On-policy distillation."""

TRANSFER_QUEUE: dict[str, Any] = {
    "enable": False,
    "metrics.enabled": False,
    "metrics.port": 0,
    "backend.storage_backend": "SimpleStorage",
    "backend.SimpleStorage.total_storage_size": 100000,
    "backend.SimpleStorage.num_data_storage_units": 8,
    "backend.MooncakeStore.auto_init": False,
    "backend.MooncakeStore.metadata_server": "localhost:50123",
    "backend.MooncakeStore.master_server_address": "localhost:50124",
    "backend.MooncakeStore.local_hostname": "localhost",
    "backend.MooncakeStore.protocol": "tcp",
    "backend.MooncakeStore.global_segment_size": 4294967296,
    "backend.MooncakeStore.local_buffer_size": 1073741824,
    "backend.MooncakeStore.device_name": "",
}
"""The transfer queue."""

PROFILER: dict[str, Any] = {
    "tool": None,
    "steps": None,
    "profile_continuous_steps": False,
    "save_path": "outputs/profile",
    "relocate_results": False,
    "finish_hook_cmd": None,
    "finish_hook_all_ranks": False,
    "finish_hook_ranks": [],
    "global_tool_config.nsys.discrete": False,
    "global_tool_config.torch_memory.trace_alloc_max_entries": 100000,
    "global_tool_config.torch_memory.stack_depth": 32,
    "global_tool_config.torch_memory.memory_snapshot_num_steps": 1,
    "global_tool_config.torch_memory.context": "all",
    "global_tool_config.torch_memory.stacks": "all",
    "global_tool_config.torch_memory.kw_args": {},
    "global_tool_config.precision_debugger.config_path": None,
    "global_tool_config.precision_debugger.steps": None,
    "global_tool_config.precision_debugger.stages": None,
    "global_tool_config.precision_debugger.strict": False,
}
"""Profilers."""

MULTI_TURN: dict[str, Any] = {
    "enable": False,
    "max_assistant_turns": None,
    "tool_config_path": None,
    "function_tool_path": None,
    "max_user_turns": None,
    "max_parallel_calls": 1,
    "max_tool_response_length": 256,
    "tool_response_truncate_side": "middle",
    "use_inference_chat_template": False,
    "tokenization_sanity_check_mode": "strict",
    "format": "hermes",
    "num_repeat_rollouts": None,
}
"""Answers of several turns."""

AGENT: dict[str, Any] = {
    "num_workers": 8,
    "default_agent_loop": "single_turn_agent",
    "agent_loop_config_path": None,
    "custom_async_server.path": None,
    "custom_async_server.name": None,
}
"""Agent loops."""

ASYNC_TRAINER: dict[str, Any] = {
    "colocate_async.num_warmup_batches": 1,
    "separate_async.num_warmup_batches": 1,
    "separate_async.parameter_sync_step": 4,
    "separate_async.hybrid_rollout.enable_switch": False,
    "separate_async.hybrid_rollout.switch_threshold_ratio": 0.4,
    "separate_async.hybrid_rollout.adaptive_switch_threshold": True,
    "separate_async.hybrid_rollout.switch_threshold_step_up": 0.05,
    "separate_async.hybrid_rollout.switch_threshold_step_down": 0.03,
    "separate_async.hybrid_rollout.switch_threshold_release_steps": 2,
    "separate_async.hybrid_rollout.switch_cost_window_size": 3,
    "sampler.max_off_policy_threshold": 8,
    "sampler.max_off_policy_strategy": "drop",
    "sampler.sync_refill_failed_groups": False,
    "sampler.custom_sampler.path": None,
    "sampler.custom_sampler.name": None,
    "sampler.sampler_kwargs": {},
}
"""Asynchronous trainers."""
