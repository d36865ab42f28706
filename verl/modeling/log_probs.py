"""From hidden states to log-probs, entropies and their gradients, without a (tokens, V) float32 tensor.

States go through the last projection in chunks. Of a chunk the logits stay in the dtype that the projection gives, and
sums over the vocabulary run in float32; the backward pass writes the gradient of the logits from them in one pass.
Where the logits of all chunks are few they wait for it; else those of a chunk are computed again.

V: vocabulary; S: selected states. x: logits / temperature; p: softmax(x); H: entropy.
"""

from collections.abc import Callable, Iterator

import torch
from torch.utils.checkpoint import checkpoint

from verl.modeling.batch_invariant.chunked import log_sum_exp

OUTPUTS = ("log_probs", "entropys", "sum_pi_squared")

#: logits of one chunk at most. A GPU needs thousands of rows for a fast product; 2**24 float32 numbers are 64 MiB
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 5 * 2**28}
#: logits that each thread of a CPU computes with at a time: a quarter of a MiB in float32
CACHED_ELEMENTS = 2**16
#: the share of a GPU's memory that logits may take between the forward and the backward pass
KEPT_SHARE = 1 / 16


class _TokenStatistics(torch.autograd.Function):
    """(log-probs, entropies, sums of squared probabilities), each (s,), of the logits (s, V) of one chunk."""

    @staticmethod
    def forward(
        ctx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        wanted: tuple[bool, bool, bool],
        invariant: bool,
    ) -> tuple[torch.Tensor, ...]:
        lse, *found = statistics_by(logits, targets, temperature, wanted, invariant)
        ctx.save_for_backward(logits, targets, lse, *found[1:])
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, targets, lse, entropys, squares = ctx.saved_tensors
        wanted = tuple(gradient is not None for gradient in gradients)  # what was measured alone costs nothing here
        gradients = tuple(torch.zeros_like(lse) if gradient is None else gradient for gradient in gradients)
        compute = _gradient_on_gpu if _by_kernel(logits) else logits_gradient
        found = compute(logits, targets, lse, entropys, squares, gradients, ctx.temperature, wanted)
        return found, None, None, None, None


def statistics_by(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    wanted: tuple[bool, bool, bool],
    invariant: bool = False,
) -> list[torch.Tensor]:
    """As `statistics`, by the kernel on a GPU, which goes through each row alone."""
    if _by_kernel(logits):
        return _statistics_on_gpu(logits, targets, temperature, wanted)
    return statistics(logits, targets, temperature, wanted, invariant)


def statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    wanted: tuple[bool, bool, bool],
    invariant: bool = False,
) -> list[torch.Tensor]:
    """[log sum exp x, log-probs, entropies, sums of squares], each (s,) and 0 where not wanted, in plain torch.

    invariant: the first two of a row have the same bits whatever the other rows are.
    """
    found = [logits.new_zeros(len(logits), dtype=_wide(logits)) for _ in range(4)]
    for rows in _blocks(logits):
        x = _scaled(logits[rows], temperature)
        top = x.amax(-1)
        e = (x - top[:, None]).exp_()
        total = e.sum(-1)
        lse = found[0][rows] = log_sum_exp(x) if invariant else top + total.log()
        found[1][rows] = x.gather(-1, targets[rows, None])[:, 0] - lse
        if wanted[2]:
            found[3][rows] = e.square().sum(-1) / total.square()
        if wanted[1]:
            # a logit of -inf has no part in it: 0 times it is NaN, which is left out (a NaN of x is in lse too)
            found[2][rows] = lse - e.mul_(x).nansum(-1) / total
    return found


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropys: torch.Tensor,
    squares: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
    temperature: float,
    wanted: tuple[bool, bool, bool],
) -> torch.Tensor:
    """(s, V) in the dtype of the logits, in plain torch.

    d log p_y / dx = 1[y] - p;  d H / dx = -p (log p + H);  d sum p^2 / dx = 2 p (p - sum p^2).
    """
    of_log_prob, of_entropy, of_squares = (gradient[:, None] / temperature for gradient in gradients)
    found = torch.empty_like(logits, memory_format=torch.contiguous_format)
    in_place = found.dtype == _wide(logits)
    for rows in _blocks(logits):
        log_p = torch.sub(_scaled(logits[rows], temperature), lse[rows, None], out=found[rows] if in_place else None)
        factor = -of_log_prob[rows]
        if wanted[1]:
            finite = log_p.masked_fill(log_p == float("-inf"), 0)
            factor = factor - of_entropy[rows] * (finite + entropys[rows, None])
        p = log_p.exp_()
        if wanted[2]:
            factor = factor + of_squares[rows] * 2 * (p - squares[rows, None])
        p.mul_(factor).scatter_add_(1, targets[rows, None], of_log_prob[rows])
        if not in_place:
            found[rows] = p
    return found


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Runs of rows that plain torch goes through at a time, many operations each: a CPU's cache holds them."""
    rows = len(logits) if logits.is_cuda else max(1, CACHED_ELEMENTS * torch.get_num_threads() // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), max(1, rows)))


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)  # bf16 log-probs would be noise


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(_wide(logits))
    return logits if temperature == 1.0 else logits / temperature


def _by_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64  # the kernels compute in float32


def _statistics_on_gpu(*arguments) -> list[torch.Tensor]:
    from verl.modeling import log_probs_triton

    return log_probs_triton.statistics(*arguments)


def _gradient_on_gpu(*arguments) -> torch.Tensor:
    from verl.modeling import log_probs_triton

    return log_probs_triton.logits_gradient(*arguments)


def token_statistics(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    outputs: tuple[str, ...],
    temperature: float = 1.0,
    invariant: bool = False,
) -> dict[str, torch.Tensor]:
    """Each asked output, (S,), of the distribution softmax(head(states) / temperature).

    float32, or float64 for a float64 model.

    states: (S, hidden). targets: (S,) token ids. head: (s, hidden) -> (s, V).
    outputs: log_probs of the targets, entropys, sum_pi_squared (the sum over V of squared probabilities).
    invariant: log_probs do not depend, in any bit, on the other states; so must the head.
    """
    unknown = set(outputs) - set(OUTPUTS)
    if unknown:
        raise ValueError(f"the logits give {', '.join(OUTPUTS)}, not {sorted(unknown)}")
    wanted = tuple(name in outputs for name in OUTPUTS)

    def of_chunk(states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _TokenStatistics.apply(head(states), targets, temperature, wanted, invariant)

    rows = max(1, CHUNK_ELEMENTS[states.device.type] // vocab_size)
    if states.is_cuda and len(states) > rows:  # chunks of one size: a small last one would be a slow product
        rows = -(-len(states) // -(-len(states) // rows))
    chunks = list(zip(states.split(rows), targets.split(rows)))
    recompute = torch.is_grad_enabled() and len(chunks) > 1 and not _fit(states, vocab_size)
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk) for chunk in chunks]
    return {name: torch.cat([part[OUTPUTS.index(name)] for part in parts]) for name in outputs}


def _fit(states: torch.Tensor, vocab_size: int) -> bool:
    """Whether the logits of all states may be kept for the backward pass."""
    if not states.is_cuda:
        return False
    size = states.shape[0] * vocab_size * states.element_size()
    return size <= KEPT_SHARE * torch.cuda.get_device_properties(states.device).total_memory
