"""The decoder of the native engine in plain torch: prefill, and one decode step for all rows over a `SlotCache`."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from verl.rollout.native.decoder import (
    ACTIVATIONS,
    Decoder,
    Layer,
    Projection,
    RopeTable,
    addmm_loses_precision,
    rms_norm,
)
from verl.rollout.native.kv_cache import BatchInvariantCache, CacheViews, SlotCache
from verl.rollout.native.vision import PromptImages, rotary_rows
from verl.rollout.sampling import choose
from verl.rollout.tensor_parallel import on_every_rank

#: max prompt tokens of one prefill, padding included; a longer prompt is computed alone
PREFILL_TOKENS = 16384
#: max fraction of padding in one prefill
PREFILL_WASTE = 0.125


#: (layer, indices of the prompts, keys and values (count, T, 2 HK, D), right-padded to the longest prompt)
Store = Callable[[int, list[int], torch.Tensor], None]


class Layers:
    """The layers of a `Decoder` in plain torch, with rotary tables of `length` positions. N tokens."""

    def __init__(self, decoder: Decoder, length: int, records: bool = False):
        """records: keep the choices of the routers."""
        self.decoder = decoder
        self.records = records
        self.recorded_experts: list[torch.Tensor] = []  # of the layers with experts since they were last collected
        self.prompt_experts: list[torch.Tensor] = []  # of the last prefill: per prompt (tokens, layers, k)
        self.tp = decoder.tp
        self.activation = ACTIVATIONS[decoder.activation]
        self.tables = [rope.table(length, decoder.stream_dtype, decoder.folded) for rope in decoder.ropes]

    # ---- whole prompts ------------------------------------------------------------------------------------------

    def prompts(
        self, prompts: list[list[int]], store: Store, images: Sequence[PromptImages | None] | None = None
    ) -> torch.Tensor:
        """Prefill: pass keys and values of `prompts` to `store`. Returns logits (len(prompts), V) float32.

        images: those of each prompt, if any has some.
        """
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        logits = torch.empty(len(prompts), self.decoder.vocab_size, device=self.decoder.embedding.device)
        self.prompt_experts = [logits] * len(prompts) if self.records else []
        while order:
            count = prefill_batch_size([len(prompts[i]) for i in order])
            indices, order = order[:count], order[count:]
            batch_images = [None if images is None else images[i] for i in indices]
            logits[self._upload(indices)] = self._prompts(indices, [prompts[i] for i in indices], store, batch_images)
        return logits

    def _prompts(
        self, indices: list[int], prompts: list[list[int]], store: Store, images: Sequence[PromptImages | None]
    ) -> torch.Tensor:
        decoder = self.decoder
        count, width = len(prompts), max(map(len, prompts))
        # right padding: no query of the prompt attends to it
        ids = self._upload([p + [p[-1]] * (width - len(p)) for p in prompts]).view(-1)
        last = self._upload([i * width + len(p) - 1 for i, p in enumerate(prompts)])
        x, blocks = decoder.embed(ids), None
        vision = None if decoder.vision is None else decoder.vision.prefill(x, prompts, images)
        if vision is None:
            tables = [tuple(t[:width].repeat(count, 1)[:, None] for t in table) for table in self.tables]
        else:
            x, blocks, every = vision.embeds, vision.blocks, zip(self.tables, decoder.ropes)
            rows = [rotary_rows(table, rope.axes, vision.positions) for table, rope in every]
            tables = [tuple(t[:, None] for t in table) for table in rows]
        for index, layer in enumerate(decoder.layers):
            qkv = self._qkv(layer, x, tables[layer.rope]).view(count, width, -1, decoder.head_dim)
            store(index, indices, qkv[:, :, decoder.heads :])
            attended = self._attend_causally(qkv, layer.window, blocks)
            # only the last token of each prompt, which is text, is needed from the last layer on
            is_last = index == len(decoder.layers) - 1
            if is_last and not self.records:
                x, attended = x[last], attended[last]
            x = self._finish(layer, x, attended)
            if vision is not None and not is_last:
                x = vision.added(x, index)
        if self.records:
            x = x[last]
            routed_experts = self.collect_experts().unflatten(0, (count, width))
            for i, prompt in enumerate(prompts):
                self.prompt_experts[indices[i]] = routed_experts[i, : len(prompt)]
        return decoder.logits(x)

    def collect_experts(self) -> torch.Tensor:
        """The choices of the routers since the last call, (N, layers, k) int16."""
        routed_experts, self.recorded_experts = torch.stack(self.recorded_experts, 1).to(torch.int16), []
        return routed_experts

    def _upload(self, values: list) -> torch.Tensor:
        """Integers (nested lists) as a tensor on the decoder's device."""
        return torch.tensor(values, device=self.decoder.embedding.device)

    # ---- parts of a layer ---------------------------------------------------------------------------------------

    def _qkv(self, layer: Layer, x: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """x (N, H), rotary table (N, 1, .) -> (N, HQ + 2 HK, D), with queries and keys normed and rotated."""
        qkv = layer.qkv(self.decoder.normed(x, layer.attention_norm)).view(len(x), -1, self.decoder.head_dim)
        self._rotate(layer, qkv, table)
        return qkv

    def _rotate(self, layer: Layer, qkv: torch.Tensor, table: RopeTable) -> None:
        """Apply norm and rotary embedding to the queries and keys of qkv, in place."""
        decoder = self.decoder
        qk = qkv[:, : decoder.heads + decoder.kv_heads]
        if decoder.folded:
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, qk.shape[-1:], None, decoder.eps).mul_(layer.qk_norm))
            (rotation,) = table
            rotated = qk[..., : 2 * rotation.shape[-1]]
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotation)
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
        """The rest of a layer: x (N, H), attention output (N, HQ D) -> (N, H). Overwrites x."""
        decoder = self.decoder
        x = _add(decoder, x, attended, layer.out, layer.attention_post_norm)
        if layer.experts is not None:
            return x.add_(self._mixture(layer, decoder.normed(x, layer.mlp_norm)))
        gate, up = layer.gate_up(decoder.normed(x, layer.mlp_norm)).chunk(2, -1)
        return _add(decoder, x, self.activation(gate).mul_(up), layer.down, layer.mlp_post_norm)

    def _mixture(self, layer: Layer, x: torch.Tensor, static: bool = False) -> torch.Tensor:
        """The routed experts of a layer: normed (N, H) -> (N, H). static: as in `Experts.outputs`."""
        experts, weights = layer.experts.route(x)
        if self.records:
            self.recorded_experts.append(experts)
        return self.tp.all_reduce(layer.experts.outputs(x, experts, weights, self.activation, static))

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q (B HK, G, D), scaled; k (B HK, D, L); v (B HK, L, D) -> (B HK, G, D). mask: additive, (B, HK, G, L)."""
        scores, softcap = torch.bmm(q, k), self.decoder.attention_softcap
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(mask.shape[0], -1, *scores.shape[1:]).add_(mask)
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)

    def _attend_causally(
        self, qkv: torch.Tensor, window: int | None, blocks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention inside prompts: qkv (b, T, HQ + 2 HK, D) -> (b T, HQ D).

        blocks: (b, T) tokens with the same number above 0 also attend to later ones of them.
        """
        decoder, width = self.decoder, qkv.shape[1]
        sizes = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.split(sizes, 2))
        plain = decoder.attention_softcap is None and (window is None or window >= width)
        if blocks is not None:
            at = torch.arange(width, device=q.device)
            seen = (at[:, None] >= at) | ((blocks[:, :, None] == blocks[:, None]) & (blocks > 0)[:, None])
            if window is not None:
                seen &= at > at[:, None] - window
            mask = seen[:, None]
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=decoder.scaling, enable_gqa=True)
        elif plain:
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

    def __init__(self, decoder: Decoder, cache: SlotCache, positions: int, records: bool = False):
        """positions: max sequence length. records: keep the choices of the routers."""
        super().__init__(decoder, positions, records)
        self.step_experts: torch.Tensor | None = None  # of the last step: (B, layers, k)
        self.table_length = positions
        self.cache = cache

    @on_every_rank
    def prefill(
        self,
        prompts: list[list[int]],
        slots: list[list[int]],
        images: Sequence[PromptImages | None] | None = None,
    ) -> torch.Tensor:
        """Prefill each prompt once, with keys and values for all its `slots`. Returns logits (len(prompts), V)
        float32."""
        if images is not None:
            offsets = [0 if image is None else image.offset for image, targets in zip(images, slots) for _ in targets]
            self.cache.offsets[[slot for targets in slots for slot in targets]] = self._upload(offsets)
        lengths = [len(prompt) for prompt, targets in zip(prompts, slots) for _ in targets]
        every_slot = [slot for targets in slots for slot in targets]
        self.cache.allocate(self._upload(every_slot), self._upload(lengths))

        def store(layer: int, indices: list[int], stored: torch.Tensor) -> None:
            width = stored.shape[1]
            source = self._upload([i for i, c in enumerate(indices) for _ in slots[c]])
            target = self._upload([slot for c in indices for slot in slots[c]])
            filled = self._upload([width - len(prompts[c]) for c in indices for _ in slots[c]])
            # prompts are right-aligned in the cache; the columns before a shorter one are masked
            at = (torch.arange(width, device=target.device) - filled[:, None]).clamp_min_(0)
            self.cache.write_prompts(layer, target, stored[source[:, None], at])

        return self.prompts(prompts, store, images)

    @on_every_rank
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        self.cache.move(sources, targets)

    @on_every_rank
    def start_step_at(self, positions: torch.Tensor) -> None:
        """Set the positions (B,) of rows 0 .. B - 1 for the next `step`; each step advances them by one."""
        self.cache.start_step_at(positions)

    @on_every_rank
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one step. tokens: (B,) of rows 0 .. B - 1. Returns logits (B, V) float32."""
        decoder, cache = self.decoder, self.cache
        views = cache.step_views()
        at = cache.positions
        if decoder.vision is not None:
            at = at + cache.offsets[: len(at)]
        tables = [tuple(t.index_select(0, at)[:, None] for t in table) for table in self.tables]
        x = decoder.embed(tokens)
        for index, layer in enumerate(decoder.layers):
            qkv = self._qkv(layer, x, tables[layer.rope])
            views.new_keys[index].copy_(qkv[:, decoder.heads : -decoder.kv_heads])
            views.new_values[index].copy_(qkv[:, -decoder.kv_heads :])
            attended = self._attend(layer.window, qkv[:, : decoder.heads], index, views)
            x = self._finish(layer, x, attended)
        if self.records:
            self.step_experts = self.collect_experts()
        cache.extend()
        return decoder.logits(x)

    def _attend(self, window: int | None, queries: torch.Tensor, layer: int, views: CacheViews) -> torch.Tensor:
        """Attention over the cache: queries (B, HQ, D) -> (B, HQ D)."""
        rows, heads, size = queries.shape
        if not self.decoder.folded:
            queries = queries * self.decoder.scaling
        # grouped-query attention: the query heads of a key head are adjacent, so keys need not be repeated
        q = queries.reshape(rows * self.decoder.kv_heads, -1, size)
        out = self._attention(q, views.keys[window][layer], views.values[window][layer], views.masks[window])
        return out.view(rows, heads * size)


def _add(
    decoder: Decoder, x: torch.Tensor, y: torch.Tensor, projection: Projection, post_norm: torch.Tensor | None
) -> torch.Tensor:
    """x += post_norm(projection(y)), in place."""
    if post_norm is not None:
        return x.add_(rms_norm(decoder.reduced(projection, y), post_norm, decoder.eps))
    if addmm_loses_precision(x) or x.dtype != y.dtype or decoder.tp.size > 1 or type(projection) is not Projection:
        return x.add_(decoder.reduced(projection, y))
    if projection.bias is not None:
        x.add_(projection.bias)
    return x.addmm_(y, projection.matrix)


def prefill_batch_size(lengths: list[int]) -> int:
    """Number of prompts in the next prefill. lengths: longest first."""
    tokens = 0
    for count, length in enumerate(lengths):
        tokens += length
        padded = lengths[0] * (count + 1)
        if count and (padded > PREFILL_TOKENS or padded - tokens > PREFILL_WASTE * padded):
            return count
    return len(lengths)


# ---- steps of several tokens per row, which verify drafts -----------------------------------------------------------


class PositionDecoder(TorchDecoder):
    """A `TorchDecoder` over a cache with position p in column p, so that rejected drafts are overwritten. Text only."""

    cache: BatchInvariantCache

    def prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        """See `TorchDecoder.prefill`."""

        def store(layer: int, indices: list[int], stored: torch.Tensor) -> None:
            source = [i for i, c in enumerate(indices) for _ in slots[c]]
            target = [slot for c in indices for slot in slots[c]]
            keys, values = stored.transpose(1, 2).chunk(2, 1)
            self.cache.keys[layer][target, :, : keys.shape[2]] = keys[source]
            self.cache.values[layer][target, :, : keys.shape[2]] = values[source]

        return self.prompts(prompts, store)

    def start_step_at(self, positions: torch.Tensor) -> None:
        """A step gets its positions."""

    def verify(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Decode tokens (B, Q) at consecutive positions (B, Q) of rows 0 .. B - 1. Returns logits (B Q, V) float32."""
        decoder, (rows, queries), seen = self.decoder, tokens.shape, int(positions.max()) + 1
        at, size = positions.flatten(), decoder.head_dim
        tables = [tuple(t.index_select(0, at)[:, None] for t in table) for table in self.tables]
        masks = {window: self._mask(positions, seen, window) for window in {layer.window for layer in decoder.layers}}
        x, index = decoder.embed(tokens.flatten()), torch.arange(rows, device=at.device).repeat_interleave(queries)
        for number, layer in enumerate(decoder.layers):
            qkv, keys, values = (
                self._qkv(layer, x, tables[layer.rope]),
                self.cache.keys[number],
                self.cache.values[number],
            )
            keys[index, :, at], values[index, :, at] = qkv[:, decoder.heads :].chunk(2, 1)
            q = qkv[:, : decoder.heads]
            q = q if decoder.folded else q * decoder.scaling
            # (B HK, G Q, D)
            q = (
                q.view(rows, queries, decoder.kv_heads, -1, size)
                .permute(0, 2, 3, 1, 4)
                .reshape(rows * decoder.kv_heads, -1, size)
            )
            k, v = (each[:rows, :, :seen].flatten(0, 1) for each in (keys, values))
            mask = masks[layer.window]
            if mask is not None:
                mask = mask[:, None, None].expand(-1, -1, q.shape[1] // queries, -1, -1).flatten(2, 3)
            out = self._attention(q, k.transpose(1, 2), v, mask)
            out = out.view(rows, decoder.heads, queries, size).transpose(1, 2).reshape(rows * queries, -1)
            x = self._finish(layer, x, out)
        if self.records:
            self.step_experts = self.collect_experts()
        return decoder.logits(x)

    def _mask(self, positions: torch.Tensor, seen: int, window: int | None) -> torch.Tensor | None:
        """Additive (B, Q, seen); None if every query attends to all columns."""
        if positions.shape[1] == 1 and int(positions.min()) + 1 == seen and (window is None or window >= seen):
            return None
        columns = torch.arange(seen, device=positions.device)
        hidden = columns > positions[..., None]
        if window is not None:
            hidden |= columns <= positions[..., None] - window
        return torch.zeros(hidden.shape, dtype=self.decoder.dtype).masked_fill_(hidden, float("-inf"))
