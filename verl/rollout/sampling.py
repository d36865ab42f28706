"""Token sampling: temperature, top-k, top-p, min-p, and counter-based random numbers.

The random numbers of a row depend only on (seed, sample id, position), so a response does not depend on the rest of the
batch, the number of processes, or the order in which rows are admitted. They are computed with 64-bit integer
operations and are bitwise equal on every device. B rows, V vocabulary.
"""

import torch
from torch.nn import functional as F

from verl.modeling.token_filter import TokenFilter
from verl.rollout.request import SamplingParams, TopLogProbs

#: the sampling keys that this module applies, for the engines that sample with it
SAMPLING_KEYS = frozenset({"temperature", "top_k", "top_p", "min_p", "ignore_eos"})

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_BELOW_ONE = 1 - 2.0**-53  # the largest float64 below one; times this, a number becomes the next smaller one
#: in vocabularies above _LARGE, the sampled token is searched in two levels: its block, then its index in the block
_LARGE = 4096
_BLOCK = 256


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): int64 -> int64; every output bit depends on all input
    bits."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor  # a logical shift: int64's own keeps the sign
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform(seed: int | torch.Tensor, sample_ids: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """Uniform random numbers in [0, 1), one per (seed, sample id, position), float64.

    Args:
        seed: an int or an int64 tensor.
        sample_ids: (B,) int64.
        position: an int or (B,) int64. All three may have any shapes that broadcast.
    """
    # ints become tensors, whose arithmetic wraps around; they stay on the host to avoid a synchronization
    start = _mix(sample_ids * _GOLDEN + _mix(torch.as_tensor(seed, dtype=torch.int64)))
    bits = _mix(start + (torch.as_tensor(position, dtype=torch.int64) + 1) * _GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p: (B, V) float32 logits, -inf for excluded tokens.

    See `TokenFilter.apply`.
    """
    logits = logits.float()
    if params.greedy:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
    return TokenFilter(params.top_k, params.top_p, params.min_p).apply(logits)


def choose(
    logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: (B, V).
        params: sampling parameters.
        uniforms: (B,) float64 in [0, 1); not read for greedy decoding.

    Returns:
        Tokens (B,) int64 and their log-probs (B,) float32. The log-prob is NaN, and the token invalid, if the logits of
        the row are not finite.
    """
    filtered = filter_logits(logits, params)
    if params.greedy:
        tokens = filtered.argmax(-1, keepdim=True)
        return tokens[:, 0], (filtered.gather(1, tokens) - filtered.logsumexp(-1, keepdim=True))[:, 0]
    probs = filtered.softmax(-1)
    tokens = _invert(probs, uniforms[:, None])
    return tokens[:, 0], probs.gather(1, tokens).log_()[:, 0]


def top_log_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits (B, V) -> (B, K, 2): ids, exact to 2^24, and log-probs of the K most probable tokens, as in `choose`."""
    log_probs = filter_logits(logits, params).log_softmax(-1)
    values, ids = log_probs.topk(min(params.top_logprobs, logits.shape[-1]))
    return torch.stack((ids.float(), values), -1)


def read_top(tokens: torch.Tensor) -> list[TopLogProbs]:
    """(T, K, 2) of `top_log_probs`, without the tokens that the filters exclude."""
    return [[(int(token), value) for token, value in top if value > -torch.inf] for top in tokens.tolist()]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(B, V) weights, (B, 1) uniforms -> (B, 1) first index whose cumulative weight exceeds uniform * total.

    The index never has weight 0: uniform * total is strictly below the total, and the cumulative weight increases at
    the first index that exceeds it.
    """
    if weights.shape[-1] <= _LARGE:
        mass = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).clamp_max_(weights.shape[-1] - 1)
    blocks = F.pad(weights, (0, -weights.shape[-1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    mass = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_max_(mass.shape[-1] - 1)
    upper = mass.gather(1, block)
    lower = torch.where(block > 0, mass.gather(1, (block - 1).clamp_min_(0)), 0.0)
    inside = blocks[torch.arange(len(weights), device=weights.device)[:, None], block][:, 0]
    return block * _BLOCK + _invert(inside, ((target - lower) / (upper - lower)).clamp_max_(_BELOW_ONE))


def check_finite(log_probs: torch.Tensor, rows, sample_ids) -> None:
    """Raise ValueError that names the first row with a non-finite log-prob (B,). rows, sample_ids: B integers."""
    if not bool(log_probs.isfinite().all()):
        index = int((~log_probs.isfinite()).nonzero()[0])
        raise ValueError(
            f"row {rows[index]} (sample id {sample_ids[index]}) has logits that are not finite: training may have "
            "diverged (check the learning rate and the last gradient norms)"
        )
