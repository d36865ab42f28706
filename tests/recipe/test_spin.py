"""verl/recipe/spin: pairs of data and policy, a reference that is updated and resumed, and pairs by reward."""

import json

import pytest
import torch

from tests.recipe.checks import assert_resumes
from tests.trainer.runs import fit
from verl.recipe.spin import SPINTrainer

OWN = ["actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]


@pytest.fixture
def played(settings, tiny, tmp_path):
    """The settings of a run on prompts with a response."""
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"response": row["answer"][::-1]}) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return [*settings, f"data.train_files={tmp_path / 'train.jsonl'}", *OWN]


def weights_of(trainer, role):
    return {name: value.clone() for name, value in trainer.roles[role].worker.engine.weights()}


def test_the_response_of_the_data_is_chosen(played):
    trainer, reports = fit([*played, "trainer.total_training_steps=1", "trainer.ref_update_freq=-1"], SPINTrainer)
    names = [op.name for op in trainer.pipeline.operators]
    assert names[2:] == ["gen", "sleep_rollout", "demonstrations", "reward", "pairs", "ref", "update_actor",
                         "sync_weights"]  # fmt: skip
    batch = reports[0].batch
    assert len(batch) == 8
    for row in range(0, 8, 2):
        ids = batch.batch["responses"][row][batch.batch["response_mask"][row].bool()]
        expected = trainer.tokenizer.encode(batch.non_tensor_batch["response"][row], add_special_tokens=False)
        assert ids.tolist() == [*expected, trainer.tokenizer.eos_token_id]
        assert batch.non_tensor_batch["uid"][row] == batch.non_tensor_batch["uid"][row + 1]
    assert batch.batch["token_level_scores"].sum(1).tolist() == [1, 0] * 4
    assert reports[0].metrics["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference: log 2


def test_the_reference_becomes_the_policy(played):
    settings = [*played, "trainer.total_training_steps=3", "trainer.ref_update_freq=2"]
    trainer, seen = SPINTrainer(overrides=settings), {}
    trainer.on_step.append(
        lambda report: seen.update({report.step: (weights_of(trainer, "actor"), weights_of(trainer, "ref"))})
    )
    trainer.fit()
    for name, value in seen[2][0].items():
        assert torch.equal(seen[3][1][name], value)  # of the actor after step 2, in step 3
    assert any(not torch.equal(seen[2][1][name], value) for name, value in seen[3][1].items())


@pytest.mark.slow
def test_resumed_it_is_bit_equal(played):
    assert_resumes([*played, "trainer.ref_update_freq=2"], SPINTrainer, steps=4)  # with the reference of step 3


def test_the_reward_decides_between_two_of_the_policy(settings):
    chosen = ["spin.preferred=reward", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2"]
    trainer, reports = fit([*settings, *chosen, "trainer.ref_update_freq=1"], SPINTrainer)
    assert "demonstrations" not in [op.name for op in trainer.pipeline.operators]
    assert reports[1].metrics["actor/grad_norm"] > 0


def test_data_without_responses_is_refused(settings, forbid_workers):
    with pytest.raises(ValueError, match=r"spin.response_key: the data has no column 'response', only"):
        SPINTrainer(overrides=[*settings, *OWN])
