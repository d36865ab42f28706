#!/usr/bin/env bash
# Supervised fine-tuning on the worked solutions of GSM8K, in one process.
#
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=/path/to/model DATA=data/gsm8k bash examples/sft/gsm8k/run_sft_local.sh [key=value ...]
#
# Append any config key: `trainer.total_training_steps=5 data.train_batch_size=16`.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

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
    optim.lr=1e-5 \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=sft_local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=3 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
