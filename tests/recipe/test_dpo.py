"""verl/recipe/dpo: pairs by hand, the gradient of the two passes against one, pairs that stay together, two steps."""

import math

import numpy as np
import pytest
import torch

from tests.trainer.runs import fit
from verl.config import load_config
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.recipe.dpo import DPOTrainer
from verl.recipe.dpo.flow import pairs
from verl.recipe.dpo.losses import dpo_loss
from verl.recipe.dpo.worker import DPOActorWorker, DPOConfig, sequence_weights
from verl.trainer.ppo.operators import Update


def test_pairs_by_hand():
    scores = {"a": [0.0, 1.0, 0.5], "b": [1.0, 1.0, 1.0], "c": [2.0, 0.0, 2.0]}
    rewards = torch.tensor([score for group in scores.values() for score in group])[:, None]
    uids = [uid for uid in scores for _ in range(3)]
    batch = DataProto({"token_level_rewards": rewards, "row": torch.arange(9)}, {"uid": uids})
    found = pairs(batch)
    assert found.batch["row"].tolist() == [1, 0, 3, 4, 6, 7]  # b is a tie: its first two answers, which weigh nothing
    assert found.batch["pair_weight"].tolist() == [1, 1, 0, 0, 1, 1]
    assert found.meta_info["metrics"] == {"dpo/score_mean": pytest.approx(8.5 / 9), "dpo/ties": 1 / 3}


def rows_by_hand(seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of four pairs, the second of them a tie."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]] * 4)
    rows = {
        "response_mask": mask,
        "ref_log_prob": -torch.rand(8, 3, generator=draw, dtype=torch.float64),
        "pair_weight": torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]),
    }
    return -torch.rand(8, 3, generator=draw, dtype=torch.float64), rows


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_two_passes_have_the_gradient_of_one(loss_type):
    log_probs, rows = rows_by_hand()
    settings = {"beta": 0.3, "loss_type": loss_type, "label_smoothing": 0.0}

    def pair_loss(policy, reference, lengths, num_pairs):
        assert [side.tolist() for side in lengths] == [[3, 3, 3], [2, 2, 2]]
        return dpo_loss(*policy, *reference, num_pairs=num_pairs, **settings)

    weights, metrics = sequence_weights(log_probs, rows, 3, pair_loss)
    direct = log_probs.clone().requires_grad_()
    policy = (direct * rows["response_mask"]).sum(1)[[0, 1, 4, 5, 6, 7]]
    reference = (rows["ref_log_prob"] * rows["response_mask"]).sum(1)[[0, 1, 4, 5, 6, 7]]
    loss, _ = dpo_loss(policy[0::2], policy[1::2], reference[0::2], reference[1::2], **settings)
    loss.backward()
    torch.testing.assert_close(weights[:, None] * rows["response_mask"], direct.grad)
    total, count = metrics["dpo/loss"]
    assert (total / count).item() == pytest.approx(loss.item())


def test_a_mini_batch_of_ties_only_changes_nothing():
    log_probs, rows = rows_by_hand()

    def pair_loss(policy, reference, lengths, num_pairs):
        return dpo_loss(*policy, *reference, num_pairs=num_pairs)

    weights, metrics = sequence_weights(log_probs, rows | {"pair_weight": torch.zeros(8)}, 0, pair_loss)
    assert weights.tolist() == [0] * 8 and metrics["dpo/loss"] == (0, 0)


def updated(tiny, *overrides: str) -> torch.Tensor:
    """The weights after one update on four pairs."""
    given = [f"actor_rollout_ref.model.path={tiny / 'model'}", "actor_rollout_ref.actor.optim.lr=1e-2", *overrides]
    config = load_config(overrides=given, schema=DPOConfig)
    more = {"correction": config.algorithm.rollout_correction, "dpo": config.dpo, "total_training_steps": 1}
    more |= {"device": "cpu", "pad_token_id": 0, "stop_token_ids": (2,)}
    worker = DPOActorWorker(config.actor_rollout_ref, **more)
    answers = [[3 + i] * (1 + i % 4) for i in range(8)]
    batch = DataProto(build_sequences([[7, 8]] * 8, answers, 0))
    _, rows = rows_by_hand()
    batch = batch.replace(ref_log_prob=-torch.rand(8, 4), pair_weight=rows["pair_weight"])
    batch.meta_info |= {"mini_batch_rows": 8, "last_pass": True}
    worker.update_dpo(batch)
    return torch.cat([p.double().flatten() for _, p in worker.engine.weights()])


def test_micro_batches_may_part_a_pair(tiny):
    torch.manual_seed(0)
    whole = updated(tiny)
    torch.manual_seed(0)
    parted = updated(tiny, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3")
    assert ((whole - parted).abs() > 1e-4).double().mean() < 0.01  # AdamW's first step is the sign of the gradient


class Ranks:
    """Two ranks that note which rows they are given."""

    def __init__(self):
        self.given: list[list[int]] = []

    def layout(self):
        return self

    dp_size = 2

    def submit(self, method, rows):
        self.given.append(rows.batch["row"].tolist())
        return self

    def get(self):
        return {}


def test_the_rows_of_a_pair_go_to_one_rank():
    lengths = np.array([9, 9, 1, 1, 5, 5, 4, 4, 2, 2, 8, 8, 1, 1, 1, 1])
    attention = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
    batch = DataProto({"attention_mask": attention.long(), "row": torch.arange(16)}, meta_info={"global_step": 1})
    ranks = Ranks()
    Update({"actor": ranks}, "actor", "update_dpo", 8, epochs=2, shuffle=True, rows_per_unit=2)(batch)
    for given in ranks.given:
        assert sorted(given) == list(range(16))
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(given[::2], given[1::2]))
    assert ranks.given[0] != ranks.given[1]


FLOW = "prompts repeat gen sleep_rollout reward pairs ref update_actor sync_weights"


def test_two_steps(settings):
    chosen = [*settings, "actor_rollout_ref.rollout.n=3", "trainer.total_training_steps=2", "trainer.test_freq=2"]
    trainer, reports = fit(chosen, DPOTrainer)
    assert [op.name for op in trainer.pipeline.operators] == FLOW.split()
    assert len(reports) == 2 and all(len(report.batch) == 8 for report in reports)
    # mini-batches of 2 of the 4 pairs: the first sees the policy at the reference, ln 2; the second no longer
    assert reports[0].metrics["dpo/loss"] == pytest.approx(0.693, abs=0.01)
    assert reports[0].metrics["dpo/loss"] != pytest.approx(0.693147, abs=1e-7)
    assert reports[1].metrics["actor/grad_norm"] > 0


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(settings):
    found = []
    for processes in (1, 2):
        chosen = [*settings, f"trainer.n_gpus_per_node={processes}", "trainer.total_training_steps=2"]
        chosen += ["actor_rollout_ref.actor.optim.lr=1e-5"]  # steps of AdamW amplify the rounding of sums
        _, reports = fit(chosen, DPOTrainer)
        found.append([report.metrics[name] for report in reports for name in ("dpo/loss", "actor/grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_step_of_ties_only_reports_no_loss(settings, tmp_path):
    """What was counted for nothing has no mean: it is left out, not reported as a number that is not finite."""
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    (tmp_path / "same.py").write_text(text)
    same = f"reward.custom_reward_function.path={tmp_path / 'same.py'}"
    metrics = DPOTrainer(overrides=[*settings, same, "trainer.total_training_steps=1"]).fit()
    assert metrics["dpo/ties"] == 1.0
    assert not [name for name, value in metrics.items() if not math.isfinite(value)]
    assert "actor/dpo/loss" not in metrics and "dpo/loss" not in metrics
