"""Splits a mini-batch into micro-batches, by a number of rows or by a budget of tokens."""

from verl.engines.base import MicroBatching, Tensors
from verl.modeling.shared_prefix import first_with_prompt, plan_shared
from verl.utils.balance import token_budget_micro_batches

#: tokens that keep a GPU busy: larger micro-batches take more memory and gain next to nothing
ENOUGH_TOKENS = 16384


def token_budget(lengths: list[int], micro: MicroBatching) -> int | None:
    """The most tokens of a micro-batch, None where they are not what limits it."""
    return max(ENOUGH_TOKENS, *lengths) if micro.tokens == "auto" else micro.tokens


def plan(lengths: list[int], micro: MicroBatching, columns: Tensors | None = None) -> list[list[int]]:
    """Row indices of each micro-batch; every row is in exactly one.

    columns: of the rows whose lengths these are, where prompts are shared: then a prompt counts once in a micro-batch.
    """
    budget = token_budget(lengths, micro)
    if budget is not None:
        pieces = token_budget_micro_batches(lengths, budget)
        if columns is None:
            return pieces
        width = columns["responses"].shape[1]
        prompts = columns["attention_mask"][:, :-width].sum(1).tolist()
        first = first_with_prompt(columns["attention_mask"], columns["input_ids"], width)
        shared = plan_shared(lengths, prompts, first, budget)
        return shared if len(shared) <= len(pieces) else pieces
    size = micro.rows or len(lengths)
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]


def split_to(pieces: list[list[int]], count: int) -> list[list[int]]:
    """The same rows in exactly `count` micro-batches, by halving the largest.

    Ranks that shard one model go through their layers together: they need the same number of micro-batches.
    """
    pieces = list(pieces)
    while len(pieces) < count:
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        rows = pieces[largest]
        if len(rows) < 2:
            raise ValueError(f"{sum(map(len, pieces))} rows cannot be cut into {count} micro-batches")
        pieces[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return pieces
