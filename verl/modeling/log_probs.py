"""From hidden states to log-probs, entropies and their gradients, without a (tokens, V) float32 tensor.

The last projection runs in chunks. The logits of a chunk stay in the dtype of the projection, and sums over the
vocabulary run in float32; the backward pass writes the gradient of the logits in one pass. If the logits of all chunks
fit, they are kept for it; otherwise they are recomputed chunk by chunk.

V: vocabulary; S: selected states. x: logits / temperature; p: softmax(x); H: entropy.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from verl.modeling.token_filter import NO_TOKEN, TokenFilter, kept_statistics

OUTPUTS = ("log_probs", "entropys", "sum_pi_squared")
#: outputs of several tokens per state
CANDIDATES = ("candidate_log_probs", "candidate_ids")

#: (logits, targets, temperature, requested) -> log-probs, entropies and sums of squares
ShardedStatisticsFn = Callable[[torch.Tensor, torch.Tensor, float, tuple[bool, bool, bool]], tuple[torch.Tensor, ...]]

#: logits per chunk. A GPU needs thousands of rows for a fast GEMM; 2**24 float32 numbers are 64 MiB
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 5 * 2**28}
#: logits that each CPU thread computes with at a time: a quarter of a MiB in float32
CACHED_ELEMENTS = 2**16
#: share of a GPU's memory that logits may take between the forward and the backward pass
KEPT_SHARE = 1 / 16
#: bytes that they may take on a CPU
KEPT_BYTES = 2**29


class _TokenStatistics(torch.autograd.Function):
    """(log-probs, entropies, sums of squared probabilities), each (s,), of the logits (s, V) of one chunk."""

    @staticmethod
    def forward(
        ctx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        requested: tuple[bool, bool, bool],
        batch_invariant: bool,
    ) -> tuple[torch.Tensor, ...]:
        lse, *results = logit_statistics(logits, targets, temperature, requested, batch_invariant)
        ctx.save_for_backward(logits, targets, lse, *results[1:])
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradient_of_logits(*ctx.saved_tensors, gradients, ctx.temperature), None, None, None, None


class ShardedStatistics(torch.autograd.Function):
    """(log-probs, entropies, sums of squared probabilities), each (S,), of logits sharded over tensor-parallel ranks.

    S: selected states; v: the vocabulary entries of one rank. The logits (S, v) stay sharded: the ranks exchange four
    values per state.

    With the log-sum-exp l_i, the entropy H_i and the sum of squares q_i of the entries of rank i, and their share of
    the probability w = softmax(l): H = sum w_i (H_i - log w_i), q = sum w_i^2 q_i.

    The gradient of the logits is that of the rank's own entries; every rank computes the same loss. v may be 0.
    """

    @staticmethod
    def forward(
        ctx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        requested: tuple[bool, bool, bool],
        first: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        is_local = (targets >= first) & (targets < first + logits.shape[1])
        local = torch.where(is_local, targets - first, -1)
        if logits.shape[1]:
            lse, log_probs, *others = logit_statistics(logits, local.clamp(min=0), temperature, requested)
        else:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            lse = torch.full(local.shape, float("-inf"), dtype=dtype, device=local.device)
            log_probs, *others = (torch.zeros_like(lse) for _ in range(3))
        target = torch.where(is_local, lse + log_probs, 0)
        gathered = torch.empty(group.size(), 4, len(lse), dtype=lse.dtype, device=lse.device)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), torch.stack([lse, target, *others]), group=group)
        lses, target_logits, entropys, squares = gathered.unbind(1)
        lse = lses.logsumexp(0)
        log_shares = lses.log_softmax(0)
        shares = log_shares.exp()
        # a rank without entries has no share, and a log-sum-exp of -inf
        terms = torch.where(shares > 0, entropys - log_shares, 0)
        entropy = (shares * terms).sum(0) if requested[1] else torch.zeros_like(lse)
        square = (shares.square() * squares).sum(0)
        ctx.save_for_backward(logits, local, lse, entropy, square)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target_logits.sum(0) - lse, entropy, square

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits = ctx.saved_tensors[0]
        if not logits.shape[1]:
            return torch.zeros_like(logits), None, None, None, None, None
        return gradient_of_logits(*ctx.saved_tensors, gradients, ctx.temperature), None, None, None, None, None


def logit_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    requested: tuple[bool, bool, bool],
    batch_invariant: bool = False,
) -> list[torch.Tensor]:
    """[log sum exp x, log-probs, entropies, sums of squares], each (s,); 0 where not requested.

    By a Triton kernel on a GPU, which is batch-invariant, and otherwise in plain torch.

    Args:
        logits: (s, V).
        targets: (s,) token ids.
        temperature: divides the logits.
        requested: which of log-probs, entropies and sums of squares.
        batch_invariant: the bits of the first two do not depend on the other rows.
    """
    if _has_kernel(logits):
        from verl.modeling import log_probs_triton

        return log_probs_triton.statistics(logits, targets, temperature, requested)
    if batch_invariant:
        from verl.modeling.batch_invariant.chunked import log_sum_exp
    results = [logits.new_zeros(len(logits), dtype=_wide(logits)) for _ in range(4)]
    for rows in _blocks(logits):
        x = _scaled(logits[rows], temperature)
        top = x.amax(-1)
        e = (x - top[:, None]).exp_()
        total = e.sum(-1)
        lse = results[0][rows] = log_sum_exp(x) if batch_invariant else top + total.log()
        results[1][rows] = x.gather(-1, targets[rows, None])[:, 0] - lse
        if requested[2]:
            results[3][rows] = e.square().sum(-1) / total.square()
        if requested[1]:
            # a logit of -inf contributes nothing, but 0 * -inf is NaN and is skipped (a NaN of x is in lse too)
            results[2][rows] = lse - e.mul_(x).nansum(-1) / total
    return results


def gradient_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropys: torch.Tensor,
    squares: torch.Tensor,
    gradients: tuple[torch.Tensor | None, ...],
    temperature: float,
) -> torch.Tensor:
    """The gradient of the logits, (s, V) in their dtype. A target of -1 is none of the entries.

    d log p_y / dx = 1[y] - p;  d H / dx = -p (log p + H);  d sum p^2 / dx = 2 p (p - sum p^2). An entry of `gradients`
    is None for an output without one.
    """
    requested = tuple(gradient is not None for gradient in gradients)
    gradients = tuple(torch.zeros_like(lse) if gradient is None else gradient for gradient in gradients)
    if _has_kernel(logits):
        from verl.modeling import log_probs_triton

        return log_probs_triton.logits_gradient(
            logits, targets, lse, entropys, squares, gradients, temperature, requested
        )
    g_log_prob, g_entropy, g_squares = (gradient[:, None] / temperature for gradient in gradients)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    in_place = result.dtype == _wide(logits)
    for rows in _blocks(logits):
        log_p = torch.sub(_scaled(logits[rows], temperature), lse[rows, None], out=result[rows] if in_place else None)
        factor = -g_log_prob[rows]
        if requested[1]:
            finite = log_p.masked_fill(log_p == float("-inf"), 0)
            factor = factor - g_entropy[rows] * (finite + entropys[rows, None])
        p = log_p.exp_()
        if requested[2]:
            factor = factor + g_squares[rows] * 2 * (p - squares[rows, None])
        g_target = g_log_prob[rows] * (targets[rows, None] >= 0)
        p.mul_(factor).scatter_add_(1, targets[rows, None].clamp(min=0), g_target)
        if not in_place:
            result[rows] = p
    return result


def candidate_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_probs: torch.Tensor,
    candidates: torch.Tensor | int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, ids), each (s, K), of K tokens of the vocabulary: log p_k = x_k - x_y + log p_y for the target y.

    Args:
        logits: (s, V).
        targets, log_probs: (s,) y and log p_y.
        candidates: (s, K) token ids, or K: the K most probable tokens.
        temperature: divides the logits.
    """
    ids = logits.detach().topk(candidates, -1).indices if isinstance(candidates, int) else candidates
    x = _scaled(logits.gather(-1, torch.cat([targets[:, None], ids], -1)), temperature)
    return x[:, 1:] - x[:, :1] + log_probs[:, None], ids


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Runs of rows that fit into the cache of a CPU, which plain torch computes one after another."""
    rows = len(logits) if logits.is_cuda else max(1, CACHED_ELEMENTS * torch.get_num_threads() // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), max(1, rows)))


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)  # bf16 log-probs would be noise


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(_wide(logits))
    return logits if temperature == 1.0 else logits / temperature


def _has_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64  # the kernels compute in float32


def token_statistics(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    outputs: tuple[str, ...],
    temperature: float = 1.0,
    batch_invariant: bool = False,
    sharded_statistics: ShardedStatisticsFn | None = None,
    candidates: torch.Tensor | int | None = None,
    kept: torch.Tensor | TokenFilter | None = None,
) -> dict[str, torch.Tensor]:
    """Statistics of the distribution softmax(head(states) / temperature).

    Args:
        states: (S, hidden).
        targets: (S,) token ids.
        head: (s, hidden) -> (s, V).
        vocab_size: V.
        outputs: any of log_probs (of the targets), entropys, sum_pi_squared (sum over V of squared probabilities).
        temperature: divides the logits.
        batch_invariant: the bits of log_probs do not depend on the other states, provided that the head's do not.
        sharded_statistics: computes the three statistics for a head that returns a shard of the vocabulary;
            `vocab_size` is then the size of the shard.
        candidates: (S, K) token ids, or K for the K most probable ones: further outputs are candidate_log_probs and
            candidate_ids. Not with `sharded_statistics` or `kept`.
        kept: (S, K) the tokens that the distribution is over, the target first (`token_filter.kept_statistics`), or
            the filter that determines them; None: all.

    Returns:
        name -> (S,) float32, or float64 for a float64 model; candidate_log_probs and candidate_ids are (S, K). With a
        filter also kept_tokens (S, K) int64.
    """
    names = OUTPUTS if candidates is None or sharded_statistics is not None else (*OUTPUTS, *CANDIDATES)
    if unknown := set(outputs) - set(names):
        raise ValueError(f"expected outputs out of {', '.join(names)}, found {sorted(unknown)}")
    requested = tuple(name in outputs for name in OUTPUTS)

    def chunk_statistics(
        states: torch.Tensor, targets: torch.Tensor, candidates: Any, kept: Any
    ) -> tuple[torch.Tensor, ...]:
        logits = head(states)
        if kept is not None:
            return kept_statistics(logits, targets, kept, temperature)
        if sharded_statistics is not None:
            return sharded_statistics(logits, targets, temperature, requested)
        statistics = _TokenStatistics.apply(logits, targets, temperature, requested, batch_invariant)
        if candidates is None:
            return statistics
        return *statistics, *candidate_log_probs(logits, targets, statistics[0], candidates, temperature)

    chunks = _chunks(states, vocab_size, targets, candidates, kept)
    recompute = torch.is_grad_enabled() and len(chunks) > 1 and not _fit(states, vocab_size)
    compute = partial(checkpoint, chunk_statistics, use_reentrant=False) if recompute else chunk_statistics
    results = [compute(*chunk) for chunk in chunks]
    values = {name: torch.cat([result[names.index(name)] for result in results]) for name in outputs}
    if isinstance(kept, TokenFilter):
        rows_of_kept = [row for result in results for row in result[-1]]
        values["kept_tokens"] = pad_sequence(rows_of_kept, batch_first=True, padding_value=NO_TOKEN)
    return values


def _chunks(states: torch.Tensor, vocab_size: int, *values: Any) -> list[tuple[Any, ...]]:
    """States and values per state in chunks whose logits have a bounded size; a value that is no tensor is in each."""
    rows = max(1, CHUNK_ELEMENTS[states.device.type] // vocab_size)
    if states.is_cuda and len(states) > rows:  # equal chunks: a small last one would be a slow GEMM
        rows = -(-len(states) // -(-len(states) // rows))
    split = (v.split(rows) if isinstance(v, torch.Tensor) else itertools.repeat(v) for v in values)
    return list(zip(states.split(rows), *split))


def _fit(states: torch.Tensor, vocab_size: int) -> bool:
    """Whether the logits of all states fit until the backward pass."""
    size = states.shape[0] * vocab_size * states.element_size()
    if not states.is_cuda:
        return size <= KEPT_BYTES
    return size <= KEPT_SHARE * torch.cuda.get_device_properties(states.device).total_memory
