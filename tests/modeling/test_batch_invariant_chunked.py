"""On a CPU: a row's result has the same bits whatever rows it is computed with, and is the right one."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from verl.modeling.batch_invariant import chunked
from verl.modeling.batch_invariant.chunked import elementwise, log_sum_exp
from verl.modeling.batch_invariant.model import linear, with_gradient_of

COUNTS = (*range(1, 36), 63, 64, 65, 128, 333, 600)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.fast("*33-17*", "*300-600*", "2-64-256-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inside", "outside"), [(33, 17), (64, 256), (128, 97), (300, 600)])
def test_linear_row_by_row(threads, inside, outside, dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((600, inside), (outside, inside), (outside,)))
    whole = chunked.linear(x, weight, bias)
    for count in COUNTS:
        start = (7 * count) % (601 - count)
        assert torch.equal(chunked.linear(x[start : start + count], weight, bias), whole[start : start + count])
    exact = x.double() @ weight.double().t() + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(whole.double(), exact, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("function", [F.silu, F.gelu, partial(F.gelu, approximate="tanh"), torch.exp, torch.tanh])
def test_an_elementwise_function_at_any_position(threads, function):
    torch.manual_seed(0)
    x = torch.randn(70_000) * 3
    whole = elementwise(function, x)
    for count in (*COUNTS, 40_000):
        start = (911 * count) % (70_001 - count)
        assert torch.equal(elementwise(function, x[start : start + count]), whole[start : start + count])
    torch.testing.assert_close(whole.double(), function(x.double()), atol=2e-6, rtol=1e-6)
    assert elementwise(function, x.view(7, 10, 1000)).shape == (7, 10, 1000)


@pytest.mark.parametrize("vocabulary", [29, 33_000])
def test_log_sum_exp_row_by_row(threads, vocabulary):
    torch.manual_seed(0)
    x = torch.randn(20, vocabulary) * 5
    x[:, 3] = float("-inf")
    whole = log_sum_exp(x)
    for count in (1, 2, 3, 8, 17):
        assert torch.equal(log_sum_exp(x[20 - count :]), whole[20 - count :])
    torch.testing.assert_close(whole.double(), x.double().logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_gradients_are_those_of_the_standard_functions():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (4, 3), (4,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, weight: linear(x, weight), (x, weight.detach()))
    assert torch.autograd.gradcheck(lambda x: with_gradient_of(F.silu, partial(elementwise, F.silu), x), (x,))
