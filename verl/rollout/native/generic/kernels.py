"""Triton kernels of a decoding step over pages (`cache.Pages`), as `native.triton_kernels`, for keys and values of
different sizes, latents, masks and sinks."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from verl.rollout.native.triton_kernels import LIVE, POSITION, STATUS, merge_partials, softcapped

_POSITION, _STATUS, _LIVE = tl.constexpr(POSITION), tl.constexpr(STATUS), tl.constexpr(LIVE)


@triton.jit(do_not_specialize=["slots", "table_width"])
def store_token(key, value, pages, table, state, slots, table_width, key_row, key_head, value_row, value_head,
                HK: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """Write one key and value per live row and head to pages (., HK, S, DK + DV). Grid (B, HK)."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(state + _STATUS * slots + b) != _LIVE:
        return
    n, d = tl.load(state + _POSITION * slots + b), tl.arange(0, DP)
    page = tl.load(table + b * table_width + n // S).to(tl.int64)
    at = pages + ((page * HK + h) * S + n % S) * (DK + DV) + d
    new_key = tl.load(key + b * key_row + h * key_head + d, mask=d < DK)
    new_value = tl.load(value + b * value_row + h * value_head + d, mask=d < DV)
    tl.store(at, new_key.to(pages.dtype.element_ty), mask=d < DK)
    tl.store(at + DK, new_value.to(pages.dtype.element_ty), mask=d < DV)


@triton.jit
def _scores(q, q_rest, keys, seen, a, r, scale, softcap, DK: tl.constexpr, DA: tl.constexpr, SOFTCAP: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Scores (GP, N) of queries and keys, which have two groups of columns, a and r."""
    k = tl.load(keys + a[None, :], mask=seen[:, None] & (a < DK)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DA < DK:
        k_rest = tl.load(keys + r[None, :], mask=seen[:, None] & (r < DK)[None, :], other=0.0)
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision=PRECISION)
    scores *= scale
    if SOFTCAP:
        scores = softcapped(scores, softcap)
    return tl.where(seen[None, :], scores, -1e30)


@triton.jit(do_not_specialize=["slots", "table_width", "splits", "mask_row"])
def attend(
    query, pages, table, state, mask, sinks, out, partial, arrived, scale, softcap, slots, table_width, splits,
    mask_row,
    HQ: tl.constexpr, HK: tl.constexpr, GP: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    ROW: tl.constexpr, DK: tl.constexpr, DA: tl.constexpr, DR: tl.constexpr, FIRST: tl.constexpr, DV: tl.constexpr,
    DP: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one query token per row to all keys so far, which the pages have. Grid (B, HK TILES, splits).

    query (B, HQ, DK); pages (., HK, S, ROW), keys in columns 0 .. DK - 1 and values in FIRST .. FIRST + DV - 1; out
    (B, HQ, DV). A program computes GP query heads of a key head. DA, a power of two, and DR cover DK. mask (B, keys)
    with MASK, sinks (HQ,) with SINKS, keys before the window are skipped with WINDOW. N: keys that are read at once.
    partial and arrived: as in `triton_kernels.attend`.
    """
    b, h, s = tl.program_id(0).to(tl.int64), tl.program_id(1) // TILES, tl.program_id(2)
    g = (tl.program_id(1) % TILES) * GP + tl.arange(0, GP)
    heads, valid = h * (HQ // HK) + g, g < HQ // HK
    d, a, r = tl.arange(0, DP), tl.arange(0, DA), DA + tl.arange(0, DR)
    at = out + (b * HQ + heads)[:, None] * DV + d[None, :]
    real = valid[:, None] & (d < DV)[None, :]
    if tl.load(state + _STATUS * slots + b) != _LIVE:
        if s == 0:
            tl.store(at, tl.zeros([GP, DP], out.dtype.element_ty), mask=real)
        return
    n = tl.load(state + _POSITION * slots + b)
    row = query + (b * HQ + heads)[:, None] * DK
    q = tl.load(row + a[None, :], mask=valid[:, None] & (a < DK)[None, :], other=0.0)
    q_rest = tl.load(row + r[None, :], mask=valid[:, None] & (r < DK)[None, :], other=0.0)
    highest, weight = tl.full([GP], -1e30, tl.float32), tl.zeros([GP], tl.float32)
    total = tl.zeros([GP, DP], tl.float32)
    if SINKS:  # noqa: SIM102 - a constant of the compiler
        if s == 0:
            highest = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32)
            weight = weight + 1.0
    begin, end = tl.maximum(n - WINDOW + 1, 0) // N if WINDOW > 0 else 0, n // N + 1
    span = (end - begin + splits - 1) // splits
    for p in range(begin + s * span, tl.minimum(end, begin + (s + 1) * span)):
        column = p * N + tl.arange(0, N)
        page = tl.load(table + b * table_width + p * N // S).to(tl.int64)
        seen = column <= n
        if MASK:
            seen &= tl.load(mask + b * mask_row + column, mask=seen, other=0) != 0
        if WINDOW > 0:
            seen &= column > n - WINDOW
        cached = pages + (((page * HK + h) * S + column % S) * ROW)[:, None]
        scores = _scores(q, q_rest, cached, seen, a, r, scale, softcap, DK, DA, SOFTCAP, PRECISION)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        v = tl.load(cached + FIRST + d[None, :], mask=seen[:, None] & (d < DV)[None, :], other=0.0)
        total = total * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(shares, 1)
        highest = higher
    if SPLIT:
        program = b * HK * TILES + tl.program_id(1)
        partials = partial + program * splits * GP * (DP + 2)
        merge_partials(at, real, partials, arrived + program, s, splits, highest, weight, total, GP, DP, SP)
    else:
        tl.store(at, (total / weight[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["query_row", "key_row", "value_row"])
def delta_rule(query, key, value, decay, beta, state, out, query_row, key_row, value_row, HK: tl.constexpr,
               HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
               NORM: tl.constexpr):  # fmt: skip
    """One step of the gated delta rule: state (B, HV, K, V) float32, in place, and out (B, HV, V).

    query, key (B, HK, K), value (B, HV, V), decay (log) and beta (B, HV). Grid (B HV, V / BV rounded up).
    """
    b, h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    k, v = tl.arange(0, KP), tl.program_id(1) * BV + tl.arange(0, BV)
    source = h // (HV // HK) * K + k
    q = tl.load(query + b * query_row + source, mask=k < K, other=0.0).to(tl.float32)
    x = tl.load(key + b * key_row + source, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
        x *= tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    new = tl.load(value + b * value_row + h * V + v, mask=v < V, other=0.0).to(tl.float32)
    shrink = tl.exp(tl.load(decay + b * HV + h).to(tl.float32))
    at = state + (b * HV + h) * K * V + k[:, None] * V + v[None, :]
    mask = (k < K)[:, None] & (v < V)[None, :]
    s = tl.load(at, mask=mask, other=0.0) * shrink
    change = (new - tl.sum(s * x[:, None], 0)) * tl.load(beta + b * HV + h).to(tl.float32)
    s += x[:, None] * change[None, :]
    tl.store(at, s, mask=mask)
    result = tl.sum(s * q[:, None], 0) / tl.sqrt(K + 0.0)
    tl.store(out + (b * HV + h) * V + v, result.to(out.dtype.element_ty), mask=v < V)


def delta_rule_step(
    plain: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoding step of transformers' `torch_recurrent_gated_delta_rule`, with the state updated in place.

    Args:
        plain: that function, for what is not a decoding step on a GPU.
        query, key, value: (B, 1, HK, K), (B, 1, HK, K) and (B, 1, HV, V).
        options: its other arguments.
    """
    state = options.get("initial_state")
    if state is None or value.shape[1] != 1 or state.dtype != torch.float32 or torch.is_grad_enabled():
        return plain(query, key, value, **options)
    rows, _, heads, width = value.shape
    tensors = [x if x[0].is_contiguous() else x.contiguous() for x in (query, key, value)]
    decay, beta = (options[name].contiguous() for name in ("g", "beta"))
    out = value.new_empty(value.shape, dtype=query.dtype)
    size, block = key.shape[-1], min(32, triton.next_power_of_2(width))
    delta_rule[(rows * heads, triton.cdiv(width, block))](
        *tensors, decay, beta, state, out, *(x.stride(0) for x in tensors), HK=key.shape[2], HV=heads, K=size,
        KP=triton.next_power_of_2(size), V=width, BV=block, NORM=options.get("use_qk_l2norm_in_kernel", False),
    )  # fmt: skip
    return out, state
