"""Decoding steps of several tokens per row in plain torch, which verify drafts."""

import torch

from verl.rollout.native.kv_cache import BatchInvariantCache
from verl.rollout.native.torch_decoder import TorchDecoder


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
