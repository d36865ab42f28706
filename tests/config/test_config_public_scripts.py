"""Command lines in the form of public run scripts, with vLLM's keys replaced by those of a built-in engine.

Written from the keys that such scripts set. Each loads, and what it sets without an effect is named in one note.
"""

import logging
import shlex

import pytest

from verl.config import load_config
from verl.config.checks.run import check_built_in
from verl.trainer.startup.command_line import split_arguments

COMMON = """
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation='error'
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.rollout.name=native actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
    trainer.critic_warmup=0 trainer.logger='["console","tensorboard"]' trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name='qwen3_8b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
KL_LOSS = """
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
"""
MICRO = """
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
"""
DYNAMIC = """
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
"""

# name -> ((a key, its value, how many keys are ignored), what a script adds to COMMON)
SCRIPTS = {
    "a mini-batch of more prompts than a batch, a feature of a fork that is off, and a model of the reference": (
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 8, 3),
        f"""algorithm.adv_estimator=reinforce_plus_plus {KL_LOSS} data.train_batch_size=8
        +trainer.hf_push.enable=False +trainer.hf_push.repo_id=me/x
        +actor_rollout_ref.ref.override_config.attn_implementation=sdpa""",
    ),
    "grpo with generations in the trackers and a legacy switch": (
        ("trainer.log_val_generations", 10, 2),
        f"""algorithm.adv_estimator=grpo {KL_LOSS} {DYNAMIC} trainer.log_val_generations=10
        trainer.use_legacy_worker_impl=disable trainer.val_before_train=False ++trainer.use_v1=False""",
    ),
    "hydra groups and a configuration by name": (
        ("algorithm.adv_estimator", "grpo", 2),
        f"""--config-path=./config --config-name='ppo_trainer' algorithm.adv_estimator=grpo {KL_LOSS} {MICRO}
        model_engine=dp actor@actor_rollout_ref.actor=dp_actor ref@actor_rollout_ref.ref=dp_ref
        hydra.run.dir=outputs/grpo data.return_raw_chat=False""",
    ),
    "lora from shared memory": (
        ("actor_rollout_ref.model.lora_rank", 64, 3),
        f"""algorithm.adv_estimator=grpo {KL_LOSS} {MICRO} actor_rollout_ref.model.use_shm=True
        actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.rollout.load_format=safetensors
        actor_rollout_ref.rollout.layered_summon=True""",
    ),
    "ppo with a critic in the old sections": (
        ("critic.fsdp.optimizer_offload", True, 0),
        f"""algorithm.adv_estimator=gae {MICRO} critic.optim.lr=1e-5 critic.model.use_remove_padding=True
        critic.model.path=Qwen/Qwen3-8B critic.model.enable_gradient_checkpointing=True
        critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False
        critic.model.fsdp_config.optimizer_offload=True algorithm.use_kl_in_reward=False""",
    ),
    "ppo with sequence balancing and sequence parallelism": (
        ("critic.fsdp.ulysses_sequence_parallel_size", 2, 1),
        f"""algorithm.adv_estimator=gae {DYNAMIC} critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=98304
        critic.forward_max_token_len_per_gpu=98304 critic.model.enable_activation_offload=True
        actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 critic.ulysses_sequence_parallel_size=2""",
    ),
    "dapo with the keys of older releases": (
        (
            "reward.reward_kwargs",
            {"max_resp_len": 1024, "overlong_buffer": {"enable": True, "len": 512, "penalty_factor": 1.0}},
            0,
        ),
        f"""algorithm.adv_estimator=grpo {DYNAMIC} actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0
        actor_rollout_ref.actor.loss_agg_mode=token-mean data.gen_batch_size=1536
        algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10
        algorithm.filter_groups.metric=acc actor_rollout_ref.actor.grad_clip=1.0 reward_model.reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
        +reward_model.reward_kwargs.overlong_buffer_cfg.len=512
        +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
        +reward_model.reward_kwargs.max_resp_len=1024 actor_rollout_ref.rollout.val_kwargs.do_sample=True
        actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
        actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.enable_chunked_prefill=True
        actor_rollout_ref.rollout.max_num_batched_tokens=1536 trainer.resume_mode=auto""",
    ),
    "reinforce++ with micro-batches over all gpus": (
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 32, 0),
        """algorithm.adv_estimator=reinforce_plus_plus actor_rollout_ref.actor.ppo_micro_batch_size=256
        actor_rollout_ref.rollout.log_prob_micro_batch_size=512 actor_rollout_ref.ref.log_prob_micro_batch_size=512
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse""",
    ),
    "profiling": (
        ("trainer.device", "cuda", 6),
        f"""algorithm.adv_estimator=grpo {MICRO} global_profiler.tool=nsys global_profiler.steps=[1,2,5]
        global_profiler.save_path=./profile actor_rollout_ref.actor.profiler.enable=True
        actor_rollout_ref.actor.profiler.all_ranks=False actor_rollout_ref.actor.profiler.ranks=[0,1]
        actor_rollout_ref.actor.profiler.tool_config.npu.level=level1 trainer.device=cuda""",
    ),
    "leftovers of megatron": (
        ("actor_rollout_ref.actor.strategy", "fsdp2", 1),
        f"""algorithm.adv_estimator=grpo {KL_LOSS} {MICRO} actor_rollout_ref.actor.strategy=fsdp2
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
        actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
        actor_rollout_ref.rollout.mode=sync actor_rollout_ref.rollout.calculate_log_probs=False""",
    ),
    "a custom reward and an attention kernel": (
        ("actor_rollout_ref.model.override_config", {"max_position_embeddings": 32768}, 1),
        f"""algorithm.adv_estimator=grpo {MICRO} custom_reward_function.path=recipe/my/reward.py
        custom_reward_function.name=compute_score +custom_reward_function.reward_kwargs.scale=2
        +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2
        +actor_rollout_ref.model.override_config.max_position_embeddings=32768
        trainer.resume_from_path=checkpoints/x/global_step_20 ray_kwargs.ray_init.num_cpus=32""",
    ),
    "values in the grammar of Hydra": (
        (
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False, "note": "a, b:c", "url": "http://x:1", "n": 2},
            0,
        ),
        f"""{KL_LOSS} {MICRO} "+data.apply_chat_template_kwargs={{enable_thinking:false,note:'a, b:c',url:http://x:1,n:2}}"
        trainer.experiment_name=@qwen data.train_files=*.parquet""",
    ),
    "a reward model on devices of its own": (
        ("reward.reward_model.model_path", "Skywork/Reward-8B", 5),
        f"""{KL_LOSS} {MICRO} reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True
        reward.reward_model.n_gpus_per_node=8 reward.reward_model.nnodes=2
        reward.reward_model.model_path=Skywork/Reward-8B reward.reward_model.rollout.name=vllm
        data.continuous_token.enable=True data.continuous_token.model_family=qwen3""",
    ),
    "the loss of the entropy recipe, and keys of recipes that select nothing": (
        ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio", 0.002, 2),
        f"""{KL_LOSS} {MICRO} actor_rollout_ref.actor.loss_mode=kl_cov actor_rollout_ref.actor.kl_cov_ratio=0.002
        actor_rollout_ref.actor.ppo_kl_coef=1 trainer.spo.enable=False trainer.spo.mode=stateful
        trainer.gen_cache.use_gen_cache=False fault_manager.enable=True trainer.debug=False""",
    ),
    "a custom dataset with a section of its own, features of a fork that are off, and limits of images": (
        ("data.custom_cls.kwargs", {"cis": {"swap_offset": 2, "rows": {"seed": 7}}, "size": 5}, 5),
        f"""algorithm.adv_estimator=grpo {MICRO} data.custom_cls.path=d.py data.custom_cls.name=MyData
        +data.cis.swap_offset=2 +data.cis.rows.seed=7 +data.size=5 +trainer.use_dapo=False +trainer.hooks=[]
        +actor_rollout_ref.rollout.limit_images=2 +actor_rollout_ref.rollout.limit_videos=1
        trainer.tensorboard_dir=tb +model.trust_remote_code=True""",
    ),
    "one teacher, in the section of older releases": (
        ("distillation.teacher_models.teacher_model.model_path", "Qwen/Qwen3-32B", 5),
        f"""algorithm.adv_estimator=grpo {MICRO} distillation.enabled=True distillation.num_workers=4
        distillation.teacher_model.model_path=Qwen/Qwen3-32B distillation.teacher_model.enable_resource_pool=True
        distillation.teacher_model.n_gpus_per_node=4 distillation.teacher_model.inference.name=sglang
        distillation.teacher_backend=fsdp +distillation.teacher_fsdp_config.param_offload=False
        distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True""",
    ),
    "deepspeed, which runs as fsdp": (
        ("critic.strategy", "fsdp", 3),
        f"""algorithm.adv_estimator=gae {MICRO} actor@actor_rollout_ref.actor=ds_actor critic=ds_critic
        critic.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.deepspeed.zero_stage=2
        critic.deepspeed_config.zero_stage=2 critic.deepspeed_config.offload=cpu""",
    ),
    "the configuration of a multi-turn example, by its name": (
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", 4, 0),
        f"""--config-path=examples/sglang_multiturn/config --config-name=search_multiturn_grpo {KL_LOSS} {MICRO}
        algorithm.adv_estimator=grpo""",
    ),
    "the keys that are used most": (
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"], 0),
        f"""{KL_LOSS} {MICRO}
        data.prompt_key=prompt data.image_key=images data.shuffle=True data.seed=1 data.custom_cls.path=d.py
        data.custom_cls.name=MyData actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=16
        actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.trust_remote_code=False
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
        actor_rollout_ref.actor.ppo_epochs=1 actor_rollout_ref.actor.clip_ratio=0.2
        actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
        actor_rollout_ref.actor.policy_loss.loss_mode=vanilla actor_rollout_ref.actor.strategy=fsdp2
        actor_rollout_ref.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model']
        actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0
        actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True
        actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.95
        actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.n=4
        actor_rollout_ref.rollout.multi_turn.enable=False actor_rollout_ref.rollout.multi_turn.format=hermes
        actor_rollout_ref.rollout.agent.num_workers=8 actor_rollout_ref.rollout.calculate_log_probs=True
        actor_rollout_ref.rollout.mode=async critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
        critic.model.use_remove_padding=True critic.model.enable_gradient_checkpointing=True
        critic.model.fsdp_config.param_offload=False critic.ppo_micro_batch_size_per_gpu=4
        critic.cliprange_value=0.5 algorithm.adv_estimator=grpo algorithm.gamma=1.0 algorithm.lam=0.95
        algorithm.use_kl_in_reward=False algorithm.kl_penalty=kl algorithm.kl_ctrl.type=fixed
        algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_ctrl.horizon=10000 algorithm.kl_ctrl.target_kl=0.1
        algorithm.norm_adv_by_std_in_grpo=True algorithm.filter_groups.enable=False
        algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10
        algorithm.rollout_correction.rollout_is=null algorithm.rollout_correction.rollout_is_threshold=2.0
        trainer.total_training_steps=100 trainer.val_before_train=False trainer.val_only=False
        trainer.default_local_dir=checkpoints/x trainer.resume_mode=auto trainer.resume_from_path=null
        trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2 trainer.rollout_data_dir=rollouts
        trainer.validation_data_dir=validation trainer.log_val_generations=0 reward.custom_reward_function.path=r.py
        reward.custom_reward_function.name=compute_score reward_model.reward_manager=naive""",
    ),
    "manager and dataset of packages": (
        ("reward.reward_manager.module.path", "my_package.managers", 0),
        """algorithm.adv_estimator=grpo reward_manager.source=importlib reward_manager.name=MyManager
        reward_manager.module.path=my_package.managers data.custom_cls.path=pkg://my_package.data
        data.custom_cls.name=MyDataset""",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_public_script_loads(name, caplog):
    (key, value, ignored), further = SCRIPTS[name]
    path, overrides, _ = split_arguments(shlex.split(COMMON + further))
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(path, overrides, extra_checks=[check_built_in])
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    for part in key.split("."):
        config = config[part]
    assert config == value
    notes = [note for note in caplog.messages if note.startswith("ignored: ")]
    assert sum(int(note.split()[1]) for note in notes) == ignored
