"""Weight synchronization: what arrives is what was sent, or an error names what differs."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import SamplingParams, make_requests
from verl.single_controller.worker import free_port
from verl.weight_sync import (
    CollectiveSync,
    InProcessSync,
    ModuleReceiver,
    ReplicaSync,
    SyncReport,
    TransferGroup,
    local_sync,
    receive_collective,
)
from verl.weight_sync.verify import combine, sums_of

SIZES = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=64)
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=(0,), seed=3)
REQUESTS = make_requests([[1, 2], [3]], PARAMS)
CPU = torch.device("cpu")
TIMEOUT = 60.0  # of a group, in seconds


class Trained:
    """The part of a training engine that is synchronized."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def rollout_weights(self, dtype):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG)


def check_same_weights(source: torch.nn.Module, target: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    for (name, a), (_, b) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(a if dtype is None else a.to(dtype).float(), b), name


def hf(module, weights=None):
    return HFRollout(module, pad_token_id=0, weights=weights)


def native(module, weights=None):
    return NativeRollout(module, weights=weights)


def test_in_process_moves_nothing():
    rollout = native(make_module())
    report = InProcessSync(rollout).push(Trained(rollout.module), 7)
    assert (report.version, report.bytes) == (7, 0) and rollout.weight_version == 7
    assert rollout.receiver() is None


@pytest.mark.parametrize("make", [hf, native])
def test_a_replica_is_filled_used_and_freed(make):
    source, module = make_module(0), make_module(1)
    expected = make(source).generate(REQUESTS)
    rollout = make(module, ModuleReceiver(module))
    assert sum(p.numel() for p in module.parameters()) == 0
    with pytest.raises(ValueError, match="no weights: push them first"):
        rollout.generate(REQUESTS)
    for version in range(2):
        report = ReplicaSync(rollout).push(Trained(source), version)
        assert report.bytes == sum(p.nbytes for p in source.parameters())
        assert rollout.weight_version == version
        assert [c.token_ids for c in rollout.generate(REQUESTS)] == [c.token_ids for c in expected]
        rollout.sleep()
        rollout.receiver().release()
        assert sum(p.numel() for p in module.parameters()) == 0


class Stops:
    """A receiver that reads the first `reads` parameters, and then raises or returns."""

    def __init__(self, reads: int, error: BaseException | None):
        self.reads, self.error = reads, error

    def receive(self, weights, version):
        for _ in zip(range(self.reads), weights):
            pass
        if self.error is not None:
            raise self.error

    def release(self):
        raise AssertionError("not called")


@pytest.mark.parametrize("reads", [0, 1])
def test_a_replica_that_has_not_read_all_weights_is_refused(reads):
    rollout = SimpleNamespace(receiver=lambda: Stops(reads, None), weight_version=3)
    with pytest.raises(ValueError, match=r"^Stops.receive returned before it had read all weights$"):
        ReplicaSync(rollout).push(Trained(make_module()), 4)
    assert rollout.weight_version == 3


def together(*functions):
    """The results of functions that wait for one another."""
    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(function) for function in functions]
    return [future.exception() or future.result() for future in futures]


def groups(size: int) -> list[TransferGroup]:
    address = ("127.0.0.1", free_port())

    def join(rank: int) -> TransferGroup:
        time.sleep(0.05 * (rank > 0))  # TCPStore retries after 5 seconds if rank 0 does not listen yet
        return TransferGroup(address, rank, size, CPU, TIMEOUT)

    return together(*(lambda rank=rank: join(rank) for rank in range(size)))


@pytest.mark.fast("1-dtype1", "8192-None")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 8192, 1 << 30])
def test_collective_delivers_every_parameter_to_every_rank(bucket_bytes, dtype):
    source = make_module(0)
    sender, *receivers = groups(3)
    modules = [make_module(1), make_module(2)]
    targets = [ModuleReceiver(module, filled=True) for module in modules]
    sync = CollectiveSync(sender, dtype, bucket_bytes)
    for version in range(2):
        with torch.no_grad():
            source.lm_head.weight.add_(1)
        reports = together(
            lambda v=version: sync.push(Trained(source), v),
            *(lambda t=t, g=g, v=version: receive_collective(t, g, v) for t, g in zip(targets, receivers)),
        )
        assert len({(r.version, r.bytes, r.checksum) for r in reports}) == 1, reports
        size = sum(p.numel() for p in source.parameters())
        assert reports[0].bytes == size * (4 if dtype is None else 2)
        for module in modules:
            check_same_weights(source, module, dtype)


def test_training_ranks_without_a_group_only_iterate():
    trained = Trained(make_module())
    report = CollectiveSync(None).push(trained, 1)
    assert report == SyncReport(1, seconds=report.seconds)  # nothing is sent, and the link is not measured


def test_a_damaged_bucket_is_named_on_both_sides(monkeypatch):
    source, (sender, receiver) = make_module(0), groups(2)
    receive, contents = receiver.start_broadcast, []

    def damaged(tensor: torch.Tensor):
        work = receive(tensor)
        if tensor.dtype == torch.uint8:  # not the checksums
            contents.append(tensor)
            if len(contents) == 3:
                work.wait()
                tensor[-5] ^= 1
        return work

    receiver.start_broadcast = damaged
    name, parameter = list(source.named_parameters())[2]
    checksum = combine([sums_of(parameter.detach().view(torch.uint8).flatten())]) % 2**64
    found = together(
        lambda: CollectiveSync(sender, bucket_bytes=1).push(Trained(source), 4),
        lambda: receive_collective(ModuleReceiver(make_module(1)), receiver, 4),
    )
    for error in found:
        assert isinstance(error, ValueError) and name in str(error)
        assert "bucket 2 is corrupted on rollout rank 0" in str(error) and f"expected {checksum:016x};" in str(error)


def test_another_version_is_refused_on_both_sides():
    source, (sender, receiver) = make_module(0), groups(2)
    found = together(
        lambda: CollectiveSync(sender, bucket_bytes=1 << 30).push(Trained(source), 4),
        lambda: receive_collective(ModuleReceiver(make_module(1)), receiver, 5),
    )
    for error in found:
        assert isinstance(error, ValueError)
        assert "rollout rank 0 cannot load the weights: expected weights of version 5, " in str(error)
        assert str(error).endswith("found version 4")


def without_timeout(*functions):
    """`together`, where no function waits for the timeout of the group."""
    start = time.monotonic()
    found = together(*functions)
    assert time.monotonic() - start < TIMEOUT / 3, "not by the timeout of the group"
    return found


FULL, EXIT, SURROGATE = MemoryError("full"), SystemExit(3), FileNotFoundError("no \udcff")


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])  # a bucket for each parameter, one bucket for all
@pytest.mark.parametrize(
    ("reads", "error", "text"),
    [
        *((reads, FULL, "MemoryError: full") for reads in (0, 1, 2, 1000)),
        *((reads, None, "ValueError: Stops.receive returned before it had read all weights") for reads in (0, 1, 2)),
        *((reads, EXIT, "SystemExit: 3") for reads in (0, 1, 1000)),
        *((reads, SURROGATE, "FileNotFoundError: no ?") for reads in (0, 1)),
    ],
)
def test_no_rank_waits_for_a_receiver_that_has_stopped(bucket_bytes, reads, error, text):
    source, members = make_module(0), groups(3)
    found = without_timeout(
        lambda: CollectiveSync(members[0], bucket_bytes=bucket_bytes).push(Trained(source), 4),
        lambda: receive_collective(ModuleReceiver(make_module(1)), members[1], 4),
        lambda: receive_collective(Stops(reads, error), members[2], 4),
    )
    for other in found[:2]:
        assert isinstance(other, ValueError)
        assert str(other) == f"weight sync: rollout rank 1 cannot load the weights: {text}"
    assert found[2] is error if error else isinstance(found[2], ValueError)


class Lists:
    """A source of given tensors. Exceptions among them are raised."""

    def __init__(self, *tensors: torch.Tensor | BaseException | None):
        self.tensors = tensors

    def rollout_weights(self, dtype):
        for number, tensor in enumerate(self.tensors):
            if isinstance(tensor, BaseException):
                raise tensor
            yield f"p{number}", tensor


class Collects:
    """A receiver that keeps all weights."""

    def receive(self, weights, version):
        self.weights = dict(weights)

    def release(self):
        raise AssertionError("not called")


def test_no_rank_waits_for_a_receiver_without_memory_for_a_bucket(monkeypatch):
    members, empty = groups(3), torch.empty

    def full(*size, **options):
        if "device" in options:  # the content of a bucket, not that of a header
            raise torch.OutOfMemoryError("full")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    found = without_timeout(
        lambda: CollectiveSync(members[0], bucket_bytes=1).push(Lists(torch.ones(4)), 4),
        *(lambda g=g: receive_collective(Collects(), g, 4) for g in members[1:]),
    )
    for error in found:
        assert isinstance(error, ValueError)
        assert str(error).startswith("weight sync: rollout rank 0 cannot load the weights: ")
        assert str(error).endswith("OutOfMemoryError: full")


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("sent", [0, 2])
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (RuntimeError("no \udcff"), "RuntimeError: no ?"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (None, "AttributeError: 'NoneType' object has no attribute "),  # while the bucket is filled
    ],
)
def test_no_rank_waits_for_a_sender_that_has_failed(bucket_bytes, sent, bad, text):
    members, tensors = groups(3), [torch.ones(4)] * 3
    sync = CollectiveSync(members[0], bucket_bytes=bucket_bytes)
    found = without_timeout(
        lambda: sync.push(Lists(*tensors[:sent], bad), 4),
        lambda: receive_collective(Collects(), members[1], 4),
        lambda: receive_collective(Stops(sent, FULL), members[2], 4),  # fails at the same time
    )
    assert found[0] is bad if bad is not None else isinstance(found[0], AttributeError)
    assert isinstance(found[1], ValueError)
    assert str(found[1]).startswith(f"weight sync: training rank 0 cannot send the weights: {text}")
    assert isinstance(found[2], MemoryError | ValueError)

    target = Collects()
    reports = without_timeout(
        lambda: sync.push(Lists(*tensors), 5),
        lambda: receive_collective(target, members[1], 5),
        lambda: receive_collective(Collects(), members[2], 5),
    )
    assert {report.version for report in reports} == {5} and len(target.weights) == 3, "the group is usable"


def test_no_rank_waits_for_an_empty_list_of_weights():
    sender, receiver = groups(2)
    found = without_timeout(
        lambda: CollectiveSync(sender).push(Lists(), 4),
        lambda: receive_collective(ModuleReceiver(make_module()), receiver, 4),
    )
    assert [type(error) for error in found] == [ValueError, ValueError]
    assert "weights of version 4: " in str(found[0]) and "are missing" in str(found[1])
    found = without_timeout(
        lambda: CollectiveSync(sender).push(Lists(), 5), lambda: receive_collective(Collects(), receiver, 5)
    )
    assert [report.bytes for report in found] == [0, 0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_a_source_may_reuse_its_memory(bucket_bytes, dtype):
    sizes = [3, 5, 100, 1, 2, 0, 40]  # some are larger than a bucket of 64 bytes

    class Reuses:
        def rollout_weights(self, dtype):
            memory = torch.empty(100)
            for number, size in enumerate(sizes):
                yield f"p{number}", memory[:size].fill_(number)
            memory.fill_(-1)

    (sender, receiver), target = groups(2), Collects()
    reports = together(
        lambda: CollectiveSync(sender, dtype, bucket_bytes).push(Reuses(), 4),
        lambda: receive_collective(target, receiver, 4),
    )
    assert reports[0].bytes == reports[1].bytes == sum(sizes) * (4 if dtype is None else 2)
    for number, size in enumerate(sizes):
        assert torch.equal(target.weights[f"p{number}"], torch.full((size,), float(number), dtype=dtype)), number


# ---- what a receiver stores, and the choice of a method -------------------------------------------------------------


def engine_of(receiver):
    return SimpleNamespace(receiver=lambda: receiver, weight_version=-1)


class Forgets(ModuleReceiver):
    """A receiver that keeps the old value of one parameter, or of all."""

    def __init__(self, module, forgotten):
        super().__init__(module, filled=True)
        self.forgotten = forgotten

    def receive(self, weights, version):
        kept = {name: self.stored(name).clone() for name in self.forgotten}
        super().receive(weights, version)
        for name, value in kept.items():
            self.module.get_parameter(name).data.copy_(value)


NAMES = [name for name, _ in make_module().named_parameters()]


@pytest.mark.parametrize(("forgotten", "count"), [(NAMES[3:4], 1), (NAMES, 16)])
def test_a_parameter_that_was_not_loaded_is_named(forgotten, count):
    # the norms are 1 in both modules, so 5 of the 21 parameters do not differ
    text = (
        f"version 4 were not loaded: after Forgets.receive, {count} of 21 parameters differ .*first .'{forgotten[0]}'"
    )
    rollout = engine_of(Forgets(make_module(1), forgotten))
    with pytest.raises(ValueError, match=text):
        ReplicaSync(rollout).push(Trained(make_module(0)), 4)
    assert rollout.weight_version == -1
    sender, receiver = groups(2)
    found = together(
        lambda: CollectiveSync(sender).push(Trained(make_module(0)), 4),
        lambda: receive_collective(Forgets(make_module(1), forgotten), receiver, 4),
    )
    for error in found:
        assert isinstance(error, ValueError) and "Forgets.receive" in str(error) and forgotten[0] in str(error)


def test_the_checksum_is_the_same_on_every_rank_that_stores_the_same():
    targets = [ModuleReceiver(make_module(seed), filled=True) for seed in (1, 2)]
    reports = [ReplicaSync(engine_of(target)).push(Trained(make_module(0)), 4) for target in targets]
    other = ReplicaSync(engine_of(targets[0])).push(Trained(make_module(3)), 4)
    assert reports[0].checksum == reports[1].checksum != other.checksum


def test_a_method_that_does_not_fit_the_engine_is_refused():
    shared, copied = engine_of(None), engine_of(ModuleReceiver(make_module()))
    for engine, name in ((shared, "InProcessSync"), (copied, "ReplicaSync")):
        assert type(local_sync("auto", engine, CPU, bucket_bytes=1)).__name__ == name
    with pytest.raises(ValueError, match=r"rollout.weight_sync=reshard: .* is synchronized by 'replica': use auto"):
        local_sync("reshard", copied, CPU, bucket_bytes=1)


def test_shards_are_read_for_a_full_copy_where_that_is_preferred():
    copied = engine_of(ModuleReceiver(make_module()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for prefers, name in ((False, "ReplicaSync"), (True, "ReshardSync")):
            sync = local_sync("auto", copied, CPU, bucket_bytes=1, has_shards=True, prefers_shards=prefers)
            assert type(sync).__name__ == name
    finally:
        dist.destroy_process_group()
