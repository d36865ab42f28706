"""Attention over packed rows, registered with transformers as "verl_packed": no token of padding is computed.

The model runs over (1, N) tokens of many rows; attention must not cross from row to row. On a GPU, in 16 bits, torch's
variable-length kernel takes the rows as they lie. Elsewhere queries, keys and values alone are laid out right-padded
for the built-in causal attention, which needs no mask then: a padding position is after every real one of its row.

Where ranks share the tokens (`sequence_parallel`), they trade them for heads around it.
"""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from verl.engines.micro_batch import Packing

NAME = "verl_packed"
#: the widest head that the variable-length kernel takes
WIDEST_HEAD = 256

# before torch 2.13 fewer key heads than query heads are taken without a word
_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _unpack(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """(1, H, N, D) packed -> (b, H, L, D) right-padded with zeros."""
    heads, _, dim = x.shape[1:]
    padded = x.new_zeros(packing.rows * packing.max_length, heads, dim)
    padded = padded.index_copy(0, packing.slots, x[0].transpose(0, 1))
    return padded.view(packing.rows, packing.max_length, heads, dim).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(L, L) True where query i sees key j: the last `window` positions up to its own."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None]
    return (distance >= 0) & (distance < window)


def _softcapped(q, k, v, scaling: float, softcap: float, mask: torch.Tensor) -> torch.Tensor:
    """Attention with scores softcap * tanh(score / softcap) (Gemma 2). q: (b, H, L, D); k, v: (b, K, L, D)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap))
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(v.dtype)
    return weights @ v


@torch.compiler.disable  # the kernel is one call, and the lengths of the rows are no constants to compile for
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row. query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    if s_aux is not None:
        raise ValueError("attention sinks are not known to the packed attention: set model.use_remove_padding=false")
    # under autocast the rotary embedding leaves queries and keys in float32; the values have the dtype to compute in
    query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    if packing.ranks is None:
        return _attend(query, key, value, packing, **options), None
    ranks, heads = packing.ranks, query.shape[1]
    key, value = ranks.spread_heads(key, heads), ranks.spread_heads(value, heads)
    q, k, v = ranks.tokens_to_heads(query, key, value)
    tokens, filled = packing.slots.numel(), q.shape[2]
    out = _attend(*(x[:, :, :tokens] for x in (q, k, v)), packing, **options)
    return ranks.heads_to_tokens(pad(out, (0, 0, 0, 0, 0, filled - tokens))), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The attention of all tokens of some heads; shapes as `packed_attention`."""
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_length else None
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and narrow and softcap is None and query.shape[-1] <= WIDEST_HEAD:
        return _attend_rows(query, key, value, packing, scaling, window)
    q, k, v = (_unpack(x, packing) for x in (query, key, value))
    length = packing.max_length
    if softcap is not None:
        mask = _window_mask(length, window or length, q.device)
        out = _softcapped(q, k, v, scaling if scaling is not None else q.shape[-1] ** -0.5, softcap, mask)
    else:
        mask = _window_mask(length, window, q.device) if window is not None else None
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    b, heads, _, dim = out.shape
    flat = out.transpose(1, 2).reshape(b * length, heads, dim)
    return flat[packing.slots][None]


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """The same by the variable-length kernel. window: keys that a query sees, its own among them; None for all."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    starts, longest = packing.cu_seqlens, packing.max_length
    seen = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=seen, **_GQA)[None]


AttentionInterface.register(NAME, packed_attention)
