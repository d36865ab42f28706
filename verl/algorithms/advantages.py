"""Advantage estimators: how much better than expected each token was.

The parameters of an estimator name the columns that it reads (`verl.algorithms.binding`); its keyword-only parameters
are settings, read from `algorithm.*`:

    @register_adv_est("mine", min_group_size=2)
    def mine(token_level_rewards, response_mask, uid, *, temperature=1.0):
        ...
        return advantages, returns

Shapes: B samples, T padded response length. `token_level_rewards` and `response_mask` are (B, T); `uid` (B,) identifies
the prompt of each sample. Both results are (B, T) in float32 (or float64), and zero where the mask is 0. Values outside
the mask are never read.

R_i is the reward of response i, the sum of its token rewards. Group estimators compare a response with the others of
its prompt. A sample without tokens (an aborted response) does not contribute to the statistics of its group. For a
prompt with a single response the advantage is 0, and a warning counts such prompts.

Estimators with a baseline per token are in `token_baselines`, PRIME in `prime`, SPPO in `preference`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch

from verl.algorithms.masked import Groups, checked_column, masked_whiten
from verl.registry import Registry

ADV_ESTIMATOR_REGISTRY: Registry[Callable] = Registry("advantage estimator")


def _name(name: str | Enum) -> str:
    return name.value if isinstance(name, Enum) else name


def register_adv_est(name: str | Enum, *, min_group_size: int = 1) -> Callable[[Callable], Callable]:
    """Decorator that registers an advantage estimator.

    Args:
        name: the value of `algorithm.adv_estimator`, or a member of `AdvantageEstimator`.
        min_group_size: the fewest responses per prompt that the estimator needs. Stored as the attribute
            `min_group_size` of the function; a check at start-up compares it with `rollout.n`.
    """

    def decorate(fn: Callable) -> Callable:
        fn.min_group_size = min_group_size
        return ADV_ESTIMATOR_REGISTRY.register(_name(name), fn)

    return decorate


def get_adv_estimator_fn(name: str | Enum) -> Callable:
    """Return the estimator registered under `name`. Raises ValueError with the known names."""
    return ADV_ESTIMATOR_REGISTRY[_name(name)]


# ------------------------------------------------------------------------------------------------------------ helpers


class GroupedRewards:
    """The checked rewards of a batch and the group of each sample.

    Rewards are in float64, where the mean of equal float32 rewards is exactly that reward. So a zero-variance group has
    an advantage of exactly 0, also after division by 0 + epsilon.

    Attributes:
        reward: (B,) float64, R_i.
        groups: the groups, over samples with at least one token.
        comparable: (B,) bool, samples whose group has at least `min_group_size` responses.
    """

    def __init__(
        self,
        estimator: str,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        uid: Sequence,
        min_group_size: int = 2,
    ):
        self.token_level_rewards = checked_column("token_level_rewards", token_level_rewards, response_mask)
        self.mask = response_mask.bool()
        self.reward = self.token_level_rewards.double().sum(-1)  # (B,)
        self.groups = Groups(uid, self.mask.any(-1))
        self.comparable = self.groups.counted & (self.groups.count >= min_group_size)  # (B,)
        too_small = self.groups.num_groups_with(self.groups.counted & ~self.comparable)
        if too_small:
            warnings.warn(
                f"{estimator}: {too_small} of {self.groups.num_groups} prompts have fewer than {min_group_size} "
                "responses; their advantage is 0",
                stacklevel=4,
            )

    def spread(self, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one advantage per response (B,) to its tokens: (advantages, returns), 0 where not comparable."""
        advantage = torch.where(self.comparable, advantage, 0).to(self.token_level_rewards.dtype)
        advantages = torch.where(self.mask, advantage.unsqueeze(-1), 0)
        return advantages, advantages.clone()


def rewards_to_go(rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return G_t = r_t + gamma * G_(t+1) over the tokens of the policy, (B, T).

    Tokens outside the mask (tool output) are skipped: they neither add a reward nor discount. `rewards` must be zero
    there.
    """
    mask = response_mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return torch.where(mask, returns, 0)


# ---------------------------------------------------------------------------------------------- token-level estimators


@register_adv_est("gae")
@torch.no_grad()
def gae(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438), whitened over the batch.

    A critic's values are the baseline; `lam` trades the bias of the critic against the variance of the return.

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1)
        returns = A + V, before whitening

    Token t + 1 is the next token of the policy; tool output in between is skipped. Assumes a critic that was trained
    on similar states.

    Args:
        values: (B, T), the critic's value of the state before each token.
    """
    rewards = checked_column("token_level_rewards", token_level_rewards, response_mask)
    values = checked_column("values", values, response_mask)
    mask = response_mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    returns = torch.where(mask, advantages + values, 0)
    return torch.where(mask, masked_whiten(advantages, mask), 0), returns


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, *, gamma: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): discounted rewards to go, whitened over the batch.

    The mean over the whole batch is the baseline, so that one response per prompt is enough.

        A_t = whiten(G_t),  G_t = r_t + gamma G_(t+1)

    Assumes a KL penalty in the rewards (`algorithm.use_kl_in_reward`). Returns are not whitened.
    """
    rewards = checked_column("token_level_rewards", token_level_rewards, response_mask)
    returns = rewards_to_go(rewards, response_mask, gamma)
    return torch.where(response_mask.bool(), masked_whiten(returns, response_mask), 0), returns


@register_adv_est("remax")
@torch.no_grad()
def remax(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, reward_baselines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax (Li et al. 2023, arXiv 2310.10505): the reward of the greedy response is the baseline.

        A_t = G_t - R_greedy,  G_t = sum of the rewards from token t on

    The baseline does not depend on the sampled response, so the gradient is unbiased. Costs one greedy response per
    prompt.

    Args:
        reward_baselines: (B,), the total reward of one greedy response to the same prompt.
    """
    rewards = checked_column("token_level_rewards", token_level_rewards, response_mask)
    if reward_baselines.shape != rewards.shape[:1] or not torch.isfinite(reward_baselines).all():
        raise ValueError(
            f"reward_baselines: expected {len(rewards)} finite numbers, one per response, "
            f"found shape {tuple(reward_baselines.shape)}: {reward_baselines.tolist()}"
        )
    returns = rewards_to_go(rewards, response_mask)
    return torch.where(response_mask.bool(), returns - reward_baselines.to(returns.dtype).unsqueeze(-1), 0), returns


# ---------------------------------------------------------------------------------------------- group estimators


@register_adv_est("grpo", min_group_size=2)
@register_adv_est("grpo_vectorized", min_group_size=2)  # in public verl; here every estimator is vectorized
@torch.no_grad()
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300): reward standardized within its group.

        A_i = (R_i - mean_group R) / (std_group R + epsilon)

    The group mean replaces a critic; the standard deviation is over n - 1. Assumes that rewards within a group differ:
    a zero-variance group has advantage 0.

    Args:
        norm_adv_by_std_in_grpo: False skips the division: Dr.GRPO (Liu et al. 2025, arXiv 2503.20783), without the bias
            towards prompts whose rewards hardly differ.
    """
    grouped = GroupedRewards("grpo", token_level_rewards, response_mask, uid)
    advantage = grouped.reward - grouped.groups.mean(grouped.reward)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (grouped.groups.std(grouped.reward) + epsilon)
    return grouped.spread(advantage)


@register_adv_est("grpo_passk", min_group_size=2)
@torch.no_grad()
def grpo_passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass@k by leave-one-out gain (Tang et al. 2025, arXiv 2503.19595): only the best response has an advantage.

        A_best = (R_max - R_second) / (std_group R + epsilon), the others 0

    Removing any other response would not change the best of k. A tie for the best gives 0 for all responses.

    Args:
        norm_adv_by_std_in_grpo: False skips the division by the standard deviation.
    """
    grouped = GroupedRewards("grpo_passk", token_level_rewards, response_mask, uid)
    groups, reward = grouped.groups, grouped.reward
    best = groups.max(reward)
    row = torch.arange(len(reward), dtype=reward.dtype, device=reward.device)
    winner = row == groups.max(torch.where(reward == best, row, -torch.inf))
    second = groups.max(torch.where(winner, -torch.inf, reward))
    advantage = torch.where(winner, best - second, 0)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.std(reward) + epsilon)
    return grouped.spread(advantage)


@register_adv_est("analytic_passk", min_group_size=2)
@torch.no_grad()
def analytic_passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    passk_k: int = 4,
    passk_threshold: float = 0.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass@k training in closed form (Chen et al. 2025, arXiv 2508.10751): averaged over all subsets of k responses.

    For a prompt with N responses, W of them incorrect, P = 1 - C(W, k) / C(N, k) and s = sqrt(P (1 - P)):

        correct:   A = (1 - P) / s
        incorrect: A = (1 - P - C(W - 1, k - 1) / C(N - 1, k - 1)) / s
        0 if s is 0

    Assumes rewards that are correct or incorrect, and at least k responses per prompt.

    Args:
        passk_k: k.
        passk_threshold: a response with a reward above this is correct.
    """
    if passk_k < 1:
        raise ValueError(f"passk_k: expected an integer of at least 1, found {passk_k}")
    grouped = GroupedRewards("analytic_passk", token_level_rewards, response_mask, uid, max(2, passk_k))
    correct = grouped.reward > passk_threshold
    num_incorrect = grouped.groups.sum((~correct).double())

    def all_incorrect(drawn: int, removed: int) -> torch.Tensor:
        """Probability that `drawn` responses are all incorrect, after `removed` incorrect ones left the group."""
        probability = torch.ones_like(num_incorrect)
        for i in range(removed, removed + drawn):
            probability = probability * (num_incorrect - i).clamp(min=0) / (grouped.groups.count - i).clamp(min=1)
        return probability

    failure = all_incorrect(passk_k, removed=0)  # 1 - P
    std = (failure * (1 - failure)).sqrt()
    advantage = failure - torch.where(correct, 0, all_incorrect(passk_k - 1, removed=1))
    return grouped.spread(torch.where(std > 0, advantage / std, 0))


@register_adv_est("rloo", min_group_size=2)
@register_adv_est("rloo_vectorized", min_group_size=2)
@torch.no_grad()
def rloo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): the other responses are the baseline.

        A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_group R)

    The baseline does not depend on response i, so the gradient is unbiased.
    """
    grouped = GroupedRewards("rloo", token_level_rewards, response_mask, uid)
    count = grouped.groups.count
    return grouped.spread((grouped.reward - grouped.groups.mean(grouped.reward)) * count / (count - 1).clamp(min=1))


@register_adv_est("opo", min_group_size=2)
@torch.no_grad()
def opo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """On-policy RL with optimal baseline (Hao et al. 2025, arXiv 2505.23585): a length-weighted group mean.

        A_i = R_i - sum_j L_j R_j / sum_j L_j, with L the response length

    This minimizes the variance if the squared gradient norm of a response is proportional to its length. Assumes
    strictly on-policy training (one update per batch), without KL and entropy terms.
    """
    grouped = GroupedRewards("opo", token_level_rewards, response_mask, uid)
    length = grouped.mask.sum(-1).double()
    baseline = grouped.groups.sum(length * grouped.reward) / grouped.groups.sum(length).clamp(min=1)
    return grouped.spread(grouped.reward - baseline)


@register_adv_est("gpg", min_group_size=2)
@torch.no_grad()
def gpg(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    f_norm: float = 1.0,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): centered reward, rescaled for zero-variance groups.

        A_i = alpha (R_i - mean_group R) / f_norm,  alpha = B / (number of samples with |R_i - mean| > epsilon)

    alpha compensates for the zero-variance groups, which contribute no gradient. Assumes one update per batch.
    """
    grouped = GroupedRewards("gpg", token_level_rewards, response_mask, uid)
    advantage = torch.where(grouped.comparable, grouped.reward - grouped.groups.mean(grouped.reward), 0)
    contributing = int((advantage.abs() > epsilon).sum())
    alpha = int(grouped.groups.counted.sum()) / max(1, contributing)
    return grouped.spread(alpha * advantage / f_norm)


@register_adv_est("reinforce_plus_plus_baseline", min_group_size=2)
@torch.no_grad()
def reinforce_plus_plus_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262): centered per group, whitened over the batch.

        A_it = whiten(R_i - mean_group R), over all tokens of the batch

    A response enters the whitening once per token, so long responses weigh more.
    """
    grouped = GroupedRewards("reinforce_plus_plus_baseline", token_level_rewards, response_mask, uid)
    centered, _ = grouped.spread(grouped.reward - grouped.groups.mean(grouped.reward))
    advantages = whiten_comparable(centered, grouped)
    return advantages, advantages.clone()


@register_adv_est("gdpo", min_group_size=2)
@torch.no_grad()
def gdpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    columns: Mapping,
    *,
    gdpo_reward_keys: Sequence[str],
    gdpo_reward_weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group reward-decoupled normalization (arXiv 2601.05242): several rewards, each standardized on its own.

        A_i = whiten(sum_k w_k (R_ik - mean_group R_k) / (std_group R_k + epsilon)), over all tokens of the batch

    So a reward on a small scale is not dominated by one on a large scale.

    Args:
        columns: the batch. Reward k is the column (B,) `reward_<key>`, where the extra values of a reward function are,
            or `<key>`.
        gdpo_reward_keys: one key per reward.
        gdpo_reward_weights: one weight per key; 1 by default.
    """
    weights = gdpo_reward_weights or [1.0] * len(gdpo_reward_keys)
    if not gdpo_reward_keys or len(weights) != len(gdpo_reward_keys):
        raise ValueError(
            f"gdpo: expected gdpo_reward_keys and a weight for each of them, found keys {gdpo_reward_keys} and weights "
            f"{gdpo_reward_weights}"
        )
    grouped = GroupedRewards("gdpo", token_level_rewards, response_mask, uid)
    total = torch.zeros_like(grouped.reward)
    for key, weight in zip(gdpo_reward_keys, weights):
        component = _reward_component(columns, key).to(total)
        centered = component - grouped.groups.mean(component)
        total += weight * centered / (grouped.groups.std(component) + epsilon)
    advantages = whiten_comparable(grouped.spread(total)[0], grouped)
    return advantages, advantages.clone()


def _reward_component(columns: Mapping, key: str) -> torch.Tensor:
    """Return one reward as (B,) float64. Raises ValueError if the column is missing or not finite."""
    present = [name for name in (f"reward_{key}", key) if name in columns]
    if not present:
        raise ValueError(
            f"gdpo: gdpo_reward_keys names {key!r}, but there is no column 'reward_{key}' or {key!r}; columns: "
            f"{', '.join(sorted(columns))}"
        )
    values = columns[present[0]]
    component = torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float64)
    if not torch.isfinite(component).all():
        raise ValueError(f"gdpo: expected finite numbers in column {present[0]!r}, found {values}")
    return component


def whiten_comparable(advantages: torch.Tensor, grouped: GroupedRewards) -> torch.Tensor:
    """Whiten over the tokens of comparable samples; the others are 0 and do not enter the statistics."""
    mask = grouped.mask & grouped.comparable.unsqueeze(-1)
    if not mask.any():
        return torch.zeros_like(advantages)
    return torch.where(mask, masked_whiten(advantages, mask), 0)
