"""verl/recipe/dpo online: pairs by hand, the gradient of two passes against one, pairs that stay together, steps."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipe.checks import assert_same_on_two_processes
from tests.trainer.runs import fit
from verl.algorithms.preference import PREFERENCE_LOSSES, PreferenceLoss
from verl.config import load_config
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.recipe.dpo import DPOTrainer
from verl.recipe.dpo.online import pairs
from verl.recipe.dpo.worker import DPOActorWorker, OnlineDPOConfig, sequence_columns, with_mismatched
from verl.trainer.ppo.operators import Update


def test_pairs_by_hand():
    scores = {"a": [0.0, 1.0, 0.5], "b": [1.0, 1.0, 1.0], "c": [2.0, 0.0, 2.0]}
    rewards = torch.tensor([score for group in scores.values() for score in group])[:, None]
    uids = [uid for uid in scores for _ in range(3)]
    batch = DataProto({"token_level_rewards": rewards, "row": torch.arange(9)}, {"uid": uids})
    found = pairs(batch)
    assert found.batch["row"].tolist() == [1, 0, 3, 4, 6, 7]  # b is a tie: its first two answers, which weigh nothing
    assert found.batch["pair_weight"].tolist() == [1, 1, 0, 0, 1, 1]
    assert found.batch["label"].tolist() == [1, 0] * 3 and found.batch["margin"].tolist() == [1, 1, 0, 0, 2, 2]
    assert found.meta_info["metrics"] == {"dpo/score_mean": pytest.approx(8.5 / 9), "dpo/ties": 1 / 3}
    batch.batch["token_level_rewards"][7] = math.nan
    with pytest.raises(ValueError, match=r"found NaN in rows \[7\]"):
        pairs(batch)


def worker(tiny, loss: str, *overrides: str) -> DPOActorWorker:
    settings = [f"actor_rollout_ref.model.path={tiny / 'model'}", "actor_rollout_ref.actor.optim.lr=1e-2", *overrides]
    config = load_config(overrides=settings, schema=OnlineDPOConfig)
    further = {"correction": config.algorithm.rollout_correction, "loss": PreferenceLoss(loss)}
    further |= {"total_training_steps": 1, "device": "cpu", "pad_token_id": 0, "stop_token_ids": (2,)}
    return DPOActorWorker(config.actor_rollout_ref, **further)


def batch_of(loss: str) -> DataProto:
    """Four pairs, the second of them a tie."""
    draw = torch.Generator().manual_seed(0)
    answers = [[3 + i] * (1 + i % 4) for i in range(8)]
    batch = DataProto(build_sequences([[7, 8], [9]] * 4, answers, 0))
    batch = batch.replace(
        label=torch.tensor([1.0, 0.0] * 4),
        margin=torch.ones(8),
        pair_weight=torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]),
    )
    batch = with_mismatched(batch) if PreferenceLoss(loss).needs_kl else batch
    batch.meta_info |= {"mini_batch_rows": len(batch), "last_pass": True}
    return batch.replace(ref_log_prob=-10 * torch.rand(len(batch), 4, generator=draw))


def weights_of(updated: DPOActorWorker) -> torch.Tensor:
    return torch.cat([p.double().flatten() for _, p in updated.engine.weights()])


@pytest.mark.parametrize("name", sorted({*PREFERENCE_LOSSES} - {"bradley_terry"}))
def test_two_passes_have_the_gradient_of_one(name, tiny):
    """The norm of the gradient of one backward pass through the loss, with rows that micro-batches of 3 split apart."""
    loss, batch = PreferenceLoss(name), batch_of(name)
    module = AutoModelForCausalLM.from_pretrained(tiny / "model")
    log_probs = []
    for ids, attention, mask in zip(*(batch.batch[n] for n in ("input_ids", "attention_mask", "response_mask"))):
        ids, count = ids[attention.bool()], int(mask.sum())
        logits = module(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
        log_probs.append(logits.gather(1, ids[-count:, None]).sum())
    columns = sequence_columns(torch.zeros(len(batch), 4), batch.tensors) | {"log_prob": torch.stack(log_probs)}
    count, kl = 3, 0.0
    if loss.needs_kl:
        log_ratio = (columns["log_prob"] - columns["ref_log_prob"])[1::2]
        columns, count, kl = {key: value[0::2] for key, value in columns.items()}, 6, max(log_ratio.mean().item(), 0)
        assert kl > 0  # so that the test would see a wrong one
    value, _ = loss(columns, count, kl)
    value.backward()
    norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm().item()
    for further in ([], ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"]):
        metrics = worker(tiny, name, *further).update_dpo(batch)
        total, number = metrics["actor/grad_norm"]
        assert total / number == pytest.approx(norm, rel=1e-4)
        total, number = metrics["dpo/loss"]
        assert total / number == pytest.approx(value.item(), rel=1e-5)


def test_padding_changes_nothing(tiny):
    updated = [worker(tiny, "simpo"), worker(tiny, "simpo", "actor_rollout_ref.model.use_remove_padding=false")]
    for each in updated:
        each.update_dpo(batch_of("simpo"))
    difference = (weights_of(updated[0]) - weights_of(updated[1])).abs()
    assert (difference > 1e-4).double().mean() < 0.01  # AdamW's first step is the sign of the gradient


def test_mismatched_rows_by_hand():
    batch = DataProto(build_sequences([[7, 8], [9]], [[1, 2, 3], [4]], 0)).replace(label=torch.tensor([1.0, 0.0]))
    rows = with_mismatched(batch).batch
    assert rows["label"].tolist() == [1, 1, 0, 0]
    assert rows["input_ids"].tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0], [0, 9, 4, 0, 0], [0, 9, 1, 2, 3]]
    assert rows["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1], [0, 0, 1, 2, 3]]
    assert rows["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 1]]


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
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_processes_give_the_numbers_of_one(loss, settings):
    # steps of AdamW amplify the rounding of sums
    chosen = [*settings, f"dpo.loss={loss}", "actor_rollout_ref.actor.optim.lr=1e-5"]
    assert_same_on_two_processes(chosen, DPOTrainer, "dpo/loss", "actor/grad_norm")


def test_a_loss_without_reference_has_no_reference_model(settings):
    overrides = [*settings, "dpo.loss=orpo", "actor_rollout_ref.ref.enable=false", "trainer.total_training_steps=1"]
    trainer, reports = fit(overrides, DPOTrainer)
    assert [op.name for op in trainer.pipeline.operators] == FLOW.replace("ref ", "").split()
    assert "ref" not in trainer.roles and reports[0].metrics["actor/grad_norm"] > 0


def test_a_step_of_ties_only_reports_no_loss(settings, tmp_path):
    """What was counted for nothing has no mean: it is left out, not reported as a number that is not finite."""
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    (tmp_path / "same.py").write_text(text)
    same = f"reward.custom_reward_function.path={tmp_path / 'same.py'}"
    metrics = DPOTrainer(overrides=[*settings, same, "trainer.total_training_steps=1"]).fit()
    assert metrics["dpo/ties"] == 1.0
    assert not [name for name, value in metrics.items() if not math.isfinite(value)]
    assert "actor/dpo/loss" not in metrics and "dpo/loss" not in metrics
