"""Statistics of an evaluation: pass@k, confidence intervals, and the paired comparison of two models.

The unit is the prompt: responses to one prompt are not independent, so the bootstrap resamples prompts with all their
responses. No result depends on the order of the prompts.
"""

from dataclasses import dataclass
from math import comb
from statistics import NormalDist

import numpy as np

_DRAWS = 1 << 21  # per chunk: bounds the memory of a bootstrap


def pass_at_k(correct: np.ndarray, responses: np.ndarray, k: int) -> np.ndarray:
    """Return an unbiased estimate of the probability that at least one of k responses is correct, for each prompt.

    With c correct responses of n, 1 - C(n-c, k) / C(n, k) is the fraction of subsets of size k that contain a correct
    response (Chen et al. 2021, arXiv:2107.03374). It is a quotient of whole numbers, which neither overflows for large
    n nor loses precision for small results.

    Args:
        correct: (Q,) integers, c of each prompt.
        responses: (Q,) integers, n of each prompt.

    Returns:
        (Q,) float64.

    Raises:
        ValueError: If k exceeds n for a prompt.
    """
    correct, responses = np.asarray(correct), np.asarray(responses)
    if k < 1 or (len(responses) and k > responses.min()):
        raise ValueError(f"pass@{k}: expected k from 1 to {responses.min()}, the smallest number of responses")
    if np.any(correct < 0) or np.any(correct > responses):
        raise ValueError("pass@k: expected between 0 and n correct responses")
    pairs = [*zip(correct.tolist(), responses.tolist())]
    values = {(c, n): (comb(n, k) - comb(n - c, k)) / comb(n, k) for c, n in set(pairs)}
    return np.array([values[pair] for pair in pairs])


def bootstrap_means(values: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Return the means of `samples` data sets resampled with replacement.

    Args:
        values: (Q, M), one row per prompt.

    Returns:
        (samples, M) float64.
    """
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    # Sorted, so that the result does not depend on the order of the rows.
    values = values[np.lexsort(values.T)]
    random = np.random.default_rng(seed)
    means = []
    remaining = samples
    while remaining:
        size = min(remaining, max(1, _DRAWS // count))
        drawn = random.integers(0, count, (size, count)) + np.arange(size)[:, None] * count
        times = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)  # how often each row was drawn
        means.append(times @ values / count)
        remaining -= size
    return np.concatenate(means)


def bootstrap_intervals(
    values: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> np.ndarray:
    """Return percentile bootstrap intervals of the mean of each column (Efron 1979).

    If all prompts have the same value, the interval has width 0: the bootstrap only reflects observed variation.

    Args:
        values: (Q, M), one row per prompt.

    Returns:
        (M, 2) float64, lower and upper bounds.
    """
    tail = 50 * (1 - confidence)
    return np.percentile(bootstrap_means(values, samples, seed), [tail, 100 - tail], axis=0).T


def wilson_interval(mean: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a proportion of `count` outcomes of 0 or 1 (Wilson 1927). Unlike the bootstrap, it has a
    width if all outcomes are equal: for 0 of 16 it is 0 .. 0.19."""
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    center = (mean + z2 / (2 * count)) / (1 + z2 / count)
    half = (z2 * (mean * (1 - mean) / count + z2 / (4 * count**2))) ** 0.5 / (1 + z2 / count)
    return max(0.0, center - half), min(1.0, center + half)


def mean_intervals(
    values: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> list[tuple[float, float]]:
    """An interval of the mean of each column of values, (Q, M), one row per prompt: Wilson's if all values are 0 or 1,
    otherwise the bootstrap's."""
    resampled = bootstrap_intervals(values, confidence=confidence, samples=samples, seed=seed).tolist()
    binary = np.isin(values, (0.0, 1.0)).all(0)
    means = values.mean(0).tolist()
    return [
        wilson_interval(mean, len(values), confidence) if is_binary else (low, high)
        for mean, is_binary, (low, high) in zip(means, binary, resampled)
    ]


@dataclass(frozen=True)
class PairedComparison:
    """Two models on the same prompts.

    Attributes:
        difference: Mean of first - second.
        low, high: Its bootstrap interval; None for a single prompt.
        p_value: Two-sided p-value of the sign-flip test.
        wins, losses, ties: Prompts on which the first model is better, worse, or equal.
    """

    prompts: int
    difference: float
    low: float | None
    high: float | None
    p_value: float
    wins: int
    losses: int
    ties: int


def compare_paired(
    first: np.ndarray, second: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> PairedComparison:
    """Compare the scores of two models, (Q,) each, on the same prompts in the same order."""
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    options = {"samples": samples, "seed": seed}
    low, high = None, None
    if len(differences) > 1:
        low, high = bootstrap_intervals(differences[:, None], confidence=confidence, **options)[0].tolist()
    wins, losses = int((differences > 1e-12).sum()), int((differences < -1e-12).sum())
    return PairedComparison(
        prompts=len(differences),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=sign_flip_test(differences, **options),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
    )


def sign_flip_test(differences: np.ndarray, *, samples: int = 10_000, seed: int = 0) -> float:
    """The two-sided p-value of the mean of paired differences, (Q,) (Fisher's randomization test): the fraction of
    random sign assignments, the observed one included, whose mean is at least as far from 0. Unlike a bootstrap
    p-value, it is valid for few prompts, and never 0."""
    differences = np.sort(differences)  # the result does not depend on the order of the prompts
    observed = abs(differences.mean())
    random = np.random.default_rng(seed)
    as_far, remaining = 1, samples
    while remaining:
        size = min(remaining, max(1, _DRAWS // len(differences)))
        signs = random.integers(0, 2, (size, len(differences))) * 2 - 1
        as_far += int((np.abs(signs @ differences) / len(differences) >= observed - 1e-12).sum())
        remaining -= size
    return as_far / (samples + 1)
