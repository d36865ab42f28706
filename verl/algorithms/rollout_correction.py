"""Correction of the training-inference mismatch.

The probabilities of the rollout engine differ from those of the training engine: different kernels, different
precision, older weights. With x_t = log pi_train(t) - log pi_rollout(t):

- importance weights: exp(x), truncated at a bound (TIS), or set to 0 outside two bounds (IcePop)
- rejection: tokens or whole responses whose mismatch exceeds a bound are masked
- veto: a response with a token that is almost impossible under pi_train is masked
- metrics of the mismatch

Bounds on a ratio are bounds on pi_train / pi_rollout. (Some releases of public verl compare the *inverse* ratio with
the bounds of the k1 rejections; bounds "lo_hi" tuned there are "1/hi_1/lo" here.)

Rejection changes the mask of the *loss*. Compute advantages with the mask before rejection: the reward is on the last
token, and group statistics are over all responses.
"""

import math
import warnings

import torch

from verl.algorithms.kl import k3
from verl.algorithms.masked import checked_column, masked_mean
from verl.registry import did_you_mean

MAX_LOG_WEIGHT = 20.0
IS_LEVELS = ("token", "sequence")
REJECTIONS = (
    *(f"token_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_{how}_{kind}" for how in ("sum", "mean") for kind in ("k1", "k2", "k3")),
    *(f"seq_max_{kind}" for kind in ("k2", "k3")),
)


def mismatch(train_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return x = log pi_train - log pi_rollout, (B, T), zero outside the mask. ValueError if not finite inside it."""
    train = checked_column("training log-probs", train_log_prob, response_mask)
    return train - checked_column("rollout log-probs", rollout_log_prob, response_mask)


# ------------------------------------------------------------------------------------------------- importance weights


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute importance weights.

    Untruncated sequence weights are unbiased, but their variance grows with the length. Truncation adds bias. Token
    weights have less variance and do not correct the distribution of states.

    Args:
        log_ratio: (B, T), x of `mismatch`.
        rollout_is: "token": exp(x_t); "sequence": exp(sum_t x_t) on every token of the response.
        rollout_is_threshold: C: larger weights are set to C (truncated importance sampling). "lo_hi": weights outside
            these bounds are set to 0 (IcePop).
        rollout_is_batch_normalize: divide by the mean weight (over tokens, or over sequences), after the truncation.

    Returns:
        The weights (B, T), without gradient, zero outside the mask; and their metrics.
    """
    if rollout_is not in IS_LEVELS:
        raise ValueError(f"no rollout_is is called {rollout_is!r}: {did_you_mean(str(rollout_is), IS_LEVELS)}")
    low, high = _weight_bounds(rollout_is_threshold)
    mask = response_mask.bool()
    log_ratio = checked_column("log_ratio", log_ratio, mask)
    if rollout_is == "token":
        log_weight, units = log_ratio, mask
    else:  # one weight per sequence: (B, 1), counted once
        log_weight, units = log_ratio.sum(-1, keepdim=True), mask.any(-1, keepdim=True)
    raw = log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    weights = raw.clamp(max=high) if low is None else torch.where((raw >= low) & (raw <= high), raw, 0)
    metrics = _weight_metrics(raw, weights, units, low, high)
    if rollout_is_batch_normalize:
        mean = masked_mean(weights, units)
        weights = torch.where(mean > 0, weights / mean, weights)
    return torch.where(mask, weights, 0), metrics


def _weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """Return (None, C) for truncation, (lo, hi) for IcePop."""
    text = str(threshold)
    low, high = (
        _two_bounds(text, "rollout_is_threshold") if "_" in text else (None, _number(text, "rollout_is_threshold"))
    )
    if high <= 0:
        raise ValueError(
            f"rollout_is_threshold: expected a number above 0, or 'lo_hi' with 0 <= lo < hi, found {threshold!r}"
        )
    return low, high


def _weight_metrics(
    raw: torch.Tensor, weights: torch.Tensor, units: torch.Tensor, low: float | None, high: float
) -> dict[str, float]:
    """Metrics of the weights before batch normalization; `units` selects the tokens or sequences that have one."""
    if not units.any():
        return {}
    selected = weights[units]
    name = "rollout_corr/rollout_is_"
    return {
        name + "mean": float(selected.mean()),
        name + "std": float(selected.std(unbiased=False)),
        name + "max": float(selected.max()),
        name + "min": float(selected.min()),
        name + "ratio_fraction_high": float((raw[units] > high).double().mean()),
        name + "ratio_fraction_low": float((raw[units] < (1 / high if low is None else low)).double().mean()),
        name + "eff_sample_size": effective_sample_size(selected),
    }


def effective_sample_size(weights: torch.Tensor) -> float:
    """Return 1 / mean((w / mean w)^2) of a vector of weights: 1 if all are equal, 1 / n if only one is not 0."""
    mean_square = float((weights.double() ** 2).mean())
    return float(weights.double().mean()) ** 2 / mean_square if mean_square else 0.0


# ---------------------------------------------------------------------------------------------------------- rejection


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, rollout_rs: str, rollout_rs_threshold: float | str
) -> tuple[torch.Tensor, dict[str, float]]:
    """Mask tokens or responses whose mismatch exceeds a bound.

    `token_*` masks tokens, `seq_*` masks responses:

    | kind | of x | bound |
    |---|---|---|
    | k1 | exp(x), the ratio pi_train / pi_rollout | "lo_hi"; a single u means "1/u_u" |
    | k2 | x^2 / 2 | u |
    | k3 | exp(x) - 1 - x | u |

    token_k1..3: per token; seq_sum_k1..3: sum over the response (k1: the ratio of the whole response); seq_mean_k1..3:
    mean (k1: geometric mean ratio); seq_max_k2, seq_max_k3: maximum over the tokens.

    Args:
        log_ratio: (B, T), x of `mismatch`.
        rollout_rs: names separated by commas. A token is kept if it passes all of them.
        rollout_rs_threshold: the bounds in the same order, separated by commas, or one bound for all.

    Returns:
        The response mask without the rejected tokens, in the same dtype; and the rejected fractions.
    """
    mask = response_mask.bool()
    x = checked_column("log_ratio", log_ratio, mask).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    accepted, metrics = mask, {}
    for option, low, high in parse_rejections(rollout_rs, rollout_rs_threshold):
        value = _mismatch_value(option, x, mask)
        passes = (value >= low) & (value <= high)
        metrics |= _rejected_fractions(f"rollout_corr/{option}_", mask, mask & passes)
        accepted = accepted & passes
    metrics |= _rejected_fractions("rollout_corr/rollout_rs_", mask, accepted)
    return response_mask * accepted.to(response_mask.dtype), metrics


def parse_rejections(rollout_rs: str, rollout_rs_threshold: float | str) -> list[tuple[str, float, float]]:
    """Return (name, lower, upper) of each rejection. Raises ValueError for an unknown name or invalid bounds."""
    options = [option.strip() for option in rollout_rs.split(",")]
    if rollout_rs_threshold is None:
        raise ValueError(
            f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold: one bound, or one per name separated by commas"
        )
    bounds = [bound.strip() for bound in str(rollout_rs_threshold).split(",")]
    if len(bounds) == 1:
        bounds *= len(options)
    if len(bounds) != len(options):
        raise ValueError(
            f"rollout_rs_threshold: expected 1 or {len(options)} bounds for {rollout_rs!r}, "
            f"found {rollout_rs_threshold!r}"
        )
    return [(option, *_bounds_of(option, bound)) for option, bound in zip(options, bounds)]


def _bounds_of(option: str, bound: str) -> tuple[float, float]:
    if option not in REJECTIONS:
        raise ValueError(f"no rollout_rs is called {option!r}: {did_you_mean(option, REJECTIONS)}")
    if option.endswith("k1") and "_" in bound:
        return _two_bounds(bound, option)
    if "_" in bound:
        raise ValueError(f"{option}: expected one upper bound, found {bound!r} (only k1 takes two bounds)")
    high = _number(bound, option)
    if not option.endswith("k1"):
        return -math.inf, high
    if high < 1:
        raise ValueError(f"{option}: a single bound u means 1/u_u: expected at least 1, found {bound!r}")
    return 1 / high, high


def _two_bounds(text: str, name: str) -> tuple[float, float]:
    bounds = text.split("_")
    low, high = (_number(bound, name) for bound in bounds) if len(bounds) == 2 else (1.0, 0.0)
    if not 0 <= low < high:
        raise ValueError(f"{name}: expected 'lo_hi' with 0 <= lo < hi, such as '0.5_2.0', found {text!r}")
    return low, high


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, or two joined by '_', found {text!r}") from None


def _mismatch_value(option: str, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the value that is compared with the bounds: (B, T), or (B, 1) per response."""
    *reduction, estimator = option.split("_")
    if estimator == "k1":
        per_token = x
    else:
        per_token = 0.5 * x**2 if estimator == "k2" else k3(-x)
    if reduction == ["token"]:
        value = per_token
    elif reduction == ["seq", "max"]:  # k2 and k3 are at least 0, and padding is 0
        value = per_token.amax(-1, keepdim=True)
    else:
        value = (per_token.sum(-1) if reduction == ["seq", "sum"] else masked_mean(per_token, mask, -1)).unsqueeze(-1)
    return value.exp() if estimator == "k1" else value


def _rejected_fractions(name: str, before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    tokens, sequences = before.sum(), before.any(-1).sum()
    return {
        name + "masked_fraction": float(1 - after.sum() / tokens) if tokens else 0.0,
        name + "seq_masked_fraction": float(1 - after.any(-1).sum() / sequences) if sequences else 0.0,
    }


@torch.no_grad()
def veto_mask(log_ratio: torch.Tensor, response_mask: torch.Tensor, threshold: float = 1e-4) -> torch.Tensor:
    """Return the response mask without responses that have a token with pi_train / pi_rollout below `threshold`."""
    x = checked_column("log_ratio", log_ratio, response_mask)
    passes = (x >= math.log(threshold)).all(-1, keepdim=True)  # padding is x = 0 and passes
    return response_mask * passes.to(response_mask.dtype)


# ----------------------------------------------------------------------------------------------------------- together


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    rollout_token_veto_threshold: float | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Apply `algorithm.rollout_correction`: importance weights, rejection, veto and metrics.

    Weights are computed and batch-normalized over all tokens, including rejected ones.

    Args:
        old_log_prob: (B, T), log-probs of the sampled tokens by the training engine.
        rollout_log_prob: (B, T), by the rollout engine.
        rollout_is: None skips the weights; see `compute_rollout_correction_weights`.
        rollout_rs: None skips the rejection; see `compute_rollout_rejection_mask`.
        rollout_token_veto_threshold: None skips the veto; see `veto_mask`.

    Returns:
        The weights (B, T) or None, the response mask of the loss, and the metrics.
    """
    x = mismatch(old_log_prob, rollout_log_prob, response_mask)
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights = None
    if rollout_is is not None:
        weights, weight_metrics = compute_rollout_correction_weights(
            x, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= weight_metrics
    loss_mask = response_mask
    if rollout_rs is not None:
        loss_mask, weight_metrics = compute_rollout_rejection_mask(x, response_mask, rollout_rs, rollout_rs_threshold)
        metrics |= weight_metrics
    if rollout_token_veto_threshold is not None:
        vetoed = veto_mask(x, response_mask, rollout_token_veto_threshold)
        metrics |= _rejected_fractions("rollout_corr/veto_", response_mask.bool(), vetoed.bool())
        loss_mask = loss_mask * vetoed
    if response_mask.any() and not loss_mask.any():
        warnings.warn(
            "rollout correction rejected every token of the batch, so its gradient is 0: check rollout_corr/kl, then "
            "widen rollout_rs_threshold or fix the mismatch",
            stacklevel=2,
        )
    return weights, loss_mask, metrics


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Metrics of the training-inference mismatch.

    kl and k3_kl estimate KL(pi_rollout || pi_train); chi2_token and chi2_seq are mean(rho^2) - 1, per token and per
    response; perplexities and their ratio are means over the responses.
    """
    x = mismatch(old_log_prob, rollout_log_prob, response_mask).double()
    mask, rows = response_mask.bool(), response_mask.bool().any(-1)
    if not rows.any():
        return {}
    train_nll = -masked_mean(old_log_prob.double(), mask, -1)[rows]  # (rows,) log-perplexity of each response
    rollout_nll = -masked_mean(rollout_log_prob.double(), mask, -1)[rows]
    tokens = x[mask].clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    sequences = x.sum(-1)[rows].clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    metrics = {
        "training_ppl": train_nll.exp().mean(),
        "rollout_ppl": rollout_nll.exp().mean(),
        "log_ppl_diff": (rollout_nll - train_nll).mean(),
        "log_ppl_abs_diff": (rollout_nll - train_nll).abs().mean(),
        "ppl_ratio": (train_nll - rollout_nll).exp().mean(),
        "kl": -tokens.mean(),
        "k3_kl": k3(-tokens).mean(),
        "chi2_token": (2 * tokens).exp().mean() - 1,
        "chi2_seq": (2 * sequences).exp().mean() - 1,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
