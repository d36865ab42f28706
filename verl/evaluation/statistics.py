"""Figures of an evaluation: pass@k, bootstrap intervals, and two models compared on the same questions.

The unit is the question: the answers to one question are not independent of each other, so what is drawn again by the
bootstrap is questions with all their answers. No figure depends on the order of the questions.
"""

from dataclasses import dataclass

import numpy as np

_DRAWS = 1 << 21  # drawn at a time: bounds the memory of a bootstrap


def pass_at_k(right: np.ndarray, answers: np.ndarray, k: int) -> np.ndarray:
    """The probability that at least one of k answers is right, for each question, without bias.

    With c right ones among n answers, 1 - C(n-c, k) / C(n, k): of all ways to choose k of the n answers, the share that
    has a right one (Chen et al. 2021, arXiv:2107.03374). Computed as 1 - prod (1 - k/i) over i = n-c+1 .. n, by
    logarithms, so that neither large n overflow nor small results lose digits.

    right, answers: (Q,) whole numbers, c and n of each question. Returns (Q,) float64.
    Raises ValueError where k is more than n: what would have come of answers that were not drawn is not known.
    """
    right, answers = np.asarray(right), np.asarray(answers)
    if k < 1 or (len(answers) and k > answers.min()):
        raise ValueError(f"pass@{k}: expected k from 1 to the {answers.min()} answers that every question has")
    if np.any(right < 0) or np.any(right > answers):
        raise ValueError("pass@k: expected between 0 and n right answers of n")
    pairs, which = np.unique(np.stack([right, answers], 1), axis=0, return_inverse=True)
    return np.array([_pass_at_k(int(c), int(n), k) for c, n in pairs])[which.reshape(-1)]


def _pass_at_k(c: int, n: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return abs(float(np.expm1(np.log1p(-k / np.arange(n - c + 1, n + 1)).sum())))


def bootstrap_means(values: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Means of `samples` data sets drawn from the rows with replacement. values: (Q, M). Returns (samples, M)."""
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    # Sorted, so that rows in another order give the same figures.
    values = values[np.lexsort(values.T)]
    random = np.random.default_rng(seed)
    means = []
    left = samples
    while left:
        size = min(left, max(1, _DRAWS // count))
        drawn = random.integers(0, count, (size, count)) + np.arange(size)[:, None] * count
        times = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)  # each row was drawn
        means.append(times @ values / count)
        left -= size
    return np.concatenate(means)


def bootstrap_intervals(
    values: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> np.ndarray:
    """Percentile intervals of the mean of each column (Efron 1979). values: (Q, M). Returns (M, 2): low and high.

    Questions that all came out alike give an interval of width 0: the bootstrap knows nothing that it has not seen.
    """
    tail = 50 * (1 - confidence)
    return np.percentile(bootstrap_means(values, samples, seed), [tail, 100 - tail], axis=0).T


@dataclass(frozen=True)
class PairedComparison:
    """Two models on the same questions.

    difference: mean of (first - second), with its bootstrap interval low..high (None for a single question). p_value:
    two-sided, by random signs. wins, losses, ties: questions on which the first is better, worse, or equal.
    sign_test_p: exact, two-sided, of the hypothesis that a win is as likely as a loss.
    """

    questions: int
    difference: float
    low: float | None
    high: float | None
    p_value: float
    wins: int
    losses: int
    ties: int
    sign_test_p: float


def compare_paired(
    first: np.ndarray, second: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> PairedComparison:
    """Compare the scores of two models question by question. first, second: (Q,), the same questions in one order."""
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    options = {"samples": samples, "seed": seed}
    low, high = None, None
    if len(differences) > 1:
        low, high = bootstrap_intervals(differences[:, None], confidence=confidence, **options)[0].tolist()
    wins, losses = int((differences > 1e-12).sum()), int((differences < -1e-12).sum())
    return PairedComparison(
        questions=len(differences),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=sign_flip_test(differences, **options),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        sign_test_p=sign_test(wins, losses),
    )


def sign_flip_test(differences: np.ndarray, *, samples: int = 10_000, seed: int = 0) -> float:
    """The two-sided p-value of a mean difference (Fisher's randomisation test for pairs).

    If the two models were the same, each difference might as well have had the other sign: p is the share of random
    signs that take the mean at least as far from 0 as it is, the signs found among them, so p is never 0. It holds for
    few questions too, where a bootstrap p-value does not. differences: (Q,).
    """
    differences = np.sort(differences)  # questions in another order give the same figure
    found = abs(differences.mean())
    random = np.random.default_rng(seed)
    as_far, left = 1, samples
    while left:
        size = min(left, max(1, _DRAWS // len(differences)))
        signs = random.integers(0, 2, (size, len(differences))) * 2 - 1
        as_far += int((np.abs(signs @ differences) / len(differences) >= found - 1e-12).sum())
        left -= size
    return as_far / (samples + 1)


def sign_test(wins: int, losses: int) -> float:
    """The two-sided p-value of `wins` against `losses` when both are equally likely; ties do not count.

    Twice the probability that a fair coin gives as few of the rarer side, or 1.
    """
    n, few = wins + losses, min(wins, losses)
    i = np.arange(1, few + 1)
    log_chances = np.concatenate([[0.0], np.cumsum(np.log((n - i + 1) / i))]) - n * np.log(2)
    return min(1.0, 2 * float(np.exp(log_chances).sum()))
