"""verl config convert: figures by hand, and every key of the file is in the result or in a remark."""

import json

import pytest
import yaml

from verl.cli.config import as_text, print_converted
from verl.config import ConfigError, load_config
from verl.config.fields import unflatten
from verl.config.public.convert import convert, read_source
from verl.config.schema import Config, SFTConfig

_ACTOR = "actor_rollout_ref.actor."


def converted(tmp_path, arguments: dict, source="auto", gpus=1, schema=Config):
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(arguments))
    layer, remarks = read_source(path)
    found = convert(layer, source, schema, gpus)
    found.remarks += remarks
    found.check()
    return found


def remark(found, name: str) -> str:
    (line,) = [remark for remark in found.remarks if name in remark]
    return line


GRPO = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
GRPO |= {"num_generations": 8, "num_iterations": 1, "max_steps": 200, "save_steps": 50, "num_train_epochs": 2.0}


def test_batch_sizes_and_steps_of_grpo(tmp_path):
    """8 completions x 2 GPUs x 4 = 64 per update = 8 prompts; two updates per generation, which is one step here."""
    values = converted(tmp_path, GRPO, gpus=2).values
    assert values["data.train_batch_size"] == 16 and values[_ACTOR + "ppo_mini_batch_size"] == 8
    assert values[_ACTOR + "ppo_micro_batch_size_per_gpu"] == 8 and values["actor_rollout_ref.rollout.n"] == 8
    assert values["trainer.total_training_steps"] == 100 and values["trainer.save_freq"] == 25
    assert values["trainer.total_epochs"] == 2
    by_size = converted(tmp_path, {**GRPO, "steps_per_generation": None, "generation_batch_size": 256}).values
    assert by_size["data.train_batch_size"] == 32 and by_size[_ACTOR + "ppo_mini_batch_size"] == 4


def test_sizes_that_are_no_whole_number_of_prompts(tmp_path):
    sizes = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_generations": 3}
    found = converted(tmp_path, GRPO | sizes)
    assert "data.train_batch_size" not in found.values
    (line,) = [line for line in found.remarks if "per_device_train_batch_size: 8" in line]
    assert "data.train_batch_size would be 2.66667, expected an integer" in line
    odd = converted(tmp_path, {**GRPO, "max_steps": 3})
    assert "would be 1.5" in remark(odd, "max_steps")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"beta": 0.04}, {_ACTOR + "use_kl_loss": True, _ACTOR + "kl_loss_coef": 0.04}),
        ({"num_generations": 4}, {_ACTOR + "use_kl_loss": False, _ACTOR + "loss_agg_mode": "token-mean"}),  # defaults
        ({"loss_type": "dr_grpo"}, {_ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"loss_type": "cispo"}, {"algorithm.name": "cispo"}),
        ({"beta": 0, "scale_rewards": False}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        ({"beta": 0, "importance_sampling_level": "sequence"}, {_ACTOR + "policy_loss.loss_mode": "gspo"}),
        ({"beta": 0, "adam_beta1": 0.8, "adam_beta2": 0.99}, {_ACTOR + "optim.betas": [0.8, 0.99]}),
        ({"beta": 0, "top_k": 0}, {"actor_rollout_ref.rollout.top_k": -1}),
        ({"beta": 0, "report_to": "wandb"}, {"trainer.logger": ["console", "jsonl", "wandb"]}),
        ({"beta": 0, "report_to": "none"}, {"trainer.logger": ["console", "jsonl"]}),
        ({"beta": 0, "save_strategy": "no"}, {"trainer.save_freq": -1}),
        ({"max_length": 64, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
         {"data.max_length": 64, "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 4, "optim.lr": 2e-5}),
    ],
)  # fmt: skip
def test_values_that_change(arguments, expected, tmp_path):
    found = converted(tmp_path, arguments)
    assert expected.items() <= found.values.items()
    assert not [line for line in found.remarks if line.startswith("problem")]
    load_config(base=unflatten(found.values), schema=found.schema)


def test_nothing_of_trl_is_dropped_silently(tmp_path):
    given = GRPO | {"push_to_hub": True, "reward_funcs": ["f"], "lr_scheduler_type": "polynomial", "lora_r": None}
    found = converted(tmp_path, given)
    schedule = converted(tmp_path, GRPO | {"lr_scheduler_type": "linear"}).values[_ACTOR + "optim.lr_scheduler_type"]
    assert schedule == "linear"
    assert remark(found, "push_to_hub") == "no counterpart: push_to_hub: True"
    assert "custom_reward_function.path" in remark(found, "reward_funcs")
    assert "constant, cosine or linear" in remark(found, "polynomial")
    assert remark(found, "null in the file") == "null in the file: lora_r"
    assert "beta=0.0" in remark(found, "TRL's defaults")
    assert converted(tmp_path, {"learning_rate": 1e-5, "packing": True}).schema is SFTConfig


SCRIPT = """
set -x
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet data.train_batch_size=1024 \\
    actor_rollout_ref.model.use_shm=True \\
    actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.strategy=megatron \\
    critic.model.path=null +trainer.foo=3 data.audio_key=audios \\
    trainer.logger='["console","wandb"]' $@
"""


def test_a_script_for_public_verl(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    layer, remarks = read_source(path)
    assert remarks == [
        "not a setting: --config-name=ppo_trainer",
        "shell variables, replace them with values: data.train_files",
    ]
    found = convert(layer, "auto", Config, 1)
    found.check()
    assert found.values["algorithm.adv_estimator"] == "grpo" and found.values[_ACTOR + "optim.clip_grad"] == 0.5
    assert found.values["trainer.logger"] == ["console", "wandb"]
    assert "data.train_batch_size" not in found.values  # 1024 is the default
    assert remark(found, "use_shm").startswith("no effect here (speed or memory only)")
    assert "unknown key" in remark(found, "trainer.foo") and remark(found, "strategy: ").startswith("problem: ")
    assert remark(found, "audio_key").startswith("off in the file, and not supported here")
    assert "trainer.n_gpus_per_node=8 (here 1)" in remark(found, "verl's defaults")
    words = " ".join([*found.values, *found.remarks])
    for key in layer:
        assert key in words or key in (_ACTOR + "grad_clip", "data.train_batch_size", "critic.model.path"), key


def test_both_forms_load(tmp_path):
    found = converted(tmp_path, GRPO | {"output_dir": "a b", "run_name": "012"})
    text = as_text(found, "x", overrides=False)
    assert text.startswith("# converted from x; use with verl train")
    assert unflatten(found.values) == yaml.safe_load(text)
    script = tmp_path / "run.sh"
    script.write_text(as_text(found, "x", overrides=True))
    layer, _ = read_source(script)
    by_words = load_config(base={key: setting.value for key, setting in layer.items()})
    assert by_words == load_config(base=unflatten(found.values))


def test_wrong_files(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        read_source(tmp_path / "nothing.sh")
    with pytest.raises(ValueError, match="--from trl: expected auto, verl, trl-grpo"):
        convert({}, "trl", Config, 1)
    with pytest.raises(ValueError, match="cliprange, kl_coef: a PPOConfig is not converted"):
        converted(tmp_path, {"kl_coef": 0.1, "cliprange": 0.3})


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.yaml", ""), ("run.json", "{}"), ("run.sh", "#!/bin/bash\nset -x\n"), ("run.yaml", "\n# a\n")],
)
def test_a_file_without_settings(name, text, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert print_converted(path, "auto", "ppo", 1, overrides=False) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "expected a configuration to convert, found no setting" in shown.err
