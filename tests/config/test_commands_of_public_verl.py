"""The commands of public verl's asynchronous trainers: `main_ppo` with a configuration."""

import pytest
import yaml

from verl.compat import MOVED
from verl.trainer import main_fully_async, main_one_step_off

DEVICES = ["rollout.nnodes=1", "rollout.n_gpus_per_node=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        (main_fully_async, [], ("fsdp", 4, 32, True)),
        (main_fully_async, ["async_training.trigger_parameter_sync_step=1"], ("fsdp", 1, 32, True)),
        (main_fully_async, ["--config-name=one_step_off_ppo_trainer"], ("fsdp", 1, 1024, True)),
        (main_one_step_off, [], ("fsdp", 1, 1024, True)),
        (main_one_step_off, ["trainer.async.max_staleness=2"], ("fsdp", 2, 1024, True)),
    ],
)
def test_the_configuration_of_a_command(module, arguments, expected, capsys):
    assert module.main(["--print-config", *DEVICES, *arguments]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    actor, correction = config["actor_rollout_ref"]["actor"], config["algorithm"]["rollout_correction"]
    found = actor["strategy"], config["trainer"]["async"]["max_staleness"], config["data"]["train_batch_size"]
    assert (*found, correction["bypass_mode"]) == expected


def test_a_file_is_not_combined_with_the_configuration_of_a_command(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 64}\n")
    for given in (["--config", str(tmp_path / "mine.yaml")], [f"--config-path={tmp_path}", "--config-name=mine"]):
        assert main_fully_async.main(["--print-config", *given, DEVICES[2]]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["data"]["train_batch_size"], config["trainer"]["async"]["max_staleness"]) == (64, 0)


def test_the_modules_of_the_commands():
    experimental = "verl.experimental."
    assert MOVED[experimental + "fully_async_policy.fully_async_main"] == main_fully_async.__name__
    assert MOVED[experimental + "one_step_off_policy.main_ppo"] == main_one_step_off.__name__
