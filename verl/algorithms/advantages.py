"""Advantage estimators: how much better than expected was each token?

An estimator is a function of columns, found by the names of its parameters (`verl.algorithms.binding`), and of
settings, its keyword-only parameters, read from `algorithm.*`:

    @register_adv_est("mine", min_group_size=2)
    def mine(token_level_rewards, response_mask, uid, *, temperature=1.0):
        ...
        return advantages, returns

B responses, T padded response length. `token_level_rewards` and `response_mask` are (B, T), `uid` (B,) names the
prompt of each row. Both results are (B, T), float32 at least, zero where the mask is 0. What lies outside the mask is
never read.

The group estimators judge a response against the others of its prompt. A row without any token (an aborted response)
takes no part in the statistics of its group. A prompt with one response has nothing to be compared with: its advantage
is 0, and a warning counts such prompts.

The estimators with a baseline per token are in `token_baselines`, PRIME is in `prime`, SPPO in `preference`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from verl.algorithms.masked import Groups, checked_column, masked_whiten
from verl.registry import Registry

ADV_ESTIMATOR_REGISTRY: Registry[Callable] = Registry("advantage estimator")


def register_adv_est(name: str, *, min_group_size: int = 1) -> Callable[[Callable], Callable]:
    """Decorator that registers an advantage estimator.

    min_group_size: the responses per prompt below which the estimator has nothing to say; kept as the attribute
        `min_group_size` of the function, which a start-up check compares with `rollout.n`.
    """

    def decorate(fn: Callable) -> Callable:
        fn.min_group_size = min_group_size
        return ADV_ESTIMATOR_REGISTRY.register(name, fn)

    return decorate


def get_adv_estimator_fn(name: str) -> Callable:
    """The estimator registered under `name`. Raises ValueError that lists the names."""
    return ADV_ESTIMATOR_REGISTRY[name]


# ---------------------------------------------------------------------------------------------- parts of estimators


class GroupedRewards:
    """The reward of each response, R_i = sum_t r_it, beside those of its prompt; all in float64.

    In float64 the mean of equal float32 rewards is exactly that reward, so that a group without a difference has an
    advantage of exactly 0, also after division by a standard deviation of 0 + epsilon.
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
        alone = self.groups.how_many(self.groups.counted & ~self.comparable)
        if alone:
            warnings.warn(
                f"{estimator}: {alone} of {self.groups.num_groups} prompts have fewer than {min_group_size} responses "
                "to compare; their advantage is 0",
                stacklevel=4,
            )

    def spread(self, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One advantage per response (B,) -> (advantages, returns) on each of its tokens; 0 where not comparable."""
        advantage = torch.where(self.comparable, advantage, 0).to(self.token_level_rewards.dtype)
        advantages = torch.where(self.mask, advantage.unsqueeze(-1), 0)
        return advantages, advantages.clone()


def rewards_to_go(rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """G_t = r_t + gamma * G_(t+1) over the tokens of the policy; `rewards` (B, T) is zero outside the mask.

    Tokens outside the mask (tool output) are stepped over: the running return passes through them as it is.
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
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438), whitened over the batch.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  returns = A + V before whitening.
    The successor of a token is the next token of the policy: tool output in between is stepped over.

    values: (B, T), the critic's value before each token
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
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the discounted rewards to go, whitened over the batch.

    The KL penalty belongs into the rewards (`algorithm.use_kl_in_reward`). Returns are not whitened.
    """
    rewards = checked_column("token_level_rewards", token_level_rewards, response_mask)
    returns = rewards_to_go(rewards, response_mask, gamma)
    return torch.where(response_mask.bool(), masked_whiten(returns, response_mask), 0), returns


@register_adv_est("remax")
@torch.no_grad()
def remax(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, reward_baselines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax (Li et al. 2023, arXiv 2310.10505): rewards to go minus the reward of the greedy response.

    reward_baselines: (B,), the summed reward of one greedy response to the same prompt
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
@torch.no_grad()
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): (R - mean) / (std + epsilon).

    The standard deviation is over n - 1. `norm_adv_by_std_in_grpo=False` leaves it out: Dr.GRPO (Liu et al. 2025,
    arXiv 2503.20783), without the bias towards prompts on which the rewards hardly differ.
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
    """Pass@k by its leave-one-out gain (arXiv 2503.19595): the best response earns R_max - R_second, the others 0.

    Only the best response of k changes the best of k. On a tie for the best nobody does, so all are 0. Divided by the
    group's standard deviation + epsilon when `norm_adv_by_std_in_grpo`.
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
    """Pass@k training in closed form (Chen et al. 2025, arXiv 2508.10751): the mean over all subsets of k responses.

    With N responses of which W are wrong, P = 1 - C(W, k) / C(N, k) and s = sqrt(P (1 - P)):
    right (1 - P) / s, wrong (1 - P - C(W - 1, k - 1) / C(N - 1, k - 1)) / s, and 0 where s is 0.

    passk_k: k; a prompt needs at least k responses
    passk_threshold: a response with a reward above this is right
    """
    if passk_k < 1:
        raise ValueError(f"passk_k: expected an integer of at least 1, found {passk_k}")
    grouped = GroupedRewards("analytic_passk", token_level_rewards, response_mask, uid, max(2, passk_k))
    right = grouped.reward > passk_threshold
    wrong_count = grouped.groups.sum((~right).double())

    def all_wrong(drawn: int, given: int) -> torch.Tensor:
        """Chance that `drawn` further responses are wrong, when `given` wrong ones are taken out of the group."""
        chance = torch.ones_like(wrong_count)
        for taken in range(given, given + drawn):
            chance = chance * (wrong_count - taken).clamp(min=0) / (grouped.groups.count - taken).clamp(min=1)
        return chance

    failure = all_wrong(passk_k, given=0)  # 1 - P
    spread = (failure * (1 - failure)).sqrt()
    advantage = failure - torch.where(right, 0, all_wrong(passk_k - 1, given=1))
    return grouped.spread(torch.where(spread > 0, advantage / spread, 0))


@register_adv_est("rloo", min_group_size=2)
@torch.no_grad()
def rloo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): R_i minus the mean of the *other* rewards.

    Equal to n / (n - 1) (R_i - mean). The baseline does not depend on the response, so the gradient is unbiased.
    """
    grouped = GroupedRewards("rloo", token_level_rewards, response_mask, uid)
    count = grouped.groups.count
    return grouped.spread((grouped.reward - grouped.groups.mean(grouped.reward)) * count / (count - 1).clamp(min=1))


@register_adv_est("opo", min_group_size=2)
@torch.no_grad()
def opo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """On-policy RL with optimal baseline (Hao et al. 2025, arXiv 2505.23585): R_i - sum_j L_j R_j / sum_j L_j.

    L is the response length: the variance-optimal baseline, if the squared gradient of a response grows with it. Meant
    for exact on-policy training (one update per batch), without KL and entropy terms.
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
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): alpha (R - mean) / f_norm.

    alpha = B / (responses whose advantage is not 0) makes up for the groups without a difference, which contribute
    nothing. Advantages up to epsilon count as 0.
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
    """REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262): R - mean on every token, whitened over all tokens.

    The whitening weighs a response by its length.
    """
    grouped = GroupedRewards("reinforce_plus_plus_baseline", token_level_rewards, response_mask, uid)
    centred, _ = grouped.spread(grouped.reward - grouped.groups.mean(grouped.reward))
    advantages = whiten_comparable(centred, grouped)
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
    """Group reward-decoupled normalisation (arXiv 2601.05242): several rewards, each normalised by itself.

    Each component is normalised in its group like GRPO, the results are added with their weights and whitened over all
    tokens of the batch. So a component on a small scale is not drowned by one on a large scale.

    columns: the batch; a component is its column (B,) `reward_<key>`, where a reward function's extra figures are, or
        `<key>`, for each of `gdpo_reward_keys`
    gdpo_reward_weights: one per key, 1 when not given
    """
    weights = gdpo_reward_weights or [1.0] * len(gdpo_reward_keys)
    if not gdpo_reward_keys or len(weights) != len(gdpo_reward_keys):
        raise ValueError(
            f"gdpo: expected at least one of gdpo_reward_keys and a weight for each, found keys {gdpo_reward_keys} "
            f"and weights {gdpo_reward_weights}"
        )
    grouped = GroupedRewards("gdpo", token_level_rewards, response_mask, uid)
    total = torch.zeros_like(grouped.reward)
    for key, weight in zip(gdpo_reward_keys, weights):
        component = _reward_component(columns, key).to(total)
        centred = component - grouped.groups.mean(component)
        total += weight * centred / (grouped.groups.std(component) + epsilon)
    advantages = whiten_comparable(grouped.spread(total)[0], grouped)
    return advantages, advantages.clone()


def _reward_component(columns: Mapping, key: str) -> torch.Tensor:
    """The column (B,) of one component of the reward. Raises ValueError when it is missing or not all finite."""
    found = [name for name in (f"reward_{key}", key) if name in columns]
    if not found:
        raise ValueError(
            f"gdpo: gdpo_reward_keys names {key!r}, but there is no column 'reward_{key}' or {key!r}; columns: "
            f"{', '.join(sorted(columns))}"
        )
    values = columns[found[0]]
    component = torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float64)
    if not torch.isfinite(component).all():
        raise ValueError(f"gdpo: expected finite numbers in column {found[0]!r}, found {values}")
    return component


def whiten_comparable(advantages: torch.Tensor, grouped: GroupedRewards) -> torch.Tensor:
    """Whitened over the tokens of the rows that could be compared; the others stay at 0 and out of the statistics."""
    mask = grouped.mask & grouped.comparable.unsqueeze(-1)
    if not mask.any():
        return torch.zeros_like(advantages)
    return torch.where(mask, masked_whiten(advantages, mask), 0)


# The names of the vectorised variants of verl: here every estimator is vectorised.
ADV_ESTIMATOR_REGISTRY.register("grpo_vectorized", grpo)
ADV_ESTIMATOR_REGISTRY.register("rloo_vectorized", rloo)
