"""Masked statistics, groups of samples, loss aggregation, and metrics that merge exactly.

A mask is 0/1 and has the shape of the tensor it masks. Values where it is 0 are never read, so NaN or infinity in the
padding cannot reach a loss or a gradient.

- `masked_sum masked_mean masked_var masked_whiten zero_padding`: masked statistics
- `Groups`: statistics over the samples of one prompt
- `LossAggregation`, `agg_loss`: a scalar from a matrix of token losses, independent of how the batch is split
- `mean_parts`, `Largest`: metrics that merge exactly over micro-batches and ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.registry import did_you_mean

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Cast to float32; float64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def zero_padding(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each tensor in float32 (or float64) with zeros where the mask is 0.

    A loss calls this on its inputs, before any arithmetic. Masking only the result would give the right value, but the
    gradient at a padded position would be 0 * NaN.

    Raises:
        ValueError: if the shape of a tensor differs from that of the mask. Broadcasting would hide the error.
    """
    keep = mask.bool()
    for x in tensors:
        if x.shape != mask.shape:
            raise ValueError(
                f"expected a tensor of the mask's shape {tuple(mask.shape)}, found {tuple(x.shape)}: "
                "every (B, T) column of a batch has the same width"
            )
    return tuple(torch.where(keep, at_least_float32(x), 0.0) for x in tensors)


def checked_column(name: str, x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return a (B, T) column in float32 (or float64), zero outside the mask.

    Raises:
        ValueError: if the shape differs from that of the mask, or a value inside the mask is NaN or infinite. A single
            such reward would silently turn the gradient of the whole batch into NaN.
    """
    if x.shape != response_mask.shape:
        raise ValueError(
            f"{name}: expected the shape of response_mask {tuple(response_mask.shape)}, found {tuple(x.shape)}"
        )
    (x,) = zero_padding(response_mask, x)
    bad = (~torch.isfinite(x)).any(-1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"{name}: expected finite numbers, found NaN or infinity in {len(bad)} of {len(x)} rows, the first is row "
            f"{bad[0]}: fix or drop these samples"
        )
    return x


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `x` where the mask is 1, over `dim`; None: over all elements."""
    return torch.where(mask.bool(), x, 0).sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `x` where the mask is 1; 0 if the mask is 0 everywhere."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(x: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance of the masked values; divided by n - 1 if `unbiased`, otherwise by n.

    Raises:
        ValueError: if the mask selects fewer than two values.
    """
    n = int(mask.bool().sum())
    if n < 2:
        raise ValueError(f"a variance needs at least 2 valid tokens, found {n}: check the response mask and batch size")
    squares = masked_sum((x - masked_mean(x, mask)) ** 2, mask)
    return squares / (n - 1 if unbiased else n)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)`, with mean and variance of the masked values of the whole tensor.

    Call it on the whole batch, never on a micro-batch. Padded positions are shifted and scaled like the others. With
    `shift_mean=False` the mean is not subtracted.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


class Groups:
    """The samples of each prompt (those with the same `uid`), and statistics over them.

    Every statistic is returned once per sample: entry i is the value of the group that sample i belongs to. Groups may
    have any size, and their samples any order.

    Args:
        uid: (B,) identifies the prompt of each sample.
        counted: (B,) bool. Other samples do not contribute to the statistics, but receive those of their group.

    Attributes:
        count: (B,) number of counted samples in the group of each sample.
    """

    def __init__(self, uid: Sequence, counted: torch.Tensor):
        numbers: dict[object, int] = {}
        keys = uid.tolist() if isinstance(uid, torch.Tensor) else uid
        index = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(index) != len(counted):
            raise ValueError(f"expected one uid per row ({len(counted)}), found {len(index)}")
        self.index = torch.tensor(index, dtype=torch.long, device=counted.device)  # (B,) group of each sample
        self.num_groups = len(numbers)
        self.counted = counted.bool()
        self.count = self.sum(torch.ones(len(index), dtype=torch.float64, device=counted.device))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Group sums; `x` and the result are (B,) or (B, T)."""
        total = torch.zeros(self.num_groups, *x.shape[1:], dtype=x.dtype, device=x.device)
        counted = self.counted.view(-1, *[1] * (x.dim() - 1))
        return total.index_add_(0, self.index, torch.where(counted, x, 0))[self.index]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Group means (B,)."""
        return self.sum(x) / self.count.clamp(min=1)

    def std(self, x: torch.Tensor) -> torch.Tensor:
        """Group standard deviations (B,), with n - 1; 0 for a group of one."""
        return (self.sum((x - self.mean(x)) ** 2) / (self.count - 1).clamp(min=1)).sqrt()

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Group maxima (B,); -inf for a group without counted samples."""
        low = torch.full((self.num_groups,), -torch.inf, dtype=x.dtype, device=x.device)
        values = torch.where(self.counted, x, -torch.inf)
        return low.scatter_reduce(0, self.index, values, "amax")[self.index]

    def num_groups_with(self, samples: torch.Tensor) -> int:
        """Number of groups that have at least one of `samples`, a (B,) bool mask."""
        return int(self.index[samples].unique().numel())


class LossAggregation(str):
    """The name of an aggregation mode, together with the counts of the whole mini-batch.

    A gradient must not depend on how a mini-batch is split into micro-batches or over ranks. So every loss term is a
    sum divided by one global count, taken before the split:

        aggregation = LossAggregation.from_mask("token-mean", mini_batch_response_mask)
        for micro in micro_batches:
            agg_loss(token_losses, micro_mask, aggregation).backward()

    It is a `str`, so a loss written for mode names takes it unchanged.

    Args:
        mode: one of `LOSS_AGG_MODES`.
        num_tokens: ones in the response mask of the mini-batch, over all ranks.
        num_sequences: responses of the mini-batch with at least one token, over all ranks.
        scale_factor: the constant C of "seq-mean-token-sum-norm".
    """

    num_tokens: float
    num_sequences: float
    scale_factor: float | None

    def __new__(cls, mode: str, num_tokens: float, num_sequences: float, scale_factor: float | None = None):
        self = super().__new__(cls, _checked_mode(mode))
        if mode == "seq-mean-token-sum-norm" and not scale_factor:
            raise ValueError(
                "seq-mean-token-sum-norm: expected scale_factor > 0 (for example data.max_response_length), "
                f"found {scale_factor}"
            )
        self.num_tokens, self.num_sequences, self.scale_factor = num_tokens, num_sequences, scale_factor
        return self

    def __getnewargs__(self):  # so that pickling keeps the counts
        return str(self), self.num_tokens, self.num_sequences, self.scale_factor

    @classmethod
    def from_mask(cls, mode: str, response_mask: torch.Tensor, scale_factor: float | None = None) -> "LossAggregation":
        """Return the aggregation of a mini-batch, from its response mask (B, T).

        Without `scale_factor`, C is T, the width of the mask. That is only correct if all batches are padded to the
        same T.
        """
        tokens = response_mask.bool()
        return cls(mode, int(tokens.sum()), int(tokens.any(-1).sum()), scale_factor or response_mask.shape[-1])

    def with_mode(self, mode: str) -> "LossAggregation":
        """Return the same counts with another mode, for losses that are defined for a single mode."""
        return LossAggregation(mode, self.num_tokens, self.num_sequences, self.scale_factor)

    def share(self, loss: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a micro-batch's loss as a metric (sum, count): the counts of a mini-batch add up to 1."""
        return loss.detach(), mask.bool().any(-1).sum() / max(self.num_sequences, 1)


def _checked_mode(mode: str) -> str:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"no loss_agg_mode is called {str(mode)!r}: {did_you_mean(str(mode), LOSS_AGG_MODES)}")
    return mode


def force_mode(loss_agg_mode: str, mode: str) -> str:
    """Return `mode` with the counts of `loss_agg_mode`, if it has any."""
    return loss_agg_mode.with_mode(mode) if isinstance(loss_agg_mode, LossAggregation) else mode


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Aggregate a matrix of token losses into a scalar.

    | mode | value |
    |---|---|
    | token-mean | sum over tokens / number of tokens (DAPO, arXiv 2503.14476) |
    | seq-mean-token-sum | mean over sequences of their sum |
    | seq-mean-token-mean | mean over sequences of their mean (GRPO, arXiv 2402.03300) |
    | seq-mean-token-sum-norm | mean over sequences of their sum / C (Dr.GRPO, arXiv 2503.20783) |
    | token-sum | sum over tokens |

    The counts come from `loss_agg_mode` if it is a `LossAggregation`, otherwise from the keyword arguments, otherwise
    from this matrix, with C = T. Only the first two make the sum over micro-batches equal to the value of the whole
    mini-batch. Sequences without tokens are not counted; without any token, loss and gradient are 0.

    Args:
        loss_mat: (B, T) token losses.
        loss_mask: (B, T) response mask.
        loss_agg_mode: a mode name or a `LossAggregation`.
        dp_size: factor that cancels the averaging of gradients over data-parallel ranks.
        batch_num_tokens: tokens of the mini-batch, over all ranks.
        global_batch_size: non-empty sequences of the mini-batch, over all ranks.
        loss_scale_factor: C of "seq-mean-token-sum-norm".

    Raises:
        ValueError: if the mode is unknown.
    """
    _checked_mode(loss_agg_mode)
    num_tokens, num_sequences, scale = batch_num_tokens, global_batch_size, loss_scale_factor
    if isinstance(loss_agg_mode, LossAggregation):
        num_tokens, num_sequences = loss_agg_mode.num_tokens, loss_agg_mode.num_sequences
        scale = loss_agg_mode.scale_factor
    loss_mat, mask = at_least_float32(loss_mat), loss_mask.bool()

    if loss_agg_mode in ("token-mean", "token-sum"):
        total, count = masked_sum(loss_mat, mask), 1
        if loss_agg_mode == "token-mean":
            count = mask.sum() if num_tokens is None else num_tokens
    else:
        per_sequence = masked_mean if loss_agg_mode == "seq-mean-token-mean" else masked_sum
        total = per_sequence(loss_mat, mask, -1).sum()
        count = mask.any(-1).sum() if num_sequences is None else num_sequences
        if loss_agg_mode == "seq-mean-token-sum-norm":
            total = total / (scale or loss_mat.shape[-1])
    # if every token is rejected the loss is 0, not 0 / 0
    return total / (count.clamp(min=1) if isinstance(count, torch.Tensor) else max(1, count)) * dp_size


def mean_over(losses: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Sum of the per-sample losses (N,) divided by `count`, the samples of the whole mini-batch; by N if None."""
    return at_least_float32(losses).sum() / max(1, len(losses) if count is None else count)


@dataclass(frozen=True)
class Largest:
    """A metric that is reduced by the maximum. `value`: a number or a tensor with one element."""

    value: Any


def mean_parts(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masked (sum, count) of `x`, detached: a metric that merges exactly."""
    return masked_sum(x.detach(), mask), mask.bool().sum()
