"""Whatever is registered has been checked in every way that there is: a new name without its checks fails here.

The checks are tests of this folder with the name as a parameter; pytest itself is asked what it would run.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl.algorithms import ADV_ESTIMATOR_REGISTRY, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY
from verl.algorithms.covariance_losses import CHOOSE_AMONG_THE_TOKENS_OF_ONE_CALL
from verl.algorithms.kl import KL_KINDS
from verl.algorithms.rollout_correction import IS_LEVELS, REJECTIONS

FOLDER = Path(__file__).parent

#: what there is -> (its names, check -> the test that makes it)
CHECKS = {
    "advantage estimators": (
        set(ADV_ESTIMATOR_REGISTRY),
        {
            "worked example": "test_worked_examples.py::test_every_estimator_has_an_example",
            "float64 loop": "test_estimators.py::test_equals_the_loop",
            "padding of NaN": "test_estimators.py::TestContract::test_shape_dtype_and_zero_outside_the_mask",
            "padding of anything": "test_estimators.py::TestContract::test_padding_is_never_read",
            "order of rows": "test_estimators.py::TestContract::test_order_of_rows",
            "bandit": "test_bandit.py::test_the_expected_gradient",
        },
    ),
    "policy losses": (
        set(POLICY_LOSS_REGISTRY),
        {
            "worked example": "test_worked_losses.py::test_policy_losses",
            "float64 loop and its gradient": "test_policy_losses.py::test_equals_the_loop",
            "finite differences": "test_policy_losses.py::test_gradient_by_finite_differences",
            "parts of a mini-batch": "test_policy_losses.py::test_micro_batches_add_up",
            "padding of NaN": "test_policy_losses.py::TestContract::test_padding_is_never_read",
            "order of rows": "test_policy_losses.py::TestContract::test_order_of_rows",
            "bandit": "test_bandit.py::test_rloo_is_unbiased_with_every_loss",
        },
    ),
    # `full` compares distributions, not tokens: test_full_is_the_sum_over_the_vocabulary
    "KL estimators": (
        {kind + plus for kind in KL_KINDS if kind != "full" for plus in ("", "+")},
        {
            "worked example": "test_worked_losses.py::test_kl_penalty",
            "float64 loop and its gradient": "test_kl.py::test_equals_the_loop",
            "finite differences": "test_kl.py::test_gradient_by_finite_differences",
            "padding of NaN, rows, parts": "test_kl.py::test_kl_loss_reads_no_padding_and_adds_up",
        },
    ),
    "aggregations": (
        set(LOSS_AGG_MODES),
        {
            "worked example": "test_worked_losses.py::test_aggregation",
            "float64 loop, padding of NaN, rows": (
                "test_aggregation.py::test_equals_the_loop_in_any_order_of_rows_and_reads_no_padding"
            ),
            "finite differences": "test_aggregation.py::test_gradient_by_finite_differences",
            "parts of a mini-batch": "test_aggregation.py::test_micro_batches_add_up",
            "parts of several ranks": "test_aggregation.py::test_ranks_add_up_when_their_gradients_are_averaged",
        },
    ),
    "importance weights": (
        set(IS_LEVELS),
        {
            "worked example": "test_worked_losses.py::test_truncated_importance_weights",
            "float64 loop": "test_rollout_correction.py::test_weights_equal_the_loop",
            "padding of NaN, rows, parts": "test_rollout_correction.py::test_padding_rows_and_parts",
        },
    ),
    "rejections": (
        set(REJECTIONS),
        {
            "worked example": "test_rollout_correction.py::test_every_rejection_by_hand",
            "float64 loop": "test_rollout_correction.py::test_rejections_equal_the_loop",
            "padding of NaN, rows, parts": "test_rollout_correction.py::test_padding_rows_and_parts",
        },
    ),
}
#: (what, check) -> who goes without it, and why
EXCEPTIONS = {
    # a test of its own, next to its estimator: test_sppo_loss
    ("policy losses", "worked example"): {"sppo"},
    # loops of their own: test_kl_cov_equals_the_loop, test_clip_cov_takes_out_only_candidates
    ("policy losses", "float64 loop and its gradient"): set(CHOOSE_AMONG_THE_TOKENS_OF_ONE_CALL),
    # a weight without gradient stands in these, so that differences see another function: the loop has their gradient
    ("policy losses", "finite differences"): {"gspo", "cispo", "dppo_tv", "dppo_kl"},
    # they choose among the tokens of one call, and say so
    ("policy losses", "parts of a mini-batch"): set(CHOOSE_AMONG_THE_TOKENS_OF_ONE_CALL),
}

COLLECT = """
import json, sys, pytest
class Plugin:
    def pytest_collection_finish(self, session):
        found = [(i.nodeid, list(map(str, i.callspec.params.values()))) for i in session.items
                 if "[" in i.nodeid]
        print("\\n" + json.dumps(found))
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", sys.argv[1]], plugins=[Plugin()]))
"""


@pytest.fixture(scope="module")
def parameters() -> dict[str, set[str]]:
    """Test -> the values that it is run with."""
    done = subprocess.run([sys.executable, "-c", COLLECT, str(FOLDER)], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    found: dict[str, set[str]] = {}
    for test, values in json.loads(line):
        found.setdefault(test.split("[")[0].removeprefix("tests/algorithms/"), set()).update(values)
    return found


@pytest.mark.parametrize("what, check", [(what, check) for what, (_, checks) in CHECKS.items() for check in checks])
def test_every_registered_name_is_checked(what, check, parameters):
    names, checks = CHECKS[what]
    assert names - parameters[checks[check]] == EXCEPTIONS.get((what, check), set())
