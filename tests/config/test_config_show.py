"""Writing a configuration so that it loads again, the reference table, the other schemas, and the example files."""

import pytest
import yaml

from verl.config import Config, dump_config, load_config, reference_table, to_flat_dict
from verl.config.fields import fields_of, unflatten
from verl.config.schema import EvalConfig, GenerationConfig
from verl.utils.redaction import redacted

CHANGES = ["data.train_batch_size=64", "data.train_files=[a.parquet,b.jsonl]", "actor_rollout_ref.rollout.n=5"]
CHANGES += ["actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.3"]
CHANGES += ["critic.ppo_epochs=2", "critic.optim.betas=[0.8,0.9]", "trainer.experiment_name=012"]
CHANGES += ["trainer.logger=[console,wandb]", "reward.reward_kwargs.overlong_buffer.len=3"]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    "overrides", [CHANGES, ["algorithm.name=grpo", "actor_rollout_ref.actor.use_kl_loss=false"]], ids=["many", "preset"]
)
def test_a_written_configuration_loads_to_the_same(overrides, everything, tmp_path):
    """Also where a setting is the default, and the preset has another value."""
    config = load_config(overrides=overrides)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config, everything=everything))
    assert load_config(file) == config
    assert config.with_overrides(["trainer.seed=7"]) == load_config(overrides=[*overrides, "trainer.seed=7"])


def test_only_the_differences_are_written():
    assert yaml.safe_load(dump_config(load_config(overrides=CHANGES))) == {
        "data": {"train_batch_size": 64, "train_files": ["a.parquet", "b.jsonl"]},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 64, "clip_ratio": 0.1, "clip_ratio_high": 0.3},
            "rollout": {"n": 5},
        },
        "critic": {"ppo_epochs": 2, "optim": {"betas": [0.8, 0.9]}},
        "reward": {"reward_kwargs": {"overlong_buffer": {"len": 3}}},
        "trainer": {"experiment_name": "012", "logger": ["console", "wandb"]},
    }
    assert dump_config(Config()) == "{}\n"


def test_the_key_n_is_written_without_quotes():
    assert "    n: 5\n" in dump_config(load_config(overrides=CHANGES))


def test_flat_keys():
    flat = to_flat_dict(load_config(overrides=CHANGES))
    assert list(flat) == list(fields_of(Config))
    assert flat["critic.optim.betas"] == [0.8, 0.9]
    assert flat["reward.reward_kwargs"] == {"overlong_buffer": {"len": 3}}


def test_the_reference_table_has_a_row_for_every_key():
    lines = reference_table().splitlines()
    assert len(lines) == 2 + len(fields_of(Config))
    assert "| `critic.optim.lr` | float >= 0 | `1.0e-05` | peak learning rate |" in lines
    assert all(line.count("|") == 5 for line in lines)
    assert any("| `${trainer.seed}` |" in line for line in lines)


def test_generation_as_on_the_command_line():
    words = (
        "data.path=q.parquet data.prompt_key=prompt data.n_samples=8 data.batch_size=1024 data.output_path=out.parquet "
        "model.path=/m rollout.temperature=0.6 rollout.top_p=0.95 trainer.nnodes=1 trainer.n_gpus_per_node=2"
    )
    config = load_config(overrides=words.split(), schema=GenerationConfig)
    assert (config.data.n_samples, config.rollout.top_p, config.trainer.n_gpus_per_node) == (8, 0.95, 2)
    assert config.rollout.seed == config.trainer.seed


def test_evaluation_as_on_the_command_line():
    words = (
        "data.path=out.parquet data.prompt_key=prompt data.response_key=responses "
        "custom_reward_function.path=./recipe/r1/reward_score.py custom_reward_function.name=reward_func"
    )
    config = load_config(overrides=words.split(), schema=EvalConfig)
    assert config.data.path == ["out.parquet"]
    assert config.reward.custom_reward_function.name == "reward_func"


def test_values_of_environment_variables_are_not_saved():
    given = {"trainer.worker_env": {"HF_TOKEN": "s3cret"}, "trainer.seed": 7}
    given["ray_kwargs.ray_init"] = {"num_cpus": 4, "runtime_env": {"env_vars": {"API_KEY": "s3cret"}, "pip": ["a"]}}
    given["reward.custom_reward_function.reward_kwargs"] = {"api_key": "s3cret", "hf_token": "s3cret", "scale": 2}
    config = Config.model_validate(unflatten(given))
    assert "s3cret" not in dump_config(config, redact=True) + str(redacted(to_flat_dict(config)))
    saved = yaml.safe_load(dump_config(config, redact=True))
    assert saved["trainer"] == {"worker_env": {"HF_TOKEN": "<not saved>"}, "seed": 7}
    assert saved["ray_kwargs"]["ray_init"]["num_cpus"] == 4
    assert saved["ray_kwargs"]["ray_init"]["runtime_env"] == {"env_vars": {"API_KEY": "<not saved>"}, "pip": ["a"]}
    assert redacted(to_flat_dict(config)).keys() == to_flat_dict(config).keys()
    kwargs = saved["reward"]["custom_reward_function"]["reward_kwargs"]
    assert kwargs == {"api_key": "<not saved>", "hf_token": "<not saved>", "scale": 2}
    assert "s3cret" in dump_config(config)
    with pytest.raises(ValueError, match=r"reward_kwargs\.api_key.*was not saved with the configuration"):
        load_config(overrides=["reward.custom_reward_function.reward_kwargs.api_key=<not saved>"])
