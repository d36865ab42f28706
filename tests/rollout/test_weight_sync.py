"""Weight synchronization: what arrives is what was sent, or an error names what differs."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import SamplingParams, make_requests
from verl.single_controller.worker import free_port
from verl.weight_sync import (
    CollectiveSync,
    DiskSync,
    InProcessSync,
    ModuleReceiver,
    ReplicaSync,
    SyncReport,
    TransferGroup,
    checksum_of,
    receive_collective,
)
from verl.weight_sync.adapters import Part
from verl.weight_sync.base import StoredWeights, is_check_due
from verl.weight_sync.verify import Loading, checksums, combine, fold, sums_of

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=(0,), seed=3)
REQUESTS = make_requests([[1, 2], [3]], PARAMS)
CPU = torch.device("cpu")
TIMEOUT = 60.0  # of a group, in seconds


class Trained:
    """The part of a training engine that is synchronized."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def weights(self):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG)


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


def test_incomplete_weights_are_refused():
    module = make_module()
    weights = [(name, p.detach().clone()) for name, p in module.named_parameters()]
    receiver = ModuleReceiver(module)
    with pytest.raises(ValueError, match=r"version 5: 1 are missing, first \['model.embed_tokens.weight'\]"):
        receiver.receive(weights[1:], 5)
    with pytest.raises(ValueError, match=r"version 6: .*'model.embed_tokens.weight' is unknown or was sent twice"):
        receiver.receive([weights[0], weights[0]], 6)
    with pytest.raises(ValueError, match=r"shape \(1,\), expected \(24, 32\)"):
        receiver.receive([(weights[0][0], torch.zeros(1))], 7)


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
            for (name, a), (_, b) in zip(source.named_parameters(), module.named_parameters()):
                assert torch.equal(a if dtype is None else a.to(dtype).float(), b), name


def test_training_ranks_that_do_not_write_only_iterate(tmp_path):
    report = DiskSync(tmp_path, writes=False).push(Trained(make_module()), 3)
    assert (report.version, report.bytes) == (3, 0) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [3, 1024, 1027, 2050])
def test_sums_of_rows_and_columns(words):
    """Rows of 1,024 words; the last one may be shorter."""
    values = [(7 * i) % 1000 - 300 for i in range(words)]
    rows = [sum(values[at : at + 1024]) for at in range(0, words, 1024)]
    columns = [sum(values[column::1024]) for column in range(1024)]
    assert sums_of(torch.tensor(values).view(torch.uint8)).tolist() == [*rows, *columns]


def test_any_other_bit_gives_another_checksum():
    """Also the highest bit of a word, whose changes of the sums of its row and its column could cancel out."""
    words = torch.arange(3 * 1024 + 5) * 0x123456789ABCDEF
    checksum = checksum_of(words.view(torch.uint8))
    found = {checksum}
    for at in (0, 1, 7, 1023, 1024, 3071, 3076):
        for bit in range(64):
            other = words.clone()
            other[at] ^= (1 << bit) - (2**64 if bit == 63 else 0)
            found.add(checksum_of(other.view(torch.uint8)))
    assert len(found) == 1 + 7 * 64


def test_each_checksum_is_that_of_its_content():
    """Whatever its neighbours are."""
    contents = [torch.arange(n, dtype=torch.int64).view(torch.uint8) for n in (5, 2000, 1024)]
    found = checksums([sums_of(content) for content in contents]).tolist()
    assert found == [int(checksums([sums_of(content)])) for content in contents] and len({*found}) == 3
    assert combine([sums_of(content) for content in contents]) == fold(found) and combine([]) == 0


def test_a_folded_checksum_depends_on_every_one_and_on_the_order():
    """Also on the first of many: an even factor would shift it out of 64 bits."""
    many = [0] * 100
    folded = {fold([*many[:at], 1, *many[at:]]) for at in (0, 1, 50, 100)}
    assert len(folded | {fold(many), fold([*many, 0]), fold([])}) == 4 + 3


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
    checksum = checksum_of(parameter.detach().view(torch.uint8).flatten()) % 2**64
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

    def weights(self):
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
        def weights(self):
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


def test_checksums_depend_on_every_byte_and_its_position():
    content = torch.arange(64, dtype=torch.uint8).repeat(200)
    expected = checksum_of(content)
    for at in (0, 7, 8, 8191, 8192, 12799):
        changed = content.clone()
        changed[at] += 1
        assert checksum_of(changed) != expected
    swapped = content.view(-1, 8).flip(0).reshape(-1)
    assert checksum_of(swapped) != expected
    changed = content.clone()
    changed[:16] = changed[:16].view(2, 8).flip(0).reshape(-1)
    assert checksum_of(changed) != expected, "two words of one row"
    changed = content.clone()
    changed[8008:8016], changed[8192:8200] = content[8192:8200], content[8008:8016]
    assert checksum_of(changed) != expected, "two words of different rows"


@pytest.fixture
def tensors():
    """One longer than a row of 1,024 words, odd numbers of bytes, one without elements, one that is not contiguous."""
    torch.manual_seed(0)
    shapes = {"a": (3, 5), "large": (300, 70), "none": (0, 4), "b": (7,), "c": (64, 64)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()} | {"view": torch.randn(9, 4).T}


class Stores(StoredWeights):
    """Stores what it receives in a dtype, after a change."""

    def __init__(self, change=lambda tensors: None, dtype=torch.float32):
        self.change, self.dtype, self.tensors = change, dtype, {}

    def receive(self, weights, version):
        for name, tensor in weights:
            self.tensors[name] = tensor.to(self.dtype, copy=True)
        self.change(self.tensors)

    def release(self):
        self.tensors.clear()

    def stored(self, name):
        return self.tensors.get(name, torch.empty(0, dtype=self.dtype))


def load(receiver: StoredWeights, tensors, compares: bool = True) -> int:
    return Loading(receiver, 1, compares).load(Part(None, tensors.items()))


@pytest.mark.parametrize("name", ["a", "large", "b", "c", "view"])
def test_a_stored_tensor_with_another_bit_is_named(tensors, name):
    def flip(stored):
        flat = stored[name].reshape(-1)
        flat[-1] = -flat[-1]
        stored[name] = flat.view(stored[name].shape)

    assert load(Stores(), tensors) == load(Stores(), tensors) != 0
    receiver = Stores(flip)
    with pytest.raises(
        ValueError, match=rf"Stores.receive, 1 of 6 parameters differ from what was sent, first .'{name}'"
    ):
        load(receiver, tensors)
    assert not receiver.tensors, "they are released"
    assert load(Stores(flip), tensors, compares=False) == 0, "not in a push without a comparison"


def test_stored_tensors_of_other_sizes_and_exchanged_words_are_named(tensors):
    def resize(stored):
        stored["b"] = torch.cat([stored["b"], torch.zeros(1)])  # the padding of 7 elements

    with pytest.raises(ValueError, match=r"1 of 6 parameters differ from what was sent, first \['b'\]"):
        load(Stores(resize), tensors)

    def exchange(stored):
        flat, old = stored["c"].view(-1), stored["c"].flatten().clone()
        flat[0:2], flat[2:4] = old[2:4], old[0:2]  # two words of 8 bytes of a row

    with pytest.raises(ValueError, match=r"1 of 6 parameters differ from what was sent, first \['c'\]"):
        load(Stores(exchange), tensors)


def test_a_stored_cast_is_that_of_torch(tensors):
    assert load(Stores(dtype=torch.bfloat16), tensors) == load(Stores(), tensors)


def test_memory_of_a_tensor_is_used_again_while_it_is_read():
    memory = torch.zeros(4)
    loading = Loading(Stores(), 1, True)
    loading.load(Part(None, ((str(value), memory.fill_(value)) for value in (1.0, 2.0))))
    assert {name: tensor.tolist() for name, tensor in loading.receiver.tensors.items()} == {
        "1.0": [1.0] * 4,
        "2.0": [2.0] * 4,
    }


def test_checks_are_due_at_the_first_version_and_at_multiples():
    last, due = None, []
    for version in (7, 8, 10, 10, 11, 20):
        if is_check_due(version, last, 10):
            last = version
            due.append(version)
    assert due == [7, 10, 20] and not is_check_due(0, None, 0)


class StoresSome(StoredWeights):
    """Stores one of two parameters as it is sent, and the other one in another form."""

    def __init__(self):
        self.found = {}

    def receive(self, weights, version):
        self.found = {name: tensor.clone() for name, tensor in weights}

    def release(self):
        self.found.clear()

    def stored(self, name):
        return self.found.get(name, torch.empty(4)) if name == "a" else None


def test_a_parameter_that_is_stored_in_another_form_is_not_compared():
    weights = {"a": torch.ones(4), "b": torch.zeros(3)}
    first = Loading(StoresSome(), 1, True).load(Part(None, weights.items()))
    assert first == Loading(StoresSome(), 1, True).load(Part(None, weights.items()))
    weights["b"] = torch.ones(3)
    assert first != Loading(StoresSome(), 1, True).load(Part(None, weights.items()))  # but it is in the checksum
