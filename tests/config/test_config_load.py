"""YAML, overrides, interpolation, types, and derived defaults."""

import subprocess
import sys

import pytest

from verl.config import Config, ConfigError, Problem, load_config, to_flat_dict
from verl.config.fields import derived_fields, fields_of
from verl.config.sources import read_overrides


def load(*overrides, **kwargs):
    return load_config(overrides=overrides, **kwargs)


@pytest.mark.parametrize("prefix", ["", "--", "+", "++", "--+"])
def test_leading_signs_of_an_override(prefix):
    assert load(f"{prefix}data.train_batch_size=64").data.train_batch_size == 64


FILES = ["a.parquet", "b.parquet"]
READ = [
    # lists as shells pass them on; one text is a list of one
    *((f"data.train_files={text}", FILES) for text in ('["a.parquet","b.parquet"]', "[a.parquet,b.parquet]")),
    ("data.train_files=['a.parquet', 'b.parquet']", FILES),
    ("data.train_files=a.parquet", ["a.parquet"]),
    ("trainer.logger=console", ["console"]),
    ("imports=my.pkg", ["my.pkg"]),
    ("actor_rollout_ref.actor.optim.lr=1e-6", 1e-6),
    ("actor_rollout_ref.actor.use_kl_loss=True", True),
    ("trainer.total_training_steps=null", None),
    ("data.max_prompt_length=1e3", 1000),
    ("critic.optim.betas=[0.8,0.9]", [0.8, 0.9]),
]


@pytest.mark.parametrize(("override", "value"), READ)
def test_values_of_overrides(override, value):
    found = to_flat_dict(load(override))[override.partition("=")[0]]
    assert found == value and type(found) is type(value)


#: YAML 1.1 reads 012 as 10, 12:30 as 750 and yes as true; a name is none of them, and a number is decimal
SCALARS = [
    *(("experiment_name", text, text) for text in ("012", "12:30", "yes", "1_000", "0x10", "2024-01-01", "1e3")),
    *(("seed", text, n) for text, n in (("010", 10), ("0042", 42), ("1_000", 1000), ("1e3", 1000), ("+5", 5))),
    *(("val_only", text, value) for text, value in (("yes", True), ("on", True), ("no", False), ("off", False))),
]


@pytest.mark.parametrize(("key", "text", "value"), SCALARS)
def test_scalars_of_overrides_and_files(key, text, value, tmp_path):
    file = tmp_path / "c.yaml"
    devices = f"placement: {{actor_devices: [{text}]}}\n" if key == "seed" else ""
    file.write_text(f"trainer:\n  {key}: {text}\n{devices}")
    config = load_config(file)
    for found in (load(f"trainer.{key}={text}").trainer[key], config.trainer[key]):
        assert found == value and type(found) is type(value)
    if key == "seed":
        assert load(f"actor_rollout_ref.rollout.temperature={text}").actor_rollout_ref.rollout.temperature == value
        assert config.placement.actor_devices == [value]


def test_a_tilde_removes_a_key_from_earlier_sources(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("data: {seed: 3}\nactor_rollout_ref: {rollout: {n: 4, engine_kwargs: {vllm: {a: 1}}}}\n")
    config = load_config(file, ["~data.seed", "~actor_rollout_ref.rollout.engine_kwargs", "~trainer.device=cuda"])
    assert config.data.seed == 42
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}
    assert load_config(file, ["~actor_rollout_ref.rollout"]).actor_rollout_ref.rollout.n == 1
    assert load_config(file, ["~data.seed", "data.seed=5"]).data.seed == 5
    with pytest.raises(ConfigError, match=r"data.sed \(override '~data.sed'\): unknown key; did you mean data.seed"):
        load("~data.sed")


def test_order_defaults_base_file_overrides(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trainer: {total_epochs: 2, save_freq: 2}")
    base = {"trainer": {"total_epochs": 1, "save_freq": 1, "test_freq": 1}, "data.max_prompt_length": 7}
    config = load_config(file, ["trainer.total_epochs=3"], base=base)
    trainer = config.trainer
    assert (trainer.total_epochs, trainer.save_freq, trainer.test_freq, trainer.nnodes) == (3, 2, 1, 1)
    assert config.data.max_prompt_length == 7


def test_interpolation(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    file = tmp_path / "c.yaml"
    file.write_text(
        """
data: {max_prompt_length: 100, max_response_length: "${data.max_prompt_length}"}
trainer:
  total_training_steps: ${oc.env:STEPS}
  experiment_name: run-${data.train_batch_size}-${oc.select:trainer.nothing,none}
actor_rollout: {model_name_or_path: "/m/${trainer.experiment_name}"}
critic: {model_name_or_path: "${actor_rollout.model_name_or_path}-critic"}
reward:
  reward_kwargs: {limit: "${actor_rollout_ref.rollout.response_length}", path: "${actor_rollout_ref.model.path}"}
"""
    )
    config = load_config(file, ["data.train_batch_size=8", "data.max_prompt_length=50"])
    assert config.data.max_response_length == 50  # the override reaches what refers to it
    assert config.trainer.total_training_steps == 12
    assert config.trainer.experiment_name == "run-8-none"
    assert config.actor_rollout_ref.model.path == "/m/run-8-none"
    assert config.critic.model.path == "/m/run-8-none-critic"  # under its second name
    assert config.reward.reward_kwargs == {"limit": 50, "path": "/m/run-8-none"}  # a default, and under its first name


def test_empty_sections_and_files(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("data:\nactor_rollout_ref:\n  rollout:\nactor_rollout:\n")
    assert load_config(file) == load_config() == Config()
    file.write_text("# nothing\n")
    assert load_config(file) == Config()


def test_the_key_n_with_and_without_quotes(tmp_path):
    for key in ("n", "'n'", '"n"'):
        file = tmp_path / "c.yaml"
        file.write_text(f"actor_rollout_ref: {{rollout: {{{key}: 5}}}}")
        assert load_config(file).actor_rollout_ref.rollout.n == 5


def test_a_free_mapping_can_be_emptied(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("actor_rollout_ref: {model: {override_config: {a: 1, b: {c: 2}}}}")
    key = "actor_rollout_ref.model.override_config"
    for overrides, expected in {
        (f"{key}.b.c=3",): {"a": 1, "b": {"c": 3}},
        (f"{key}={{}}",): {},
        (f"{key}={{}}", f"{key}.d=4"): {"d": 4},
    }.items():
        assert load_config(file, overrides).actor_rollout_ref.model.override_config == expected
    several = load(f"{key}={{attn: {{dropout: 0.1}}}}", f"+{key}.num_layers=2").actor_rollout_ref.model
    assert several.override_config == {"attn": {"dropout": 0.1}, "num_layers": 2}
    given = load("critic.optim.override_optimizer_config=null", "critic.optim.override_optimizer_config.eps=1e-9")
    assert given.critic.optim.override_optimizer_config == {"eps": 1e-9}


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(
        "data.train_files=~/a.parquet", "actor_rollout_ref.model.path=~/m", "reward.custom_reward_function.path=~/r.py"
    )
    assert config.data.train_files == [f"{tmp_path}/a.parquet"]
    assert config.actor_rollout_ref.model.path == config.critic.model.path == f"{tmp_path}/m"
    assert config.reward.custom_reward_function.path == f"{tmp_path}/r.py"


def test_derived_defaults():
    config = load(
        "trainer.seed=7", "actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.3"
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.3)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == actor.data_loader_seed == 7
    assert config.critic.data_loader_seed == 7


def test_null_restores_a_derived_default():
    config = load(
        "actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_low=null", "data.seed=null"
    )
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert config.data.seed == config.trainer.seed == 42


def test_derived_defaults_of_a_config_built_in_python():
    config = Config(trainer={"seed": 3}, data={"max_response_length": 9})
    assert (config.data.seed, config.actor_rollout_ref.rollout.response_length) == (3, 9)


def test_derived_fields_have_the_default_of_their_source():
    """So a section that is built on its own has the defaults of the whole."""
    values = to_flat_dict(Config())
    named = {"trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"}  # test_naming.py
    for key in derived_fields(Config).keys() - named:
        assert values[key] == fields_of(Config)[key].default, key


def test_a_small_batch_is_one_mini_batch():
    config = load("data.train_batch_size=48")
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 48
    from_text = load_config(base={"data": {"train_batch_size": "48"}})  # as an environment variable gives it
    assert from_text.critic.ppo_mini_batch_size == 48
    explicit = load("data.train_batch_size=48", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert explicit.critic.ppo_mini_batch_size == 16


def test_nothing_changes_after_loading():
    config = Config()
    with pytest.raises(ValueError, match=r'DataConfig is read-only: seed .* config.with_overrides\({"...seed": 1}\)'):
        config.data.seed = 1
    changed = config.with_overrides({"data": {"seed": 1}, "actor_rollout_ref.actor.clip_ratio": 0.3})
    assert (config.data.seed, changed.data.seed) == (42, 1)
    assert changed.actor_rollout_ref.actor.clip_ratio_high == 0.3  # follows from clip_ratio
    assert repr(changed.data) == "DataConfig(seed=1)"


def test_every_field_has_help_and_a_type():
    for key, found in fields_of(Config).items():
        assert len(found.help) > 5, key
        assert found.expected(), key


def test_extra_checks_are_reported_with_the_others():
    def never(config):
        yield Problem("data.seed", f"{config.data.seed} is unlucky")

    with pytest.raises(ConfigError) as error:
        load("data.seed=13", "actor_rollout_ref.rollout.temperature=0", extra_checks=[never])
    assert "data.seed (override 'data.seed=13'): 13 is unlucky" in str(error.value)
    assert len(error.value.problems) == 2


def test_loading_is_fast_and_needs_no_torch():
    code = (
        "import sys; from verl.config import load_config; load_config(overrides=['data.seed=1']);"
        "import time; print('torch' in sys.modules, time.process_time())"
    )
    torch, seconds = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert torch == "False"
    assert float(seconds) < 1.5  # 0.3 on an idle core


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"data: [1\n", "is not valid YAML"),
        (b"- a\n- b\n", "found list, expected a mapping of keys"),
        (b"data: {seed: 1}\ndata: {seed: 2}\n", "is not valid YAML: .*duplicate key"),
        (b"a: &x {b: *x}", "is not valid YAML: an anchor contains itself"),
        (b"a: &x [*x]", "is not valid YAML: an anchor contains itself"),
        (b"\x80\x02\xff", "is not a text file in UTF-8"),
        (b"data: \x00", "is not valid YAML"),
        # ten levels of ten aliases
        (
            b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b"*a%d," % (i - 1) * 10) for i in range(1, 11)),
            "is not valid YAML: .* more than 100,000 values",
        ),
    ],
)
def test_files_that_cannot_be_read(content, reason, tmp_path):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s)run.yaml:? {reason}"):
        load_config(tmp_path / "run.yaml")


def test_an_override_with_an_anchor_that_contains_itself():
    _, (problem,), _ = read_overrides(["data.train_files=&x [*x]"])
    assert "an anchor contains itself" in problem.message
