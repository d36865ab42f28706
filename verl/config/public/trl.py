"""Config keys for TRL's arguments and for common short names, suggested in errors about unknown keys.

docs/migrate_from_trl.md lists TRL's arguments with notes.
"""

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

_RUN = {
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "output_dir": "trainer.default_local_dir",
    "run_name": "trainer.experiment_name",
    "report_to": "trainer.logger",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "resume_from_checkpoint": "trainer.resume_from_path",
    "load_best_model_at_end": "trainer.save_best",
    "metric_for_best_model": "trainer.save_best",
    "greater_is_better": "trainer.save_best_mode",
    "early_stopping_patience": "trainer.early_stopping.patience",
    "early_stopping_threshold": "trainer.early_stopping.min_delta",
}

RL = _RUN | {
    "learning_rate": _ACTOR + "optim.lr",
    "weight_decay": _ACTOR + "optim.weight_decay",
    "max_grad_norm": _ACTOR + "optim.clip_grad",
    "warmup_ratio": _ACTOR + "optim.lr_warmup_steps_ratio",
    "warmup_steps": _ACTOR + "optim.lr_warmup_steps",
    "lr_scheduler_type": _ACTOR + "optim.lr_scheduler_type",
    "adam_beta1": _ACTOR + "optim.betas",
    "adam_beta2": _ACTOR + "optim.betas",
    "per_device_train_batch_size": _ACTOR + "ppo_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "data.train_batch_size",
    "generation_batch_size": "data.train_batch_size",
    "steps_per_generation": _ACTOR + "ppo_mini_batch_size",
    "per_device_eval_batch_size": "data.val_batch_size",
    "num_generations": _ROLLOUT + "n",
    "num_generations_eval": _ROLLOUT + "val_kwargs.n",
    "num_iterations": _ACTOR + "ppo_epochs",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "temperature": _ROLLOUT + "temperature",
    "top_p": _ROLLOUT + "top_p",
    "top_k": _ROLLOUT + "top_k",
    "min_p": _ROLLOUT + "min_p",
    "beta": _ACTOR + "kl_loss_coef",
    "epsilon": _ACTOR + "clip_ratio",
    "epsilon_high": _ACTOR + "clip_ratio_high",
    "loss_type": _ACTOR + "loss_agg_mode",
    "importance_sampling_level": _ACTOR + "policy_loss.loss_mode",
    "sapo_temperature_pos": _ACTOR + "tau_pos",
    "sapo_temperature_neg": _ACTOR + "tau_neg",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "reward_funcs": "reward.custom_reward_function.path",
    "reward_weights": "algorithm.gdpo_reward_weights",
    "shuffle_dataset": "data.shuffle",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "dataset_name": "data.train_files",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "model_name_or_path": _MODEL + "path",
    "gradient_checkpointing": _MODEL + "enable_gradient_checkpointing",
    "use_liger_kernel": _MODEL + "use_liger",
    "lora_r": _MODEL + "lora_rank",
    "lora_alpha": _MODEL + "lora_alpha",
    "lora_target_modules": _MODEL + "target_modules",
    "bf16": _ACTOR + "fsdp_config.dtype",
    "fp16": _ACTOR + "fsdp_config.dtype",
    "use_vllm": _ROLLOUT + "name",
    "vllm_gpu_memory_utilization": _ROLLOUT + "gpu_memory_utilization",
    "vllm_tensor_parallel_size": _ROLLOUT + "tensor_model_parallel_size",
    "log_completions": "trainer.log_samples",
    "num_completions_to_print": "trainer.log_samples",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
}

SFT = _RUN | {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.clip_grad",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "warmup_steps": "optim.lr_warmup_steps",
    "per_device_train_batch_size": "data.micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "data.train_batch_size",
    "max_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "dataset_name": "data.train_files",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "use_liger_kernel": "model.use_liger",
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "bf16": "engine.dtype",
    "save_total_limit": "trainer.max_ckpt_to_keep",
}

#: arguments of PPOConfig, beside those of GRPOConfig with the same meaning
PPO = {name: RL[name] for name in RL.keys() - {"num_iterations", "beta", "epsilon", "epsilon_high", "loss_type"}} | {
    "exp_name": "trainer.experiment_name",
    "sft_model_path": _MODEL + "path",
    "reward_model_path": "reward.reward_model.model_path",
    "num_ppo_epochs": _ACTOR + "ppo_epochs",
    "num_mini_batches": _ACTOR + "ppo_mini_batch_size",
    "response_length": "data.max_response_length",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_estimator": "algorithm.kl_penalty",
    "cliprange": _ACTOR + "clip_ratio",
    "cliprange_value": "critic.cliprange_value",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
}


_SHORT = {
    "lr": "learning_rate",
    "batch_size": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "model_path": "model_name_or_path",
    "group_size": "num_generations",
    "num_samples": "num_generations",
    "tp_size": "vllm_tensor_parallel_size",
}
"""Short name -> the argument of TRL that means the same."""


def key_of(name: str, schema: str | None) -> str | None:
    """Return the config key for an argument of TRL or a short name; None if it is neither.

    Args:
        name: the last part of an unknown key.
        schema: as in `upstream_key`: "ppo", "sft" or another.
    """
    return {"ppo": RL, "sft": SFT}.get(schema or "", {}).get(_SHORT.get(name, name))
