"""Edits of the PPO flow: what an operator before the KL does to rewards stays; a missing column is found at once."""

import pytest

from tests.trainer.runs import fit, untimed
from verl import Operator
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.utils.rng import seed_everything


def add_one(batch):
    return {"token_level_rewards": batch.batch["token_level_rewards"] + batch.batch["response_mask"]}


@pytest.mark.parametrize("kl", ["true", "false"])
def test_rewards_that_were_edited_reach_the_estimator(kl, settings):
    class Edited(LocalPPOTrainer):
        def build_flow(self):
            edit = Operator("edit", add_one, reads=("token_level_rewards",), writes=("token_level_rewards",))
            return super().build_flow().insert_after("reward", edit)

    chosen = ["algorithm.name=rloo", f"algorithm.use_kl_in_reward={kl}", "algorithm.kl_ctrl.kl_coef=1e-6"]
    _, (report,) = fit([*settings, *chosen, "trainer.total_training_steps=1"], Edited)
    batch = report.batch.batch
    added = (batch["token_level_rewards"] - batch["token_level_scores"])[batch["response_mask"].bool()]
    assert added.tolist() == pytest.approx([1.0] * len(added), abs=1e-3)


def test_a_flow_without_the_reference_that_its_loss_needs_does_not_compile(settings):
    class Without(LocalPPOTrainer):
        def build_flow(self):
            return super().build_flow().remove("ref")

    with pytest.raises(ValueError, match=r"'update_actor' reads 'ref_log_prob', but no upstream operator writes it"):
        Without(overrides=[*settings, "algorithm.name=grpo", "actor_rollout_ref.actor.use_kl_loss=true"])


@pytest.mark.parametrize(
    "score, found", [("1.0", "all scores are 1"), ("sum(map(ord, ground_truth)) % 2", "scores are from 0 to 1")]
)
def test_ties_in_every_group_are_said(score, found, settings, paid_by, caplog):
    chosen = ["algorithm.name=grpo", paid_by(f"return {score}"), "trainer.total_training_steps=2"]
    assert LocalPPOTrainer(overrides=[*settings, *chosen]).fit()["reward/tied_groups"] == 1.0
    assert caplog.text.count(f"the same score ({found}), so no advantage can be computed") == 1


def test_the_time_to_wait_for_other_ranks_reaches_every_worker(settings):
    chosen = ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true", "actor_rollout_ref.nccl_timeout=7200"]
    specs = LocalPPOTrainer(overrides=[*settings, *chosen]).worker_specs()
    assert specs["critic"].kwargs["timeout"] == 7200
    assert [specs[role].kwargs["config"].nccl_timeout for role in ("actor", "ref")] == [7200, 7200]


def test_the_seconds_of_a_step_are_those_of_all_operators(settings):
    _, reports = fit([*settings, "trainer.total_training_steps=2"])
    for metrics, parts in ((report.metrics, sum(report.timings.values())) for report in reports):
        assert parts <= metrics["timing_s/step"] < parts + 0.5
        assert metrics["timing_s/step"] > metrics["timing_s/update_actor"] + metrics["timing_s/gen"]
        tokens = metrics["perf/throughput"] * metrics["timing_s/step"]
        assert tokens == pytest.approx(metrics["perf/total_num_tokens"])


def test_a_loop_of_single_steps_trains_as_fit_does(settings, tmp_path):
    chosen = [*settings, "algorithm.name=grpo", "trainer.total_training_steps=1"]
    _, (theirs,) = fit(chosen)
    own = LocalPPOTrainer(overrides=[*chosen, f"trainer.default_local_dir={tmp_path}/own"])
    with pytest.raises(RuntimeError, match=r"role 'actor' has no workers: call start\(\) first, or use fit"):
        own.roles["actor"]
    seed_everything(own.config.trainer.seed)
    own.init_workers()
    with pytest.raises(ValueError, match=r"numbered from 1, found global_step 0: call trainer.step\(\)"):
        own.pipeline.run()
    own = LocalPPOTrainer(overrides=[*chosen, f"trainer.default_local_dir={tmp_path}/own"])
    seed_everything(own.config.trainer.seed)
    own.init_workers()
    expected = untimed(theirs, "weight_sync/canary")  # fit checks before step 1
    assert untimed(own.step(), "weight_sync/canary") == expected
    assert "actor/grad_norm" in expected and "critic/score/mean" in expected
    own.shutdown()
