"""SFT command lines as public scripts of several verl releases write them."""

import shlex

import pytest

from verl.config import load_config
from verl.config.schema.sft import SFTConfig

COMMON = "data.train_files=train.parquet data.val_files=test.parquet trainer.project_name=gsm8k-sft"
OLD = f"{COMMON} model.partial_pretrain=org/model trainer.default_hdfs_dir=null"
PAIRS = "data.prompt_key=extra_info data.response_key=extra_info +data.prompt_dict_keys=['question']"
CALLS = {
    "pairs": (f"{OLD} {PAIRS} +data.response_dict_keys=['answer'] optim.lr=1e-4 data.micro_batch_size_per_gpu=4 "
     "trainer.total_epochs=4 trainer.logger=['console','wandb']",
     {"model.path": "org/model", "data.response_dict_keys": ["answer"], "data.prompt_dict_keys": ["question"]}),
    "sequence parallelism, Liger": (
        f"{OLD} {PAIRS} data.micro_batch_size=4 model.use_liger=True trainer.logger=console "
        "ulysses_sequence_parallel_size=2 use_remove_padding=true",
        {
            "engine.ulysses_sequence_parallel_size": 2,
            "model.use_remove_padding": True,
            "model.use_liger": True,
            "data.micro_batch_size_per_gpu": 1,
        },
    ),
    "few sequences for many GPUs": (f"{OLD} data.micro_batch_size=3 trainer.n_gpus_per_node=8",
     {"data.micro_batch_size_per_gpu": 1}),
    "LoRA": (
        f"{OLD} {PAIRS} model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear model.strategy=fsdp2 "
        "model.use_shm=False",
        {"model.lora_rank": 32, "model.target_modules": ["all-linear"], "engine.strategy": "fsdp2"},
    ),
    "chats": (
        f"{OLD} data.multiturn.enable=true data.multiturn.messages_key=conversation data.multiturn.tools_key=tools "
        "data.multiturn.enable_thinking_key=enable_thinking",
        {"data.messages_key": "conversation"},
    ),
    "chats in the default column": (f"{OLD} data.multiturn.enable=true", {"data.messages_key": "messages"}),
    "no chats": (f"{OLD} data.multiturn.enable=false data.multiturn.messages_key=conversation data.prompt_key=question",
     {"data.messages_key": None, "data.prompt_key": "question"}),
    "FSDP of older releases": (
        f"{OLD} model.fsdp_config.model_dtype=bf16 model.fsdp_config.wrap_policy.min_num_params=0 "
        "model.fsdp_config.cpu_offload=True model.fsdp_config.offload_params=True model.external_lib=null "
        "model.enable_gradient_checkpointing=True data.balance_dp_token=False data.chat_template=null "
        "trainer.checkpoint.save_contents=[model,hf_model]",
        {
            "engine.model_dtype": "bf16",
            "engine.offload_policy": True,
            "checkpoint.save_contents": ["model", "hf_model"],
            "checkpoint.load_contents": ["model", "hf_model"],
        },
    ),
    "optimizer of older releases": (
        f"{OLD} optim.betas=[0.9,0.95] optim.weight_decay=0.01 optim.warmup_steps_ratio=0.1 optim.clip_grad=0.5 "
        "optim.lr_scheduler=cosine",
        {
            "optim.betas": (0.9, 0.95),
            "optim.lr_warmup_steps_ratio": 0.1,
            "optim.lr_scheduler_type": "cosine",
            "optim.clip_grad": 0.5,
        },
    ),
    "names of two releases": (
        "data.train_files=a.parquet data.messages_key=messages data.pad_mode=no_padding optim.lr=1e-4 "
        "model.partial_pretrain=/m model.fsdp_config.model_dtype=bf16 engine.strategy=fsdp2 trainer.total_epochs=2 "
        "optim.warmup_style=cosine trainer.profile_interval=[-1,-1]",
        {"optim.lr": 1e-4, "optim.lr_scheduler_type": "cosine", "model.path": "/m", "engine.model_dtype": "bf16"}
        | {"engine.strategy": "fsdp2", "data.train_batch_size": 256, "data.use_dynamic_bsz": True, "data.seed": 1},
    ),
    "engine form": ("data.train_files=train.parquet data.val_files=null data.train_batch_size=256 data.max_length=2048 "
     "data.pad_mode=no_padding data.truncation=error data.use_dynamic_bsz=True data.max_token_len_per_gpu=65536 "
     "data.messages_key=messages data.num_workers=4 data.ignore_input_ids_mismatch=True model.path=org/model "
     "model.use_remove_padding=True optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.2 optim.min_lr_ratio=0.1 "
     "optim.warmup_style=cosine engine.strategy=fsdp engine.fsdp_size=-1 engine.ulysses_sequence_parallel_size=1 "
     "engine.mixed_precision.param_dtype=bf16 trainer.test_freq=after_each_epoch trainer.save_freq=after_each_epoch "
     "trainer.max_ckpt_to_keep=1 trainer.resume_mode=disable trainer.total_training_steps=null "
     "trainer.balance_batch=true checkpoint.save_contents=[model,optimizer,extra]", {
     "trainer.test_freq": "after_each_epoch", "trainer.save_freq": "after_each_epoch", "data.val_files": [],
     "engine.dtype": "bf16", "optim.lr_scheduler_type": "cosine", }),
    "Megatron": (
        "data.train_files=a.parquet data.train_batch_size=64 engine=megatron optim=megatron model=hf_model "
        "model.path=/m model.use_remove_padding=False engine.use_remove_padding=False engine.use_megatron_fsdp=True "
        "engine.context_parallel_size=2 +engine.override_transformer_config.cp_comm_type=p2p "
        "+engine.override_transformer_config.mtp_num_layers=null optim.lr=1e-4 optim.min_lr=1e-5",
        {"engine.strategy": "megatron", "optim.min_lr_ratio": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_loads(name):
    call, expected = CALLS[name]
    config = load_config(None, shlex.split(call), base={"trainer.n_gpus_per_node": 4}, schema=SFTConfig)
    found = {key: config[key.split(".")[0]][key.split(".")[1]] for key in expected}
    assert found == expected


def test_offloading_on_one_device_keeps_the_weights_in_host_memory():
    config = load_config(None, shlex.split(f"{OLD} model.fsdp_config.cpu_offload=True"), schema=SFTConfig)
    assert (config.engine.param_offload, config.engine.offload_policy) == (True, False)
