"""Command lines in the form of public verl's scripts for Megatron: they load, and what has no effect is named."""

import logging
import shlex

import pytest

from verl.config import ConfigError, load_config, settings_without_effect
from verl.config.schema import Config, SFTConfig
from verl.trainer.startup.command_line import split_arguments

ACTOR, REF = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.ref.megatron."
TRANSFORMER = f"+{ACTOR}override_transformer_config."
COMMON = """
    --config-path=config --config-name='ppo_megatron_trainer.yaml'
    data.train_files=$HOME/data/math/train.parquet data.val_files=$HOME/data/math/test.parquet
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=native
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.logger='["console","tensorboard"]'
    trainer.critic_warmup=0 trainer.project_name='verl_megatron_math_examples' trainer.experiment_name='qwen2_7b'
    trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
KL_LOSS = """
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 algorithm.use_kl_in_reward=False
"""
DENSE = f"""
    {ACTOR}pipeline_model_parallel_size=2 {ACTOR}virtual_pipeline_model_parallel_size=2
    {ACTOR}tensor_model_parallel_size=4 {REF}pipeline_model_parallel_size=2
    {REF}virtual_pipeline_model_parallel_size=2 {REF}tensor_model_parallel_size=4
"""
SCRIPTS = {
    "qwen2-7b math grpo": (f"algorithm.adv_estimator=grpo {KL_LOSS} {DENSE} actor_rollout_ref.rollout.n=5", ()),
    "deepseek7b math ppo": (
        f"""algorithm.adv_estimator=gae {DENSE} actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
        critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.ppo_micro_batch_size_per_gpu=4
        critic.megatron.pipeline_model_parallel_size=2 critic.megatron.virtual_pipeline_model_parallel_size=2
        critic.megatron.tensor_model_parallel_size=4 algorithm.use_kl_in_reward=False {ACTOR}seed=42""",
        (),
    ),
    "qwen3-30b moe grpo": (
        f"""algorithm.adv_estimator=grpo {KL_LOSS} trainer.nnodes=4 actor_rollout_ref.rollout.n=5
        {ACTOR}pipeline_model_parallel_size=2 {ACTOR}tensor_model_parallel_size=4 {ACTOR}expert_model_parallel_size=4
        {ACTOR}expert_tensor_parallel_size=1 {ACTOR}context_parallel_size=1 {ACTOR}use_dist_checkpointing=True
        {ACTOR}dist_checkpointing_path=/ckpt/qwen3-30b {ACTOR}param_offload=True {ACTOR}optimizer_offload=True
        {ACTOR}grad_offload=True {ACTOR}use_mbridge=True {REF}param_offload=True {REF}use_dist_checkpointing=True
        {REF}dist_checkpointing_path=/ckpt/qwen3-30b {REF}expert_tensor_parallel_size=1
        {TRANSFORMER}recompute_method=uniform {TRANSFORMER}recompute_granularity=full
        {TRANSFORMER}recompute_num_layers=1
        {TRANSFORMER}moe_router_dtype=fp32 {TRANSFORMER}moe_permute_fusion=True {TRANSFORMER}moe_grouped_gemm=True
        {TRANSFORMER}moe_token_dispatcher_type=flex {TRANSFORMER}moe_enable_deepep=True
        {TRANSFORMER}moe_router_load_balancing_type=none {TRANSFORMER}apply_rope_fusion=True
        {TRANSFORMER}moe_aux_loss_coeff=0.01 {TRANSFORMER}gradient_accumulation_fusion=True
        {TRANSFORMER}num_layers_in_last_pipeline_stage=20 {TRANSFORMER}moe_shared_expert_overlap=False
        +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1
        +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True""",
        (
            f"{ACTOR}use_dist_checkpointing, {ACTOR}dist_checkpointing_path, {REF}use_dist_checkpointing",
            ": initial weights are read from model.path",
            "override_transformer_config.* (6 keys)",
        ),
    ),
    "qwen3-235b moe grpo, the ends of the pipeline have a layer less": (
        f"""algorithm.adv_estimator=grpo {KL_LOSS} trainer.nnodes=8 {ACTOR}tensor_model_parallel_size=4
        {ACTOR}pipeline_model_parallel_size=8 {ACTOR}expert_model_parallel_size=4
        {TRANSFORMER}account_for_loss_in_pipeline_split=True {TRANSFORMER}account_for_embedding_in_pipeline_split=True
        actor_rollout_ref.actor.optim.lr_decay_style='constant' actor_rollout_ref.actor.optim.lr_warmup_steps=10
        actor_rollout_ref.actor.optim.lr_decay_steps=51200 actor_rollout_ref.rollout.expert_parallel_size=64
        +actor_rollout_ref.rollout.moe_tensor_parallel_size=2 {ACTOR}vanilla_mbridge=False
        +actor_rollout_ref.model.override_config.model_config.max_position_embeddings=10240
        actor_rollout_ref.nccl_timeout=7200 trainer.balance_batch=True""",
        ("moe_tensor_parallel_size", "optim.total_training_steps: 51200 has no effect with"),
    ),
    "qwen3-235b long context, keys for the kernels of another device": (
        f"""algorithm.adv_estimator=grpo {KL_LOSS} trainer.nnodes=16 {ACTOR}tensor_model_parallel_size=4
        {ACTOR}pipeline_model_parallel_size=4 {ACTOR}context_parallel_size=8 {ACTOR}expert_model_parallel_size=8
        {TRANSFORMER}context_parallel_size=8 {TRANSFORMER}sequence_parallel=True {TRANSFORMER}swiglu=True
        {TRANSFORMER}use_distributed_optimizer=True {TRANSFORMER}normalization=RMSNorm {TRANSFORMER}use_flash_attn=True
        {TRANSFORMER}use_fused_rmsnorm=True {TRANSFORMER}position_embedding_type=rope {ACTOR}thd_format=False
        ++{REF}override_transformer_config.use_flash_attn=True ++{REF}override_transformer_config.sequence_parallel=True
        actor_rollout_ref.actor.use_torch_compile=True actor_rollout_ref.model.use_remove_padding=False""",
        ("override_transformer_config.use_flash_attn", "model.use_remove_padding: false has no effect with strategy"),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_public_script_loads(name, caplog):
    further, ignored = SCRIPTS[name]
    path, overrides, _ = split_arguments(shlex.split(COMMON + further))
    with caplog.at_level(logging.WARNING, "verl.config"):
        config: Config = load_config(path, overrides)
    policy = config.actor_rollout_ref
    assert (policy.actor.strategy, policy.ref.strategy, config.critic.strategy) == ("megatron",) * 3
    assert policy.actor.megatron.tensor_model_parallel_size == policy.ref.megatron.tensor_model_parallel_size == 4
    assert policy.ref.megatron.expert_model_parallel_size == policy.actor.megatron.expert_model_parallel_size
    notes = "".join([*caplog.messages, *settings_without_effect(config)])
    assert all(key in notes for key in ignored)


def test_supervised_fine_tuning_has_the_keys_of_the_engine():
    keys = """engine=megatron optim=megatron engine.use_mbridge=True engine.vanilla_mbridge=False optim.min_lr=0
        engine.override_transformer_config.context_parallel_size=1 optim.lr_decay_style=cosine
        engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2
        engine.param_offload=true engine.override_transformer_config.recompute_granularity=full model.path=x
        data.train_files=a.parquet data.train_batch_size=4 trainer.n_gpus_per_node=4"""
    path, overrides, _ = split_arguments(shlex.split(keys))
    engine = load_config(path, overrides, schema=SFTConfig).engine
    assert engine.selected is engine.megatron and engine.strategy == "megatron"
    assert engine.selected.ranks_with_same_rows == 4 and engine.selected.param_offload
    assert engine.selected.override_transformer_config.recompute_granularity == "full"
    with pytest.raises(ConfigError, match="not divisible by the model-parallel size 4"):
        load_config(path, [*overrides, "trainer.n_gpus_per_node=2"], schema=SFTConfig)


def test_router_replay_and_its_key_in_the_megatron_section():
    found = load_config(None, ["model_engine=megatron", f"{ACTOR}router_replay.mode=R2"])
    assert found.actor_rollout_ref.actor.router_replay.mode == "R2"


def test_a_reference_is_not_trained():
    keys = ("override_transformer_config.moe_aux_loss_coeff=0.1", "optimizer_offload=true")
    notes = settings_without_effect(load_config(None, ["model_engine=megatron", *(f"{REF}{key}" for key in keys)]))
    assert [note.partition(":")[0] for note in notes] == [f"{REF}{key.split('=')[0]}" for key in reversed(keys)]
    assert all(note.endswith("has no effect with actor_rollout_ref.ref.strategy=megatron") for note in notes)
