"""Values through a channel and shared memory, between its two ends in one process."""

import os
import threading

import numpy as np
import pytest
import torch

from verl.processes.child import Channel
from verl.protocol import DataProto
from verl.single_controller.local import transport
from verl.single_controller.local.transport import Kind, MemoryFile, Parcel, receive
from verl.single_controller.remote_batch import dumps


@pytest.fixture
def ends():
    a, b = Channel.pair()
    with a, b:
        yield a, b


def through(ends, value):
    Parcel(value).send(ends[0], Kind.CALL, 7)
    message = receive(ends[1])
    assert (message.kind, message.call_id) == (Kind.CALL, 7)
    return message.load()


TENSORS = [torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).T, torch.tensor(2.5, dtype=torch.bfloat16)]
TENSORS += [torch.tensor([True, False]), torch.empty(0, 5), torch.arange(4, dtype=torch.float16).requires_grad_()]
TENSORS += [torch.complex(torch.ones(2), torch.zeros(2))]


@pytest.mark.parametrize("tensor", TENSORS)
def test_tensors_of_every_kind(ends, tensor):
    found = through(ends, {"t": tensor})["t"]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor.detach())
    found.zero_()  # the memory may be written to


def test_a_batch_with_objects(ends):
    batch = DataProto.from_dict(
        {"x": torch.arange(3)},
        {"uid": ["a", "b", "c"], "image": [np.arange(5), np.zeros((2, 2)), None]},
        {"step": 3, "weights": torch.ones(2)},
    )
    found = through(ends, batch)
    assert found.batch["x"].tolist() == [0, 1, 2] and found.batch.batch_size == torch.Size([3])
    assert found.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert found.non_tensor_batch["image"][0].tolist() == [0, 1, 2, 3, 4]
    assert found.meta_info["step"] == 3 and found.meta_info["weights"].tolist() == [1, 1]


def test_only_the_rows_of_a_slice_are_sent():
    whole = torch.zeros(1000, 1000)
    head, buffers = dumps(DataProto.from_dict({"x": whole})[:10])
    assert sum(b.nbytes for b in buffers) == 10 * 1000 * 4 and len(head) < 1000


def test_a_tensor_referenced_twice_is_sent_once(ends):
    tensor = torch.ones(100)
    assert len(dumps([tensor, tensor])[1]) == 1
    first, second = through(ends, [tensor, tensor])
    assert first.data_ptr() == second.data_ptr()


def test_receivers_do_not_see_each_other_write(ends):
    """A parcel is written once for all receivers, and each may change what it got."""
    value = torch.zeros(10)
    parcel = Parcel(value)
    parcel.send(ends[0], Kind.CALL, 1)
    parcel.send(ends[0], Kind.CALL, 2)
    first, second = receive(ends[1]).load(), receive(ends[1]).load()
    first += 1
    assert first.sum() == 10 and second.sum() == 0 and value.sum() == 0


def test_sending_never_waits_for_the_receiver(ends):
    """A hundred large messages fit in the socket, since they hold no data: none is read until all are sent."""
    sender = threading.Thread(target=lambda: [Parcel(["x" * 100_000]).send(ends[0], Kind.CALL, i) for i in range(100)])
    sender.start()
    sender.join(10)
    assert not sender.is_alive()
    assert [receive(ends[1]).call_id for _ in range(100)] == list(range(100))


def test_nothing_stays_open(ends):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        through(ends, torch.ones(100_000))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_connection_is_an_end_of_file(ends):
    ends[0].close()
    with pytest.raises(EOFError, match="closed the connection"):
        receive(ends[1])


def test_large_messages_are_in_memory_and_elsewhere_in_an_unnamed_file(monkeypatch):
    def kind_of_file():
        file = MemoryFile.write([memoryview(b"abc")])
        assert file.map()[:3] == b"abc"
        return os.readlink(f"/proc/self/fd/{file.descriptor}")

    assert kind_of_file() == "/memfd:verl-message (deleted)"
    monkeypatch.setattr(transport.sys, "platform", "darwin")
    assert kind_of_file().endswith("(deleted)") and "memfd" not in kind_of_file()
