"""Drawing tokens: temperature, top-k, top-p, min-p, and random numbers by counter.

A row's random numbers depend on (seed, sample id, position) alone, so its answer does not depend on what else is in the
batch, on the number of processes, or on the order in which rows are served. B rows, V vocabulary.
"""

import torch

from verl.rollout.base import SamplingParams

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): int64 -> int64, every bit depends on every bit."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor  # a logical shift: int64's own keeps the sign
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform(seed: int, sample_ids: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """(B,) float64 numbers in [0, 1), one per (seed, sample id, position). sample_ids: (B,) int64."""
    whole = {"dtype": torch.int64, "device": sample_ids.device}
    start = _mix(sample_ids * _GOLDEN + _mix(torch.as_tensor(seed, **whole)))
    bits = _mix(start + (torch.as_tensor(position, **whole) + 1) * _GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """(B, V) float32 logits over temperature, -inf where top-k, top-p or min-p excludes a token.

    In that order, each on what the one before left; the most probable token always stays.
    """
    logits = logits.float() if params.greedy else logits.float() / params.temperature
    if params.greedy:
        return logits
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= params.top_p  # the mass before this token is enough already
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), float("-inf"))
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), float("-inf"))
    return logits


def draw(
    logits: torch.Tensor, params: SamplingParams, sample_ids: torch.Tensor, position: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-prob under the distribution it was drawn from: (B,) int64, (B,) float32.

    Raises ValueError that names the row when its logits hold NaN or no finite value.
    """
    filtered = filter_logits(logits, params)
    lse = filtered.logsumexp(-1)
    if not bool(lse.isfinite().all()):
        row = int((~lse.isfinite()).nonzero()[0])
        raise ValueError(
            f"row {row} (sample id {int(sample_ids[row])}) has logits that are not finite: the weights are broken "
            "(check the learning rate and the last gradient norms)"
        )
    if params.greedy:
        tokens = filtered.argmax(-1)
    else:
        mass = (filtered - lse[:, None]).exp().double().cumsum(-1)
        target = uniform(params.seed, sample_ids, position) * mass[:, -1]
        tokens = torch.searchsorted(mass, target[:, None], right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return tokens, filtered.gather(1, tokens[:, None])[:, 0] - lse
