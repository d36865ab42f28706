"""The KV caches of the native engine in plain torch.

A slot holds the keys and values of one row. In `SlotCache`, all rows write their next token to the same column,
whatever its position, so that a write is a slice instead of a scatter. Rows are therefore right-aligned: the tokens of
a row are the columns up to that one. A mask (slots, L) marks them; rows of equal length need none. When the columns are
used up, the live ones are moved back to the front. Active rows are always in slots 0 .. B - 1, so that a step uses
views instead of a gather. Most of the cost of attention is reading the cache, so keys are stored transposed, with the
columns of one dimension contiguous, as the matmul with a query reads them.
"""

from typing import NamedTuple

import torch

from verl.rollout.native.decoder import Decoder, padded_width


class CacheViews(NamedTuple):
    """Views of a cache for one step, per layer. C: the largest number of columns that a query attends to.

    new_keys, new_values: (B, HK, D), to be written. The others by window size: keys (B HK, D, C), values (B HK, C, D),
    masks (B, 1, 1, C), or None if every row attends to all columns.
    """

    new_keys: tuple[torch.Tensor, ...]
    new_values: tuple[torch.Tensor, ...]
    keys: dict[int | None, tuple[torch.Tensor, ...]]
    values: dict[int | None, tuple[torch.Tensor, ...]]
    masks: dict[int | None, torch.Tensor | None]


class SlotCache:
    """Keys and values of `slots` rows over `length` columns: (layers, slots, HK, D, L) and (layers, slots, HK, L, D).

    Attributes:
        mask: (slots, L), 0 where the next query of a row attends to the column, otherwise -inf.
        column: the next column to write.
        positions: (B,) positions of the tokens that rows 0 .. B - 1 write there.
        longest: the largest of these positions.
        offsets: (slots,) what is added to them for rotary embeddings: `PromptImages.offset`.
    """

    def __init__(self, decoder: Decoder, slots: int, length: int):
        like, layers = decoder.embedding, len(decoder.layers)
        heads, size, width = decoder.kv_heads, decoder.head_dim, padded_width(length)
        # zeros, not uninitialized memory: masked columns have weight 0, and 0 * NaN would be NaN
        self.keys = like.new_zeros(layers, slots, heads, size, width, dtype=decoder.dtype)
        self.values = like.new_zeros(layers, slots, heads, width, size, dtype=decoder.dtype)
        self.mask = like.new_zeros(slots, width, dtype=decoder.dtype)
        self.device, self.dtype = like.device, decoder.dtype
        self.windows = {layer.window for layer in decoder.layers}
        self.slots, self.length = slots, width
        self.column = self.longest = 0
        self.even = True
        self.positions = torch.zeros(0, dtype=torch.int64, device=like.device)
        self.offsets = torch.zeros(slots, dtype=torch.int64, device=like.device)

    def copy_from(self, other: "SlotCache") -> None:
        """Copy the rows of a smaller cache, which stay in their slots and columns."""
        self.keys[:, : other.slots, ..., : other.length] = other.keys
        self.values[:, : other.slots, :, : other.length] = other.values
        self.mask[: other.slots, : other.length] = other.mask
        self.column, self.longest, self.even = other.column, other.longest, other.even
        self.positions = other.positions
        self.offsets[: other.slots] = other.offsets

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        for values in (*self.keys, *self.values, self.mask, self.offsets):  # of one layer each, which are large
            values[targets] = values[sources]

    def allocate(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Allocate columns for prompts of `lengths` (n,) tokens in `slots` (n,): the columns before the next one."""
        longest = int(lengths.max())
        if not len(self.positions):
            self.column = longest
        elif self.column < longest:
            self._slide(longest)
        columns = torch.arange(self.length, device=slots.device)
        unseen = columns < self.column - lengths[:, None]
        self.mask[slots] = self.mask.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))

    def write_prompts(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Write the prompts of `slots` (n,). stored: keys and values (n, T, 2 HK, D), right-aligned."""
        keys, values = stored.chunk(2, 2)
        columns = slice(self.column - stored.shape[1], self.column)
        self.keys[layer][..., columns].index_copy_(0, slots, keys.permute(0, 2, 3, 1))
        self.values[layer][:, :, columns].index_copy_(0, slots, values.transpose(1, 2))

    def start_step_at(self, positions: torch.Tensor) -> None:
        """Set the positions (B,) of the next tokens of rows 0 .. B - 1. An empty tensor clears the cache."""
        self.positions = positions.clone()
        if len(positions):
            self.longest = int(positions.max())
            self.even = self.longest == int(positions.min())

    def step_views(self) -> CacheViews:
        """Views for the next token of every row."""
        if self.column == self.length:
            self._slide(self.longest)
        rows, column = len(self.positions), self.column
        seen = {w: slice(column - min(self.longest, w - 1 if w else self.longest), column + 1) for w in self.windows}
        keys, values = self.keys[:, :rows], self.values[:, :rows]
        flat_keys, flat_values = keys.flatten(1, 2), values.flatten(1, 2)
        return CacheViews(
            new_keys=keys[..., column].unbind(0),
            new_values=values[..., column, :].unbind(0),
            keys={window: flat_keys[..., columns].unbind(0) for window, columns in seen.items()},
            values={window: flat_values[:, :, columns].unbind(0) for window, columns in seen.items()},
            masks={w: None if self.even else self.mask[:rows, None, None, columns] for w, columns in seen.items()},
        )

    def extend(self) -> None:
        """Advance every row by one token."""
        self.column += 1
        self.longest += 1
        self.positions.add_(1)

    def _slide(self, column: int) -> None:
        """Make `column` the next one: move the live columns to those before it."""
        rows, seen = len(self.positions), self.longest
        source, target = slice(self.column - seen, self.column), slice(column - seen, column)
        for layer in range(len(self.keys)):
            keys, values = self.keys[layer, :rows], self.values[layer, :rows]
            keys[..., target] = keys[..., source].clone()
            values[:, :, target] = values[:, :, source].clone()
        mask = self.mask[:rows, source].clone()
        self.mask[:rows, : target.start] = float("-inf")
        self.mask[:rows, target] = mask
        self.mask[:rows, column:] = 0
        self.column = column


class BatchInvariantCache:
    """Keys and values of `slots` rows of up to `length` tokens: (layers, slots, HK, L, D), position p in column p."""

    def __init__(self, decoder: Decoder, slots: int, length: int):
        shape = (len(decoder.layers), slots, decoder.kv_heads, length, decoder.head_dim)
        # zeros, not uninitialized memory: masked columns have weight 0, and 0 * NaN would be NaN
        self.keys = decoder.embedding.new_zeros(shape, dtype=decoder.dtype)
        self.values = decoder.embedding.new_zeros(shape, dtype=decoder.dtype)
        self.device, self.dtype = self.keys.device, decoder.dtype
        self.slots, self.length = slots, length

    def copy_from(self, other: "BatchInvariantCache") -> None:
        """Copy the rows of a smaller cache, which stay in their slots."""
        self.keys[:, : other.slots, :, : other.length] = other.keys
        self.values[:, : other.slots, :, : other.length] = other.values

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        for values in (*self.keys, *self.values):
            values[targets] = values[sources]
