"""Checks of asynchronous training: the cause is alone, and what an error proposes is accepted."""

import pytest

from verl.config import ConfigError, load_config

K1 = ["algorithm.adv_estimator=grpo", "trainer.async.max_staleness=1"]
TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SEQUENCE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
#: 3 x 3 responses of a mini-batch
ROWS = ["data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.rollout.n=3"]


def problems(*overrides: str) -> list[str]:
    """The problems of a configuration, "key: text"."""
    try:
        load_config(overrides=[*K1, *overrides])
    except ConfigError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("settings", [[], [f"{TENSOR}=2"], [f"{TENSOR}=4", *ROWS], [f"{SEQUENCE}=2"], ROWS])
def test_a_missing_placement_is_the_only_problem_and_its_fix_is_accepted(devices, settings):
    """Neither rank counts nor tensor-parallel sizes are checked against devices that the run will not have."""
    run = [f"trainer.n_gpus_per_node={devices}", *settings]
    (found,) = problems(*run)
    assert found.startswith("trainer.async.max_staleness: 1, but generation overlaps training only on separate devices")
    assert "use placement=auto, or set placement.actor_devices and placement.rollout_devices" in found
    assert ("trainer.n_gpus_per_node=2 or more" in found) == (devices == 1)
    assert not problems(*run, "placement=auto")
    if devices == 6 and not settings:
        assert not problems(*run, "placement.actor_devices=[0,1]", "placement.rollout_devices=[2,3,4,5]")


def test_other_problems_follow_the_placement():
    first, second = problems("trainer.n_gpus_per_node=2", "algorithm.shuffle_rewards=true")
    assert "separate devices" in first and "permutes the rewards" in second
    unrelated = problems("trainer.n_gpus_per_node=2", f"{TENSOR}=2", "actor_rollout_ref.rollout.name=hf")
    assert "separate devices" in unrelated[0] and "not supported by" in unrelated[1] and len(unrelated) == 2


@pytest.mark.parametrize("method", ["collective", "auto"])
def test_the_weight_sync_is_that_of_separate_devices(method):
    """No second problem, of a setting that is right as soon as there is a placement."""
    run = ["trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout.weight_sync={method}"]
    assert len(problems(*run)) == 1 and not problems(*run, "placement=auto")
    (found,) = problems(*run[:1], "placement=auto", "actor_rollout_ref.rollout.weight_sync=reshard")
    assert "found reshard, but the rollout has separate devices" in found


def test_hosts_that_do_not_match_are_the_cause():
    """`rollout.nnodes` asks for devices of the rollout: the placement is missing because the sizes differ."""
    run = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.nnodes=1"]
    (found,) = problems(*run, "actor_rollout_ref.rollout.n_gpus_per_node=2")
    assert found.startswith("actor_rollout_ref.rollout.n_gpus_per_node: 2, but the hosts of training and rollout")


def test_a_placement_that_shares_the_devices_is_named():
    (found,) = problems("trainer.n_gpus_per_node=2", "placement.rollout_devices=[0,1]")
    assert "separate devices" in found
