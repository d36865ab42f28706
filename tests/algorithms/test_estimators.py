"""Every registered estimator against an independent float64 loop, worked examples, and the common contract.

A new estimator needs an entry in estimator_loops.REFERENCES; the contract tests find it in the registry.
"""

import math
import warnings

import numpy as np
import pytest
import torch

from tests.algorithms.estimator_loops import REFERENCES, UID, Loop, estimate, make_batch
from verl.algorithms import ADV_ESTIMATOR_REGISTRY

GROUPED = sorted(name for name, fn in ADV_ESTIMATOR_REGISTRY.items() if fn.min_group_size > 1)


def test_every_estimator_has_a_reference():
    assert set(REFERENCES) == set(ADV_ESTIMATOR_REGISTRY)


def rows_of(batch, index):
    return {k: c[index] if isinstance(c, torch.Tensor) else [c[i] for i in index] for k, c in batch.items()}


def outcome(*lengths_and_rewards, uid=None, width=4):
    """Columns with an outcome reward on the last token: (length, reward) per sample."""
    rewards, mask = torch.zeros(2, len(lengths_and_rewards), width)
    for i, (length, reward) in enumerate(lengths_and_rewards):
        rewards[i, length - 1], mask[i, :length] = reward, 1
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": uid or "a" * len(mask)}


FOUR = outcome((1, 1), (2, 0), (3, 0), (4, 1))
# name, columns, settings that the loops do not cover, advantages of each sample's first token; worked by hand
WORKED = [
    ("grpo", FOUR, {"norm_adv_by_std_in_grpo": False}, [0.5, -0.5, -0.5, 0.5]),
    # Four of six samples have an advantage: alpha 6 / 4. Counting non-zero rewards (6 / 2) would give 1.5.
    ("gpg", outcome(*[(1, r) for r in (1, 0, 0, 1, 0, 0)], uid="aaaabb"), {"f_norm": 1},
     [0.75, -0.75, -0.75, 0.75, 0, 0]),
    ("grpo_passk", outcome((1, 3), (2, 1), (3, 2), (4, 0)), {"norm_adv_by_std_in_grpo": False}, [1, 0, 0, 0]),
    ("gdpo", {**outcome((2, 1), (2, 11), (2, 0), (2, 0), width=2), "acc": [1, 1, 0, 0], "format": [0, 10, 0, 0]},
     {"gdpo_reward_weights": None}, [0.222589, 1.438844, -0.830717, -0.830717]),
]  # fmt: skip


@pytest.mark.parametrize("name, columns, settings, expected", WORKED)
def test_worked_examples(name, columns, settings, expected):
    found = estimate(name, columns, **settings)[0][:, 0]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_loop(name, seed):
    batch = make_batch(seed)
    loop = Loop(batch)
    expected = REFERENCES[name](loop)
    advantages, returns = expected if isinstance(expected, tuple) else (expected, expected)
    found, found_returns = estimate(name, batch)
    torch.testing.assert_close(found, loop.place(advantages), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found_returns, loop.place(returns), rtol=1e-7, atol=1e-9)


# ----------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", ADV_ESTIMATOR_REGISTRY)
class TestContract:
    def test_shape_dtype_and_zero_outside_the_mask(self, name):
        for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
            batch = make_batch(dtype=dtype)
            for found in estimate(name, batch):
                assert found.shape == batch["response_mask"].shape
                assert found.dtype == expected
                assert torch.isfinite(found).all()
                assert (found[batch["response_mask"] == 0] == 0).all()
                assert not found.requires_grad

    def test_padding_is_never_read(self, name):
        batch, other = make_batch(), make_batch()
        for column in other.values():
            if isinstance(column, torch.Tensor) and column.is_floating_point():
                column.nan_to_num_(123.0)
        for found, expected in zip(estimate(name, batch), estimate(name, other)):
            assert torch.equal(found, expected)

    def test_arguments_are_not_modified(self, name):
        batch, before = make_batch(), make_batch()
        advantages, returns = estimate(name, batch)
        advantages += 1  # the two results do not share memory, nor with a column
        assert not torch.equal(advantages, returns)
        for key, column in batch.items():
            if isinstance(column, torch.Tensor):
                torch.testing.assert_close(column, before[key], equal_nan=True, rtol=0, atol=0)

    def test_mask_may_be_bool_or_float(self, name):
        batch = make_batch()
        expected, _ = estimate(name, batch)
        for dtype in (torch.bool, torch.float32):
            found, _ = estimate(name, {**batch, "response_mask": batch["response_mask"].to(dtype)})
            assert torch.equal(found, expected)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_reward_that_is_not_finite_is_an_error(self, name, bad):
        batch = make_batch()
        batch["token_level_rewards"][3, 0] = bad
        with pytest.raises(ValueError, match=r"token_level_rewards: expected finite numbers.* row 3"):
            estimate(name, batch)

    def test_a_column_of_the_wrong_width_is_an_error(self, name):
        batch = make_batch()
        batch["token_level_rewards"] = batch["token_level_rewards"][:, :1]
        with pytest.raises(ValueError, match=r"expected the shape of response_mask \(10, 6\), found \(10, 1\)"):
            estimate(name, batch)

    def test_no_warning_when_every_prompt_can_be_compared(self, name):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            estimate(name, make_batch())


# ----------------------------------------------------------------------------------------------- group estimators


@pytest.mark.parametrize("name", GROUPED)
def test_prompts_with_one_response_have_advantage_zero_and_one_warning(name):
    batch = make_batch(uid=["a", "x", "a", "y", "a"])
    with pytest.warns(UserWarning, match=rf"^{name.removesuffix('_vectorized')}: 2 of 3 prompts have fewer") as caught:
        found, _ = estimate(name, batch)
    assert len(caught) == 1
    assert (found[[1, 3]] == 0).all()
    rest = rows_of(batch, [0, 2, 4])
    alone = 5 / 3 if name == "gpg" else 1  # gpg compensates for samples that contribute nothing
    torch.testing.assert_close(found[[0, 2, 4]], estimate(name, rest)[0] * alone)


@pytest.mark.parametrize("name", GROUPED)
def test_a_sample_without_tokens_does_not_contribute(name):
    batch = make_batch()
    batch["response_mask"][5] = 0
    rest = [i for i in range(len(UID)) if i != 5]
    expected, _ = estimate(name, rows_of(batch, rest))
    found, _ = estimate(name, batch)
    torch.testing.assert_close(found[rest], expected)
    assert (found[5] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", "gdpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7])
def test_equal_rewards_give_exactly_zero(name, reward):
    # In float32 the mean of three times .1 is not .1, and the difference would be divided by epsilon.
    rewards, mask = torch.zeros(6, 3), torch.ones(6, 3)
    rewards[:, -1] = reward
    columns = {"token_level_rewards": rewards, "response_mask": mask, "uid": list("aaabbb")}
    found, _ = estimate(name, {**columns, "acc": [reward] * 6, "format": [reward] * 6})
    assert (found == 0).all()


def test_passk_ties_for_the_best_are_zero():
    columns = {"token_level_rewards": torch.tensor([[1.0], [1], [0]]), "response_mask": torch.ones(3, 1), "uid": "aaa"}
    assert (estimate("grpo_passk", columns)[0] == 0).all()


def test_uid_may_be_a_tensor_or_mixed():
    batch = make_batch()
    numbers = torch.tensor([ord(uid) for uid in UID])
    mixed = np.array([1 if uid == "a" else uid for uid in UID], dtype=object)
    for uid in (numbers, mixed):
        assert torch.equal(estimate("grpo", {**batch, "uid": uid})[0], estimate("grpo", batch)[0])
    with pytest.raises(ValueError, match=r"one uid per row \(10\), found 3"):
        estimate("grpo", {**batch, "uid": ["a", "b", "c"]})


def test_gdpo_errors_name_the_column():
    with pytest.raises(ValueError, match="names 'style', but there is no column 'reward_style'"):
        estimate("gdpo", make_batch(), gdpo_reward_keys=["style"], gdpo_reward_weights=None)
    with pytest.raises(ValueError, match="a weight for each of them"):
        estimate("gdpo", make_batch(), gdpo_reward_keys=["acc"])
    with pytest.raises(ValueError, match="finite numbers in column 'acc'"):
        estimate("gdpo", {**make_batch(), "acc": [None] * 10})


def test_gdpo_reads_the_values_reported_by_the_reward_function():
    batch = make_batch()
    reported = {**batch, "reward_acc": batch["acc"], "acc": ["text"] * 10}
    assert torch.equal(estimate("gdpo", reported)[0], estimate("gdpo", batch)[0])


def test_remax_needs_one_baseline_per_sample():
    batch = make_batch()
    with pytest.raises(ValueError, match="expected 10 finite numbers, one per response"):
        estimate("remax", {**batch, "reward_baselines": batch["reward_baselines"].unsqueeze(-1)})
