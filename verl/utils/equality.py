"""Equality of batch contents: tensors, arrays, containers of them, plain values."""

from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal; NaN equals NaN.

    Tensors are equal if shape, dtype and all entries are, on any device. A tensor, an array and a list are never equal
    to each other.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)
