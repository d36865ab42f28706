#!/usr/bin/env bash
# Supervised fine-tuning of a 0.5B model on GSM8K with sequence parallelism over 2 GPUs and Liger kernels.
#
#   pip install liger-kernel
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=data/gsm8k bash examples/sft/gsm8k/run_qwen_05_sp2_liger.sh [key=value ...]
#
# With ulysses_sequence_parallel_size=2 two neighboring GPUs share the tokens of every sequence. N_GPUS is the number of
# processes, a multiple of 2. `torchrun --nproc_per_node=N -m verl.trainer.sft_trainer` takes the same keys. One step
# with a tiny random model on a CPU, which has no Liger kernels:
#
#   python examples/quickstart/make_tiny_model.py --like qwen2 --out data/tiny
#   MODEL=data/tiny DATA=data/gsm8k bash examples/sft/gsm8k/run_qwen_05_sp2_liger.sh \
#       model.use_liger=false data.train_batch_size=8 data.train_max_samples=64 data.val_max_samples=16 \
#       trainer.total_training_steps=1
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}
N_GPUS=${N_GPUS:-2}

exec "${PYTHON:-python}" -m verl.trainer.sft_trainer \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.prompt_key=extra_info \
    data.prompt_dict_keys='[question]' \
    data.response_key=extra_info \
    data.response_dict_keys='[answer]' \
    data.train_batch_size=256 \
    data.max_length=2048 \
    model.path="$MODEL" \
    model.use_liger=true \
    engine.ulysses_sequence_parallel_size=2 \
    optim.lr=1e-4 \
    trainer.n_gpus_per_node="$N_GPUS" \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=qwen_05_sp2_liger \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=3 \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=after_each_epoch \
    "$@"
