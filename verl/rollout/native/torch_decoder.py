"""The decoder of the native engine in plain torch: a key/value cache of slots, prefill, and one step for all rows.

A slot is one row's place in the cache. All rows write their next token into the same column, whatever its position, so
that a write is one slice and not a scatter: what a row has seen lies in the columns before that one, its first token
the further back the longer the row is. A mask (slots, L) says which of them are a row's own; where all rows are equally
long none is needed. When the columns are used up, what is still needed moves back to the first ones. The rows in work
are always slots 0 .. B - 1, so that a step takes views and gathers nothing. Reading the cache is most of what attention
costs, so keys lie as the product with a query reads them: the columns of one dimension side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from verl.rollout.native.model import ACTIVATIONS, Decoder, Layer, Projection, RopeTable, rms_norm, unaliased
from verl.rollout.sampling import choose

#: prompt tokens (padding with them) that are computed at once, except where one prompt is longer
PREFILL_TOKENS = 16384
#: share of padding above which prompts are not computed together
PREFILL_WASTE = 0.125


class SlotCache:
    """Keys and values of `slots` rows over `length` columns: (layers, slots, HK, D, L) and (layers, slots, HK, L, D).

    mask: (slots, L), 0 where a row's next query sees the column, -inf elsewhere. column: that which is written next.
    positions: (B,) of the tokens that rows 0 .. B - 1 write there. longest: the largest of them.
    """

    def __init__(self, decoder: Decoder, slots: int, length: int):
        like, layers = decoder.embedding, len(decoder.layers)
        heads, size, width = decoder.kv_heads, decoder.head_dim, unaliased(length)
        # zeros, not just any memory: an unseen column weighs 0, and 0 times what was there must be 0
        self.keys = like.new_zeros(layers, slots, heads, size, width, dtype=decoder.dtype)
        self.values = like.new_zeros(layers, slots, heads, width, size, dtype=decoder.dtype)
        self.mask = like.new_zeros(slots, width, dtype=decoder.dtype)
        self.windows = {layer.window for layer in decoder.layers}
        self.slots, self.length = slots, width
        self.column = self.longest = 0
        self.even = True
        self.positions = torch.zeros(0, dtype=torch.int64, device=like.device)

    def move(self, source: int, target: int) -> None:
        """Give the row of slot `source` the slot `target`."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]
        self.mask[target] = self.mask[source]

    def open(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Let the rows of `slots` (n,) see their prompts of `lengths` (n,) tokens, which end at the next column."""
        longest = int(lengths.max())
        if not len(self.positions):
            self.column = longest
        elif self.column < longest:
            self._slide(longest)
        columns = torch.arange(self.length, device=slots.device)
        unseen = columns < self.column - lengths[:, None]
        self.mask[slots] = self.mask.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))

    def put(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Write the prompts of `slots` (n,): keys and values stored (n, T, 2 HK, D), which end with their row."""
        keys, values = stored.chunk(2, 2)
        columns = slice(self.column - stored.shape[1], self.column)
        self.keys[layer][..., columns].index_copy_(0, slots, keys.permute(0, 2, 3, 1))
        self.values[layer][:, :, columns].index_copy_(0, slots, values.transpose(1, 2))

    def seat(self, positions: torch.Tensor) -> None:
        """Rows 0 .. B - 1 are to write their tokens at `positions` (B,) next; no rows empty the cache."""
        self.positions = positions.clone()
        if len(positions):
            self.longest = int(positions.max())
            self.even = self.longest == int(positions.min())

    def begin(self) -> "StepViews":
        """What the next token of every row is written to and read from."""
        if self.column == self.length:
            self._slide(self.longest)
        rows, column = len(self.positions), self.column
        seen = {w: slice(column - min(self.longest, w - 1 if w else self.longest), column + 1) for w in self.windows}
        keys, values = self.keys[:, :rows], self.values[:, :rows]
        flat_keys, flat_values = keys.flatten(1, 2), values.flatten(1, 2)
        return StepViews(
            new_keys=keys[..., column].unbind(0),
            new_values=values[..., column, :].unbind(0),
            keys={window: flat_keys[..., columns].unbind(0) for window, columns in seen.items()},
            values={window: flat_values[:, :, columns].unbind(0) for window, columns in seen.items()},
            masks={w: None if self.even else self.mask[:rows, None, None, columns] for w, columns in seen.items()},
        )

    def advance(self) -> None:
        """On to the next token of every row."""
        self.column += 1
        self.longest += 1
        self.positions.add_(1)

    def _slide(self, column: int) -> None:
        """Make `column` the next one: what rows still see moves to the columns before it."""
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


class StepViews(NamedTuple):
    """Parts of a cache that a step uses, per layer. C: columns that a query sees at most, within a window by its size.

    new_keys, new_values: (B, HK, D), to be written. keys: (B HK, D, C). values: (B HK, C, D). masks: (B, 1, 1, C), or
    None where every row sees all of them.
    """

    new_keys: tuple[torch.Tensor, ...]
    new_values: tuple[torch.Tensor, ...]
    keys: dict[int | None, tuple[torch.Tensor, ...]]
    values: dict[int | None, tuple[torch.Tensor, ...]]
    masks: dict[int | None, torch.Tensor | None]


#: takes (layer, which prompts, keys and values (count, T, 2 HK, D)); T is that of the longest, what follows a prompt is
#: of no meaning
Store = Callable[[int, list[int], torch.Tensor], None]


class Layers:
    """The maths of a `Decoder` in plain torch, up to rotary tables of `length` positions. N tokens."""

    def __init__(self, decoder: Decoder, length: int):
        self.decoder = decoder
        self.activation = ACTIVATIONS[decoder.activation]
        self.tables = [rope.table(length, decoder.stream_dtype, decoder.tuned) for rope in decoder.ropes]

    # ---- whole prompts ------------------------------------------------------------------------------------------

    def prompts(self, prompts: list[list[int]], store: Store) -> torch.Tensor:
        """Compute `prompts` and hand their keys and values to `store`. Logits after each, (len(prompts), V) float32."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        logits = torch.empty(len(prompts), self.decoder.vocab_size, device=self.decoder.embedding.device)
        while order:
            count = _together([len(prompts[i]) for i in order])
            chosen, order = order[:count], order[count:]
            logits[self._upload(chosen)] = self._prompts(chosen, [prompts[i] for i in chosen], store)
        return logits

    def _prompts(self, chosen: list[int], prompts: list[list[int]], store: Store) -> torch.Tensor:
        decoder = self.decoder
        count, width = len(prompts), max(map(len, prompts))
        # padding stands after a prompt: no query of the prompt sees it
        ids = self._upload([p + [p[-1]] * (width - len(p)) for p in prompts]).view(-1)
        last = self._upload([i * width + len(p) - 1 for i, p in enumerate(prompts)])
        tables = [tuple(t[:width].repeat(count, 1)[:, None] for t in table) for table in self.tables]
        x = decoder.embed(ids)
        for index, layer in enumerate(decoder.layers):
            qkv = self._qkv(layer, x, tables[layer.rope]).view(count, width, -1, decoder.head_dim)
            store(index, chosen, qkv[:, :, decoder.heads :])
            attended = self._attend_causally(qkv, layer.window)
            if index == len(decoder.layers) - 1:  # only the last token of a prompt matters from here on
                x, attended = x[last], attended[last]
            x = self._finish(layer, x, attended)
        return decoder.logits(x)

    def _upload(self, values: list) -> torch.Tensor:
        """Integers (nested lists) as a tensor on the decoder's device."""
        return torch.tensor(values, device=self.decoder.embedding.device)

    # ---- parts of a layer ---------------------------------------------------------------------------------------

    def _qkv(self, layer: Layer, x: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """x (N, H), a table of its tokens (N, 1, .) -> (N, HQ + 2 HK, D): queries and keys normed and rotated."""
        qkv = layer.qkv(self.decoder.normed(x, layer.attention_norm)).view(len(x), -1, self.decoder.head_dim)
        self._rotate(layer, qkv, table)
        return qkv

    def _rotate(self, layer: Layer, qkv: torch.Tensor, table: RopeTable) -> None:
        """Norm and rotate the queries and keys of qkv in place."""
        decoder = self.decoder
        qk = qkv[:, : decoder.heads + decoder.kv_heads]
        if decoder.tuned:
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, qk.shape[-1:], None, decoder.eps).mul_(layer.qk_norm))
            (turns,) = table
            rotated = qk[..., : 2 * turns.shape[-1]]
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(turns)
            return
        cos, sin = table
        wide, half = qk.to(cos.dtype), cos.shape[-1] // 2
        if layer.qk_norm is not None:
            wide = F.rms_norm(wide, wide.shape[-1:], None, decoder.eps).mul_(layer.qk_norm)
        swapped = torch.cat((wide[..., half : 2 * half], wide[..., :half]), -1)
        qk[..., : 2 * half] = wide[..., : 2 * half].mul(cos).addcmul_(swapped, sin)
        if layer.qk_norm is not None:
            qk[..., 2 * half :] = wide[..., 2 * half :]

    def _finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: x (N, H) and attention's output (N, HQ D) -> (N, H). Overwrites x."""
        eps = self.decoder.eps
        x = _add(x, attended, layer.out, layer.attention_post_norm, eps)
        gate, up = layer.gate_up(self.decoder.normed(x, layer.mlp_norm)).chunk(2, -1)
        return _add(x, self.activation(gate).mul_(up), layer.down, layer.mlp_post_norm, eps)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q (B HK, G, D), scaled; k (B HK, D, L); v (B HK, L, D) -> (B HK, G, D). mask: added, as (B, HK, G, L)."""
        scores, softcap = torch.bmm(q, k), self.decoder.attention_softcap
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(mask.shape[0], -1, *scores.shape[1:]).add_(mask)
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)

    def _attend_causally(self, qkv: torch.Tensor, window: int | None) -> torch.Tensor:
        """qkv (b, T, HQ + 2 HK, D) -> (b T, HQ D)."""
        decoder, width = self.decoder, qkv.shape[1]
        sizes = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.split(sizes, 2))
        plain = decoder.attention_softcap is None and (window is None or window >= width)
        if plain:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=decoder.scaling, enable_gqa=True)
        else:
            at = torch.arange(width, device=q.device)
            seen = at[:, None] >= at
            if window is not None:
                seen &= at > at[:, None] - window
            mask = q.new_zeros(width, width).masked_fill_(~seen, float("-inf"))
            group = decoder.heads // decoder.kv_heads
            k, v = (part.repeat_interleave(group, 1).flatten(0, 1) for part in (k, v))
            out = self._attention((q * decoder.scaling).flatten(0, 1), k.transpose(1, 2), v, mask[None, None])
            out = out.view(q.shape)
        return out.transpose(1, 2).reshape(-1, decoder.heads * decoder.head_dim)


class TorchDecoder(Layers):
    """Generates over a `SlotCache`. All inputs and outputs are on the decoder's device."""

    choose = staticmethod(choose)

    def __init__(self, decoder: Decoder, cache: SlotCache, positions: int):
        """positions: of the longest row."""
        super().__init__(decoder, positions)
        self.cache = cache

    def prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        """Compute each of `prompts` once, with keys and values into its `slots`. Logits (len(prompts), V) float32."""
        lengths = [len(prompt) for prompt, targets in zip(prompts, slots) for _ in targets]
        everyone = [slot for targets in slots for slot in targets]
        self.cache.open(self._upload(everyone), self._upload(lengths))

        def store(layer: int, chosen: list[int], stored: torch.Tensor) -> None:
            width = stored.shape[1]
            source = self._upload([i for i, c in enumerate(chosen) for _ in slots[c]])
            target = self._upload([slot for c in chosen for slot in slots[c]])
            filled = self._upload([width - len(prompts[c]) for c in chosen for _ in slots[c]])
            # prompts end together in the cache; what stands before a shorter one is not seen
            at = (torch.arange(width, device=target.device) - filled[:, None]).clamp_min_(0)
            self.cache.put(layer, target, stored[source[:, None], at])

        return self.prompts(prompts, store)

    def seat(self, positions: torch.Tensor) -> None:
        """The next `step` is of rows 0 .. B - 1 at `positions` (B,), those after it each one further."""
        self.cache.seat(positions)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B,) of rows 0 .. B - 1. Logits (B, V) float32."""
        decoder, cache = self.decoder, self.cache
        views = cache.begin()
        tables = [tuple(t.index_select(0, cache.positions)[:, None] for t in table) for table in self.tables]
        x = decoder.embed(tokens)
        for index, layer in enumerate(decoder.layers):
            qkv = self._qkv(layer, x, tables[layer.rope])
            views.new_keys[index].copy_(qkv[:, decoder.heads : -decoder.kv_heads])
            views.new_values[index].copy_(qkv[:, -decoder.kv_heads :])
            attended = self._attend(layer.window, qkv[:, : decoder.heads], index, views)
            x = self._finish(layer, x, attended)
        cache.advance()
        return decoder.logits(x)

    def _attend(self, window: int | None, queries: torch.Tensor, layer: int, views: StepViews) -> torch.Tensor:
        """queries (B, HQ, D) -> (B, HQ D)."""
        rows, heads, size = queries.shape
        if not self.decoder.tuned:
            queries = queries * self.decoder.scaling
        # the query heads of one key head stand side by side like queries of one sequence: nothing is repeated
        q = queries.reshape(rows * self.decoder.kv_heads, -1, size)
        out = self._attention(q, views.keys[window][layer], views.values[window][layer], views.masks[window])
        return out.view(rows, heads * size)


def _add(
    x: torch.Tensor, y: torch.Tensor, projection: Projection, post_norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x + post_norm(projection(y)), in the memory of x."""
    if post_norm is not None:
        return x.add_(rms_norm(projection(y), post_norm, eps))
    if x.dtype != y.dtype:
        return x.add_(projection(y))
    if projection.bias is not None:
        x.add_(projection.bias)
    return x.addmm_(y, projection.matrix)


def _together(lengths: list[int]) -> int:
    """How many of the prompts, longest first, to compute at once."""
    tokens = 0
    for count, length in enumerate(lengths):
        tokens += length
        padded = lengths[0] * (count + 1)
        if count and (padded > PREFILL_TOKENS or padded - tokens > PREFILL_WASTE * padded):
            return count
    return len(lengths)
