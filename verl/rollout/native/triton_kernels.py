"""Triton kernels of one decoding step over a paged KV cache. B rows, V vocabulary, D head size.

A layer is a few kernel launches: everything between two matmuls is one kernel. Sums and exponentials are float32;
stored values have the model's dtype.

State of the rows, (FIELDS, slots) int32: TOKEN and POSITION of the next input token; STEP, the number of response
tokens so far; START, STEP when the uniforms were drawn; LIMIT, max response tokens; OUT, offset of the response in the
flat output buffers; STATUS; OFFSET, added to POSITION for the rotary embedding. Rows that are not LIVE are not changed.

KV cache: (layers, blocks, 2 HK, BLOCK_SIZE, D), the keys of the HK heads, then their values. Block table: (slots, max
blocks of a row) int32.
"""

import triton
import triton.language as tl

from verl.modeling.fp8_triton import store_groups

BLOCK_SIZE = 64  # tokens of a KV-cache block
VOCABULARY_BLOCK = 4096
TOKEN, POSITION, STEP, START, LIMIT, OUT, STATUS, OFFSET, FIELDS = range(9)
DONE, LIVE, BROKEN = 0, 1, 2

_STEP, _START, _LIMIT, _OUT = (tl.constexpr(i) for i in (STEP, START, LIMIT, OUT))
_TOKEN, _POSITION, _STATUS, _OFFSET = (tl.constexpr(i) for i in (TOKEN, POSITION, STATUS, OFFSET))
_DONE, _LIVE, _BROKEN = (tl.constexpr(i) for i in (DONE, LIVE, BROKEN))
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap)."""
    return cap - 2 * cap / (tl.exp(2 * x / cap) + 1)


@triton.jit
def _partner(d, R: tl.constexpr):
    """For each dimension d (D,), the one that it is rotated with; itself if d >= R."""
    return tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))


@triton.jit
def _rotated(x, y, mask, weight, weight_offsets, cos, sin, d, eps, D: tl.constexpr, R: tl.constexpr,
             NORM: tl.constexpr):  # fmt: skip
    """Apply RMS norm and rotary embedding to heads x (N, D); y: x permuted by `_partner`. cos, sin: (D,), which are
    1 and 0 for d >= R. Returns float32."""
    partner = _partner(d, R)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(weight + weight_offsets + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y *= scale * tl.load(weight + weight_offsets + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _add_keys(q, at, mask, seen, highest, weight, total, scale, softcap, to_values, SOFTCAP: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Online softmax: add the keys at `at` (N, DP) to the running maximum (GP,), weight (GP,) and total (GP, DP).
    seen: (1 or GP, N)."""
    k = tl.load(at, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        scores = softcapped(scores, softcap)
    scores = tl.where(seen, scores, -1e30)
    higher = tl.maximum(highest, tl.max(scores, 1))
    shares = tl.exp(scores - higher[:, None])
    shrink = tl.exp(highest - higher)
    v = tl.load(at + to_values, mask=mask, other=0.0)
    total = total * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
    return higher, weight * shrink + tl.sum(shares, 1), total


@triton.jit
def merge_partials(out, mask, partials, arrived, s, splits, highest, weight, total, GP: tl.constexpr, DP: tl.constexpr,
          SP: tl.constexpr):  # fmt: skip
    """Write the running sums of program s to partials (splits, GP, DP + 2). The last program merges them."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    pointers = partials + (s * GP + g) * (DP + 2)
    tl.store(pointers[:, None] + d[None, :], total)
    tl.store(pointers + DP, highest)
    tl.store(pointers + DP + 1, weight)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived, 0)
        # written by other programs: bypass the L1 cache
        i = tl.arange(0, SP)
        each = partials + (i[:, None] * GP + g[None, :]) * (DP + 2) + DP
        tops = tl.load(each, mask=(i < splits)[:, None], other=-1e30, cache_modifier=".cg")
        weights = tl.load(each + 1, mask=(i < splits)[:, None], other=0.0, cache_modifier=".cg")
        highest = tl.max(tops, 0)
        weight = tl.sum(weights * tl.exp(tops - highest[None, :]), 0)
        total = tl.zeros([GP, DP], tl.float32)
        for first in range(0, splits, 4):  # four loads in flight
            for k in tl.static_range(4):
                source = partials + ((first + k) * GP + g) * (DP + 2)
                valid = first + k < splits
                share = tl.exp(tl.load(source + DP, mask=valid, other=-1e30, cache_modifier=".cg") - highest)
                part = tl.load(source[:, None] + d[None, :], mask=valid, other=0.0, cache_modifier=".cg")
                total += part * share[:, None]
        tl.store(out, (total / weight[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _new_token(row, h, d, g, real, HQ: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
               R: tl.constexpr):  # fmt: skip
    """Load queries (GP, DP) and key (1, DP), each also permuted by `_partner`, and value (DP,) of head h from a row of
    qkv."""
    inside, partner = d < D, _partner(d, R)
    heads, head = (h * G + g)[:, None] * D, (HQ + h + tl.arange(0, 1)[:, None]) * D
    q = tl.load(row + heads + d[None, :], mask=real, other=0.0)
    q_partner = tl.load(row + heads + partner[None, :], mask=real, other=0.0)
    k = tl.load(row + head + d[None, :], mask=inside[None, :], other=0.0)
    k_partner = tl.load(row + head + partner[None, :], mask=inside[None, :], other=0.0)
    return q, q_partner, k, k_partner, tl.load(row + (HQ + HK + h) * D + d, mask=inside, other=0.0)


@triton.jit
def _first_sum(q, k, v, first, scale, softcap, GP: tl.constexpr, DP: tl.constexpr, SOFTCAP: tl.constexpr):
    """Initialize the online softmax of `_add_keys`; with the new key (1, DP) if `first`, otherwise empty."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    if SOFTCAP:
        score = softcapped(score, softcap)
    weight = tl.where(first, 1.0, 0.0) + tl.zeros([GP], tl.float32)
    total = tl.where(first, v.to(tl.float32), 0.0)[None, :] + tl.zeros([GP, DP], tl.float32)
    return tl.where(first, score, -1e30), weight, total


@triton.jit(do_not_specialize=["slots", "table_width", "splits"])
def attend(
    qkv, kv_cache, table, state, cos, sin, qk_norm, out, partial, arrived, scale, eps, softcap, slots, table_width,
    splits, HQ: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROUND: tl.constexpr, SP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one new token per row: norms and rotates its heads, writes its key and value, attends to all so far.

    Grid (B, HK, splits). qkv (B, (HQ + 2 HK) D); kv_cache of one layer; cos, sin (positions, R); qk_norm (HQ + HK, D).
    out (B, HQ D). ROUND: blocks that are read at once. With SPLIT, partial (B, HK, splits, GP, DP + 2) float32 holds
    the weighted sum, maximum and weight of each program. The last program to finish, determined by the counters
    arrived (slots, HK), merges them and resets its counter to 0. WINDOW < 0: out is the rotated queries.
    """
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # independent loads first: short rows are bound by memory latency
    n, status = tl.load(state + _POSITION * slots + b), tl.load(state + _STATUS * slots + b)
    rope = n + tl.load(state + _OFFSET * slots + b)
    d, g = tl.arange(0, DP), tl.arange(0, GP)
    inside, heads, head = d < D, (h * G + g)[:, None] * D, (HQ + h + tl.arange(0, 1)[:, None]) * D
    real = (g[:, None] < G) & inside[None, :]
    row = qkv + b * (HQ + 2 * HK) * D
    q, q_partner, new_k, k_partner, new_v = _new_token(row, h, d, g, real, HQ, HK, G, D, R)
    if status != _LIVE:
        return
    c = tl.load(cos + rope * R + d, mask=d < R, other=1.0).to(tl.float32)
    sn = tl.load(sin + rope * R + d, mask=d < R, other=0.0).to(tl.float32)
    new_block = tl.load(table + b * table_width + n // BLOCK_SIZE).to(tl.int64)
    q = _rotated(q, q_partner, real, qk_norm, heads, c, sn, d, eps, D, R, NORM).to(new_v.dtype)
    new_k = _rotated(new_k, k_partner, inside[None, :], qk_norm, head, c, sn, d, eps, D, R, NORM).to(new_v.dtype)
    first = s == 0  # write the new token's key and value to the cache and start the sum with them
    if first:
        new_at = kv_cache + ((new_block * 2 * HK + h) * BLOCK_SIZE + n % BLOCK_SIZE) * D
        tl.store(new_at + d[None, :], new_k, mask=inside[None, :])
        tl.store(new_at + HK * BLOCK_SIZE * D + d, new_v, mask=inside)
    highest, weight, total = _first_sum(q, new_k, new_v, first, scale, softcap, GP, DP, SOFTCAP)

    begin = tl.maximum(n - WINDOW + 1, 0) // BLOCK_SIZE if WINDOW > 0 else 0
    end = (n + BLOCK_SIZE - 1) // BLOCK_SIZE if WINDOW >= 0 else 0
    span = (end - begin + splits - 1) // splits
    high = tl.minimum(end, begin + (s + 1) * span)
    column = tl.arange(0, ROUND * BLOCK_SIZE)
    for p in range(begin + s * span, high, ROUND):
        index = p + column // BLOCK_SIZE
        block = tl.load(table + b * table_width + index, mask=index < high, other=0).to(tl.int64)
        key = kv_cache + (((block * 2 * HK + h) * BLOCK_SIZE + column % BLOCK_SIZE) * D)[:, None] + d[None, :]
        seen = (p * BLOCK_SIZE + column < n) & (index < high)
        if WINDOW > 0:
            seen &= p * BLOCK_SIZE + column > n - WINDOW
        highest, weight, total = _add_keys(
            q, key, seen[:, None] & inside[None, :], seen[None, :], highest, weight, total, scale, softcap,
            HK * BLOCK_SIZE * D, SOFTCAP, PRECISION,
        )  # fmt: skip
    at = out + b * HQ * D + heads + d[None, :]
    if WINDOW < 0:
        tl.store(at, q, mask=real)
    elif SPLIT:
        partials = partial + (b * HK + h) * splits * GP * (DP + 2)
        merge_partials(at, real, partials, arrived + b * HK + h, s, splits, highest, weight, total, GP, DP, SP)
    else:
        tl.store(at, (total / weight[:, None]).to(q.dtype), mask=real)


@triton.jit(do_not_specialize=["slots", "table_width", "splits"])
def attend_slots(
    query, kv_cache, table, state, out, partial, arrived, scale, softcap, slots, table_width, splits, Q: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of Q rows per slot to all keys up to their own, which the cache has: it is read once for all of them.

    Grid (slots, HK TILES, splits). query, out (slots Q, HQ D). The rows of a slot have its first position if they are
    not live. A program computes GP of the Q G queries of a key head. Others: as in `attend`.
    """
    b, h, s = tl.program_id(0), tl.program_id(1) // TILES, tl.program_id(2)
    if tl.load(state + _STATUS * slots + b * Q) != _LIVE:
        return
    i, d = (tl.program_id(1) % TILES) * GP + tl.arange(0, GP), tl.arange(0, DP)
    inside, real = d < D, (i < Q * G)[:, None] & (d < D)[None, :]
    rows = b * Q + tl.minimum(i // G, Q - 1)
    at = (rows * HQ + h * G + i % G)[:, None] * D + d[None, :]
    q = tl.load(query + at, mask=real, other=0.0)
    n, first = tl.load(state + _POSITION * slots + rows), tl.load(state + _POSITION * slots + b * Q)
    highest, weight = tl.full([GP], -1e30, tl.float32), tl.zeros([GP], tl.float32)
    total, last = tl.zeros([GP, DP], tl.float32), tl.max(n, 0)
    begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_SIZE if WINDOW > 0 else 0
    end = last // BLOCK_SIZE + 1
    span = (end - begin + splits - 1) // splits
    for p in range(begin + s * span, tl.minimum(end, begin + (s + 1) * span)):
        block, column = tl.load(table + b * Q * table_width + p).to(tl.int64), tl.arange(0, BLOCK_SIZE)
        key = kv_cache + (((block * 2 * HK + h) * BLOCK_SIZE + column) * D)[:, None] + d[None, :]
        column += p * BLOCK_SIZE
        seen = column[None, :] <= n[:, None]
        if WINDOW > 0:
            seen &= column[None, :] > n[:, None] - WINDOW
        highest, weight, total = _add_keys(
            q, key, (column <= last)[:, None] & inside[None, :], seen, highest, weight, total, scale, softcap,
            HK * BLOCK_SIZE * D, SOFTCAP, PRECISION,
        )  # fmt: skip
    if SPLIT:
        program = b * HK * TILES + tl.program_id(1)
        partials = partial + program * splits * GP * (DP + 2)
        merge_partials(out + at, real, partials, arrived + program, s, splits, highest, weight, total, GP, DP, SP)
    else:
        tl.store(out + at, (total / weight[:, None]).to(q.dtype), mask=real)


@triton.jit
def rotate(qkv, cos, sin, qk_norm, eps, HEADS: tl.constexpr, HQK: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
           DP: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Apply RMS norm and rotary embedding to the first HQK of HEADS heads of qkv (N, HEADS, D), in place.

    cos, sin: (N, R). Grid (N,)."""
    n = tl.program_id(0).to(tl.int64)
    d, heads = tl.arange(0, DP), tl.arange(0, HP)[:, None]
    c = tl.load(cos + n * R + d, mask=d < R, other=1.0).to(tl.float32)
    s = tl.load(sin + n * R + d, mask=d < R, other=0.0).to(tl.float32)
    mask = (heads < HQK) & (d < D)[None, :]
    start = qkv + n * HEADS * D + heads * D
    x = tl.load(start + d[None, :], mask=mask, other=0.0)
    y = tl.load(start + _partner(d, R)[None, :], mask=mask, other=0.0)
    x = _rotated(x, y, mask, qk_norm, heads * D, c, s, d, eps, D, R, NORM)
    tl.debug_barrier()  # all reads come before the first write
    tl.store(start + d[None, :], x.to(qkv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["padded"])
def add_norm(
    x, y, post_weight, weight, out, scales, padded, eps, H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    POST: tl.constexpr, DTYPE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """x (N, H) += y, or with POST the norm of y; out = the norm of x in DTYPE. Grid (N,).

    y: (PARTS, N, H) partial sums, added up and rounded to DTYPE first; unused if PARTS = 0. FP8: out has the codes of
    the norm, and scales (H / 128, padded) their scales.
    """
    at = tl.program_id(0) * H + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK)
    mask = c < H
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(y + part * tl.num_programs(0) * H + at, mask=mask, other=0.0).to(tl.float32)
        added = added.to(DTYPE).to(tl.float32)
        if POST:
            added *= tl.rsqrt(tl.sum(added * added, 0) / H + eps)
            added *= tl.load(post_weight + c, mask=mask, other=0.0).to(tl.float32)
            added = added.to(DTYPE).to(tl.float32)
        v = (v + added).to(x.dtype.element_ty).to(tl.float32)
        tl.store(x + at, v.to(x.dtype.element_ty), mask=mask)
    v *= tl.rsqrt(tl.sum(v * v, 0) / H + eps)
    v *= tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        store_groups(v.to(DTYPE).to(tl.float32), out, scales, tl.program_id(0), padded, 0, H, BLOCK // 128)
    else:
        tl.store(out + at, v.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["padded"])
def gate(gate_up, out, scales, padded, I: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
         FP8: tl.constexpr):  # fmt: skip
    """gate_up (N, 2 I) -> out (N, I) = activation(gate) * up. Grid (N, I / BLOCK rounded up). FP8: as in `add_norm`."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < I
    x = tl.load(gate_up + n * 2 * I + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * I + I + c, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # gelu_pytorch_tanh; 1 + tanh(z) = 2 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1 - 1 / (tl.exp(2 * z) + 1))
    y = (x * up).to(gate_up.dtype.element_ty)
    if FP8:
        store_groups(y.to(tl.float32), out, scales, n, padded, tl.program_id(1) * (BLOCK // 128), I, BLOCK // 128)
    else:
        tl.store(out + n * I + c, y, mask=mask)


@triton.jit(do_not_specialize=["first", "slots"])
def scan_vocabulary(logits, state, parts, first, slots, inverse_temperature, softcap, V, BLOCK: tl.constexpr,
                    NB: tl.constexpr, SOFTCAP: tl.constexpr, GREEDY: tl.constexpr):  # fmt: skip
    """Maximum and sum of exponentials for each row and block of the vocabulary; with GREEDY, the argmax too.

    Grid (B, NB). logits (B, V) of slots first .. first + B - 1; parts (slots, NB, 3) float32.
    """
    b, j = tl.program_id(0), tl.program_id(1)
    slot = first + b
    if tl.load(state + _STATUS * slots + slot) != _LIVE:
        return
    c = j * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * V + c, mask=c < V, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        x = tl.where(c < V, softcapped(x, softcap), float("-inf"))
    x *= inverse_temperature
    highest = tl.max(x, 0)
    at = parts + (slot * NB + j) * 3
    tl.store(at, highest)
    tl.store(at + 1, tl.sum(tl.exp(x - highest), 0))  # propagates NaN, which a maximum may drop
    if GREEDY:
        tl.store(at + 2, tl.argmax(x, 0).to(tl.float32))


@triton.jit
def _store_token(token, log_prob, state, out_tokens, out_log_probs, is_stop, slots, slot):
    """Store the sampled token of a slot and advance its state."""
    step = tl.load(state + _STEP * slots + slot)
    at = tl.load(state + _OUT * slots + slot) + step
    tl.store(out_tokens + at, token)
    tl.store(out_log_probs + at, log_prob)
    tl.store(state + _TOKEN * slots + slot, token)
    tl.store(state + _POSITION * slots + slot, tl.load(state + _POSITION * slots + slot) + 1)
    tl.store(state + _STEP * slots + slot, step + 1)
    finite = (log_prob <= 0.5) & (log_prob > -1e30)  # rounding may give a log-prob slightly above 0
    ended = (tl.load(is_stop + token) != 0) | (step + 1 >= tl.load(state + _LIMIT * slots + slot))
    tl.store(state + _STATUS * slots + slot, tl.where(finite, tl.where(ended, _DONE, _LIVE), _BROKEN))


@triton.jit(do_not_specialize=["first", "slots"])
def draw_token(
    logits, parts, uniforms, state, out_tokens, out_log_probs, is_stop, first, slots, inverse_temperature,
    softcap, V, BLOCK: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr, SOFTCAP: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Sample by inverting the cumulative distribution: first the block, then the index within it. Grid (B,).

    uniforms: (steps, slots) float64; a row reads entry STEP - START. is_stop: (V,) int8.
    """
    b = tl.program_id(0)
    slot = first + b
    if tl.load(state + _STATUS * slots + slot) != _LIVE:
        return
    j = tl.arange(0, NBP)
    at = parts + (slot * NB + j) * 3
    maxima = tl.load(at, mask=j < NB, other=-3e38)
    highest = tl.max(maxima, 0)
    mass = tl.load(at + 1, mask=j < NB, other=0.0).to(tl.float64) * tl.exp(maxima - highest).to(tl.float64)
    total = tl.sum(mass, 0)
    log_total = tl.log(total.to(tl.float32))
    row = logits + b.to(tl.int64) * V
    if GREEDY:
        block = tl.min(tl.where(maxima == highest, j, NB - 1), 0)
        inner = tl.load(parts + (slot * NB + block) * 3 + 2).to(tl.int32)
        token = tl.minimum(block * BLOCK + inner, V - 1)
        log_prob = -log_total
    else:
        line = tl.load(state + _STEP * slots + slot) - tl.load(state + _START * slots + slot)
        target = tl.load(uniforms + line * slots + slot) * total
        cumulative = tl.cumsum(mass, 0)
        block = tl.minimum(tl.sum(((cumulative <= target) & (j < NB)).to(tl.int32), 0), NB - 1)
        lower = tl.sum(tl.where(j < block, mass, 0.0), 0)
        share = (target - lower) / tl.sum(tl.where(j == block, mass, 0.0), 0)
        share = tl.where(share < 1, tl.maximum(share, 0.0), _BELOW_ONE)  # rounding may give 1
        c = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + c, mask=c < V, other=float("-inf")).to(tl.float32)
        if SOFTCAP:
            x = tl.where(c < V, softcapped(x, softcap), float("-inf"))
        x *= inverse_temperature
        inside = tl.cumsum(tl.exp(x - tl.max(x, 0)).to(tl.float64), 0)
        inner = tl.sum((inside <= share * tl.max(inside, 0)).to(tl.int32), 0)
        token = tl.minimum(block * BLOCK + inner, V - 1)
        logit = tl.load(row + token).to(tl.float32)
        if SOFTCAP:
            logit = softcapped(logit, softcap)
        log_prob = logit * inverse_temperature - highest - log_total
    _store_token(token, log_prob, state, out_tokens, out_log_probs, is_stop, slots, slot)


@triton.jit(do_not_specialize=["first", "slots"])
def store_tokens(tokens, log_probs, state, out_tokens, out_log_probs, is_stop, first, slots):
    """Store tokens (B,) that torch sampled. Grid (B,)."""
    b = tl.program_id(0)
    slot = first + b
    if tl.load(state + _STATUS * slots + slot) != _LIVE:
        return
    token, log_prob = tl.load(tokens + b).to(tl.int32), tl.load(log_probs + b)
    _store_token(token, log_prob, state, out_tokens, out_log_probs, is_stop, slots, slot)
