"""Runs with a mixture of experts: native generates what training computes, and routers replay their choices."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from tests.trainer.conftest import run_settings
from verl.config import ConfigError, load_config
from verl.engines.expert_parallel import check_experts
from verl.trainer import main_ppo
from verl.trainer.local_trainer import LocalPPOTrainer

POLICY = "actor_rollout_ref."
RECORDS = f"{POLICY}rollout.enable_rollout_routing_replay=true"
R2, R3 = (f"{POLICY}actor.router_replay.mode={mode}" for mode in ("R2", "R3"))


def run(folder: Path, out: Path, *more: str) -> list[dict]:
    """The metrics of two steps."""
    settings = [*run_settings(folder, out), "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", *more]
    LocalPPOTrainer(overrides=settings).fit()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "moe/max_load" in line]  # without validations


def test_a_run_replays_the_choices_of_its_rollout(mixture, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    steps = run(mixture, tmp_path, RECORDS, R3, "trainer.test_freq=2")
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/logprob_gap_max"] < 1e-4  # float32: of two implementations of one model
        assert 1 <= step["moe/max_load"] <= 4 and 0 < step["moe/router_entropy"] <= 1.39  # log 4
        assert 0 <= step["moe/routing_mismatch"] < 0.5


def test_one_update_per_step_compares_the_same_weights(mixture, tmp_path):
    """Rollout and training are both float32, so their routers agree; the choices are only compared."""
    (first, _) = run(mixture, tmp_path, f"{POLICY}actor.ppo_mini_batch_size=4", RECORDS)
    assert first["moe/routing_mismatch"] == 0


def test_updates_replay_what_old_log_probs_recorded(mixture, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    steps = run(mixture, tmp_path, R2)
    assert all(step["moe/routing_mismatch"] > 0 for step in steps)  # the second update of a step has other weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([R3], "'R3' replays the experts that the rollout has recorded: set .*enable_rollout_routing_replay=true"),
        ([R2, RECORDS], "replays what training records: use false, or R3"),
        ([R3, RECORDS, f"{POLICY}rollout.deterministic=true"], "no batch-invariant kernels"),
        ([R3, RECORDS, f"{POLICY}actor.strategy=custom"], "strategy=custom does not support router replay"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=settings)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["actor.router_replay.mode=R2"], "router replay needs a mixture of experts, and llama models have no experts"),
        (["actor.fsdp_config.expert_parallel_size=2"], "expert_parallel_size=2, but llama models have no experts"),
    ],
)
def test_a_dense_model_is_refused_before_it_is_loaded(keys, message, settings, capsys):
    overrides = [f"actor_rollout_ref.{key}" for key in keys]
    assert main_ppo.main([*settings, "trainer.n_gpus_per_node=2", *overrides, "--dry-run"]) == 1
    assert message in capsys.readouterr().err


def test_experts_are_divided_by_ranks_and_ranks_by_experts():
    config = Qwen3MoeConfig(num_experts=6)
    check_experts(config, 3, 6)
    with pytest.raises(ValueError, match="=4 does not divide the number of ranks, 6"):
        check_experts(config, 4, 6)
    with pytest.raises(ValueError, match="=4 does not divide the model's 6 experts"):
        check_experts(config, 4, 8)
