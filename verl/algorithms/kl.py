"""KL divergence between the policy and a reference: estimators, the penalty in the reward, and its controllers."""

import math
from collections.abc import Mapping

import torch

from verl.algorithms.masked import agg_loss, at_least_float32, masked_mean, mean_parts, zero_padding
from verl.registry import did_you_mean

_SYNONYMS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kind: str) -> torch.Tensor:
    """An estimate of KL(pi || ref) per token from sampled log-probs, with d = logprob - ref_logprob.

    | kind | value | gradient by logprob | |
    |---|---|---|---|
    | k1, kl | d | 1 | unbiased value, may be negative; as a loss its gradient is 0 in expectation |
    | abs | abs(d) | sign(d) | |
    | k2, mse | d^2 / 2 | d | biased value; on policy, its gradient is that of KL(pi, ref) |
    | k3, low_var_kl | exp(-d) - 1 + d | 1 - exp(-d) | unbiased, never negative; its gradient is that of KL(ref, pi) |
    | full | sum_v p (log p - log q) | exact | takes logits (..., V) in place of log-probs |

    A trailing `+` ("k1+", "k3+") gives the value of the kind and the gradient of k2 (J. Schulman, "Approximating KL
    divergence", 2020). k3 clamps -d to 20 and its result to 10, either way.

    logprob, ref_logprob: (B, T); for `full`, logits (B, T, V)
    Returns (B, T), float32 at least. Raises ValueError for an unknown kind.
    """
    base, plus = (kind[:-1], True) if kind.endswith("+") else (kind, False)
    if base not in KL_KINDS or (base == "full" and plus):
        raise ValueError(
            f"no KL estimator is called {kind!r}: {did_you_mean(kind, KL_KINDS)}; "
            "a '+' behind any but 'full' takes the gradient of k2"
        )
    logprob, ref_logprob = at_least_float32(logprob), at_least_float32(ref_logprob)
    if base == "full":
        if logprob.dim() != 3:
            raise ValueError(f"full needs logits (B, T, V), found log-probs of shape {tuple(logprob.shape)}: use k3")
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
    return (torch.exp((-d).clamp(-20, 20)) - 1 + d).clamp(-10, 10)


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
    """KL in the loss: the aggregated `kl_penalty` of (B, T) log-probs, to be added with `kl_loss_coef`."""
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
    """KL in the reward: r_t = score_t - kl_coef * kl_t, and the KL that a controller is updated with.

    All tensors are (B, T); `kl_penalty_kind` is a kind of `kl_penalty`. The second result is the mean over (non-empty)
    sequences of their mean KL per token.
    """
    scores, old, ref = zero_padding(response_mask, token_level_scores, old_log_probs, ref_log_prob)
    with torch.no_grad():
        kl = kl_penalty(old, ref, kl_penalty_kind)
        per_sequence = masked_mean(kl, response_mask, -1)
        current_kl = float(masked_mean(per_sequence, response_mask.bool().any(-1)))
        return scores - kl_coef * kl, current_kl


class FixedKLController:
    """A KL coefficient that stays as it is."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A KL coefficient steered towards a target KL (Ziegler et al. 2019, arXiv 1909.08593).

    beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * n_steps / horizon)

    A batch is penalised with the coefficient from before its update.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        super().__init__(init_kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"an adaptive KL controller needs target_kl > 0 and horizon > 0, found {target_kl}, {horizon}"
            )
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """current_kl: mean KL of the batch; n_steps: its number of sequences."""
        if not math.isfinite(current_kl):
            raise ValueError(
                f"expected a finite KL to steer by, found {current_kl}: the policy or the reference is broken"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(
    type: str = "fixed", kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10000
) -> FixedKLController:
    """The controller of `algorithm.kl_ctrl`, whose keys are these parameters. Raises ValueError for an unknown type."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ValueError(f"no KL controller is called {type!r}: {did_you_mean(type, ('fixed', 'adaptive'))}")
