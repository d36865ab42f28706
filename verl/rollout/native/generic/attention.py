"""The attention function that transformers' modules call, registered as "verl_native", and their caches.

A `ForwardPass` is one call of a model. The cache layers that the modules see pass new keys and values to it, and so do
the mask function and the attention function. b rows, Q queries per row, HQ and HK heads, L keys per row, DK and DV head
sizes. A mask is True where a query attends to a key; None for all earlier keys and the query itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

NAME = "verl_native"
#: max elements of the attention scores that are computed at once
_SCORES = 1 << 28


class Scores(NamedTuple):
    """How the scores of an attention module are computed.

    Attributes:
        scaling: their factor.
        softcap: c in c * tanh(score / c).
        sinks: (HQ,) scores of keys without a value.
        window: the mask excludes keys that are further back.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None


class ForwardPass:
    """One forward pass. A subclass stores keys and values, and computes attention.

    Attributes:
        cache: the cache that the modules get.
        width: L.
        length: tokens of a row before this pass, for modules that ask their cache.
    """

    cache: Cache
    width: int
    length = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys (b, HK, Q, DK) and values (b, HK, Q, DV). Returns what the module passes to attention."""
        raise NotImplementedError

    def expand(
        self, module: torch.nn.Module, latents: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that latent attention (`layers.has_latents`) passes to `attend`."""
        return type(module).expand_kv(module, latents, rotated)

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """(b or 1, Q) positions of the queries of a mask."""
        raise NotImplementedError

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scores: Scores,
    ) -> torch.Tensor:
        """query (b, HQ, Q, DK), key and value as `write` returned them -> (b, Q, HQ, DV)."""
        raise NotImplementedError


_current = threading.local()


def expand(module: torch.nn.Module, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ForwardPass.expand` of the pass that runs; without one, the model is called by itself."""
    return getattr(_current, "forward_pass", ForwardPass()).expand(module, latents, rotated)


@contextmanager
def running(forward_pass: ForwardPass) -> Iterator[None]:
    """Context of one forward pass of this thread."""
    _current.forward_pass = forward_pass
    try:
        yield
    finally:
        del _current.forward_pass


# ---- what the modules call ------------------------------------------------------------------------------------------


@torch.compiler.disable
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """See transformers.AttentionInterface."""
    if position_bias is not None or (attention_mask is not None and attention_mask.dtype != torch.bool):
        raise ValueError("its layers change the attention mask or add a position bias")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scaling, softcap, s_aux, sliding_window)
    return _current.forward_pass.attend(module, query, key, value, attention_mask, scores), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable = causal_mask_function,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> torch.Tensor | None:
    """The mask of a pass by the rule of the model: (b or 1, 1, Q, L); None if causal. See AttentionMaskInterface."""
    forward_pass = _current.forward_pass
    if mask_function is causal_mask_function or (local_size is not None and forward_pass.width <= local_size):
        return None
    queries = forward_pass.query_positions(torch.device(device))
    rows = torch.arange(len(queries), device=device)[:, None, None, None]
    head, keys = torch.zeros_like(rows[:1]), torch.arange(forward_pass.width, device=device)
    mask = mask_function(rows, head, queries[:, None, :, None], keys[None, None, None])
    return mask.expand(len(queries), 1, queries.shape[1], forward_pass.width)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class PassCache(Cache):
    """The cache layers of a forward pass."""

    def __init__(self, layers: list, forward_pass: ForwardPass):
        super().__init__(layers=layers)
        self.forward_pass = forward_pass

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.forward_pass.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.forward_pass.width, 0


class KeyValueLayer(DynamicLayer):
    """The keys and values of one layer: passes them on to a forward pass."""

    def __init__(self, index: int, forward_pass: ForwardPass):
        super().__init__()
        self.index, self.forward_pass = index, forward_pass

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        return self.forward_pass.write(self.index, key_states, value_states)


class HybridLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with keys, values and states."""

    def __init__(self, index: int, forward_pass: ForwardPass, number_of_states: int):
        super().__init__(number_of_states)
        self.index, self.forward_pass = index, forward_pass

    update = KeyValueLayer.update


# ---- attention in plain torch ---------------------------------------------------------------------------------------


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Scores
) -> torch.Tensor:
    """query (b, HQ, Q, DK), key (b, HK, L, DK), value (b, HK, L, DV) -> (b, HQ, Q, DV). HK divides HQ.

    mask: (b or 1, 1, Q, L); None for all keys.
    """
    b, heads, queries, _ = query.shape
    kv_heads, length = key.shape[1:3]
    group, rows = heads // kv_heads, max(1, _SCORES // (b * heads * length))
    if queries > rows:
        masks = [None] * -(-queries // rows) if mask is None else mask.split(rows, 2)
        return torch.cat([attention(q, key, value, m, options) for q, m in zip(query.split(rows, 2), masks)], 2)
    # query heads of a key head are adjacent, so keys need not be repeated
    flat = query.reshape(b * kv_heads, group * queries, -1)
    scores = torch.bmm(flat, key.flatten(0, 1).transpose(1, 2)).view(b, kv_heads, group, queries, length)
    scores = scores.mul_(options.scaling)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask[:, :, None], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.view(1, kv_heads, group, 1, 1).expand(b, -1, -1, queries, -1)
        scores = torch.cat((scores.float(), sinks.float()), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype))[..., :length]
    out = torch.bmm(weights.to(value.dtype).reshape(b * kv_heads, group * queries, length), value.flatten(0, 1))
    return out.view(b, heads, queries, -1)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Scores
) -> torch.Tensor:
    """As `attention`, with as many keys as queries; without a mask, a query attends to keys up to its own."""
    if options.softcap is None and options.sinks is None:
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=options.scaling, enable_gqa=gqa
        )
    if mask is None:
        width = query.shape[2]
        mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()[None, None]
    return attention(query, key, value, mask, options)
