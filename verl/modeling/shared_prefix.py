"""Shared prefix: the tokens of a prompt are computed once for all its responses in a micro-batch.

Of n responses to a prompt, the first row holds the tokens of the prompt and its own, the other rows hold their own.
Only attention differs: the queries of a row are its tokens, its keys and values those of prompt and response, gathered
from the rows that hold them; their gradients accumulate there. Everything else is computed per token. Under a causal
mask the states of a prompt do not depend on the response, so the numbers are the same as without sharing.

N: tokens that are computed; M: tokens of all rows with their prompts; b: rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.modeling.vision import INDEX

#: limit of M as a multiple of the token budget: keys and values take memory
MOST_KEYS = 4


def first_with_prompt(
    attention_mask: torch.Tensor, input_ids: torch.Tensor, width: int, images: torch.Tensor | None = None
) -> list[int]:
    """For each row of (b, P + T), the first row with the same prompt, possibly itself.

    Args:
        attention_mask, input_ids: the rows.
        width: T.
        images: (b,) which images a row has; prompts with other images are other prompts.
    """
    mask = attention_mask[:, :-width].bool()
    prompts = torch.where(mask, input_ids[:, :-width], -1)
    prompts = (prompts if images is None else torch.cat([images[:, None], prompts], 1)).numpy()
    rows: dict[bytes, int] = {}
    return [rows.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(prompts)]


def plan_shared_prefixes(columns: dict[str, torch.Tensor], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` tokens, with rows of the same prompt together.

    Args:
        columns: input_ids, attention_mask and responses of the rows, and `vision.INDEX` if they have images.
        lengths: tokens of each row.
        budget: tokens of a micro-batch, in which a prompt counts once; a row that is longer is a micro-batch by itself.

    Returns:
        The indices of the rows of each micro-batch.
    """
    attention, width = columns["attention_mask"], columns["responses"].shape[1]
    prompts = attention[:, :-width].sum(1).tolist()
    first = first_with_prompt(attention, columns["input_ids"], width, columns.get(INDEX))
    chunks: list[list[int]] = []
    size = keys = 0
    for row in sorted(range(len(lengths)), key=lambda row: (first[row], row)):
        is_shared = bool(chunks) and first[chunks[-1][-1]] == first[row]
        cost = lengths[row] - (prompts[row] if is_shared else 0)
        if not chunks or size + cost > budget or keys + lengths[row] > MOST_KEYS * budget:
            chunks.append([])
            size, keys, cost = 0, 0, lengths[row]
        chunks[-1].append(row)
        size, keys = size + cost, keys + lengths[row]
    return [sorted(rows) for rows in chunks]


@dataclass(frozen=True)
class SharedPrefixLayout:
    """The layout of packed rows with shared prefixes."""

    rows: torch.Tensor  # rows with tokens, in packed order
    queries: torch.Tensor  # number of tokens of each of them
    kept: torch.Tensor  # (N,) flat index of each token in (b * (P + T))
    start: torch.Tensor  # (b,) index of the first token of a row
    end: torch.Tensor  # (b,) index after the prompt of a row, which may be stored in another row
    own_prompt: torch.Tensor  # (b,) whether the row contains its prompt
    source: torch.Tensor  # (M,) the token of each key
    representative: torch.Tensor  # (N,) one key of each token
    # offsets, uses: (N + 1,) and (M,): the keys of token i are uses[offsets[i]] .. uses[offsets[i + 1] - 1].
    offsets: torch.Tensor
    uses: torch.Tensor


def shared_prefix_layout(attention: torch.Tensor, width: int, first: Sequence[int]) -> SharedPrefixLayout:
    """Lay out the tokens of b rows.

    Args:
        attention: (b, P + T) bool.
        width: T.
        first: as `first_with_prompt` returns it.
    """
    leader = torch.tensor(first)
    b, total = attention.shape
    own_prompt = leader == torch.arange(b)
    lengths, responses = attention.sum(1), attention[:, -width:].sum(1)
    prompts = lengths - responses
    order = leader.argsort(stable=True)  # the first row of a prompt is its leader
    order = order[(own_prompt | (responses > 0))[order]]  # an empty response adds nothing to a prompt of another row
    computed = attention & (own_prompt[:, None] | (torch.arange(total) >= total - width))
    slots = computed[order].flatten().nonzero()[:, 0]
    slots = order[slots // total] * total + slots % total
    queries = computed.sum(1)
    start = torch.zeros(b, dtype=torch.long)
    start[order] = queries[order].cumsum(0) - queries[order]
    end = (start + prompts)[leader]

    full = lengths[order]
    row = order.repeat_interleave(full)
    within = torch.arange(len(row)) - (full.cumsum(0) - full).repeat_interleave(full)
    in_prompt = within < prompts[row]
    response_start = start + torch.where(own_prompt, prompts, 0)
    source = torch.where(in_prompt, start[leader][row] + within, response_start[row] + within - prompts[row])
    uses = source.argsort(stable=True)
    counts = source.bincount(minlength=len(slots))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return SharedPrefixLayout(
        order, queries[order], slots, start, end, own_prompt, source, uses[offsets[:-1]], offsets.int(), uses.int()
    )
