"""verl/recipe/flowrl: the loss and log Z against float64 loops, padding, micro-batches, its minimum, two steps."""

import math
import sys

import pytest
import torch

from tests.algorithms.merging import assert_micro_batches_add_up, assert_padding_is_never_read
from tests.trainer.runs import fit
from verl.algorithms import LossAggregation
from verl.recipe.flowrl import FlowRLTrainer
from verl.recipe.flowrl.loss import flowrl, log_partition

UID = ["a", "a", "b", "b", "b", "c"]
BETA = 3.0


def make_batch(seed=0, rows=6, width=5):
    """Float64 columns with NaN where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)

    def column(shift=0.0):
        values = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 0.4 + shift
        return torch.where(mask, values, torch.nan)

    columns = {"old_log_prob": column(-1.5), "ref_log_prob": column(-1.5), "log_prob": column(-1.5)}
    return columns | {"advantages": column(), "response_mask": mask.long()}


def log_z_of(batch):
    names = ("advantages", "ref_log_prob", "response_mask")
    columns = {name: batch[name] for name in names}
    return log_partition(**columns, old_log_probs=batch["old_log_prob"], uid=UID, beta=BETA)


def call(batch, log_z, agg="seq-mean-token-mean"):
    log_prob = batch["log_prob"].clone().requires_grad_()
    columns = {**batch, "log_prob": log_prob, "log_z": log_z}
    loss, metrics = flowrl(**columns, loss_agg_mode=agg, flowrl_beta=BETA)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def mean_of(batch, name, row):
    return batch[name][row][batch["response_mask"][row].bool()].mean().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_loop(seed):
    batch = make_batch(seed)
    balance = [
        BETA * mean_of(batch, "advantages", row) + mean_of(batch, "ref_log_prob", row) for row in range(6)
    ]  # fmt: skip
    shares = [balance[row] - mean_of(batch, "old_log_prob", row) for row in range(6)]
    expected = [sum(shares[j] for j in range(6) if UID[j] == u) / UID.count(u) for u in UID]
    log_z = log_z_of(batch)
    assert log_z.tolist() == pytest.approx(expected, rel=1e-12)
    loss, gradient, _ = call(batch, log_z)
    total = 0.0
    for row in range(6):
        length = int(batch["response_mask"][row].sum())
        ratio = math.exp(mean_of(batch, "log_prob", row) - mean_of(batch, "old_log_prob", row))
        weight, residual = min(ratio, 1.2), expected[row] + mean_of(batch, "log_prob", row) - balance[row]
        total += weight * residual**2 / 6
        for t in range(length):
            assert gradient[row, t].item() == pytest.approx(2 * weight * residual / length / 6, rel=1e-10)
    assert loss.item() == pytest.approx(total, rel=1e-12)


def test_padding_is_never_read():
    assert_padding_is_never_read(lambda columns: call(columns, log_z_of(columns)), make_batch(3))


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 1, 3]])
def test_micro_batches_add_up(sizes):
    batch = make_batch(4)
    agg = LossAggregation.from_mask("seq-mean-token-mean", batch["response_mask"])
    columns = batch | {"log_z": log_z_of(batch)}
    assert_micro_batches_add_up(lambda columns: call(columns, columns["log_z"], agg), columns, sizes)


def test_the_target_distribution_has_no_loss():
    """Responses of one token: log pi = log ref + beta A - log Z, with log Z of the whole distribution."""
    ref = torch.tensor([0.5, 0.3, 0.2]).double().log()
    advantages = torch.tensor([0.5, -0.2, 0.1]).double()
    target = (ref + BETA * advantages).log_softmax(-1)
    batch = {name: value[:, None] for name, value in (("ref_log_prob", ref), ("advantages", advantages))}
    batch |= {"old_log_prob": target[:, None], "log_prob": target[:, None], "response_mask": torch.ones(3, 1)}
    log_z = log_partition(advantages[:, None], target[:, None], ref[:, None], torch.ones(3, 1), ["a"] * 3, beta=BETA)
    assert log_z.tolist() == pytest.approx([(ref + BETA * advantages).logsumexp(-1).item()] * 3)
    loss, gradient, _ = call(batch, log_z)
    assert loss.item() == pytest.approx(0, abs=1e-20) and gradient.abs().max() < 1e-12


def test_two_steps(settings, monkeypatch):
    monkeypatch.delitem(sys.modules, "verl.recipe.flowrl.registration", raising=False)  # registered anew
    trainer, reports = fit([*settings, "trainer.total_training_steps=2"], FlowRLTrainer)
    names = [op.name for op in trainer.pipeline.operators]
    assert names[names.index("adv") :] == ["adv", "log_z", "update_actor", "sync_weights"]
    assert all(report.metrics["actor/grad_norm"] > 0 for report in reports)
    assert reports[0].metrics["actor/flowrl_residual"] > 0
