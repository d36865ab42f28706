"""Bad input: the message names the key, what was found, what is allowed, the nearest key, and who said so."""

import pytest

from verl.config import ConfigError, load_config


def problems(*overrides, path=None, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, **kwargs)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("data.batch_size", "data.train_batch_size"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout.model_name_or_pth", "actor_rollout.model_name_or_path"),
        ("algoritm.gamma", "algorithm.gamma"),
    ],
)
def test_unknown_key_names_the_nearest(wrong, nearest):
    assert problems(f"{wrong}=1") == [f"{wrong} (override '{wrong}=1'): unknown key; did you mean {nearest}?"]


def test_unknown_key_without_a_near_one_lists_the_section():
    (problem,) = problems("placement.qqq=1")
    assert "unknown key (keys of placement: actor_devices, ref_devices" in problem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.n=eight", "found 'eight' (text), expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.n=0", "found 0, expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.n=1.5", "found 1.5, expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.n=true", "found true, expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.n=null", "found null, expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.n=[1]", "found [1] (a list), expected a whole number >= 1"),
        ("actor_rollout_ref.rollout.top_p=1.1", "found 1.1, expected a number > 0 and <= 1"),
        ("actor_rollout_ref.rollout.top_p=0", "found 0, expected a number > 0 and <= 1"),
        ("actor_rollout_ref.actor.clip_ratio=-0.1", "found -0.1, expected a number >= 0"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "found 1, expected a number > 1"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "found nan, expected a number >= 0"),
        ("actor_rollout_ref.actor.use_kl_loss=maybe", "found 'maybe' (text), expected true or false"),
        ("actor_rollout_ref.rollout.name=vlm", "expected one of hf, native, vllm, sglang, trtllm; did you mean vllm?"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "expected one of token-mean, token-sum"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[modle]", "expected a list of one of model, optimizer"),
        ("trainer.total_training_steps=0", "found 0, expected a whole number >= 1 or null"),
        ("critic.optim.betas=[0.9]", "expected a list of 2 numbers"),
        ("trainer.device=tpu", "expected one of auto, cpu, cuda"),
    ],
)
def test_wrong_types_and_ranges(override, message):
    key = override.split("=")[0]
    (problem,) = problems(override)
    assert problem.startswith(f"{key} (override {override!r}): ")
    assert message in problem


def test_a_section_is_no_value_and_a_value_no_section():
    (problem,) = problems("placement=3")
    assert "found 3, but this is a section with the keys actor_devices, ref_devices" in problem
    (problem,) = problems("data.train_files.a=1")
    assert "data.train_files holds a list of text, nothing is below it" in problem


def test_all_problems_come_at_once(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  train_batch_sise: 3\n  truncation: cut\nreward_function: [a, {b: 1}]\n")
    found = problems("trainer.nnodes=x", "actor_rollout_ref.rollout.multi_turn.enable=true", path=file)
    assert [problem.split(":")[0] for problem in found] == [
        "data.train_batch_sise (run.yaml line 2)",
        "actor_rollout_ref.rollout.multi_turn.enable (override 'actor_rollout_ref.rollout.multi_turn.enable=true')",
        "data.truncation (run.yaml line 3)",
        "reward.reward_function (run.yaml line 4)",
        "trainer.nnodes (override 'trainer.nnodes=x')",
    ]


def test_the_message_is_readable_and_no_traceback_of_pydantic():
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["data.seed=x"])
    assert str(error.value).splitlines() == [
        "one problem in the configuration:",
        "  1. data.seed (override 'data.seed=x'): found 'x' (text), expected a whole number >= 0",
    ]
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_followers_of_a_wrong_value_are_not_reported_again():
    assert len(problems("trainer.seed=x")) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_batch_size", "an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("~data.seed=", "keys cannot be removed"),
        ("data.train_files=[a", "the value is not YAML"),
    ],
)
def test_overrides_that_cannot_be_read(override, message):
    (problem,) = problems(override)
    assert problem.startswith(override.split("=")[0] or "=3")
    assert message in problem


def test_overrides_that_cannot_be_read_come_with_the_other_problems():
    assert len(problems("x", "y", "data.seed=z")) == 3


def test_a_preset_that_is_no_name():
    assert "found ['a'] (a list), expected text or null" in problems("algorithm.name=[a]")[0]


def test_files_that_cannot_be_read(tmp_path):
    assert "there is no file 'nowhere.yaml'" in problems(path="nowhere.yaml")[0]
    broken = tmp_path / "c.yaml"
    broken.write_text("data: [1\n")
    assert "is not YAML" in problems(path=broken)[0]
    broken.write_text("- a\n- b\n")
    assert "expected keys and values, found list" in problems(path=broken)[0]
    broken.write_text("data: {seed: 1}\ndata: {seed: 2}\n")
    assert "duplicate key" in problems(path=broken)[0]


def test_interpolations_that_lead_nowhere():
    (problem,) = problems("data.seed=${trainer.sed}")
    assert problem.startswith("data.seed (override 'data.seed=${trainer.sed}'): ${trainer.sed} cannot be resolved")
    assert problem.endswith("did you mean trainer.seed?")
    (problem,) = problems("trainer.project_name=${oc.env:VERL_SURELY_NOT_SET}")
    assert "VERL_SURELY_NOT_SET" in problem
