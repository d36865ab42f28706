"""The decoder of the native engine in plain torch: a key/value cache of slots, prefill, and one step for all rows.

A slot is one row's place in the cache: L columns, position p in column p. The rows in work are always slots 0 .. B - 1,
so that a step takes views and gathers nothing. A mask (slots, L), kept up to date by one write a step, says which
columns a row sees; it is shared by all layers of one window. Reading the cache is most of what attention costs, so keys
lie as the product with a query reads them: the columns of one dimension side by side.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from verl.rollout.native_model import ACTIVATIONS, Decoder, Layer, Projection, RopeTable, rms_norm, unaliased

#: prompt tokens (padding with them) that are computed at once, except where one prompt is longer
PREFILL_TOKENS = 16384
#: share of padding above which prompts are not computed together
PREFILL_WASTE = 0.125


class SlotCache:
    """Keys and values of `slots` rows of at most `length` tokens: per layer (slots, HK, D, L) and (slots, HK, L, D).

    masks: per window (None is no window) (slots, L), 0 where a row's next query sees the column, -inf elsewhere.
    """

    def __init__(self, decoder: Decoder, slots: int, length: int):
        like = decoder.embedding
        heads, size, length = decoder.kv_heads, decoder.head_dim, unaliased(length)
        # zeros, not just any memory: an unseen column weighs 0, and 0 times what was there must be 0
        self.keys = [like.new_zeros(slots, heads, size, length) for _ in decoder.layers]
        self.values = [like.new_zeros(slots, heads, length, size) for _ in decoder.layers]
        # where the columns of each row's keys, values and mask begin in flat tensors
        self._begins = [
            torch.arange(0, slots * n * length, length, device=like.device).view(slots, n)
            for n in (heads * size, heads, 1)
        ]
        self.masks = {
            window: like.new_full((slots, length), float("-inf"))
            for window in sorted({layer.window for layer in decoder.layers}, key=lambda w: (w is None, w))
        }
        self.slots, self.length = slots, length
        self.seat(torch.zeros(0, dtype=torch.int64, device=like.device))

    def move(self, source: int, target: int) -> None:
        """Give the row of slot `source` the slot `target`."""
        for tensor in (*self.keys, *self.values, *self.masks.values()):
            tensor[target] = tensor[source]

    def open(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Let the rows of `slots` (n,) see their prompts of `lengths` (n,) tokens."""
        columns = torch.arange(self.length, device=slots.device)
        for window, mask in self.masks.items():
            seen = columns < lengths[:, None]
            if window is not None:
                seen &= columns >= lengths[:, None] - window
            mask[slots] = mask.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))

    def put(self, layer: int, slots: torch.Tensor, stored: torch.Tensor) -> None:
        """Write the prompts of `slots` (n,): keys and values stored (n, T, 2 HK, D)."""
        keys, values = stored.chunk(2, 2)
        self.keys[layer][..., : stored.shape[1]].index_copy_(0, slots, keys.permute(0, 2, 3, 1))
        self.values[layer][:, :, : stored.shape[1]].index_copy_(0, slots, values.transpose(1, 2))

    def seat(self, positions: torch.Tensor) -> None:
        """Rows 0 .. B - 1 are to be written at `positions` (B,) next."""
        self.positions = positions.clone()
        self._write = [(begins[: len(positions)] + positions[:, None]).view(-1) for begins in self._begins]

    def open_next(self) -> None:
        """Let each row see the column that it is to be written at."""
        write = self._write[2]
        for window, mask in self.masks.items():
            flat = mask.view(-1)
            if window is not None:  # one column falls out of the window; while none does, the next line undoes this one
                flat.index_fill_(0, torch.where(self.positions >= window, write - window, write), float("-inf"))
            flat.index_fill_(0, write, 0.0)

    def append(self, layer: int, stored: torch.Tensor) -> None:
        """Write one token of each row: keys and values stored (B, 2 HK, D)."""
        keys, values = stored.chunk(2, 1)
        size = stored.shape[2]
        self.keys[layer].view(-1).index_copy_(0, self._write[0], keys.reshape(-1))
        self.values[layer].view(-1, size).index_copy_(0, self._write[1], values.reshape(-1, size))

    def advance(self) -> None:
        """On to the next column of every row."""
        for at in (self.positions, *self._write):
            at.add_(1)


#: takes (layer, which prompts, keys and values (count, T, 2 HK, D)); T is that of the longest, what follows a prompt is
#: of no meaning
Store = Callable[[int, list[int], torch.Tensor], None]


class Layers:
    """The maths of a `Decoder` in plain torch, up to rotary tables of `length` positions. N tokens."""

    def __init__(self, decoder: Decoder, length: int):
        self.decoder = decoder
        self.activation = ACTIVATIONS[decoder.activation]
        self.tables = [rope.table(length, decoder.embedding.dtype, decoder.paired) for rope in decoder.ropes]

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
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, self.decoder.eps)).view(len(x), -1, self.decoder.head_dim)
        self._rotate(layer, qkv, table)
        return qkv

    def _rotate(self, layer: Layer, qkv: torch.Tensor, table: RopeTable) -> None:
        """Norm and rotate the queries and keys of qkv in place."""
        decoder = self.decoder
        qk = qkv[:, : decoder.heads + decoder.kv_heads]
        if layer.qk_norm is not None:
            wide = qk.to(layer.qk_norm.dtype)
            qk.copy_(F.rms_norm(wide, wide.shape[-1:], None, decoder.eps).mul_(layer.qk_norm))
        if decoder.paired:
            (turns,) = table
            rotated = qk[..., : 2 * turns.shape[-1]]
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(turns)
            return
        cos, sin = table
        rotated, half = qk[..., : cos.shape[-1]], cos.shape[-1] // 2
        swapped = torch.cat((rotated[..., half:], rotated[..., :half]), -1)
        rotated.mul_(cos).addcmul_(swapped, sin)

    def _finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: x (N, H) and attention's output (N, HQ D) -> (N, H). Overwrites x."""
        eps = self.decoder.eps
        x = _add(x, attended, layer.out, layer.attention_post_norm, eps)
        gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps)).chunk(2, -1)
        return _add(x, self.activation(gate).mul_(up), layer.down, layer.mlp_post_norm, eps)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q (b, h, T, D), scaled; k (b, h, D, L); v (b, h, L, D); mask to be added, as (b, h, T, L) -> (b, h, T, D)."""
        scores, softcap = torch.matmul(q, k), self.decoder.attention_softcap
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        return torch.matmul(scores.add_(mask).softmax(-1, dtype=torch.float32).to(v.dtype), v)

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
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = self._attention(q * decoder.scaling, k.transpose(2, 3), v, mask)
        return out.transpose(1, 2).reshape(-1, decoder.heads * decoder.head_dim)


class TorchDecoder(Layers):
    """Generates over a `SlotCache`. All inputs and outputs are on the decoder's device."""

    def __init__(self, decoder: Decoder, cache: SlotCache):
        super().__init__(decoder, cache.length)
        self.cache = cache

    def prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        """Compute each of `prompts` once, with keys and values into its `slots`. Logits (len(prompts), V) float32."""
        lengths = [len(prompt) for prompt, targets in zip(prompts, slots) for _ in targets]
        everyone = [slot for targets in slots for slot in targets]
        self.cache.open(self._upload(everyone), self._upload(lengths))

        def store(layer: int, chosen: list[int], stored: torch.Tensor) -> None:
            source = self._upload([i for i, c in enumerate(chosen) for _ in slots[c]])
            target = self._upload([slot for c in chosen for slot in slots[c]])
            # what follows a shorter prompt stays masked until it is overwritten
            self.cache.put(layer, target, stored[source])

        return self.prompts(prompts, store)

    def seat(self, positions: torch.Tensor) -> None:
        """The next `step` is of rows 0 .. B - 1 at `positions` (B,), those after it each one further."""
        self.cache.seat(positions)

    def step(self, tokens: torch.Tensor, longest: int) -> torch.Tensor:
        """tokens: (B,) of rows 0 .. B - 1; longest: 1 + the largest position. Logits (B, V) float32."""
        decoder, cache = self.decoder, self.cache
        rows, positions = len(tokens), cache.positions
        cache.open_next()
        masks = {window: mask[:rows, None, None, :longest] for window, mask in cache.masks.items()}
        tables = [tuple(t[positions, None] for t in table) for table in self.tables]
        x = decoder.embed(tokens)
        for index, layer in enumerate(decoder.layers):
            qkv = self._qkv(layer, x, tables[layer.rope])
            cache.append(index, qkv[:, decoder.heads :])
            keys, values = cache.keys[index][:rows, ..., :longest], cache.values[index][:rows, :, :longest]
            attended = self._attend(qkv[:, : decoder.heads], keys, values, masks[layer.window])
            x = self._finish(layer, x, attended)
        cache.advance()
        return decoder.logits(x)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """queries (B, HQ, D), keys (B, HK, D, L), values (B, HK, L, D), mask (B, 1, 1, L) -> (B, HQ D)."""
        rows, heads, size = queries.shape
        # the query heads of one key head stand side by side like queries of one sequence: nothing is repeated
        q = (queries * self.decoder.scaling).view(rows, keys.shape[1], -1, size)
        return self._attention(q, keys, values, mask).view(rows, heads * size)


def _add(
    x: torch.Tensor, y: torch.Tensor, projection: Projection, post_norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x + post_norm(projection(y)), in the memory of x."""
    if post_norm is not None:
        return x.add_(rms_norm(projection(y), post_norm, eps))
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
