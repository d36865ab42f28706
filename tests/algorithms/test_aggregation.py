"""One scalar from a matrix of token losses, the same for every split; masked statistics; metrics that merge."""

import copy
import math
import pickle

import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl.algorithms import LOSS_AGG_MODES, LossAggregation, agg_loss, mean_parts
from verl.algorithms.masked import Groups, masked_mean, masked_sum, masked_var, masked_whiten, mean_over

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]])


def losses(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(MASK.shape, generator=generator, dtype=torch.float64, requires_grad=True)


def by_hand(mode, x, mask):
    """The sum over tokens of loss x share, by plain loops; a response without tokens is none."""
    rows = [[value for value, on in zip(*row) if on] for row in zip(x.tolist(), mask.tolist())]
    rows = [row for row in rows if row]
    tokens, width = sum(map(len, rows)), mask.shape[1]
    return {
        "token-mean": sum(map(sum, rows)) / tokens,
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / width,
    }[mode]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_equals_the_loop_in_any_order_of_rows_and_reads_no_padding(mode):
    x = torch.where(MASK.bool(), losses().detach(), torch.nan)
    expected = by_hand(mode, x, MASK)
    for order in (slice(None), torch.tensor([4, 2, 0, 5, 1, 3])):
        assert agg_loss(x[order], MASK[order], mode).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ranks_add_up_when_their_gradients_are_averaged(mode):
    aggregation, x = LossAggregation.from_mask(mode, MASK), losses()
    ranks = [agg_loss(a, b, aggregation, dp_size=3) for a, b in zip(x.split([1, 2, 3]), MASK.split([1, 2, 3]))]
    torch.testing.assert_close(sum(ranks) / 3, agg_loss(x, MASK, aggregation))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_counts_by_hand_local_and_carried_agree(mode):
    x = losses()
    local = agg_loss(x, MASK, mode)
    given = agg_loss(x, MASK, mode, batch_num_tokens=12, global_batch_size=5, loss_scale_factor=4)
    assert local == given == agg_loss(x, MASK, LossAggregation.from_mask(mode, MASK))
    assert local == agg_loss(x, MASK, LossAggregation(mode, 12, 5, 4))


def test_padding_to_another_width_changes_the_norm_only_where_no_constant_is_given():
    x, mode = losses(), "seq-mean-token-sum-norm"
    wide, wide_mask = torch.nn.functional.pad(x, (0, 3)), torch.nn.functional.pad(MASK, (0, 3))
    assert agg_loss(wide, wide_mask, mode) != agg_loss(x, MASK, mode)
    constant = LossAggregation.from_mask(mode, wide_mask, scale_factor=4)
    assert agg_loss(wide, wide_mask, constant) == agg_loss(
        x, MASK, LossAggregation.from_mask(mode, MASK, scale_factor=4)
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nothing_valid_is_zero_with_a_gradient_of_zero(mode):
    x = torch.full((2, 3), math.nan, requires_grad=True)
    for counts in (mode, LossAggregation.from_mask(mode, torch.zeros(2, 3))):
        loss = agg_loss(x, torch.zeros(2, 3), counts)
        assert loss == 0
        assert (torch.autograd.grad(loss, x)[0] == 0).all()


def test_loss_aggregation_is_a_string_that_keeps_its_counts():
    aggregation = LossAggregation("seq-mean-token-sum-norm", 12, 5, 4.0)
    assert isinstance(aggregation, str)
    assert aggregation == "seq-mean-token-sum-norm"
    for copied in (pickle.loads(pickle.dumps(aggregation)), copy.deepcopy(aggregation), copy.copy(aggregation)):
        assert isinstance(copied, LossAggregation)
        assert copied == aggregation
        assert (copied.num_tokens, copied.num_sequences, copied.scale_factor) == (12, 5, 4.0)
    other = aggregation.with_mode("token-mean")
    assert (other, other.num_tokens, other.num_sequences) == ("token-mean", 12, 5)


def test_the_shares_of_micro_batches_add_up_to_one():
    aggregation = LossAggregation.from_mask("token-mean", torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]))
    first = aggregation.share(torch.tensor(0.5), torch.tensor([[1, 1], [1, 0], [0, 0]]))
    second = aggregation.share(torch.tensor(0.25), torch.tensor([[1, 1]]))
    assert [first[0], second[0]] == [0.5, 0.25]
    assert [float(first[1]), float(second[1])] == pytest.approx([2 / 3, 1 / 3])


def test_misspelt_mode_lists_the_right_ones():
    for call in (
        lambda: agg_loss(losses(), MASK, "token_mean"),
        lambda: LossAggregation("token_mean", 1, 1),
        lambda: LossAggregation.from_mask("token-mean", MASK).with_mode("token_mean"),
    ):
        with pytest.raises(ValueError, match=r"'token_mean': did you mean 'token-mean'.*seq-mean-token-sum-norm"):
            call()


def test_the_norm_needs_its_constant():
    with pytest.raises(ValueError, match="expected scale_factor > 0"):
        LossAggregation("seq-mean-token-sum-norm", 12, 5)


# ------------------------------------------------------------------------------------------------ masked statistics


def test_masked_statistics_equal_those_of_the_selected_values():
    x = torch.where(MASK.bool(), losses().detach(), torch.nan)
    values = x[MASK.bool()]
    torch.testing.assert_close(masked_sum(x, MASK), values.sum())
    torch.testing.assert_close(masked_mean(x, MASK), values.mean())
    torch.testing.assert_close(masked_var(x, MASK), values.var())
    torch.testing.assert_close(masked_var(x, MASK, unbiased=False), values.var(unbiased=False))
    whitened = masked_whiten(x, MASK)[MASK.bool()]
    torch.testing.assert_close(whitened, (values - values.mean()) / (values.var() + 1e-8).sqrt())
    scaled = masked_whiten(x, MASK, shift_mean=False)[MASK.bool()]
    torch.testing.assert_close(scaled, whitened + values.mean())
    rows = masked_mean(x, MASK, -1)
    assert rows[2] == 0
    torch.testing.assert_close(rows[3], (x[3, 0] + x[3, 2]) / 2)


def test_whitening_shifts_the_padding_too():
    found = masked_whiten(torch.tensor([[1.0, 2, 3, 100]]), torch.tensor([[1, 1, 1, 0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, 0, 1, 98]]))


@pytest.mark.parametrize("valid", [0, 1])
def test_variance_of_fewer_than_two_values_is_an_error(valid):
    with pytest.raises(ValueError, match=f"at least 2 valid tokens, found {valid}"):
        masked_var(torch.ones(3), torch.tensor([valid, 0, 0]))


def test_groups_skip_samples_that_are_not_counted():
    groups = Groups(["a", "b", "a", "a"], torch.tensor([True, False, True, False]))
    x = torch.tensor([1.0, 5, 3, 100])
    assert groups.count.tolist() == [2, 0, 2, 2]
    assert groups.sum(x).tolist() == [4, 0, 4, 4]
    assert groups.sum(x[:, None] * torch.tensor([1.0, 2])).tolist() == [[4, 8], [0, 0], [4, 8], [4, 8]]
    assert groups.max(x).tolist() == [3, -math.inf, 3, 3]
    assert groups.num_groups_with(torch.tensor([True, False, True, True])) == 1


# --------------------------------------------------------------------------------------------------------- metrics


def test_pairs_merge_to_the_value_on_the_whole():
    x = losses()
    parts = [{"m": mean_parts(a, b)} for a, b in zip(x.split([3, 1, 2]), MASK.split([3, 1, 2]))]
    assert merge_metrics(parts)["m"] == pytest.approx(x[MASK.bool()].mean().item())
    # The mean of the means is something else: a micro-batch with one token would weigh as much as one with ten.
    means = [float(total / count) for total, count in (one["m"] for one in parts[::2])]
    assert merge_metrics(parts)["m"] != pytest.approx(sum(means) / 2)


def test_mean_over():
    assert mean_over(torch.tensor([1.0, 3])) == 2
    assert mean_over(torch.tensor([1.0, 3]), count=8) == 0.5
    assert mean_over(torch.zeros(0)) == 0
