"""The chunks that the kernel of `reshard` copies and sums: its tables in a loop, and the kernel against the loop."""

import random

import pytest
import torch

from tests.rollout import test_reshard
from verl.rollout.weight_sync import chunk_table, reshard
from verl.rollout.weight_sync.checksums import wrap
from verl.rollout.weight_sync.chunk_table import ChunkTable, Pointers, Position, Weights

CPU = torch.device("cpu")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def loop(table: ChunkTable, sources: Pointers, targets: Pointers | None, dtype: torch.dtype, sums) -> None:
    """As `ChunkTable.run`, from its definition, one word at a time in numbers of Python."""
    for rows, columns, source, target, weights in table.chunks:
        tensor = sources.tensors[source.tensor].view(-1)
        tensor = tensor if targets is not None else tensor.view(dtype)
        chunk = tensor.as_strided((rows, columns), (source.stride, 1), tensor.storage_offset() + source.start)
        if targets is not None:
            to, chunk = targets.tensors[target.tensor].view(-1), chunk.to(dtype)
            to.as_strided(chunk.shape, (target.stride, 1), to.storage_offset() + target.start).copy_(chunk)
        if sums is not None:
            width = 8 * dtype.itemsize * weights.per_word
            bits = chunk.contiguous().view(BITS.get(dtype, dtype)).tolist()
            size = 8 * dtype.itemsize
            total = 0
            for i, row in enumerate(bits):
                for j in range(columns // weights.per_word):
                    word = row[j * weights.per_word : (j + 1) * weights.per_word]
                    value = sum((bit % 2**size) << (size * k) for k, bit in enumerate(word))
                    value -= 2**width if value >= 2 ** (width - 1) else 0
                    total += value * (weights.a + weights.b * i + weights.c * j)
            sums[weights.cell] = wrap(int(sums[weights.cell]) + total)


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
    """Every rank stores its slices and the sums agree; those of one operator per chunk are the same."""
    plain = [report.checksum for report in test_reshard.push(ranks, tp, boxes, case, bucket=4096)[0]]
    monkeypatch.setattr(reshard, "fits", lambda device, plan: True)
    monkeypatch.setattr(ChunkTable, "run", loop)
    reports, receivers, trained = test_reshard.push(ranks, tp, boxes, case, bucket=4096)
    assert [report.checksum for report in reports] == plain
    for rank, receiver in enumerate(receivers):
        expected = test_reshard.receiver_of(case, rank, tp, torch.bfloat16)
        for name, tensor in trained.named_parameters():
            assert torch.equal(receiver.stored(name), expected.slices.of(name, tensor.to(torch.bfloat16))), name


def random_table(generator: random.Random, device: torch.device, words: torch.dtype | None = None) -> tuple:
    """Chunks of random shapes at random positions of two tensors per dtype; no chunks share an element of a target."""
    table, sources = ChunkTable(device), []
    target = generator.choice([torch.float32, torch.bfloat16, torch.float16])
    size = 0
    for number in range(6):
        step = generator.choice([1, 4])
        rows, columns = generator.randint(1, 40), generator.choice([1, 8, 600, 1040, generator.randint(1, 300) * step])
        dtype = words or generator.choice(list(chunk_table.DTYPES))
        stride, start = columns + step * generator.randint(0, 3), step * generator.randint(0, 3)
        if words is None:
            tensor = torch.randn(start + rows * stride, device=device).to(dtype)
        else:
            tensor = torch.randint(-(2**63), 2**63 - 1, (start + rows * stride,), device=device).to(words)  # low bits
        sources.append(tensor)
        per_word = generator.choice([n for n in (1, 2, 4) if columns % n == 0 and n * target.itemsize <= 8])
        factors = [generator.randint(-(2**63), 2**63 - 1) for _ in range(3)]
        factors[2] *= generator.choice([0, 1])
        weights = Weights(*factors, 1 if words else per_word, generator.randint(0, 3))
        out = columns + step * generator.randint(0, 2)
        table.add((rows, columns), Position(number, start, stride), Position(0, size, out), weights)
        size += rows * out + generator.choice([0, 1, 4])
    return table, sources, target, size


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_does_what_the_loop_does(seed):
    device = torch.device("cuda")
    table, sources, dtype, size = random_table(random.Random(seed), device)
    pointers, found = Pointers(sources, device), []
    for run, sums in ((ChunkTable.run, 4), (loop, 4), (ChunkTable.run, 0)):
        target = torch.full((size,), 7.0, dtype=dtype, device=device)
        total = torch.arange(sums, device=device) if sums else None
        run(table, pointers, Pointers([target], device), dtype, total)
        found.append((target.tolist(), total.tolist() if sums else None))
    assert found[0] == found[1] and found[0][0] == found[2][0]


@pytest.mark.gpu
@pytest.mark.parametrize("words", [torch.int16, torch.int32, torch.int64])
def test_the_kernel_sums_words(words):
    device = torch.device("cuda")
    table, sources, *_ = random_table(random.Random(0), device, words)
    stored = Pointers([tensor.view(torch.bfloat16) for tensor in sources], device)
    found = []
    for run in (ChunkTable.run, loop):
        found.append(torch.zeros(4, dtype=torch.int64, device=device))
        run(table, stored, None, words, found[-1])
    assert found[0].any() and torch.equal(*found)
