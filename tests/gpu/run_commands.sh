#!/bin/bash
# The commands of the README and of docs/, on GPUs, as a user types them: learn, train on one GPU and on two, go on from a
# checkpoint with another number of processes, merge, generate, evaluate, fine-tune. About three minutes; a second GPU is
# used where there is one. Results go to $1 (a folder).
#
#     tests/gpu/run_commands.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
work=$(mktemp -d)
data=$work/quickstart/data
train="python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$data/train.parquet
    data.val_files=$data/test.parquet data.train_batch_size=64 data.max_prompt_length=16 data.max_response_length=8
    actor_rollout_ref.model.path=$work/quickstart/sft/global_step_200/actor/huggingface actor_rollout_ref.rollout.n=8
    actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.logger=[console] trainer.test_freq=10
    reward.custom_reward_function.path=examples/quickstart/tasks.py trainer.default_local_dir=$work/run"

nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
part 60 check python3 -c "from verl.utils.env_check import check_env; check_env()"
part 120 quickstart python3 examples/quickstart/run.py --algorithm grpo --out "$work/quickstart"
part 60 one_gpu $train trainer.n_gpus_per_node=1 trainer.total_training_steps=10 trainer.save_freq=10
processes=$((gpus > 1 ? 2 : 1))
part 60 resumed $train trainer.n_gpus_per_node=$processes trainer.total_training_steps=12 trainer.save_freq=2
part 60 merged python3 -m verl.model_merger merge --backend fsdp --local_dir "$work/run/global_step_12/actor" \
    --target_dir "$work/merged"
part 60 generated python3 -m verl.trainer.main_generation data.path="$data/test.parquet" data.prompt_key=prompt \
    data.n_samples=8 data.batch_size=128 data.output_path="$work/answers.parquet" model.path="$work/merged" \
    rollout.temperature=0.6 rollout.top_p=0.95 rollout.response_length=8 trainer.n_gpus_per_node=$processes
part 60 evaluated python3 -m verl.trainer.main_eval data.path="$work/answers.parquet" data.response_key=responses \
    reward.custom_reward_function.path=examples/quickstart/tasks.py
printf '%s\n' "${codes[@]}"
