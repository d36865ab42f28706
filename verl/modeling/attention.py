"""Attention over packed sequences without padding, registered with transformers as "verl_packed".

The model runs over (1, N) tokens of many sequences, and attention must not cross sequences. On a GPU, in 16 bits,
torch's variable-length kernel takes the packed tokens directly. Long sequences are computed one by one with cuDNN's
kernel, which is up to twice as fast on a Hopper but has no variable-length form. Otherwise queries, keys and values are
right-padded for the built-in causal attention, which then needs no mask: padding comes after every token of a sequence.

With sequence parallelism (`sequence_parallel`), ranks exchange tokens for heads before and after. With a shared prefix
(`shared_prefix`), keys and values are gathered from the rows that hold them.
"""

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from verl.modeling.packing import Packing, gather_rows, repeat_rows, scatter_rows
from verl.modeling.vision import PACKED

NAME = "verl_packed"
#: of a vision tower; transformers passes the lengths to implementations with "flash" in their names
VISION_NAME = "verl_vision_flash"
#: largest head size of the variable-length kernel
WIDEST_HEAD = 256
#: mean length from which each sequence gets its own call (its time relative to one variable-length call: 3 to 6 at 640
#: tokens, 0.75 to 0.92 at 4096, 0.55 at 16384)
LONG_ROWS = 4096

#: largest head size of cuDNN's backward pass
WIDEST_CUDNN_HEAD = 128
# in order of priority; the second is for inputs that the first does not support
_LONG_ROW_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

# before torch 2.13, grouped-query attention needs no argument
_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def unpack(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """(1, H, N, D) packed -> (b, H, L, D) right-padded with zeros."""
    tokens, size = x[0].transpose(0, 1), packing.rows * packing.max_length
    if len(tokens) != size:
        tokens = scatter_rows(tokens, packing.slots, size)
    return tokens.unflatten(0, (packing.rows, packing.max_length)).transpose(1, 2)


def pack(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """(b, H, L, D) right-padded -> (1, N, H, D) packed."""
    tokens = x.transpose(1, 2).flatten(0, 1)
    return (tokens if len(tokens) == packing.slots.numel() else gather_rows(tokens, packing.slots))[None]


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(L, L) True where query i attends to key j: the last `window` positions up to its own."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None]
    return (distance >= 0) & (distance < window)


def _plain(q, k, v, scaling: float, softcap: float | None, sinks: torch.Tensor | None, mask: torch.Tensor):
    """Attention in plain torch. q: (b, H, L, D); k, v: (b, K, L, D); mask: (L, L).

    softcap: scores are softcap * tanh(score / softcap) (Gemma 2). sinks: (H,) the score of one more key, of which the
    value is 0 (gpt-oss).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf")).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


class NoPacking(TypeError):
    """A decoder layer does not pass the packing on to its attention."""


@torch.compiler.disable  # the kernel is one call, and compiling for each set of lengths would not pay
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence. query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    if packing is None:
        raise NoPacking(f"{type(module).__name__} got no packing")
    # under autocast the rotary embedding leaves queries and keys in float32; the values have the compute dtype
    query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if packing.ranks is None:
        return _attend(query, key, value, packing, **options), None
    ranks, heads = packing.ranks, query.shape[1]
    if s_aux is not None:
        options["sinks"] = s_aux.chunk(ranks.size)[ranks.rank]
    key, value = ranks.repeat_heads(key, heads), ranks.repeat_heads(value, heads)
    q, k, v = ranks.tokens_to_heads(query, key, value)
    tokens, padded = packing.slots.numel(), q.shape[2]
    out = _attend(*(x[:, :, :tokens] for x in (q, k, v)), packing, **options)
    return ranks.heads_to_tokens(pad(out, (0, 0, 0, 0, 0, padded - tokens))), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over all tokens of some heads; shapes as `packed_attention`."""
    max_keys = packing.max_length if packing.keys is None else packing.keys.packing.max_length
    window = sliding_window if sliding_window is not None and sliding_window < max_keys else None
    is_16_bit = value.dtype in (torch.bfloat16, torch.float16)
    is_plain = softcap is None and sinks is None
    if query.is_cuda and is_16_bit and is_plain and query.shape[-1] <= WIDEST_HEAD:
        if window is None and _one_call_per_row(packing, query):
            return _attend_each_row(query, key, value, packing, scaling)
        return _attend_varlen(query, key, value, packing, scaling, window)
    if packing.keys is not None:
        source, representative = packing.keys.source, packing.keys.representative
        repeated = (repeat_rows(x.squeeze(0).transpose(0, 1), source, representative) for x in (query, key, value))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in repeated)
        full = _attend(q, k, v, packing.keys.packing, scaling, sliding_window, softcap, sinks)
        return gather_rows(full.squeeze(0), representative).unsqueeze(0)
    q, k, v = (unpack(x, packing) for x in (query, key, value))
    length = packing.max_length
    if not is_plain:
        mask = _window_mask(length, window or length, q.device)
        out = _plain(q, k, v, scaling if scaling is not None else q.shape[-1] ** -0.5, softcap, sinks, mask)
    else:
        mask = _window_mask(length, window, q.device) if window is not None else None
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return pack(out, packing)


def _attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """`_attend` with the variable-length kernel. `window`: keys that a query attends to, including its own."""
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    key_packing = packing
    if packing.keys is not None:
        from verl.modeling.layers_triton import Repeat

        key_packing = packing.keys.packing
        k, v = (Repeat.apply(x, packing.keys.source, packing.keys.offsets, packing.keys.uses) for x in (k, v))
    starts, longest = packing.cu_seqlens, packing.max_length
    key_starts, longest_keys = key_packing.cu_seqlens, key_packing.max_length
    # queries and keys of a row end together, also if there are more keys than queries
    window_size = (-1 if window is None else window - 1, 0)
    options = {"scale": scaling, "window_size": window_size, **_GQA}
    return varlen_attn(q, k, v, starts, key_starts, longest, longest_keys, **options).unsqueeze(0)


def attends_in_one_call(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of these lengths are attended to in one call, as keys that rows share need."""
    return device.type == "cpu" or (dtype.itemsize == 2 and sum(lengths) < LONG_ROWS * len(lengths))


def _one_call_per_row(packing: Packing, query: torch.Tensor) -> bool:
    """Whether the sequences are long enough for one call each, and the fast kernel is available."""
    long = packing.keys is None and sum(packing.lengths) >= LONG_ROWS * packing.rows
    return long and query.shape[-1] <= WIDEST_CUDNN_HEAD and _fast_cudnn(query.device)


@functools.cache
def _fast_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention for Hopper and later is available."""
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def _attend_each_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scaling: float | None
) -> torch.Tensor:
    """`_attend` with cuDNN, one sequence at a time, padded to one of few lengths: each new length costs a search."""
    chunks = []
    rows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), packing.lengths)
    with sdpa_kernel(_LONG_ROW_KERNELS, set_priority=True):
        for q, k, v, length in rows:
            fill = -length % (1 << max(4, length.bit_length() - 4))  # eight lengths per power of two; 16 and more
            q, k, v = (pad(x, (0, 0, 0, fill)) if fill else x for x in (q, k, v))
            gqa = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
            chunks.append(out[:, :, :length].transpose(1, 2))
    return torch.cat(chunks, 1) if len(chunks) > 1 else chunks[0]


def is_packed(module: nn.Module) -> bool:
    """Whether the rows of a model are packed: its attention is that of this module, or the batch-invariant one."""
    return module.config.get_text_config()._attn_implementation.startswith("verl_")


def use_default_attention(module: nn.Module) -> None:
    """Use the attention of transformers, for padded rows and a KV cache, in place: SDPA where it computes this model.

    SDPA has no softcap. Some versions of transformers (5.17) leave it out silently.
    """
    has_softcap = getattr(module.config.get_text_config(), "attn_logit_softcapping", None) is not None
    module.set_attn_implementation("sdpa" if module._supports_sdpa and not has_softcap else "eager")


# ---- vision towers --------------------------------------------------------------------------------------------------


@torch.compiler.disable  # as `packed_attention`
def vision_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention in both directions inside each segment. query, key, value (1, H, N, D) -> (1, N, H, D).

    The patches of all images are one sequence, and a segment is an image or a window of one. The default of
    transformers is one call per segment, in every layer: thousands of small kernels. Here it is one call of torch's
    variable-length kernel on a GPU in 16 bits, and otherwise one call per length.

    Args:
        cu_seq_lens_q: (segments + 1,) where segments start.
        max_length_q: the longest of them.
    """
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    is_16_bit = value.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and is_16_bit and q.shape[-1] <= WIDEST_HEAD:
        starts = cu_seq_lens_q.to(torch.int32)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = varlen_attn(
            q, k, v, starts, starts, int(max_length_q), int(max_length_q), scale=scaling, window_size=(-1, -1)
        )
        return out.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff()
    outputs, order = [], []
    for length in lengths.unique().tolist():
        first = cu_seq_lens_q[:-1][lengths == length]
        positions = (first[:, None] + torch.arange(length, device=first.device)).flatten()
        grouped = (x[positions].unflatten(0, (len(first), length)).transpose(1, 2) for x in (q, k, v))
        outputs.append(scaled_dot_product_attention(*grouped, scale=scaling).transpose(1, 2).flatten(0, 1))
        order.append(positions)
    return torch.cat(outputs)[torch.cat(order).argsort()].unsqueeze(0), None


def use_vision_attention(module: nn.Module) -> nn.Module:
    """Use `vision_attention` in the tower of a model in `vision.PACKED`, in place. Other models stay as they are."""
    if module.config.model_type in PACKED:  # after construction, which looks for a package of this name
        module.set_attn_implementation({"vision_config": VISION_NAME})
    return module


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(VISION_NAME, vision_attention)
