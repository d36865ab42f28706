"""Losses beside the policy loss: the critic's value loss, the entropy of the policy, supervised fine-tuning."""

import torch

from verl.algorithms.masked import agg_loss, at_least_float32, mean_parts, zero_padding


def value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    cliprange_value: float = 0.5,
) -> tuple[torch.Tensor, dict[str, object]]:
    """The critic's loss with a clipped step: 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    vpreds: (B, T) values of the critic now; values: those that the advantages were made with; returns: the targets
    loss_agg_mode: a mode name, or the `LossAggregation` of the mini-batch
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


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) - sum_v softmax(z)_v z_v of each position: logits (..., V) -> (...), float32 at least."""
    log_probs = torch.log_softmax(at_least_float32(logits), -1)
    # A token that is masked out by a logit of -inf has probability 0 and adds nothing, not 0 * inf.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def sum_pi_squared_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """sum_v pi_v^2 of each position: logits (..., V) -> (...); what the optimal token baseline asks for."""
    logits = at_least_float32(logits)
    return torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))


def entropy_loss(logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean") -> torch.Tensor:
    """The aggregated entropy of logits (B, T, V). As a bonus: `loss - entropy_coeff * entropy_loss`."""
    logits = torch.where(response_mask.bool().unsqueeze(-1), at_least_float32(logits), 0.0)
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def sft_nll(
    log_prob: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str = "token-mean"
) -> tuple[torch.Tensor, dict[str, object]]:
    """Negative log-likelihood of the tokens to imitate: log_prob (B, T), loss_mask (B, T) 1 on the assistant's tokens.

    Position t of both speaks of the same token. EOS is one of the tokens to imitate.
    """
    (log_prob,) = zero_padding(loss_mask, log_prob)
    return agg_loss(-log_prob, loss_mask, loss_agg_mode), {"train/nll": mean_parts(-log_prob, loss_mask)}
