"""Preference learning: a table of losses over pairs or labeled responses, and SPPO.

A sequence log-prob is the sum over the response (`sequence_log_prob`). A loss sees whole mini-batches as vectors of one
number per response, and its derivative by those is what the model's backward pass starts from (`PreferenceLoss`). The
parameters of a loss decide what is computed for it: without `ref_*` no reference model is loaded, and `label` instead
of `chosen` makes it a loss of single responses.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.advantages import GroupedRewards, register_adv_est
from verl.algorithms.masked import force_mode, masked_mean, mean_over, mean_parts, zero_padding
from verl.algorithms.policy_losses import LossAndMetrics, register_policy_loss, weighted_loss
from verl.registry import Registry, check_type, signature


def sequence_log_prob(log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Sum of the token log-probs of each response: (B, T) -> (B,)."""
    return zero_padding(response_mask, log_probs)[0].sum(-1)


# ---- losses ---------------------------------------------------------------------------------------------------------


class PairTerms(NamedTuple):
    """The loss of each pair, and the implicit rewards of its responses, (N,) each."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class LabelTerms(NamedTuple):
    """The loss of each labeled response, and its implicit reward, (N,) each."""

    losses: Tensor
    rewards: Tensor


PREFERENCE_LOSSES: Registry[Callable[..., PairTerms | LabelTerms]] = Registry("preference loss")


def register_preference_loss(name: str) -> Callable[[Callable], Callable]:
    """Register a loss under `name`, a value of `dpo.loss` (decorator).

        @register_preference_loss("slic")
        def slic(chosen, rejected, *, beta=0.1):
            return PairTerms(torch.relu(1 - beta * (chosen - rejected)), beta * chosen, beta * rejected)

    Positional parameters, out of: `chosen`, `rejected` (N,), sequence log-probs of N pairs; `ref_chosen`,
    `ref_rejected`, those of the reference policy; `chosen_length`, `rejected_length`, tokens; `margin`, of the data, 0
    if it has none. A loss of labeled responses has `log_prob`, `ref_log_prob`, `length`, `label` (N,), 1 for desirable
    and 0 for undesirable ones, and `kl`, a number, instead. Keyword-only parameters are settings.

    Raises:
        ValueError: other parameters.
    """

    def decorate(function: Callable) -> Callable:
        inputs, _ = _parameters(function)
        allowed = _PAIR_INPUTS if "chosen" in inputs else _LABEL_INPUTS
        if not {"chosen", "log_prob"} & {*inputs} or not {*inputs} <= {*allowed}:
            raise ValueError(
                f"preference loss {name!r}: expected positional parameters out of {', '.join(_PAIR_INPUTS)}, or out of "
                f"{', '.join(_LABEL_INPUTS)}, found {', '.join(inputs)}; settings are keyword-only, with a default"
            )
        return PREFERENCE_LOSSES.register(name, function)

    return decorate


#: input of a loss of pairs -> its column, and the row of a pair that has it
_PAIR_INPUTS = {
    "chosen": ("log_prob", 0),
    "rejected": ("log_prob", 1),
    "ref_chosen": ("ref_log_prob", 0),
    "ref_rejected": ("ref_log_prob", 1),
    "chosen_length": ("length", 0),
    "rejected_length": ("length", 1),
    "margin": ("margin", 0),
}
_LABEL_INPUTS = ("log_prob", "ref_log_prob", "length", "label", "kl")


def _parameters(function: Callable) -> tuple[list[str], dict[str, inspect.Parameter]]:
    """The names of the inputs of a loss, and its settings."""
    parameters = signature(function).parameters
    settings = {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    return [name for name in parameters if name not in settings], settings


@register_preference_loss("dpo")
def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairTerms:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

    The policy is its own Bradley-Terry reward model: r = beta log(policy / reference). With label smoothing s, the
    assumed share of flipped labels, it is conservative DPO (Mitchell 2023):

        L = -(1 - s) log sigmoid(r_chosen - r_rejected) - s log sigmoid(r_rejected - r_chosen)
    """
    better, worse = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    h = better - worse
    return PairTerms(-(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h), better, worse)


@register_preference_loss("ipo")
def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1) -> PairTerms:
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036), whose tau is beta.

    It does not assume Bradley-Terry preferences: the margin is regressed on a constant, so the KL stays bounded also
    where preferences are deterministic.

        L = ((log-ratio of chosen) - (log-ratio of rejected) - 1 / (2 beta))^2
    """
    better, worse = chosen - ref_chosen, rejected - ref_rejected
    return PairTerms((better - worse - 1 / (2 * beta)) ** 2, beta * better, beta * worse)


@register_preference_loss("kto")
def kto(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    label: Tensor,
    kl: float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabelTerms:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306).

    Responses are good or bad, without pairs. Their value is relative to a reference point, the KL of the policy to the
    reference, estimated from the responses of other prompts of the mini-batch. Its gradient is not taken.

        L = w_d (1 - sigmoid(r - beta kl)) if desirable, else w_u (1 - sigmoid(beta kl - r)), r = beta log(policy / ref)
    """
    rewards = beta * (log_prob - ref_log_prob)
    sign, weight = 2 * label - 1, label * desirable_weight + (1 - label) * undesirable_weight
    return LabelTerms(weight * torch.sigmoid(sign * (beta * kl - rewards)), rewards)


@register_preference_loss("simpo")
def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> PairTerms:
    """SimPO (Meng et al. 2024, arXiv 2405.14734): no reference; the reward is what generation ranks by.

    With r = beta times the mean log-prob per token, and the target margin gamma:

        L = -log sigmoid(r_chosen - r_rejected - gamma)
    """
    better, worse = beta * chosen / chosen_length, beta * rejected / rejected_length
    return PairTerms(-logsigmoid(better - worse - gamma), better, worse)


@register_preference_loss("orpo")
def orpo(
    chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor, *, beta: float = 0.1
) -> PairTerms:
    """ORPO (Hong et al. 2024, arXiv 2403.07691), whose lambda is beta: SFT and preferences in one stage, no reference.

    With p, the exponential of the mean log-prob per token, and odds(p) = p / (1 - p):

        L = -log p_chosen - beta log sigmoid(log odds(p_chosen) - log odds(p_rejected))
    """
    better, worse = chosen / chosen_length, rejected / rejected_length
    odds = [mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7))) for mean in (better, worse)]
    return PairTerms(-better - beta * logsigmoid(odds[0] - odds[1]), beta * better, beta * worse)


@register_preference_loss("bradley_terry")
def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coef: float = 0.0) -> PairTerms:
    """Bradley-Terry reward model: P(chosen preferred) = sigmoid(score_chosen - score_rejected).

        L = -log sigmoid(score_chosen - score_rejected - margin) + center_coef (score_chosen + score_rejected)^2

    Args:
        chosen, rejected: scores.
        margin: how much better the chosen response is (Touvron et al. 2023, arXiv 2307.09288).
        center_coef: keeps scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    centering = center_coef * (chosen + rejected) ** 2 if center_coef else 0.0
    return PairTerms(-logsigmoid(chosen - rejected - margin) + centering, chosen, rejected)


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss with its settings.

    Raises:
        ValueError: no loss has the name, or the loss has no such setting.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = _parameters(self.function)[1]
        for name, value in self.settings.items():
            if name not in parameters:
                raise ValueError(
                    f"the preference loss {self.name} has no setting {name!r}: it has {', '.join(parameters) or 'none'}"
                )
            check_type(parameters[name], value, name)

    @property
    def function(self) -> Callable[..., PairTerms | LabelTerms]:
        return PREFERENCE_LOSSES[self.name]

    @property
    def inputs(self) -> list[str]:
        """Names of its positional parameters."""
        return _parameters(self.function)[0]

    @property
    def is_paired(self) -> bool:
        """Whether rows 2i and 2i + 1 are the chosen and the rejected response of a pair."""
        return "chosen" in self.inputs

    @property
    def needs_reference(self) -> bool:
        """Whether it reads log-probs of the reference policy."""
        return any(name.startswith("ref_") for name in self.inputs)

    @property
    def needs_kl(self) -> bool:
        """Whether it reads the KL estimate, so that every response is also computed for another prompt."""
        return "kl" in self.inputs

    def __call__(self, rows: Mapping[str, Tensor], count: float, kl: float = 0.0) -> LossAndMetrics:
        """The share of B rows of a mini-batch, and metrics with the names of TRL.

        Args:
            rows: (B,) each. `log_prob` (a score, for a reward model) and what else the loss reads of `ref_log_prob`,
                `length`, `margin` and `label`, and `pair_weight`, 0 for rows without a preference.
            count: pairs or labeled responses of the whole mini-batch, without those of weight 0.
            kl: estimate of the KL to the reference.
        """
        if not self.is_paired:
            keep = rows["pair_weight"].bool()
            values = {name: kl if name == "kl" else rows[name][keep] for name in self.inputs}
            terms, is_desirable = self.function(**values, **self.settings), rows["label"][keep].bool()
            return mean_over(terms.losses, count), {
                "rewards/chosen": mean_parts(terms.rewards, is_desirable),
                "rewards/rejected": mean_parts(terms.rewards, ~is_desirable),
            }
        keep = rows["pair_weight"][0::2].bool()
        columns = ((name, *_PAIR_INPUTS[name]) for name in self.inputs)
        values = {name: rows[column][start::2][keep] for name, column, start in columns}
        terms = self.function(**values, **self.settings)
        better, worse = terms.chosen_rewards.detach(), terms.rejected_rewards.detach()
        ones = torch.ones_like(better)
        return mean_over(terms.losses, count), {
            "rewards/chosen": mean_parts(better, ones),
            "rewards/rejected": mean_parts(worse, ones),
            "rewards/accuracies": mean_parts(better > worse, ones),
            "rewards/margins": mean_parts(better - worse, ones),
        }


# ---- SPPO ------------------------------------------------------------------------------------------------------------


@register_adv_est("sppo", min_group_size=2)
@torch.no_grad()
def sppo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence, *, sppo_beta: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Self-play preference optimization (Wu et al. 2024, arXiv 2405.00675): reward minus a soft maximum of the group.

        A_i = R_i - (1 / b) (logsumexp_j(b R_j) - ln n), with b = sppo_beta

    The baseline lies between the mean (b -> 0) and the maximum (b -> inf). Use it with the policy loss `sppo`.
    """
    grouped = GroupedRewards("sppo", token_level_rewards, response_mask, uid)
    groups, reward = grouped.groups, grouped.reward
    best = groups.max(reward)  # subtracted in the exponent, so that it cannot overflow
    mean_exp = groups.mean(torch.exp(sppo_beta * (reward - best)))
    return grouped.spread(reward - best - mean_exp.clamp(min=1e-300).log() / sppo_beta)


@register_policy_loss("sppo")
def sppo_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    sppo_eta: float = 1.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """SPPO (Wu et al. 2024, arXiv 2405.00675): regress the log-ratio of a response on its advantage.

        L = mean_i (sum_t (log_prob - old_log_prob) - eta mean_t A)^2, with eta = sppo_eta

    `loss_agg_mode` is ignored: always the mean over responses. Use it with the estimator `sppo`.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).sum(-1)
    losses = ((log_ratio - sppo_eta * masked_mean(advantages, response_mask, -1)) ** 2).unsqueeze(-1)
    mode, ppo_kl = force_mode(loss_agg_mode, "seq-mean-token-mean"), old_log_prob - log_prob
    return weighted_loss(losses.expand_as(log_prob), rollout_is_weights, response_mask, mode, ppo_kl=ppo_kl)
