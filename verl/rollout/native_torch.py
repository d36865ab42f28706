"""The decoder of the native engine in plain torch: a key/value cache of slots, prefill, and one step for all rows.

A slot is one row's place in the cache: L columns, position p in column p. The rows in work are always slots 0 .. B - 1,
so that a step takes views and gathers nothing. A mask (slots, L), kept up to date by one write a step, says which
columns a row sees; it is shared by all layers of one window.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from verl.rollout.native_model import ACTIVATIONS, Decoder, Layer, Projection, rms_norm

#: prompt tokens (padding with them) that are computed at once, except where one prompt is longer
PREFILL_TOKENS = 16384
#: share of padding above which prompts are not computed together
PREFILL_WASTE = 0.125


class SlotCache:
    """Keys, then values of `slots` rows of at most `length` tokens: per layer (slots, length, 2 HK, D).

    masks: per window (None is no window) (slots, length), 0 where a row's next query sees the column, -inf elsewhere.
    """

    def __init__(self, decoder: Decoder, slots: int, length: int):
        like = decoder.embedding
        shape = (slots, length, 2 * decoder.kv_heads, decoder.head_dim)
        # zeros, not just any memory: an unseen column weighs 0, and 0 times what was there must be 0
        self.layers = [like.new_zeros(shape) for _ in decoder.layers]
        self.masks = {
            window: like.new_full((slots, length), float("-inf"))
            for window in sorted({layer.window for layer in decoder.layers}, key=lambda w: (w is None, w))
        }
        self.slots, self.length = slots, length

    def move(self, source: int, target: int) -> None:
        """Give the row of slot `source` the slot `target`."""
        for tensor in (*self.layers, *self.masks.values()):
            tensor[target] = tensor[source]

    def open(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Let the rows of `slots` (n,) see their prompts of `lengths` (n,) tokens."""
        columns = torch.arange(self.length, device=slots.device)
        for window, mask in self.masks.items():
            seen = columns < lengths[:, None]
            if window is not None:
                seen &= columns >= lengths[:, None] - window
            mask[slots] = mask.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))

    def advance(self, positions: torch.Tensor) -> torch.Tensor:
        """Let rows 0 .. B - 1 see the column of their `positions` (B,). Returns where to write: (B,) flat columns."""
        write = torch.arange(0, len(positions) * self.length, self.length, device=positions.device) + positions
        for window, mask in self.masks.items():
            flat = mask.view(-1)
            if window is not None:  # one column falls out of the window; while none does, the next line undoes this one
                flat.index_fill_(0, torch.where(positions >= window, write - window, write), float("-inf"))
            flat.index_fill_(0, write, 0.0)
        return write


#: takes (layer, which prompts, keys and values (count, T, 2 HK, D)); T is that of the longest, what follows a prompt is
#: of no meaning
Store = Callable[[int, list[int], torch.Tensor], None]


class Layers:
    """The maths of a `Decoder` in plain torch, up to rotary tables of `length` positions. N tokens."""

    def __init__(self, decoder: Decoder, length: int):
        self.decoder = decoder
        self.activation = ACTIVATIONS[decoder.activation]
        self.tables = [rope.table(length, decoder.embedding.dtype) for rope in decoder.ropes]

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
            qkv = self._qkv(layer, x, *tables[layer.rope]).view(count, width, -1, decoder.head_dim)
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

    def _qkv(self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x (N, H), cos and sin (N, 1, R) -> (N, HQ + 2 HK, D): queries and keys normed and rotated."""
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, self.decoder.eps)).view(len(x), -1, self.decoder.head_dim)
        self._rotate(layer, qkv, cos, sin)
        return qkv

    def _rotate(self, layer: Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Norm and rotate the queries and keys of qkv in place."""
        decoder = self.decoder
        qk = qkv[:, : decoder.heads + decoder.kv_heads]
        if layer.qk_norm is not None:
            wide = qk.to(layer.qk_norm.dtype)
            qk.copy_(F.rms_norm(wide, wide.shape[-1:], None, decoder.eps).mul_(layer.qk_norm))
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
        softcap, scaling = self.decoder.attention_softcap, self.decoder.scaling
        if softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scaling / softcap).tanh_().mul_(softcap).add_(mask)
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)

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
            out = self._attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)
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
            self.cache.layers[layer][:, : stored.shape[1]].index_copy_(0, target, stored[source])

        return self.prompts(prompts, store)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """tokens, positions: (B,) of rows 0 .. B - 1; longest: 1 + the largest position. Logits (B, V) float32."""
        decoder, cache = self.decoder, self.cache
        rows = len(tokens)
        write = cache.advance(positions)
        masks = {window: mask[:rows, None, None, :longest] for window, mask in cache.masks.items()}
        tables = [(cos[positions, None], sin[positions, None]) for cos, sin in self.tables]
        x = decoder.embed(tokens)
        for layer, stored in zip(decoder.layers, cache.layers):
            qkv = self._qkv(layer, x, *tables[layer.rope])
            keys = stored.view(-1, *stored.shape[2:])
            keys.index_copy_(0, write, qkv[:, decoder.heads :])
            attended = self._attend(qkv[:, : decoder.heads], stored[:rows, :longest], masks[layer.window])
            x = self._finish(layer, x, attended)
        return decoder.logits(x)

    def _attend(self, queries: torch.Tensor, stored: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """queries (B, HQ, D), stored (B, L, 2 HK, D), mask (B, 1, 1, L) -> (B, HQ D)."""
        rows, heads, size = queries.shape
        kv_heads = self.decoder.kv_heads
        # the query heads of one key head stand side by side like queries of one sequence: nothing is repeated
        q = queries.reshape(rows, kv_heads, heads // kv_heads, size)
        k, v = stored[:, :, :kv_heads].transpose(1, 2), stored[:, :, kv_heads:].transpose(1, 2)
        return self._attention(q, k, v, mask).reshape(rows, heads * size)


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
