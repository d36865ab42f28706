"""The Triton kernels, on a GPU or by Triton's interpreter (TRITON_INTERPRET=1): correct, and batch-invariant.

The bits of whole models on a GPU are in tests/gpu.
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from verl.modeling.batch_invariant import attention, triton_kernels
from verl.modeling.batch_invariant.attention import Scores

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# (rows, inside, outside); the interpreter is slow
SIZES = [(150, 64, 130), (150, 40, 33)]
LARGE = [(2300, 896, 128), (2300, 4864, 896), (2300, 333, 77), (2300, 896, 20000)]


# the interpreter has no bfloat16 matmul
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *[torch.bfloat16] * GPU])
@pytest.mark.parametrize(("rows", "inside", "outside"), [*SIZES, *LARGE * GPU])
def test_linear(rows, inside, outside, dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s).to(DEVICE, dtype) for s in ((rows, inside), (outside, inside), (outside,)))
    whole = triton_kernels.linear(x, weight, bias)
    tolerance = (1e-5 if dtype == torch.float32 else 0.1) if rows == 150 else 1e-3 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(
        whole.double(), x.double() @ weight.double().t() + bias.double(), atol=tolerance, rtol=1e-2
    )
    without_bias = (whole.float() - bias.float()).to(dtype)
    torch.testing.assert_close(triton_kernels.linear(x, weight), without_bias, atol=max(tolerance, 0.1), rtol=0.1)
    for count in (1, 2, 7, 63, 64, 65) if rows == 150 else (1, 2, 63, 256, 257, 2048):
        assert torch.equal(triton_kernels.linear(x[rows - count :], weight, bias), whole[rows - count :])


@pytest.mark.parametrize("size", [12, 1000])
def test_norm(size):
    torch.manual_seed(0)
    x, weight = torch.randn(20, 3, size, device=DEVICE), torch.randn(size, device=DEVICE)
    whole = triton_kernels.rms_norm(x, weight, 1e-3, torch.float32)
    wide = x.double()
    expected = weight.double() * wide / ((wide**2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    for count in (1, 2, 19):
        assert torch.equal(triton_kernels.rms_norm(x[20 - count :], weight, 1e-3, torch.float32), whole[20 - count :])


@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=67), Scores(0.3, window=3, softcap=0.7)], ids=str)
def test_attention(scores):
    lengths, heads, size = (1, 150, 64, 9), (6, 2), 12
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), h, size) for h in (heads[0], heads[1], heads[1]))
    expected = attention.attend_rows(*(x.double() for x in (query, key, value)), lengths, scores)
    query, key, value = (x.to(DEVICE) for x in (query, key, value))
    packed = triton_kernels.attend_rows(query, key, value, lengths, scores)
    torch.testing.assert_close(packed.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    parts = [x.split(lengths) for x in (query, key, value, packed)]
    for length, *row, found in zip(lengths, *parts):
        assert torch.equal(triton_kernels.attend_rows(*row, (length,), scores), found)
    # the last query of each row over blocks in any order, the rest of which is not written
    cache = torch.full((2, 7, heads[1], triton_kernels.BLOCK, size), torch.nan, device=DEVICE)
    table = torch.tensor([[3, 0, 0], [5, 1, 6], [0, 0, 0], [2, 0, 0]], dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(lengths):
        for start in range(0, length, triton_kernels.BLOCK):
            for store, part in zip(cache, parts[1:3]):
                block = part[row][start : start + triton_kernels.BLOCK].transpose(0, 1)
                store[table[row, start // triton_kernels.BLOCK], :, : block.shape[1]] = block
    at = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    live = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    found = triton_kernels.attend_cached(
        torch.stack([q[-1] for q in parts[0]]), *cache, triton_kernels.single_queries(at, live), table, scores
    )
    for row in (0, 1, 3):
        assert torch.equal(found[row], parts[3][row][-1])
