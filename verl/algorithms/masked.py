"""Masked sums, groups of rows, the aggregation of a loss, and metrics that merge exactly.

A mask is 0/1 and of the shape of what it covers; positions where it is 0 are never read, so that NaN or infinity in
padding cannot leak into a value or a gradient.

- `masked_sum masked_mean masked_var masked_whiten zero_padding`: statistics under a mask
- `Groups`, `group_mean_std`: statistics over the rows that share a prompt
- `LossAggregation`, `agg_loss`: one scalar from a matrix of token losses, the same for every split of the batch
- `mean_parts`, `merge_metrics`: metrics as (sum, count), which merge over micro-batches and ranks without error
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from verl.registry import did_you_mean

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or as it is when it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def zero_padding(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each tensor in float32 at least, with zeros where the mask is 0.

    A loss does this to its inputs, before any arithmetic: masking its result alone would keep the value clean, but the
    gradient at a padded position would be 0 * NaN.

    Raises ValueError when a tensor has not the shape of the mask (broadcasting would hide the mistake).
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
    """A (B, T) column in float32 at least, zero outside the mask.

    Raises ValueError for a wrong shape, or when a value inside the mask is NaN or infinite: an advantage made from it
    would stop the learning of the whole batch without a word.
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
            f"{bad[0]}: mend or drop these samples"
        )
    return x


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `x` where the mask is 1, over `dim` (None: over everything)."""
    return torch.where(mask.bool(), x, 0).sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `x` where the mask is 1; 0 where the mask selects nothing."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(x: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance of the values that the mask selects, about their mean; divided by n - 1 when `unbiased`.

    Raises ValueError for fewer than two values: there is nothing to estimate a spread from.
    """
    n = int(mask.bool().sum())
    if n < 2:
        raise ValueError(f"a variance needs at least 2 valid tokens, found {n}: check the response mask and batch size")
    squares = masked_sum((x - masked_mean(x, mask)) ** 2, mask)
    return squares / (n - 1 if unbiased else n)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with the statistics of the masked values of the *whole* tensor.

    Call it on the whole batch, never on a micro-batch. Padded positions are shifted and scaled like the others.
    `shift_mean=False` scales only.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


class Groups:
    """Rows that share a `uid` (the responses to one prompt): sums, means, maxima, each handed back to every row.

    Groups may have any size and their rows any order. Rows outside `counted` (B,) take no part in any statistic, but
    read the one of their group. `count` (B,) is the number of counted rows in the group of each row.
    """

    def __init__(self, uid: Sequence, counted: torch.Tensor):
        numbers: dict[object, int] = {}
        keys = uid.tolist() if isinstance(uid, torch.Tensor) else uid
        index = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(index) != len(counted):
            raise ValueError(f"expected one uid per row ({len(counted)}), found {len(index)}")
        self.index = torch.tensor(index, dtype=torch.long, device=counted.device)  # (B,) number of the row's group
        self.num_groups = len(numbers)
        self.counted = counted.bool()
        self.count = self.sum(torch.ones(len(index), dtype=torch.float64, device=counted.device))

    def _over_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.counted.view(-1, *[1] * (x.dim() - 1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group of each row; `x` is (B,) or (B, T), and so is the result."""
        total = torch.zeros(self.num_groups, *x.shape[1:], dtype=x.dtype, device=x.device)
        return total.index_add_(0, self.index, torch.where(self._over_rows(x), x, 0))[self.index]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Mean over the group of each row (B,)."""
        return self.sum(x) / self.count.clamp(min=1)

    def std(self, x: torch.Tensor) -> torch.Tensor:
        """Standard deviation over the group of each row (B,), divided by n - 1; 0 for a group of one."""
        return (self.sum((x - self.mean(x)) ** 2) / (self.count - 1).clamp(min=1)).sqrt()

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Largest value in the group of each row (B,); -inf for a group without counted rows."""
        low = torch.full((self.num_groups,), -torch.inf, dtype=x.dtype, device=x.device)
        rows = torch.where(self.counted, x, -torch.inf)
        return low.scatter_reduce(0, self.index, rows, "amax")[self.index]

    def how_many(self, rows: torch.Tensor) -> int:
        """The number of groups that have a row in `rows` (B,) bool."""
        return int(self.index[rows].unique().numel())


def group_mean_std(x: torch.Tensor, uid: Sequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, std, count) of the group of each row: `x` (B,), `uid` (B,), each result (B,); std is over n - 1."""
    groups = Groups(uid, torch.ones_like(x, dtype=torch.bool))
    return groups.mean(x), groups.std(x), groups.count


class LossAggregation(str):
    """The name of an aggregation mode that carries the counts of the whole mini-batch.

    A gradient must not depend on how a mini-batch is cut into micro-batches or over ranks. So every loss term is a sum
    divided by one global count, taken before the cut:

        aggregation = LossAggregation.of("token-mean", mini_batch_response_mask)
        for micro in micro_batches:
            agg_loss(token_losses, micro_mask, aggregation).backward()

    It is a string, so that a loss written for mode names receives it unchanged.

    mode: one of `LOSS_AGG_MODES`
    num_tokens: ones in the response mask of the mini-batch, over all ranks
    num_sequences: rows of it with at least one token
    scale_factor: the constant C of "seq-mean-token-sum-norm"
    """

    num_tokens: float
    num_sequences: float
    scale_factor: float | None

    def __new__(cls, mode: str, num_tokens: float, num_sequences: float, scale_factor: float | None = None):
        self = super().__new__(cls, _checked_mode(mode))
        if mode == "seq-mean-token-sum-norm" and not scale_factor:
            raise ValueError(
                "seq-mean-token-sum-norm divides by a constant: expected scale_factor > 0 (the longest response "
                f"that can occur), found {scale_factor}"
            )
        self.num_tokens, self.num_sequences, self.scale_factor = num_tokens, num_sequences, scale_factor
        return self

    def __getnewargs__(self):  # pickling: a worker in another process receives the counts too
        return str(self), self.num_tokens, self.num_sequences, self.scale_factor

    @classmethod
    def of(cls, mode: str, response_mask: torch.Tensor, scale_factor: float | None = None) -> "LossAggregation":
        """The aggregation of a whole mini-batch, from its response mask (B, T).

        Without `scale_factor`, C is T, the width of the mask: right only where every batch is padded to the same T.
        """
        tokens = response_mask.bool()
        return cls(mode, int(tokens.sum()), int(tokens.any(-1).sum()), scale_factor or response_mask.shape[-1])

    def with_mode(self, mode: str) -> "LossAggregation":
        """The same counts under another mode, for losses that are defined with one mode only."""
        return LossAggregation(mode, self.num_tokens, self.num_sequences, self.scale_factor)


def _checked_mode(mode: str) -> str:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"no loss_agg_mode is called {str(mode)!r}: {did_you_mean(str(mode), LOSS_AGG_MODES)}")
    return mode


def force_mode(loss_agg_mode: str, mode: str) -> str:
    """`mode`, with the counts that `loss_agg_mode` carries, if it carries any."""
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
    """One scalar from a matrix of token losses (B, T).

    | mode | value |
    |---|---|
    | token-mean | sum over tokens / number of tokens (DAPO, arXiv 2503.14476) |
    | seq-mean-token-sum | mean over sequences of their sum |
    | seq-mean-token-mean | mean over sequences of their mean (GRPO, arXiv 2402.03300) |
    | seq-mean-token-sum-norm | mean over sequences of their sum / C (Dr.GRPO, arXiv 2503.20783) |
    | token-sum | sum over tokens |

    Where the counts come from: a `LossAggregation` if `loss_agg_mode` is one; else the keyword arguments
    `batch_num_tokens`, `global_batch_size` (non-empty sequences) and `loss_scale_factor` (C); else this matrix, with
    C = T. Only the first two make the sum over micro-batches equal to the value on the whole. Sequences without a token
    are not counted, and a batch without any gives 0, with a gradient of 0.

    dp_size: the factor that undoes the averaging of gradients over data-parallel ranks.

    Raises ValueError for an unknown mode.
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
    # Nothing to learn from (every token rejected) is a loss of 0, not 0 / 0.
    return total / (count.clamp(min=1) if isinstance(count, torch.Tensor) else max(1, count)) * dp_size


def mean_over(losses: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """The sum of per-row losses (N,) over `count`, the rows of the whole mini-batch; over N when not given."""
    return at_least_float32(losses).sum() / max(1, len(losses) if count is None else count)


def mean_parts(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) of `x` under the mask, detached: the form of a metric that merges exactly."""
    return masked_sum(x.detach(), mask), mask.bool().sum()


def merge_metrics(metrics: Iterable[Mapping[str, object]], weights: Iterable[float] | None = None) -> dict[str, float]:
    """One dictionary of floats from those of several micro-batches or ranks.

    - a pair (sum, count): the sum of the sums over the sum of the counts (0 when nothing was counted)
    - a number, whose name ends in `max` or `min` after `_` or `/`: the largest or smallest
    - any other number: the mean, weighted by `weights` (one per dictionary; equal when not given)

    A name may be missing from some dictionaries. Raises ValueError when a name is a pair in one and a number in
    another, or when the weights are not one per dictionary.
    """
    metrics = list(metrics)
    weights = [1.0] * len(metrics) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(metrics):
        raise ValueError(f"expected one weight per dictionary of metrics ({len(metrics)}), found {len(weights)}")
    found: dict[str, list[tuple[object, float]]] = {}
    for weight, one in zip(weights, metrics):
        for name, value in one.items():
            found.setdefault(name, []).append((value, weight))
    return {name: _merge_one(name, values) for name, values in found.items()}


def _merge_one(name: str, values: list[tuple[object, float]]) -> float:
    pairs = [value for value, _ in values if isinstance(value, tuple)]
    if pairs and len(pairs) != len(values):
        raise ValueError(f"metric {name!r} is a (sum, count) pair in one place and a number in another: choose one")
    if pairs:
        total, count = (sum(float(part) for part in parts) for parts in zip(*pairs))
        return total / count if count else 0.0
    numbers = [float(value) for value, _ in values]
    if name.endswith(("_max", "/max")):
        return max(numbers)
    if name.endswith(("_min", "/min")):
        return min(numbers)
    total_weight = sum(weight for _, weight in values)
    return sum(number * weight for number, (_, weight) in zip(numbers, values)) / total_weight if total_weight else 0.0
