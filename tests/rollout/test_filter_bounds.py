"""The bound of log-probs after top-k, top-p and min-p, given that of log-probs before (`contract.kept`)."""

import math

import pytest
import torch

from tests.rollout.contract import kept
from verl.rollout.request import SamplingParams
from verl.rollout.sampling import filter_logits

BOUND = 1e-3


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}])
def test_filters_of_rounded_logits(filters):
    """Many tokens have almost equal logits, so some at the edge are kept before rounding and not after, or reversed."""
    generator, changed = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        logits = torch.randn(8, generator=generator).double()
        logits[1] = logits.max() + math.log(0.1)  # the edge of min_p
        logits = logits.repeat(4)
        logits += 2e-3 * torch.rand(32, generator=generator)
        # errors of logits up to half of the bound are errors of log-probs up to the bound
        rounded = logits + BOUND * (torch.rand(32, generator=generator) - 0.5)
        most, exact, least = (kept(logits, bound, **filters) for bound in (BOUND, 0.0, -BOUND))
        filtered = filter_logits(rounded[None].float(), SamplingParams(1, (), **filters))[0].double()
        found = {int(token) for token in filtered.isfinite().nonzero()}
        assert set(least) <= found <= set(most) and set(least) <= set(exact) <= set(most)
        changed += found != set(exact)
        for token in found:
            log_prob = float(filtered.log_softmax(-1)[token])
            low, high = (math.log(most[token] / sum(tokens.values())) for tokens in (most, least))
            assert low - 2 * BOUND <= log_prob <= high + 2 * BOUND
    assert changed > 10


def test_one_token_at_the_edge_changes_every_log_prob():
    """By log(1 + p / top_p) if a token with probability p is kept on one side only, whatever the rounding."""
    found = []
    for first in (0.8 + 1e-5, 0.8 - 1e-5):
        probs = torch.tensor([[first, 0.15, 0.85 - first]])
        found.append(filter_logits(probs.log(), SamplingParams(1, (), top_p=0.8)).log_softmax(-1)[0, 0])
    assert float(found[0] - found[1]) == pytest.approx(math.log(1 + 0.15 / 0.8), abs=1e-4)
