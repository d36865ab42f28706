"""Rows that answer the same prompt: its tokens are computed once, and what that takes of a packed input.

Of n answers to a prompt the first has the prompt's tokens before its own, the others have their own alone. Only
attention notices: the queries of a row are the tokens that it has, its keys and values those of the whole row, which
are taken from where they are and whose gradients add up there. All else is computed per token and gives each token of
a prompt what it would get in every row, because under a causal mask a prompt does not depend on its answer.

N: tokens that are computed; M: tokens of all rows with their prompts; b: rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: tokens of rows with their prompts at most, as a multiple of the tokens that are computed: keys and values take memory
MOST_KEYS = 4


def first_with_prompt(attention_mask: torch.Tensor, input_ids: torch.Tensor, width: int) -> list[int]:
    """Of each row (b, P + T) the first row that has the same prompt, itself perhaps. width: T."""
    mask = attention_mask[:, :-width].bool()
    prompts = torch.where(mask, input_ids[:, :-width], -1).numpy()
    found: dict[bytes, int] = {}
    return [found.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(prompts)]


def plan_shared(lengths: Sequence[int], prompts: Sequence[int], first: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices of micro-batches of at most `budget` tokens, rows with one prompt side by side.

    lengths, prompts: tokens of each row, and of its prompt alone. first: as `first_with_prompt` gives it. A row that is
    longer than the budget is a micro-batch of its own.
    """
    pieces: list[list[int]] = []
    size = keys = 0
    for row in sorted(range(len(lengths)), key=lambda row: (first[row], row)):
        there = bool(pieces) and first[pieces[-1][-1]] == first[row]
        cost = lengths[row] - (prompts[row] if there else 0)
        if not pieces or size + cost > budget or keys + lengths[row] > MOST_KEYS * budget:
            pieces.append([])
            size, keys, cost = 0, 0, lengths[row]
        pieces[-1].append(row)
        size, keys = size + cost, keys + lengths[row]
    return [sorted(rows) for rows in pieces]


@dataclass(frozen=True)
class Layout:
    """Where the tokens of rows that share prompts lie.

    rows: those that have tokens, in their order. queries: tokens that each has. kept: (N,) the flat index of each token
    in (b * (P + T)). start, end: (b,) where the tokens of a row begin, and where its prompt ends, whichever row has it.
    own_prompt: (b,) whether the row itself has it. source: (M,) the token of each key. one_use: (N,) a key of each
    token. offsets (N + 1,), uses (M,): the keys of token i are uses[offsets[i]] .. uses[offsets[i + 1] - 1].
    """

    rows: torch.Tensor
    queries: torch.Tensor
    kept: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    own_prompt: torch.Tensor
    source: torch.Tensor
    one_use: torch.Tensor
    offsets: torch.Tensor
    uses: torch.Tensor


def lay_out(attention: torch.Tensor, width: int, first: Sequence[int]) -> Layout:
    """attention: (b, P + T) bool. width: T. first: as `first_with_prompt` gives it."""
    leader = torch.tensor(first)
    b, total = attention.shape
    own_prompt = leader == torch.arange(b)
    lengths, answers = attention.sum(1), attention[:, -width:].sum(1)
    prompts = lengths - answers
    order = leader.argsort(stable=True)  # the first row of a prompt is its leader
    order = order[(own_prompt | (answers > 0))[order]]  # an empty answer to a prompt that is there asks nothing
    computed = attention & (own_prompt[:, None] | (torch.arange(total) >= total - width))
    kept = computed[order].flatten().nonzero()[:, 0]
    kept = order[kept // total] * total + kept % total
    queries = computed.sum(1)
    start = torch.zeros(b, dtype=torch.long)
    start[order] = queries[order].cumsum(0) - queries[order]
    end = (start + prompts)[leader]

    full = lengths[order]
    row = order.repeat_interleave(full)
    within = torch.arange(len(row)) - (full.cumsum(0) - full).repeat_interleave(full)
    of_prompt = within < prompts[row]
    answer_start = start + torch.where(own_prompt, prompts, 0)
    source = torch.where(of_prompt, start[leader][row] + within, answer_start[row] + within - prompts[row])
    uses = source.argsort(stable=True)
    counts = source.bincount(minlength=len(kept))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Layout(
        order, queries[order], kept, start, end, own_prompt, source, uses[offsets[:-1]], offsets.int(), uses.int()
    )
