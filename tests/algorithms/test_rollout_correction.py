"""Importance weights, rejection, veto and the figures of the mismatch between sampler and trainer."""

import math
import warnings

import pytest
import torch

from verl.algorithms import rollout_correction as correction

RATIOS = torch.tensor([[1.5, 3, 1], [0.5, 0.8, math.nan]], dtype=torch.float64)  # pi_train / pi_rollout
X = RATIOS.log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


# -------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("level", correction.IS_LEVELS)
def test_icepop_zeroes_what_truncation_would_cut(level):
    weights, metrics = correction.compute_rollout_correction_weights(X, MASK, level, "0.6_2.0")
    close(weights, [[1.5, 0, 1], [0, 0.8, 0]] if level == "token" else [[0, 0, 0], [0, 0, 0]])  # products 4.5 and .4
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == (0.2 if level == "token" else 0.5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == (0.2 if level == "token" else 0.5)
    # one bound: below its inverse is 0.5 alone; products 4.5 and 0.4 of the bound 2
    _, metrics = correction.compute_rollout_correction_weights(X, MASK, level, 1.5 if level == "token" else 2.0)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == (0.2 if level == "token" else 0.5)


def test_normalisation_comes_after_the_truncation():
    weights, _ = correction.compute_rollout_correction_weights(X, MASK, "token", 2.0, True)
    assert weights[MASK.bool()].mean() == pytest.approx(1)
    weights, _ = correction.compute_rollout_correction_weights(X, MASK, "sequence", 2.0, True)
    assert weights[:, 0].mean() == pytest.approx(1)  # over sequences, whatever their length
    weights, _ = correction.compute_rollout_correction_weights(X, MASK, "token", "10_20", True)
    assert (weights == 0).all()  # nothing to normalise, and no 0 / 0


def test_weights_are_finite_for_any_mismatch():
    x = torch.tensor([[1e4, -1e4, 500.0]])
    for level in correction.IS_LEVELS:
        weights, metrics = correction.compute_rollout_correction_weights(x, torch.ones(1, 3), level, 1e30)
        assert torch.isfinite(weights).all()
        assert weights.max() == pytest.approx(math.exp(20), rel=1e-4)
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("bad", [0, -1.0, "2_1", "1_2_3", "a", "_2", None])
def test_bad_thresholds(bad):
    with pytest.raises(ValueError, match="rollout_is_threshold"):
        correction.compute_rollout_correction_weights(X, MASK, "token", bad)


def test_unknown_level():
    with pytest.raises(ValueError, match="no rollout_is is called 'sequences': did you mean 'sequence'"):
        correction.compute_rollout_correction_weights(X, MASK, "sequences")


def test_effective_sample_size():
    assert correction.effective_sample_size(torch.ones(4)) == 1
    assert correction.effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == 0.25
    assert correction.effective_sample_size(torch.zeros(4)) == 0


# Random ones, and what must hold for the weights and the rejections alike: plain loops, padding, rows, parts.
MANY_MASK = (torch.arange(5) < torch.tensor([[5], [1], [3], [4], [2], [5]])).long()
MANY = torch.where(
    MANY_MASK.bool(),
    0.7 * torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    torch.nan,
)
BOUND = {"k1": 1.6, "k2": 0.2, "k3": 0.2}


def own_tokens(x, mask):
    return [[value for value, on in zip(*row) if on] for row in zip(x.tolist(), mask.tolist())]


@pytest.mark.parametrize("level", correction.IS_LEVELS)
@pytest.mark.parametrize("threshold", [1.3, "0.5_1.5"])
def test_weights_equal_the_loop(level, threshold):
    weights, _ = correction.compute_rollout_correction_weights(MANY, MANY_MASK, level, threshold)
    for i, row in enumerate(own_tokens(MANY, MANY_MASK)):
        for t, x in enumerate(row):
            ratio = math.exp(x if level == "token" else sum(row))
            expected = min(ratio, 1.3) if threshold == 1.3 else ratio * (0.5 <= ratio <= 1.5)
            assert weights[i, t].item() == pytest.approx(expected, rel=1e-12)
    assert (weights[MANY_MASK == 0] == 0).all()


def corrections():
    """Everything of this page as a function of (x, mask)."""
    found = {}
    for level in correction.IS_LEVELS:
        found[level] = lambda x, mask, level=level: correction.compute_rollout_correction_weights(x, mask, level, 1.5)[
            0
        ]
    for option in correction.REJECTIONS:
        found[option] = lambda x, mask, option=option: correction.compute_rollout_rejection_mask(
            x, mask, option, BOUND[option[-2:]]
        )[0]
    return {**found, "veto": lambda x, mask: correction.veto_mask(x, mask, 0.4)}


@pytest.mark.parametrize("name", corrections())
def test_padding_rows_and_parts(name):
    correct = corrections()[name]
    found = correct(MANY, MANY_MASK)
    assert torch.equal(found, correct(MANY.nan_to_num(55.0), MANY_MASK))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(found[order], correct(MANY[order], MANY_MASK[order]))
    parts = [correct(x, mask) for x, mask in zip(MANY.split([1, 2, 3]), MANY_MASK.split([1, 2, 3]))]
    assert torch.equal(found, torch.cat(parts))


# ------------------------------------------------------------------------------------------------------- rejection


def values_by_hand(option, rows):
    """The compared value of each token, or of its response, from the ratios."""
    *how, kind = option.split("_")
    if kind == "k1":
        fold = {"token": None, "sum": math.prod, "mean": lambda row: math.prod(row) ** (1 / len(row))}[how[-1]]
        per_token = rows
    else:
        one = {"k2": lambda r: math.log(r) ** 2 / 2, "k3": lambda r: r - 1 - math.log(r)}[kind]
        per_token = [[one(r) for r in row] for row in rows]
        fold = {"token": None, "sum": sum, "mean": lambda row: sum(row) / len(row), "max": max}[how[-1]]
    return [[fold(row)] * len(row) if fold else row for row in per_token]


@pytest.mark.parametrize("option", correction.REJECTIONS)
def test_every_rejection_by_hand(option):
    for x, mask, upper in (
        (MANY, MANY_MASK, BOUND[option[-2:]]),
        *((X, MASK, upper) for upper in (1.01, 1.2, 2.0, 5.0)),
    ):
        kept, metrics = correction.compute_rollout_rejection_mask(x, mask, option, upper)
        low = 1 / upper if option.endswith("k1") else 0
        rows = [[math.exp(value) for value in row] for row in own_tokens(x, mask)]
        expected = [[int(low <= value <= upper) for value in row] for row in values_by_hand(option, rows)]
        assert own_tokens(kept, mask) == expected and (kept[mask == 0] == 0).all()
        total = sum(map(sum, expected))
        assert x is X or 0 < total < mask.sum()
        fraction = 1 - total / int(mask.sum())
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(fraction)
        rejected = sum(not any(row) for row in expected) / len(rows)
        assert metrics[f"rollout_corr/{option}_seq_masked_fraction"] == pytest.approx(rejected)


def test_bounds_are_on_train_over_rollout():
    # The trainer holds the first row to be 1.65 times as likely per token as the sampler does.
    kept, _ = correction.compute_rollout_rejection_mask(X, MASK, "seq_mean_k1", "1.0_2.0")
    assert kept.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_a_value_equal_to_a_bound_is_kept():
    x, mask = torch.tensor([[0.0, 2.0, -2.0]]), torch.ones(1, 3)  # ratios 1, 7.4, 0.14; x^2 / 2 = 0, 2, 2
    for option, bound, kept in (
        ("token_k2", "2", [1, 1, 1]),
        ("token_k1", "1_8", [1, 1, 0]),
        ("token_k1", "0_1", [1, 0, 1]),
    ):
        assert correction.compute_rollout_rejection_mask(x, mask, option, bound)[0].tolist() == [kept]
    for bound, weights in (("1_2", [1, 0, 0]), ("0.5_1", [1, 0, 0])):
        found, metrics = correction.compute_rollout_correction_weights(x, mask, "token", bound)
        assert found.tolist() == [weights]
        assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
        assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)


def test_several_rejections_must_all_pass():
    kept, metrics = correction.compute_rollout_rejection_mask(X, MASK, "token_k1, seq_max_k2", "0.6_5, 0.3")
    assert kept.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert metrics["rollout_corr/token_k1_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/seq_max_k2_masked_fraction"] == pytest.approx(3 / 5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(4 / 5)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_the_mask_keeps_its_dtype(dtype):
    kept, _ = correction.compute_rollout_rejection_mask(X, MASK.to(dtype), "token_k1", 2)
    assert kept.dtype == dtype


@pytest.mark.parametrize(
    "option, bound, message",
    [
        ("seq_mean_k4", 1, "no rollout_rs is called 'seq_mean_k4': did you mean 'seq_mean_k"),
        ("seq_max_k1", 2, "no rollout_rs is called 'seq_max_k1'"),
        ("token_k2", "0.1_0.2", "expected one upper bound"),
        ("token_k1", 0.5, "a single bound u means 1/u_u: expected at least 1"),
        ("token_k1", "2_1", "expected 'lo_hi' with 0 <= lo < hi"),
        ("token_k1", "x", "expected a number"),
        ("token_k1,token_k2", "1,2,3", "expected 1 or 2 bounds"),
        ("token_k1", None, "needs rollout_rs_threshold"),
    ],
)
def test_bad_rejections(option, bound, message):
    with pytest.raises(ValueError, match=message):
        correction.compute_rollout_rejection_mask(X, MASK, option, bound)


def test_veto_drops_the_whole_response():
    x = torch.tensor([[0.0, math.log(0.9e-4), 0], [0, math.log(1.1e-4), math.nan]])
    assert correction.veto_mask(x, MASK, 1e-4).tolist() == [[0, 0, 0], [1, 1, 0]]


# -------------------------------------------------------------------------------------------------------- together

ROLLOUT = torch.tensor([[-1.0, -2, -1], [-2, -0.5, math.nan]], dtype=torch.float64)


def correct(**settings):
    return correction.compute_rollout_correction_and_rejection_mask(ROLLOUT + X, ROLLOUT, MASK, **settings)


def test_measures_only_by_default():
    weights, kept, metrics = correct()
    assert weights is None
    assert torch.equal(kept, MASK)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(1.5) + math.log(3) + math.log(0.5 * 0.8)) / 5)
    assert all(math.isfinite(value) for value in metrics.values())
    # log-perplexities of the rollout: (1 + 2 + 1) / 3 and (2 + 0.5) / 2; those of training are less by the mean of x
    rollout, less = [4 / 3, 1.25], [math.log(4.5) / 3, math.log(0.4) / 2]
    train = [a - b for a, b in zip(rollout, less)]
    expected = {"rollout_ppl": [*map(math.exp, rollout)], "training_ppl": [*map(math.exp, train)]}
    expected |= {"log_ppl_diff": less, "log_ppl_abs_diff": [*map(abs, less)]}
    expected |= {"ppl_ratio": [math.exp(-value) for value in less]}
    found = {name: metrics[f"rollout_corr/{name}"] for name in expected}
    assert found == pytest.approx({name: sum(values) / 2 for name, values in expected.items()})


def test_everything_at_once():
    weights, kept, metrics = correct(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.6_4",
        rollout_token_veto_threshold=0.6,
    )
    close(weights, [[1.5, 2, 1], [0.5, 0.8, 0]])
    assert kept.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert metrics["rollout_corr/veto_seq_masked_fraction"] == 0.5


def test_equal_policies_are_left_alone():
    weights, kept, metrics = correction.compute_rollout_correction_and_rejection_mask(
        ROLLOUT, ROLLOUT, MASK, rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.999_1.001"
    )
    close(weights, MASK.double().tolist())
    assert torch.equal(kept, MASK)
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/chi2_seq"] == 0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1


def test_rejecting_everything_is_said_aloud():
    with pytest.warns(UserWarning, match="rejected every token of the batch"):
        correct(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.999_1.001")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correct(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.1_10")


def test_a_log_prob_that_is_no_number_is_an_error():
    broken = ROLLOUT.clone()
    broken[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"rollout log-probs: expected finite numbers.* row 1"):
        correction.compute_rollout_correction_and_rejection_mask(ROLLOUT, broken, MASK)


def test_a_batch_without_tokens():
    nothing = torch.zeros_like(MASK)
    weights, kept, metrics = correction.compute_rollout_correction_and_rejection_mask(
        ROLLOUT, ROLLOUT, nothing, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2
    )
    assert (weights == 0).all()
    assert torch.equal(kept, nothing)
    assert all(value == 0 for value in metrics.values())
