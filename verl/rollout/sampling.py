"""Sampling tokens: temperature, top-k, top-p, min-p, and random numbers by counter.

The random numbers of a row depend on (seed, sample id, position) alone, so a response does not depend on what else is
in the batch, on the number of processes, or on the order in which rows are admitted. They are computed by 64-bit
integer operations and have the same bits on every device. B rows, V vocabulary.
"""

import math

import torch
from torch.nn import functional as F

from verl.rollout.base import SamplingParams

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_BELOW_ONE = 1 - 2.0**-53  # the largest float64 below one; times this, a number becomes the next smaller one
#: in vocabularies above _LARGE, the sampled token is searched in two levels: its block, then its index in the block
_LARGE = 4096
_BLOCK = 256
#: most probable tokens that top-p looks at first; a row that needs more is sorted completely
_NUCLEUS = 256


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): int64 -> int64, every bit depends on every bit."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor  # a logical shift: int64's own keeps the sign
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform(seed: int | torch.Tensor, sample_ids: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """Float64 numbers in [0, 1), one per (seed, sample id, position).

    Args:
        seed: a number, or int64 of a shape that broadcasts.
        sample_ids: (B,) int64.
        position: a number or (B,) int64; or any shapes that broadcast.
    """
    # numbers become tensors, which wrap around, but stay on the host: no wait for a device
    start = _mix(sample_ids * _GOLDEN + _mix(torch.as_tensor(seed, dtype=torch.int64)))
    bits = _mix(start + (torch.as_tensor(position, dtype=torch.int64) + 1) * _GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """(B, V) float32 logits over temperature, -inf where top-k, top-p or min-p excludes a token.

    In that order, each on the result of the one before. The most probable token always stays, and so do tokens that
    are exactly as probable as the last one kept by top-k or min-p.
    """
    logits = logits.float()
    if params.greedy:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
    excluded = float("-inf")
    if 0 < params.top_k < logits.shape[-1]:
        top = logits.topk(params.top_k, -1)
        if params.top_p < 1:  # the remaining ones are in order already
            kept = top.values.masked_fill(_outside(top.values.softmax(-1), params.top_p), excluded)
            logits = torch.full_like(logits, excluded).scatter_(1, top.indices, kept)
        else:
            logits = logits.masked_fill(logits < top.values[:, -1:], excluded)
    elif params.top_p < 1:
        logits = _nucleus(logits, params.top_p)
    if params.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), excluded)
    return logits


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """(B, V) logits, -inf outside the smallest set of tokens whose probability is at least top_p."""
    total, vocabulary = logits.logsumexp(-1, keepdim=True), logits.shape[-1]

    def nucleus(rows: torch.Tensor, total: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, and whether one of the `size` tokens is outside, so that no other token is inside."""
        top = rows.topk(size, -1)
        outside = _outside((top.values - total).exp_(), top_p)
        kept = top.values.masked_fill_(outside, float("-inf"))
        return torch.full_like(rows, float("-inf")).scatter_(1, top.indices, kept), outside[:, -1]

    size = _NUCLEUS if vocabulary > _LARGE else vocabulary
    found, complete = nucleus(logits, total, size)
    if size < vocabulary and len(wide := (~complete).nonzero()[:, 0]):
        found[wide] = nucleus(logits[wide], total[wide], vocabulary)[0]
    return found


def _outside(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """(B, K) probabilities in decreasing order -> True where the tokens before reach top_p already."""
    return probs.cumsum(-1) - probs >= top_p


def choose(
    logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, by inversion of the cumulative distribution, and its log-prob: (B,) int64, (B,) float32.

    logits: (B, V). uniforms: (B,) float64 in [0, 1); not read when greedy. A NaN log-prob means that the logits of the
    row were not finite; its token is invalid.
    """
    filtered = filter_logits(logits, params)
    if params.greedy:
        tokens = filtered.argmax(-1, keepdim=True)
        return tokens[:, 0], (filtered.gather(1, tokens) - filtered.logsumexp(-1, keepdim=True))[:, 0]
    probs = filtered.softmax(-1)
    tokens = _invert(probs, uniforms[:, None])
    return tokens[:, 0], probs.gather(1, tokens).log_()[:, 0]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(B, V) weights, (B, 1) uniforms -> (B, 1) first index whose cumulative weight exceeds its share of the total.

    Never an index of weight 0: a number below one times the total lies strictly below the total, and at the first index
    that exceeds it the cumulative weight has grown.
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


def draw(
    logits: torch.Tensor, params: SamplingParams, sample_ids: torch.Tensor, position: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-prob under the distribution it was sampled from: (B,) int64, (B,) float32.

    Raises:
        ValueError: logits of a row hold NaN or no finite value; it names the row.
    """
    uniforms = None if params.greedy else uniform(params.seed, sample_ids, position)
    tokens, log_probs = choose(logits, params, uniforms)
    check_finite(log_probs, range(len(log_probs)), sample_ids.tolist())
    return tokens, log_probs


def check_finite(log_probs: torch.Tensor, rows, sample_ids) -> None:
    """Raises ValueError that names the first row of log_probs (B,) that is not finite. rows, sample_ids: B integers."""
    if not bool(log_probs.isfinite().all()):
        found = int((~log_probs.isfinite()).nonzero()[0])
        raise ValueError(
            f"row {rows[found]} (sample id {sample_ids[found]}) has logits that are not finite: the weights are broken "
            "(check the learning rate and the last gradient norms)"
        )
