"""The chunks that the kernel of `reshard` copies and sums: its tables in a loop, and the kernel against the loop."""

import math
import random
import threading

import pytest
import torch

from tests.rollout import test_reshard
from verl.weight_sync import chunk_table, reshard
from verl.weight_sync.checksums import wrap
from verl.weight_sync.reshard.chunk_table import ChunkTable, Pointers, Position, SumFactors

CPU = torch.device("cpu")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def loop(table: ChunkTable, sources: Pointers, targets: Pointers | None, dtype: torch.dtype, sums) -> None:
    """As `ChunkTable.run`, from the tables, one word at a time in numbers of Python."""
    for aligned, tiles, chunks in table.tables():
        expected = []
        for number, row in enumerate(chunks.tolist()):
            rows, columns, source, start, stride, target, to, out, *factors, first, across = row
            assert not aligned or not any(n % 4 for n in (columns, start, stride, to, out))
            assert (first, across) == (len(expected), math.ceil(columns / 1024))
            expected += [number] * (math.ceil(rows / 8) * across)
            tensor = sources.tensors[source].view(-1)
            tensor = tensor if targets is not None else tensor.view(dtype)
            chunk = tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + start)
            if targets is not None:
                tensor, chunk = targets.tensors[target].view(-1), chunk.to(dtype)
                tensor.as_strided(chunk.shape, (out, 1), tensor.storage_offset() + to).copy_(chunk)
            if sums is not None:
                add_sum(chunk, factors, sums)
        assert tiles.tolist() == expected


def add_sum(chunk: torch.Tensor, factors: list[int], sums: torch.Tensor) -> None:
    """The words of a chunk, each (a + b i + c j) times."""
    a, b, c, per_word, cell = factors
    size, width = 8 * chunk.element_size(), 8 * chunk.element_size() * per_word
    total = 0
    for i, row in enumerate(chunk.contiguous().view(BITS.get(chunk.dtype, chunk.dtype)).tolist()):
        for j in range(len(row) // per_word):
            word = sum((bits % 2**size) << (size * k) for k, bits in enumerate(row[j * per_word : (j + 1) * per_word]))
            total += (word - 2**width if word >= 2 ** (width - 1) else word) * (a + b * i + c * j)
    sums[cell] = wrap(int(sums[cell]) + total)


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
    monkeypatch.setattr(reshard, "is_supported", lambda device, plan: True)
    monkeypatch.setattr(ChunkTable, "run", loop)
    reports, receivers, trained = test_reshard.push(ranks, tp, boxes, case, bucket=4096)
    assert [report.checksum for report in reports] == plain
    for rank, receiver in enumerate(receivers):
        expected = test_reshard.receiver_of(case, rank, tp, torch.bfloat16)
        for name, tensor in trained.named_parameters():
            assert torch.equal(receiver.stored(name), expected.slices.of(name, tensor.to(torch.bfloat16))), name


@pytest.mark.parametrize("fault", ["missing", "wrong", "moved"])
def test_a_fault_is_named_on_every_rank(fault, monkeypatch):
    """Of the first chunks that are written where a rank stores them."""
    done, lock = [], threading.Lock()

    def run(table: ChunkTable, sources: Pointers, targets: Pointers | None, dtype: torch.dtype, sums) -> None:
        with lock:
            is_first = not done and targets is not None and len(targets.tensors) > 1 and bool(table.chunks)
            done.extend([True] * is_first)
        if not is_first or fault != "missing":
            loop(table, sources, targets, dtype, sums)
        if is_first and fault != "missing":
            chunk = next(chunk for chunk in table.chunks if chunk.rows > 1)
            stored = targets.tensors[chunk.target.tensor].view(-1, chunk.target.stride)
            first = chunk.target.start // chunk.target.stride
            if fault == "wrong":
                stored[first, 0] += 1
            else:
                stored[[first, first + 1]] = stored[[first + 1, first]]

    monkeypatch.setattr(reshard, "is_supported", lambda device, plan: True)
    monkeypatch.setattr(ChunkTable, "run", run)
    errors, receivers, _ = test_reshard.push(2, 2, test_reshard.row_sharded)
    for error in errors:
        assert isinstance(error, ValueError), error
        assert "weights of version 0 were not loaded: " in str(error) and " on rank " in str(error)
    assert not any(receiver.filled for receiver in receivers)


def test_what_the_rollout_stores_must_be_what_its_layout_says():
    for wrong in (torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 3).bfloat16().t()):
        receivers = [test_reshard.Columns(rank) for rank in range(2)]
        for receiver in receivers:
            receiver.stored = wrong
        for error in test_reshard.push_columns(receivers):
            assert "a: expected 12 contiguous elements of torch.bfloat16 in the rollout, found" in str(error)


def random_table(generator: random.Random, device: torch.device, words: torch.dtype | None = None) -> tuple:
    """Chunks of random shapes at random positions of two tensors per dtype; no chunks share an element of a target."""
    table, sources = ChunkTable(device), []
    target = generator.choice([torch.float32, torch.bfloat16, torch.float16])
    size = 0
    for number in range(6):
        step = generator.choice([1, 4])
        rows, columns = generator.randint(1, 40), generator.choice([1, 8, 600, 2060, generator.randint(1, 300) * step])
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
        weights = SumFactors(*factors, 1 if words else per_word, generator.randint(0, 3))
        out = columns + step * generator.randint(0, 2)
        table.add((rows, columns), Position(number, start, stride), Position(0, size, out), weights)
        size += rows * out + generator.choice([0, 1, 4])
    return table, sources, target, size


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_does_what_the_loop_does(seed):
    torch.manual_seed(seed)
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
