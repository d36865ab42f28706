"""Sums over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.engines.ranks import run_on_ranks
from verl.engines.distributed import gradient_norm, init_process_group


def norm_on_rank() -> float:
    init_process_group(torch.device("cpu"))
    line, one = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    sharded = distribute_tensor(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), line, [Shard(0)])
    replicated = distribute_tensor(torch.tensor([5.0]), line, [Replicate()])
    elsewhere = distribute_tensor(torch.tensor([1.0, 7.0]), one, [Replicate(), Shard(0)])
    return gradient_norm([sharded, replicated, elsewhere, torch.tensor([2.0])]).item()


def test_the_norm_counts_every_number_once_whatever_mesh_it_is_on():
    expected = (9 + 16 + 25 + 1 + 49 + 4) ** 0.5
    assert run_on_ranks(2, norm_on_rank) == pytest.approx([expected] * 2, rel=1e-6)


def test_a_launcher_must_have_set_the_variables(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"a sharded engine needs the variables .*'RANK'"):
        init_process_group(torch.device("cpu"))
