"""The commands of public verl's trainers and recipes: which module each is, with which configuration."""

import importlib
import importlib.util

import pytest
import yaml

import verl.recipe  # noqa: F401 (the import hook)
from verl.compat import MOVED
from verl.trainer.main_asynchronous import COMMANDS

DEVICES = ["rollout.nnodes=1", "rollout.n_gpus_per_node=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
AUTO = ["trainer.n_gpus_per_node=2"]


@pytest.mark.parametrize(
    ("package", "arguments", "expected"),
    [
        ("fully_async_policy", DEVICES, ("fsdp", 4, 32, True)),
        (
            "fully_async_policy",
            [*DEVICES, "async_training.trigger_parameter_sync_step=1"],
            ("fsdp", 1, 32, True),
        ),
        (
            "fully_async_policy",
            [*DEVICES, "--config-name=one_step_off_ppo_trainer"],
            ("fsdp", 1, 1024, True),
        ),
        ("one_step_off_policy", DEVICES, ("fsdp", 1, 1024, True)),
        ("one_step_off_policy", [*DEVICES, "trainer.async.max_staleness=2"], ("fsdp", 2, 1024, True)),
        ("partial_rollout", [*AUTO, "--config-path=../../verl/trainer/config"], ("fsdp", 1, 1024, False)),
        ("reward_queue", DEVICES, ("fsdp", 4, 32, True)),
        ("reward_queue", [*DEVICES[1:], "--config-name=fully_async"], ("fsdp", 4, 32, True)),
        ("async_flow", AUTO, ("fsdp", 1, 1024, False)),
        ("async_flow", [*AUTO, "async_flow.staleness=3"], ("fsdp", 3, 1024, False)),
    ],
)
def test_the_configuration_of_a_command(package, arguments, expected, capsys):
    assert COMMANDS[package](["--print-config", *arguments]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    actor, correction = config["actor_rollout_ref"]["actor"], config["algorithm"]["rollout_correction"]
    ahead = config["trainer"]["async"]
    found = actor["strategy"], ahead["max_staleness"], config["data"]["train_batch_size"], correction["bypass_mode"]
    assert found == expected and ahead["partial_rollout"]
    assert config["placement"]["auto"] == (arguments[: len(AUTO)] == AUTO)


def test_a_file_is_not_combined_with_the_configuration_of_a_command(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 64}\n")
    for given in (["--config", str(tmp_path / "mine.yaml")], [f"--config-path={tmp_path}", "--config-name=mine"]):
        assert COMMANDS["fully_async_policy"](["--print-config", *given, DEVICES[2]]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["data"]["train_batch_size"], config["trainer"]["async"]["max_staleness"]) == (64, 0)


@pytest.mark.parametrize(
    ("published", "module"),
    [
        ("verl.experimental.fully_async_policy.fully_async_main", "main_asynchronous"),
        ("verl.experimental.one_step_off_policy.main_ppo", "main_asynchronous"),
        ("verl.recipe.partial_rollout.main_ppo", "main_asynchronous"),
        ("verl.recipe.async_flow.grpo_main", "main_asynchronous"),
        ("verl.recipe.reward_queue.main", "main_asynchronous"),
        ("verl.experimental.transfer_queue.main_ppo", "main_ppo"),
        ("verl.recipe.fault_recover.main_ppo", "main_ppo"),
        ("verl.trainer.main_generation_server", "main_generation"),
        ("verl.trainer.sft_trainer_ray", "sft_trainer"),
    ],
)
def test_the_modules_of_the_commands(published, module):
    assert MOVED[published] == f"verl.trainer.{module}"
    spec = importlib.util.find_spec(published.removeprefix("verl.") if "recipe" in published else published)
    assert spec.origin.endswith(f"/{module}.py") and spec.name.split(".")[-2] in (*COMMANDS, *published.split("."))


def test_a_recipe_that_does_not_exist_is_one_message():
    for name in ("recipe.poise.main", "recipe.dapo.other.main_dapo"):
        with pytest.raises(ModuleNotFoundError, match=r"does not exist here. The recipes are dapo, .*, sppo; one that"):
            importlib.import_module(name)
    assert importlib.util.find_spec("recipe.sppo.main_sppo") is not None
