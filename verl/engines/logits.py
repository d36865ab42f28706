"""From hidden states to log-probs, entropies and their gradients, without a (tokens, V) float32 tensor for all tokens.

States go through the last projection in chunks. Under gradient each chunk is recomputed in the backward pass, so the
logits of one chunk are alive at a time. V: vocabulary; S: selected states.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

#: logits of one chunk at most: 2**24 float32 numbers are 64 MiB
CHUNK_ELEMENTS = 2**24


def _statistics(
    states: torch.Tensor, targets: torch.Tensor, head: Callable, temperature: float, outputs: tuple[str, ...]
) -> tuple[torch.Tensor, ...]:
    logits = head(states)
    logits = logits if logits.dtype == torch.float64 else logits.float()  # bf16 log-probs would be noise
    if temperature != 1.0:
        logits = logits / temperature
    lse = logits.logsumexp(-1)
    found = []
    for name in outputs:
        if name == "log_probs":
            found.append(logits.gather(-1, targets[:, None])[:, 0] - lse)
        elif name == "entropys":
            found.append(lse - ((logits - lse[:, None]).exp() * logits).sum(-1))
        elif name == "sum_pi_squared":
            found.append(((2 * logits).logsumexp(-1) - 2 * lse).exp())
        else:
            raise ValueError(f"the logits give log_probs, entropys or sum_pi_squared, not {name!r}")
    return tuple(found)


def token_statistics(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    outputs: tuple[str, ...],
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Each asked output, (S,), of the distribution softmax(head(states) / temperature).

    float32, or float64 for a float64 model.

    states: (S, hidden). targets: (S,) token ids. head: (s, hidden) -> (s, V).
    outputs: log_probs of the targets, entropys, sum_pi_squared (the sum over V of squared probabilities).
    """
    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    chunks = list(zip(states.split(rows), targets.split(rows)))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(_statistics, s, y, head, temperature, outputs, use_reentrant=False)
        if recompute
        else _statistics(s, y, head, temperature, outputs)
        for s, y in chunks
    ]
    return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(outputs)}
