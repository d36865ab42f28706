"""Losses other than the policy loss: KL and its controllers, entropy, the critic's value loss, SFT."""

import math
from collections.abc import Mapping

import torch

from verl.algorithms.masked import agg_loss, at_least_float32, masked_mean, mean_parts, zero_padding
from verl.registry import did_you_mean

_SYNONYMS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(pi || ref) per token from the log-probs of sampled tokens, with d = logprob - ref_logprob.

    | kind | value | gradient in logprob | |
    |---|---|---|---|
    | k1, kl | d | 1 | unbiased value, may be negative; as a loss, its expected gradient is 0 |
    | abs | abs(d) | sign(d) | |
    | k2, mse | d^2 / 2 | d | biased value; on-policy, its gradient is that of KL(pi, ref) |
    | k3, low_var_kl | exp(-d) - 1 + d | 1 - exp(-d) | unbiased, never negative; its gradient is that of KL(ref, pi) |
    | full | sum_v p (log p - log q) | exact | takes logits (..., V) instead of log-probs |

    A trailing `+` ("k1+", "k3+") combines the value of the kind with the gradient of k2 (J. Schulman, "Approximating KL
    divergence", 2020). k3 clamps -d to [-20, 20] and its result to [-10, 10].

    Args:
        logprob: (B, T); for `full`, logits (B, T, V).
        ref_logprob: same shape.
        kind: see the table.

    Returns:
        (B, T) in float32 (or float64).

    Raises:
        ValueError: if the kind is unknown.
    """
    base, plus = (kind[:-1], True) if kind.endswith("+") else (kind, False)
    if base not in KL_KINDS or (base == "full" and plus):
        raise ValueError(
            f"no KL estimator is called {kind!r}: {did_you_mean(kind, KL_KINDS)}; "
            "append '+' to any but 'full' for the gradient of k2"
        )
    logprob, ref_logprob = at_least_float32(logprob), at_least_float32(ref_logprob)
    if base == "full":
        if logprob.dim() != 3:
            raise ValueError(
                f"full: expected logits (B, T, V), found shape {tuple(logprob.shape)}: use k3 for log-probs"
            )
        return full_kl(logprob, ref_logprob)
    value = _estimate(logprob - ref_logprob, _SYNONYMS.get(base, base))
    if not plus:
        return value
    k2 = 0.5 * (logprob - ref_logprob) ** 2
    return k2 - k2.detach() + value.detach()


def _estimate(d: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return 0.5 * d**2
    return k3(d.clamp(-20, 20)).clamp(-10, 10)


def k3(d: torch.Tensor) -> torch.Tensor:
    """The k3 estimate exp(-d) - 1 + d of KL(p || q) from d = log p - log q of samples of p: unbiased, at least 0."""
    return torch.exp(-d) - 1 + d


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """KL(softmax(logits) || softmax(ref_logits)) over the last dimension: (..., V) -> (...)."""
    log_p = torch.log_softmax(at_least_float32(logits), -1)
    log_q = torch.log_softmax(at_least_float32(ref_logits), -1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)


def kl_loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    kl_loss_type: str = "low_var_kl",
) -> tuple[torch.Tensor, dict[str, object]]:
    """KL in the loss: the aggregated `kl_penalty` of (B, T) log-probs. Add it with `kl_loss_coef`."""
    log_prob, ref_log_prob = zero_padding(response_mask, log_prob, ref_log_prob)
    kl = kl_penalty(log_prob, ref_log_prob, kl_loss_type)
    return agg_loss(kl, response_mask, loss_agg_mode), {"actor/kl_loss": mean_parts(kl, response_mask)}


def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    kl_coef: float,
    kl_penalty_kind: str = "kl",
) -> tuple[torch.Tensor, float]:
    """KL in the reward: r_t = score_t - kl_coef * kl_t.

    Args:
        token_level_scores, old_log_probs, ref_log_prob, response_mask: (B, T).
        kl_coef: the coefficient.
        kl_penalty_kind: a kind of `kl_penalty`.

    Returns:
        The rewards (B, T), and the KL to update a controller with: the mean over non-empty responses of their mean KL
        per token.
    """
    scores, old, ref = zero_padding(response_mask, token_level_scores, old_log_probs, ref_log_prob)
    with torch.no_grad():
        kl = kl_penalty(old, ref, kl_penalty_kind)
        per_sequence = masked_mean(kl, response_mask, -1)
        current_kl = float(masked_mean(per_sequence, response_mask.bool().any(-1)))
        return scores - kl_coef * kl, current_kl


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that adapts to a target KL (Ziegler et al. 2019, arXiv 1909.08593).

        beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * n_steps / horizon)

    A batch is penalized with the coefficient before its update.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        super().__init__(init_kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"adaptive KL controller: expected target_kl > 0 and horizon > 0, found {target_kl} and {horizon}"
            )
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the coefficient.

        Args:
            current_kl: mean KL of the batch.
            n_steps: number of sequences in the batch.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"KL controller: expected a finite KL, found {current_kl}: the policy or the reference has diverged"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(
    type: str = "fixed", kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10000
) -> FixedKLController:
    """Return the controller for `algorithm.kl_ctrl`, whose keys are these parameters. Raises ValueError if unknown."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ValueError(f"no KL controller is called {type!r}: {did_you_mean(type, ('fixed', 'adaptive'))}")


# ------------------------------------------------------------------------------------------------------------- entropy


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each position: logits (..., V) -> (...), in float32 (or float64)."""
    log_probs = torch.log_softmax(at_least_float32(logits), -1)
    # a token with a logit of -inf has probability 0 and adds nothing, not 0 * inf
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def sum_pi_squared_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """sum_v pi_v^2 of each position: logits (..., V) -> (...); used by the optimal token baseline."""
    logits = at_least_float32(logits)
    return torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))


def entropy_loss(logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean") -> torch.Tensor:
    """Aggregated entropy of logits (B, T, V). As a bonus: `loss - entropy_coeff * entropy_loss`."""
    logits = torch.where(response_mask.bool().unsqueeze(-1), at_least_float32(logits), 0.0)
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


# ---------------------------------------------------------------------------------------------------------- value, SFT


def value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    cliprange_value: float = 0.5,
) -> tuple[torch.Tensor, dict[str, object]]:
    """PPO's clipped value loss: 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    Args:
        vpreds: (B, T), v, values of the current critic.
        returns: (B, T), R, the targets.
        values: (B, T), v_old, the values that the advantages were computed from.
        loss_agg_mode: a mode name, or the `LossAggregation` of the mini-batch.
        cliprange_value: c.
    """
    vpreds, returns, values = zero_padding(response_mask, vpreds, returns, values)
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    unclipped_loss, clipped_loss = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(unclipped_loss, clipped_loss), response_mask, loss_agg_mode)
    metrics = {
        "critic/vf_clipfrac": mean_parts(clipped_loss > unclipped_loss, response_mask),
        "critic/vpred_mean": mean_parts(vpreds, response_mask),
    }
    return loss, metrics


def sft_nll(
    log_prob: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str = "token-mean"
) -> tuple[torch.Tensor, dict[str, object]]:
    """SFT loss: the aggregated negative log-likelihood of the target tokens.

    Args:
        log_prob: (B, T), log-prob of token t.
        loss_mask: (B, T), 1 where token t is a target: the assistant's tokens and its EOS.
        loss_agg_mode: a mode name, or the `LossAggregation` of the mini-batch.
    """
    (log_prob,) = zero_padding(loss_mask, log_prob)
    return agg_loss(-log_prob, loss_mask, loss_agg_mode), {"train/nll": mean_parts(-log_prob, loss_mask)}
