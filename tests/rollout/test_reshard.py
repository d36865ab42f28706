"""Every rank receives the slices of the parameters that it stores, no others, and faults are named."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.rollout.test_native_families import model
from verl.rollout.native.slices import SliceReceiver, Slices
from verl.rollout.tensor_parallel import TensorParallel
from verl.utils.shards import Box, Chunk, Shard, boxes_of, matrix_shape, whole
from verl.weight_sync import ReshardSync, SlicedWeights, SyncReport
from verl.weight_sync.reshard import sync as sync_module
from verl.weight_sync.reshard.plan import RankLayout, Stored, make_plan

CPU = torch.device("cpu")


def make_module(case: str = "qwen2", seed: int = 0) -> torch.nn.Module:
    more = {"num_key_value_heads": 1} if case == "one-kv-head" else {}
    module = model("qwen2" if case == "one-kv-head" else case, vocab_size=96, **more)
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.requires_grad_(False)


class Holder(torch.nn.Module):
    """A module with parameters of these names."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *args, **kwargs):
        return iter(self.tensors.items())

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        return self.tensors[target]


def rows_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """As torch.chunk splits."""
    share = -(-size // ranks)
    return min(rank * share, size), min((rank + 1) * share, size)


def row_sharded(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """FSDP2."""
    box = whole(shape)
    top, bottom = rows_of(box.rows, rank, ranks)
    return [box._replace(top=top, bottom=bottom)]


def tensor_and_row_sharded(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """FSDP2 over rank // 2, and tensor parallelism over two ranks."""
    box, (shard, tensor), layer = whole(shape), divmod(rank, 2), name.split(".")[-2]
    if layer in ("o_proj", "down_proj") and name.endswith("weight"):
        top, bottom = rows_of(box.rows, shard, ranks // 2)
        return [Box(top, bottom, box.columns // 2 * tensor, box.columns // 2 * (tensor + 1))]
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        half = box.rows // 2
        top, bottom = rows_of(half, shard, ranks // 2)
        return [box._replace(top=half * tensor + top, bottom=half * tensor + bottom)]
    return row_sharded(name, shape, rank, ranks)


def staged(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """Pipeline stages of two ranks, each with every second pair of rows, as in a fused projection; others in full."""
    stage = 1 if ".layers.1." in name else 0
    if rank // 2 != stage % (ranks // 2):
        return []
    box, half = whole(shape), rank % 2
    if "proj" not in name:
        return [box]
    return [box._replace(top=top, bottom=top + 2) for top in range(2 * half, box.rows, 4)]


class Source:
    """The shards of one rank."""

    replicas = ()

    def __init__(self, module: torch.nn.Module, boxes, rank: int, ranks: int):
        self.module = module
        self._layout = [
            Shard(name, tuple(p.shape), box)
            for name, p in module.named_parameters()
            for box in boxes(name, tuple(p.shape), rank, ranks)
        ]

    def rollout_weights(self, dtype):
        return ((name, p.detach().to(dtype)) for name, p in self.module.named_parameters())

    def shard_layout(self):
        return self._layout

    def shards(self):
        for shard in self._layout:
            full = self.module.get_parameter(shard.name).view(matrix_shape(shard.shape))
            yield full[shard.box.top : shard.box.bottom, shard.box.left : shard.box.right].contiguous()


def receiver_of(case: str, rank: int, tp: int, dtype: torch.dtype) -> SliceReceiver:
    module = make_module(case, seed=1).to(dtype)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    slices = Slices(module.config, TensorParallel(rank % tp, tp))
    for name, parameter in module.named_parameters():
        parameter.data = slices.slice_of(name, parameter.data).clone(memory_format=torch.contiguous_format)
    return SliceReceiver(module, slices, shapes)


def together(size: int, act) -> list:
    """act(rank, group) in threads, each a rank of a gloo group; what each returns or raises."""
    store, found = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank, dist.ProcessGroupGloo(store, rank, size))
        except ValueError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in found, found
    return found


def sync_of(receiver, group, bucket: int = 2**20, check_every: int = 1) -> ReshardSync:
    """The sync of one rank."""
    engine = SimpleNamespace(receiver=lambda: receiver, weight_version=None)
    return ReshardSync(engine, CPU, bucket, group, check_every=check_every)


def push(
    ranks: int,
    tp: int,
    boxes,
    case: str = "qwen2",
    dtype=torch.bfloat16,
    bucket: int = 2**20,
    times: int = 1,
    check_every: int = 1,
):
    """Reports of every rank, its receiver, and the trained module."""
    trained = make_module(case)
    receivers = [receiver_of(case, rank, tp, dtype) for rank in range(ranks)]

    def act(rank: int, group) -> SyncReport:
        sync, source = sync_of(receivers[rank], group, bucket, check_every), Source(trained, boxes, rank, ranks)
        for version in range(times):
            report = sync.push(source, version)
        assert max(sync._plan.slot_bytes) <= bucket
        return report

    return together(ranks, act), receivers, trained


def needed(trained: torch.nn.Module, boxes, receiver: SliceReceiver, rank: int, ranks: int) -> tuple[int, int]:
    """Elements that a rank lacks and that it has already, counted one by one."""
    lacks = has = 0
    for name, parameter in trained.named_parameters():
        rows, columns = matrix_shape(parameter.shape)
        numbers = torch.arange(parameter.numel()).view(parameter.shape)
        if name.endswith(("o_proj.bias", "down_proj.bias")) and not receiver.slices.tp.leads:
            continue
        wanted = receiver.slices.slice_of(name, numbers).flatten()
        own = torch.zeros(rows, columns, dtype=torch.bool)
        for box in boxes(name, tuple(parameter.shape), rank, ranks):
            own[box.top : box.bottom, box.left : box.right] = True
        held = int(own.flatten()[wanted].sum())
        lacks, has = lacks + len(wanted) - held, has + held
    return lacks, has


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_slices_in_another_dtype_than_that_of_training(dtype):
    reports, receivers, trained = push(2, 2, row_sharded, dtype=dtype)
    assert [report.version for report in reports] == [0, 0]
    for name, parameter in trained.named_parameters():
        assert torch.equal(receivers[0].stored(name), receivers[0].slices.slice_of(name, parameter.to(dtype))), name


@pytest.mark.fast("4096*")
@pytest.mark.parametrize(
    ("ranks", "tp", "boxes", "case"),
    [
        (2, 2, row_sharded, "qwen2"),
        (3, 1, row_sharded, "qwen2"),
        (4, 2, row_sharded, "llama"),
        (4, 4, row_sharded, "one-kv-head"),
        (2, 2, row_sharded, "phi3"),
        (4, 4, tensor_and_row_sharded, "qwen2"),
        (4, 2, tensor_and_row_sharded, "qwen2"),
        (4, 2, staged, "qwen2"),
        (1, 1, row_sharded, "qwen2"),
    ],
)
@pytest.mark.parametrize("bucket", [2**20, 4096])
def test_every_rank_gets_its_slices_and_only_what_it_lacks(ranks, tp, boxes, case, bucket):
    reports, receivers, trained = push(ranks, tp, boxes, case, bucket=bucket, times=2)
    for rank, (report, receiver) in enumerate(zip(reports, receivers)):
        for name, parameter in trained.named_parameters():
            expected = receiver.slices.slice_of(name, parameter.to(torch.bfloat16))
            assert torch.equal(receiver.stored(name), expected), (rank, name)
        assert receiver.filled
        lacks, has = needed(trained, boxes, receiver, rank, ranks)
        expected = (2 * lacks, 2 * has) if ranks > 1 else (2 * has, 0)  # one rank copies on its device
        assert (report.bytes, report.kept) == expected


def copying(change):
    """A fault in the copies of what was received: change(targets, sources) -> targets, sources."""
    honest, lock = sync_module.copy_chunks, threading.Lock()
    done = []

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        stores = sources and targets[0].dtype == sources[0].dtype
        with lock:
            if stores and not done and (changed := change(targets, sources)) is not None:
                done.append(True)
                targets, sources = changed
        honest(targets, sources)

    return copy


def missing(targets, sources):
    targets[0].fill_(7)  # fresh memory may have the values of an earlier push
    return targets[1:], sources[1:]


def wrong(targets, sources):
    sources[0].view(-1)[0] += 1
    return targets, sources


def doubled(targets, sources):
    """One chunk also at the place of another one of the same size."""
    for i, a in enumerate(targets):
        for j in range(i):
            if a.shape == targets[j].shape and not torch.equal(sources[i], sources[j]):
                return [*targets, a], [*sources, sources[j]]
    return None


def swapped(targets, sources):
    """Two chunks of the same tensor in each other's place."""
    for i, a in enumerate(targets):
        for j in range(i):
            b = targets[j]
            if a.shape == b.shape and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
                both = {i: j, j: i}
                return targets, [sources[both.get(k, k)] for k in range(len(sources))]
    return None


def exchanged(targets, sources):
    """Two words of a row of the largest chunk in each other's place."""
    row = max(sources, key=torch.numel).view(-1)
    words = 8 // row.element_size()
    row[: 2 * words] = row[: 2 * words].roll(words)
    return targets, sources


@pytest.mark.parametrize("fault", [missing, wrong, doubled, swapped, exchanged])
def test_a_fault_of_the_first_push_is_named_on_every_rank(fault, monkeypatch):
    """By the comparison of what is stored."""
    monkeypatch.setattr(sync_module, "copy_chunks", copying(fault))
    boxes = staged if fault is swapped else row_sharded
    errors, receivers, _ = push(2, 2, boxes)
    for error in errors:
        assert isinstance(error, ValueError), error
        text = str(error)
        assert "weights of version 0 were not loaded: 1 slices differ from the training shards: model." in text
        assert " on rank " in text and text == str(errors[0])
    assert not any(receiver.filled for receiver in receivers)


class Columns(SlicedWeights):
    """Stores two chunks of the columns of one parameter next to each other."""

    SHAPE = (3, 8)

    def __init__(self, rank: int, chunks: tuple[Chunk, ...] | None = None):
        own = (Chunk(Box(0, 3, 2 * rank, 2 * rank + 2)), Chunk(Box(0, 3, 4 + 2 * rank, 6 + 2 * rank), column=2))
        self.stored = torch.zeros(3, 4, dtype=torch.bfloat16)
        self._layout = {"a": Stored(self.SHAPE, 3, 4, chunks or own, torch.bfloat16)}

    def slice_layout(self):
        return self._layout

    def open_slices(self, version):
        return nullcontext({"a": self.stored})


def push_columns(receivers: list[Columns]) -> list:
    trained = Holder({"a": torch.arange(24.0).view(Columns.SHAPE)})
    return together(
        2, lambda rank, group: sync_of(receivers[rank], group).push(Source(trained, row_sharded, rank, 2), 0)
    )


def test_chunks_of_columns_next_to_each_other(monkeypatch):
    receivers = [Columns(rank) for rank in range(2)]
    push_columns(receivers)
    for receiver, columns in zip(receivers, ([0, 1, 4, 5], [2, 3, 6, 7])):
        assert receiver.stored.tolist() == [[8.0 * row + column for column in columns] for row in range(3)]
    monkeypatch.setattr(sync_module, "copy_chunks", copying(swapped))
    errors = push_columns([Columns(rank) for rank in range(2)])
    assert all("1 slices differ from the training shards: a on rank" in str(error) for error in errors)
    # chunks that have neither rows nor columns in common
    monkeypatch.undo()
    diagonal = Chunk(Box(0, 1, 0, 4)), Chunk(Box(1, 3, 4, 8), row=1)
    other = Chunk(Box(0, 1, 4, 8)), Chunk(Box(1, 3, 0, 4), row=1)
    receivers = [Columns(0, diagonal), Columns(1, other)]
    reports = push_columns(receivers)
    assert [report.version for report in reports] == [0, 0]
    full = torch.arange(24.0).view(Columns.SHAPE)
    for receiver, columns in zip(receivers, ((0, 4), (4, 0))):
        rows = zip((0, 1, 1), full, columns[:1] + columns[1:] * 2)
        assert receiver.stored.tolist() == [row[left : left + 4].tolist() for _, row, left in rows]


def test_a_stale_slice_is_named_by_the_next_comparison(monkeypatch):
    """Rank 1 keeps the q_proj of an earlier push: nothing is copied into it. `check_every` is 3."""
    trained = make_module()
    receivers = [receiver_of("qwen2", rank, 2, torch.bfloat16) for rank in range(2)]
    name = "model.layers.1.self_attn.q_proj.weight"
    barrier, honest, old = threading.Barrier(2), sync_module.copy_chunks, []

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        kept = receivers[1].stored(name).data_ptr()
        written = [i for i, target in enumerate(targets) if target.untyped_storage().data_ptr() != kept]
        honest([targets[i] for i in written], [sources[i] for i in written])

    def act(rank: int, group) -> SyncReport:
        sync, source = sync_of(receivers[rank], group, check_every=3), Source(trained, row_sharded, rank, 2)
        sync.push(source, 4)
        barrier.wait()
        if rank == 0:
            old.append(receivers[1].stored(name).clone())
            torch._foreach_mul_([*trained.parameters()], 1.5)
            monkeypatch.setattr(sync_module, "copy_chunks", copy)
        barrier.wait()
        assert sync.push(source, 5).version == sync.rollout.weight_version == 5  # not compared
        return sync.push(source, 6)

    text = f"weights of version 6 were not loaded: 1 slices differ from the training shards: {name} on rank 1"
    for error in together(2, act):
        assert str(error) == text
    assert torch.equal(receivers[1].stored(name), old[0]) and not any(receiver.filled for receiver in receivers)
    for rank, receiver in enumerate(receivers):
        for other, parameter in trained.named_parameters():
            is_new = torch.equal(receiver.stored(other), receiver.slices.slice_of(other, parameter.to(torch.bfloat16)))
            assert is_new == ((rank, other) != (1, name))


def test_layouts_that_do_not_fit_are_refused():
    shape, dtype = (4, 6), torch.float32
    full = Stored(shape, 4, 6, (Chunk(whole(shape)),), dtype)
    top, bottom = Box(0, 2, 0, 6), Box(2, 4, 0, 6)

    def plan(shards: list[list[Shard]], stored: dict) -> None:
        make_plan([RankLayout(tuple(own), stored) for own in shards], 100)

    plan([[Shard("a", shape, top)], [Shard("a", shape, bottom)]], {"a": full})
    with pytest.raises(ValueError, match=r"training does not have: \['b'\]"):
        plan([[Shard("a", shape, whole(shape))]], {"a": full, "b": full})
    with pytest.raises(ValueError, match=r"rollout does not have: \['a'\]"):
        plan([[Shard("a", shape, whole(shape))]], {})
    with pytest.raises(ValueError, match=r"a has shape \(6, 4\) in training, \(4, 6\) in the rollout"):
        plan([[Shard("a", (6, 4), whole((6, 4)))]], {"a": full})
    half = Stored(shape, 2, 6, (Chunk(top),), dtype)
    with pytest.raises(
        ValueError, match="element of a on a rollout rank, found none that stores rows 2 to 3, columns 0"
    ):
        plan([[Shard("a", shape, whole(shape))]], {"a": half})


def test_chunks_that_overlap_partly():
    """A fused matrix of q (2 rows per rank), and one head of k and v (1 row each) that both ranks have."""
    shape, dtype = (6, 4), torch.float32
    q_and_k_v = (Chunk(Box(0, 2, 0, 4)), Chunk(Box(4, 6, 0, 4), row=2)), (Chunk(Box(2, 6, 0, 4)),)
    layouts = [
        RankLayout((Shard("a", shape, Box(3 * rank, 3 * rank + 3, 0, 4)),), {"a": Stored(shape, 4, 4, chunks, dtype)})
        for rank, chunks in enumerate(q_and_k_v)
    ]
    moves = [move for bucket in make_plan(layouts, 2**20).buckets for _, move in bucket.moves]
    found = sorted((m.target, m.box.top, m.box.bottom, m.source, m.to) for m in moves)
    assert found == [
        (0, 0, 2, 0, (0, 0)),
        (0, 4, 6, 1, (2, 0)),
        (1, 2, 3, 0, (0, 0)),
        (1, 3, 6, 1, (1, 0)),
    ]


def test_replicas_do_not_send_to_each_other():
    """HSDP: ranks 0 and 1 have the two halves, and so have 2 and 3. Every rank needs the whole parameter."""
    shape = (4, 6)
    halves = [Box(0, 2, 0, 6), Box(2, 4, 0, 6)]
    full = {"a": Stored(shape, 4, 6, (Chunk(whole(shape)),), torch.float32)}

    def sources(replicas: list[tuple[int, ...]]) -> dict[int, set[int]]:
        layouts = [RankLayout((Shard("a", shape, halves[rank % 2]),), full, own) for rank, own in enumerate(replicas)]
        moves = [move for bucket in make_plan(layouts, 2**20).buckets for _, move in bucket.moves]
        return {rank: {move.source for move in moves if move.target == rank} - {rank} for rank in range(4)}

    assert sources([(0,), (0,), (1,), (1,)]) == {0: {1}, 1: {0}, 2: {3}, 3: {2}}
    # no smaller replica has the other half: the next larger set of ranks does
    assert sources([(0, 0), (1, 1), (2, 1), (3, 0)]) == {0: {3}, 1: {2}, 2: {1}, 3: {0}}


def test_pipeline_stages_send_at_the_same_time():
    shape = (4, 6)
    stages = [[Shard(f"{stage}.{i}", shape, whole(shape)) for i in range(3)] for stage in range(2)]
    stored = {s.name: Stored(shape, 4, 6, (Chunk(whole(shape)),), torch.float32) for own in stages for s in own}
    plan = make_plan([RankLayout(tuple(own), stored) for own in stages], 3 * 96)  # two parameters of 96 bytes
    assert [parameter.name for parameter in plan.parameters] == ["0.0", "1.0", "0.1", "1.1", "0.2", "1.2"]
    for bucket in plan.buckets:
        assert {move.source for _, move in bucket.moves if move.source != move.target} == {0, 1}


@pytest.mark.parametrize(
    ("offset", "size", "boxes"),
    [
        ((2, 0, 0), (2, 6, 5), [Box(12, 24, 0, 5)]),  # experts 2 and 3 of four, in full
        ((2, 0, 1), (2, 6, 2), [Box(12, 24, 1, 3)]),  # some columns of them
        ((2, 3, 0), (2, 2, 5), [Box(15, 17, 0, 5), Box(21, 23, 0, 5)]),  # some rows of each
    ],
)
def test_a_block_of_experts_as_boxes(offset, size, boxes):
    shape = (4, 6, 5)
    assert boxes_of(shape, offset, size) == boxes
    full = torch.arange(120).view(shape)
    block = full[tuple(slice(start, start + n) for start, n in zip(offset, size))]
    found = [full.view(matrix_shape(shape))[b.top : b.bottom, b.left : b.right].flatten() for b in boxes]
    assert torch.equal(torch.cat(found), block.flatten())


def test_what_the_rollout_stores_must_be_what_its_layout_says():
    for wrong in (torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 3).bfloat16().t()):
        receivers = [Columns(rank) for rank in range(2)]
        for receiver in receivers:
            receiver.stored = wrong
        for error in push_columns(receivers):
            assert "a: expected 12 contiguous elements of torch.bfloat16 in the rollout, found" in str(error)
