"""megatron-core on a CPU, for tests: replaces what it needs CUDA for."""

import importlib.util

import torch


def skip_reason() -> str:
    """Why a module whose tests run megatron-core on a CPU must be skipped, before its other imports; empty: it runs.

    On a machine with a GPU, the tests of CUDA in the same process need the functions that `shim` replaces.
    """
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed: make test-megatron"
    if torch.cuda.is_available():
        return "megatron-core on a CPU replaces functions of torch.cuda: set CUDA_VISIBLE_DEVICES= and run this file"
    return ""
