"""The chunks that `reshard` copies: what the kernel reads from their tables, and the kernel against operators of torch.

The kernel runs on a GPU, and on a CPU by Triton's interpreter: TRITON_INTERPRET=1 with the package triton installed.
"""

import math
import os
import random

import pytest
import torch

from tests.rollout import test_reshard
from verl.utils.shards import Box
from verl.weight_sync.reshard import chunk_table
from verl.weight_sync.reshard.chunk_table import TILE, ChunkTable, Position, TensorList

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def copy_by_tables(table: ChunkTable, sources: TensorList, targets: TensorList) -> None:
    """As `ChunkTable.copy`, from the tables of the kernel."""
    for aligned, tiles, chunks in table.tables:
        expected = []
        for number, row in enumerate(chunks.tolist()):
            rows, columns, source, start, stride, target, to, out, first, across = row
            assert not aligned or not any(n % 4 for n in (columns, start, stride, to, out))
            assert (first, across) == (len(expected), math.ceil(columns / 1024))
            expected += [number] * (math.ceil(rows / 8) * across)
            tensor = sources.tensors[source].view(-1)
            chunk = tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + start)
            tensor = targets.tensors[target].view(-1)
            tensor.as_strided(chunk.shape, (out, 1), tensor.storage_offset() + to).copy_(chunk)
        assert tiles.tolist() == expected


@pytest.mark.parametrize(
    ("case", "ranks", "tp", "boxes"),
    [
        ("qwen2", 2, 2, test_reshard.row_sharded),
        ("one-kv-head", 4, 4, test_reshard.row_sharded),
        ("qwen2", 4, 2, test_reshard.tensor_and_row_sharded),
        ("phi3", 2, 2, test_reshard.staged),
    ],
)
def test_the_tables_of_a_push(case, ranks, tp, boxes, monkeypatch):
    """Every rank stores its slices."""
    monkeypatch.setattr(ChunkTable, "copy", copy_by_tables)
    _, receivers, trained = test_reshard.push(ranks, tp, boxes, case, bucket=4096)
    for rank, receiver in enumerate(receivers):
        expected = test_reshard.receiver_of(case, rank, tp, torch.bfloat16)
        for name, tensor in trained.named_parameters():
            own = expected.slices.slice_of(name, tensor.to(torch.bfloat16))
            assert torch.equal(receiver.stored(name), own), name


def test_what_the_rollout_stores_must_be_what_its_layout_says():
    for wrong in (torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 3).bfloat16().t()):
        receivers = [test_reshard.Columns(rank) for rank in range(2)]
        for receiver in receivers:
            receiver.stored = wrong
        for error in test_reshard.push_columns(receivers):
            assert "a: expected 12 contiguous elements of torch.bfloat16 in the rollout, found" in str(error)


def random_table(generator: random.Random) -> tuple:
    """Chunks of random shapes at random positions of several tensors; no chunks share an element of a target."""
    dtype, sources, size = generator.choice(list(chunk_table.DTYPES)), [], 0
    table = ChunkTable(DEVICE, dtype)
    for number in range(6):
        step = generator.choice([1, 4])
        rows, columns = generator.randint(1, 40), generator.choice([1, 8, 600, 2060, generator.randint(1, 300) * step])
        stride, start = columns + step * generator.randint(0, 3), step * generator.randint(0, 3)
        source = generator.choice(list(chunk_table.DTYPES))
        values = torch.randn(start + rows * stride, device=DEVICE)
        if IS_INTERPRETED:  # which truncates casts to bfloat16
            values = values.bfloat16().float()
        sources.append(values.to(source))
        out = columns + step * generator.randint(0, 2)
        table.add(Box(0, rows, 0, columns), Position(number, start, stride), Position(0, size, out))
        size += rows * out + generator.choice([0, 1, 4])
    return table, TensorList(sources, DEVICE), size


def copy_by_kernel(table: ChunkTable, sources: TensorList, targets: TensorList) -> None:
    """As `ChunkTable.copy` on a GPU."""
    from verl.weight_sync.reshard.chunks_triton import run

    is_aligned = sources.is_aligned and targets.is_aligned
    for aligned, tiles, chunks in table.tables:
        run(tiles, chunks, sources.table, targets.table, table.dtype, is_aligned and aligned, TILE)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda" and not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_copies_what_the_operators_copy(seed):
    torch.manual_seed(seed)
    table, sources, size = random_table(random.Random(seed))
    found = []
    for copy in (copy_by_kernel, copy_by_tables):
        target = torch.full((size,), 7.0, dtype=table.dtype, device=DEVICE)
        copy(table, sources, TensorList([target], DEVICE))
        found.append(target.tolist())
    assert found[0] == found[1]
