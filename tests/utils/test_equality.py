"""Equality of whatever rows hold."""

import numpy as np
import pytest
import torch

from verl.batch.containers import same


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (float("nan"), float("nan"), True),
        (np.float32("nan"), np.float32("nan"), True),
        ({"k": [1, float("nan")]}, {"k": [1, float("nan")]}, True),
        ({"k": 1}, {"k": 1, "l": 2}, False),
        ([1, 2], [1, 2, 3], False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, 2.0]), np.array([[1.0, 2.0]]), False),
        (np.array([{"a": 1}, None], dtype=object), np.array([{"a": 1}, None], dtype=object), True),
        (np.array([1]), 1, False),
        (torch.tensor([True]), torch.tensor([True]), True),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_equality_of_whatever_rows_hold(a, b, equal):
    assert same(a, b) is equal and same(b, a) is equal
