"""Sums over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.engines.ranks import make_engine, qwen2, run_on_ranks, save_model
from verl.engines.optimizer import gradient_norm
from verl.engines.parallel import init_process_group, timeout_of


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


def timeouts_on_rank(path: str, timeout: float) -> list[float]:
    """How long the groups of a sequence-parallel engine wait, in seconds."""
    sharding = make_engine(path, sharded=True, ulysses_sequence_parallel_size=2, timeout=timeout).sharding
    groups = (dist.group.WORLD, sharding.dp_group, sharding.sequence_ranks.group)
    return [timeout_of(group).total_seconds() for group in groups]


def test_every_group_waits_as_long_as_it_was_told(tmp_path):
    """torch gives the groups of a mesh a time of its own."""
    assert run_on_ranks(2, timeouts_on_rank, save_model(qwen2(), tmp_path), 77.0) == [[77.0] * 3] * 2


def test_a_launcher_must_have_set_the_variables(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"a sharded engine needs the environment variables .*'RANK'"):
        init_process_group(torch.device("cpu"))
