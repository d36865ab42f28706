"""Attention over pages equals attention in float64 over the same keys.

The kernels run on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 with the package triton installed.
"""

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from verl.rollout.native import triton_kernels
from verl.rollout.native.generic.attention import Scores
from verl.rollout.native.generic.cache import Layout, Pages
from verl.rollout.native.generic.cuda import PagedPass
from verl.rollout.native.generic.kernels import delta_rule_step
from verl.rollout.native.triton_kernels import BLOCK_SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = [0, 63, 64, 150, 5]
LIVE = [True, True, True, True, False]
#: query heads, key heads, sizes of keys and values
SHAPES = {
    "gqa": (4, 2, 16, 16),
    "mla": (4, 4, 24, 16),
    "many heads": (20, 1, 32, 16),
    "odd": (3, 3, 20, 12),
    "small": (4, 2, 8, 8),
}


def expected(query, keys, values, position, scaling, softcap=None, sink=None, seen=None):
    """One row in float64: query (HQ, DK), keys (HK, L, DK), values (HK, L, DV) -> (HQ, DV)."""
    group = query.shape[0] // keys.shape[0]
    out = []
    for head, q in enumerate(query.double()):
        k, v = (x[head // group, : position + 1].double() for x in (keys, values))
        scores = k @ q * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = scores.exp() if seen is None else scores.exp() * seen[: position + 1]
        total = weights.sum() + (0 if sink is None else sink[head].double().exp())
        out.append((weights / total) @ v)
    return torch.stack(out)


@pytest.mark.parametrize("option", ["plain", "window", "sinks", "softcap"])
@pytest.mark.parametrize("case", SHAPES)
def test_attention_over_pages(case, option):
    heads, kv_heads, key_size, value_size = SHAPES[case]
    torch.manual_seed(0)
    rows, width = len(POSITIONS), 3
    meta = {"dtype": torch.float32, "device": "meta"}
    layout = Layout(
        ((True, 0),),
        {0: torch.empty(kv_heads, key_size, **meta)},
        {0: torch.empty(kv_heads, value_size, **meta)},
    )
    pages = Pages(layout, rows * width, BLOCK_SIZE, DEVICE)
    pages.joint[0].normal_()
    table = torch.randperm(rows * width).view(rows, width).int().to(DEVICE)
    state = torch.zeros(triton_kernels.FIELDS, rows, dtype=torch.int32, device=DEVICE)
    state[triton_kernels.POSITION] = torch.tensor(POSITIONS)
    state[triton_kernels.STATUS] = torch.tensor(LIVE).int() * triton_kernels.LIVE
    arrived = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    buffers = SimpleNamespace(pages=pages, table=table, state=state, slots=rows, width=width, arrived=arrived)
    decoder = SimpleNamespace(layout=layout, dtype=torch.float32)
    step = PagedPass(decoder, buffers, rows, {})
    key, value = (torch.randn(rows, 1, kv_heads, n, device=DEVICE).transpose(1, 2) for n in (key_size, value_size))
    query = torch.randn(rows, heads, 1, key_size, device=DEVICE)
    before = pages.joint[0].clone()
    key, value = step.write(0, key, value)
    columns, position = torch.arange(width * BLOCK_SIZE, device=DEVICE), torch.tensor(POSITIONS, device=DEVICE)[:, None]
    mask = (columns <= position) & (columns > position - 40) if option == "window" else None
    sinks = torch.randn(heads, device=DEVICE) if option == "sinks" else None
    softcap = 1.5 if option == "softcap" else None
    mask_of_heads = None if mask is None else mask[:, None, None]
    out = step.attend(None, query, key, value, mask_of_heads, Scores(0.3, softcap, sinks, 40))
    assert out.shape == (rows, 1, heads, value_size)
    for row, (at, live) in enumerate(zip(POSITIONS, LIVE)):
        whole = pages.joint[0][table[row].long()].transpose(0, 1).flatten(1, 2)
        if not live:
            assert torch.equal(pages.joint[0][table[row].long()], before[table[row].long()])
            continue
        torch.testing.assert_close(whole[:, at], torch.cat((key[row, :, 0], value[row, :, 0]), -1))
        keys, values = whole.split((key_size, value_size), -1)
        seen = None if mask is None else mask[row]
        result = expected(query[row, :, 0], keys, values, at, 0.3, softcap, sinks, seen)
        torch.testing.assert_close(out[row, 0].double(), result, atol=1e-5, rtol=1e-5)
    assert not arrived.any()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("queries", "heads", "kv_heads", "size"), [(5, 4, 2, 16), (3, 6, 1, 20), (9, 14, 2, 16)])
@pytest.mark.parametrize(("window", "softcap"), [(0, None), (40, None), (0, 1.5)])
def test_attention_of_several_rows_of_a_slot(queries, heads, kv_heads, size, splits, window, softcap):
    from verl.rollout.native.verifier import attend_slots

    torch.manual_seed(0)
    slots, width = len(POSITIONS), 3
    rows = slots * queries
    cache = torch.randn(slots * width, 2 * kv_heads, BLOCK_SIZE, size, device=DEVICE)
    table = torch.randperm(slots * width).view(slots, width).repeat_interleave(queries, 0).int().to(DEVICE)
    state = torch.zeros(triton_kernels.FIELDS, rows, dtype=torch.int32, device=DEVICE)
    # the last row of each slot has no draft
    at = torch.arange(queries) % (queries - 1)
    state[triton_kernels.POSITION] = (torch.tensor(POSITIONS)[:, None] + at).flatten()
    live = torch.tensor(LIVE)[:, None] & (torch.arange(queries) < queries - 1)
    state[triton_kernels.STATUS] = live.flatten().int() * triton_kernels.LIVE
    arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    buffers = SimpleNamespace(table=table, state=state, slots=rows, width=width, arrived=arrived)
    query = torch.randn(rows, heads * size, device=DEVICE)
    options = {"scaling": 0.3, "softcap": softcap, "window": window, "precision": "ieee", "splits": splits}
    out = attend_slots(query, cache, buffers, queries, kv_heads, heads, **options)
    for row in live.flatten().nonzero()[:, 0].tolist():
        keys, values = cache[table[row].long()].transpose(0, 1).flatten(1, 2).chunk(2)
        position = int(state[triton_kernels.POSITION, row])
        columns = torch.arange(width * BLOCK_SIZE, device=DEVICE)
        seen = columns > position - window if window else None
        result = expected(query[row].view(heads, size), keys, values, position, 0.3, softcap, None, seen)
        torch.testing.assert_close(out[row].view(heads, size).double(), result, atol=1e-5, rtol=1e-5)
    assert not arrived.any()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_step_of_the_delta_rule(kv_heads):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as plain

    torch.manual_seed(0)
    query, key = (torch.randn(3, 1, kv_heads, 24, device=DEVICE) for _ in range(2))
    value, state = torch.randn(3, 1, 4, 20, device=DEVICE), torch.randn(3, 4, 24, 20, device=DEVICE)
    options = {"g": -torch.rand(3, 1, 4, device=DEVICE), "beta": torch.rand(3, 1, 4, device=DEVICE)}
    options |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    repeated = (x.repeat_interleave(4 // kv_heads, 2) for x in (query, key))
    expected_out, expected_state = plain(*repeated, value, initial_state=state.clone(), **options)
    with torch.inference_mode():
        out, after = delta_rule_step(plain, query, key, value, initial_state=state, **options)
    assert after is state, "in place"
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)
