"""Words of the configuration to devices and dtypes, and memory figures that follow real memory."""

import gc
import mmap

import pytest
import torch

from verl.utils.device import frozen_heap, peak_memory, process_rss, resolve_device, resolve_dtype

CPU = torch.device("cpu")


def test_device_words():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for word in ("gpu", "cuda:", "cuda:x", "mps", ""):
        if word == "cuda:" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match="device"):
            resolve_device(word)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_a_missing_gpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"device 'cuda' was requested, but (this build|torch finds).*use cpu or auto"):
        resolve_device("cuda")


@pytest.mark.gpu
def test_gpu_of_the_rank():
    assert resolve_device("auto", local_rank=0) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"GPU 99 was requested.*CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda", local_rank=99)
    torch.zeros(1, device="cuda:0")  # initializes CUDA, if no test before has
    torch.cuda.reset_peak_memory_stats(0)  # the peak is that of the whole process, earlier tests included
    before = peak_memory(torch.device("cuda", 0))
    torch.zeros(1 << 26, device="cuda:0")
    assert peak_memory(torch.device("cuda", 0)) - before >= 1 << 28


def test_dtype_words():
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("bf16", CPU) == resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("fp32", CPU) == torch.float32
    assert resolve_dtype(torch.float64, CPU) == torch.float64
    with pytest.raises(ValueError, match=r"dtype: expected auto, fp64, .* found 'int8'"):
        resolve_dtype("int8", CPU)


def test_memory_figures_follow_an_allocation():
    before = process_rss()
    block = mmap.mmap(-1, 64 << 20)  # new pages: an array may get memory that was freed before
    block.write(bytes([1]) * len(block))
    assert process_rss() - before >= 48 << 20
    assert peak_memory(CPU) >= process_rss() - (8 << 20)
    block.close()


def test_the_heap_is_frozen_unless_the_program_has_done_so():
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with frozen_heap():
            assert gc.get_freeze_count() > 0
            with frozen_heap():
                pass
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        if frozen:
            gc.freeze()
