"""The planner in a run: `verl plan`, the memory check, and `placement: auto`."""

import logging
from dataclasses import replace

import pytest

from verl.cli import plan as command
from verl.config import ConfigError, load_config
from verl.planner import devices
from verl.planner.devices import GIB
from verl.trainer.checks import planning
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

H200 = devices.built_in("H200")


@pytest.fixture
def on_gpu(monkeypatch):
    """Plan for an H200 with this much memory."""

    def use(memory: float = H200.memory) -> None:
        monkeypatch.setattr(planning, "host_profile", lambda name: replace(H200, memory=memory))

    return use


def test_the_plan_has_memory_and_time(settings, capsys):
    assert command.main(settings) == 0
    printed = capsys.readouterr().out
    assert "would train" in printed and "ok  memory" in printed
    assert "memory of actor, critic on 1 device" in printed and "update of the actor" in printed
    assert "s with responses of full length: gen " in printed


def test_a_run_that_does_not_fit_is_refused(settings, on_gpu, caplog):
    on_gpu(memory=1.2 * GIB)
    with pytest.raises(ValueError, match=r"memory: .* needs about 1.5\d GiB per device, but there are 1.20 GiB"):
        PPOTrainer(overrides=settings)
    on_gpu(memory=1.45 * GIB)  # within the error of the model
    PPOTrainer(overrides=settings)
    assert "but there are 1.45 GiB" in caplog.text


def test_placement_auto_sets_the_keys_of_the_best_plan(settings, on_gpu, caplog):
    on_gpu()
    caplog.set_level(logging.INFO, "verl.trainer")
    run = [*settings, "trainer.n_gpus_per_node=2", "placement=auto", "actor_rollout_ref.actor.use_kl_loss=true"]
    trainer = PPOTrainer(overrides=run)
    placement = trainer.config.placement
    assert not placement.auto and "placement=auto sets placement.auto=False" in caplog.text
    assert "runner-up" in caplog.text
    chosen = [placement.actor_devices, placement.ref_devices, placement.critic_devices]
    assert trainer.config.trainer.overlap == (len(trainer.pools) > 1) == (None not in chosen)
    assert f"placement.actor_devices={placement.actor_devices}" in caplog.text or None in chosen


def test_placement_auto_refuses_other_placements(settings, on_gpu):
    on_gpu()
    run = [*settings, "trainer.n_gpus_per_node=2", "placement=auto", "placement.actor_devices=[0]"]
    with pytest.raises(ValueError, match=r"placement.actor_devices is set: remove one of them"):
        PPOTrainer(overrides=run)
    with pytest.raises(ConfigError, match="reward_devices, or auto"):
        load_config(overrides=["placement=best"])


def test_placement_auto_needs_a_model_that_is_modelled(settings, on_gpu, monkeypatch):
    on_gpu()

    def unknown(*_):
        raise ValueError("a mixture of experts")

    monkeypatch.setattr(planning, "shapes_of", unknown)
    with pytest.raises(ValueError, match="placement=auto is not possible: a mixture of experts"):
        PPOTrainer(overrides=[*settings, "placement=auto"])
    assert main(["--dry-run", *settings]) == 0  # no estimate, no error


def test_a_simulation_needs_no_files(capsys):
    assert command.main(["--gpus", "8", "--gpu", "A100", "--model", "7B", "--ref"]) == 0
    printed = capsys.readouterr().out
    assert "best" in printed and "runner-up" in printed and "fits into 79.2 GiB (A100)" in printed
    assert command.main(["--gpus", "1", "--gpu", "A100", "--model", "70B"]) == 1
    assert "smallest change that fits" in capsys.readouterr().out
    assert command.main(["--gpus", "1", "--gpu", "B100"]) == 1
    assert "no profile of the GPU 'B100'" in capsys.readouterr().err
