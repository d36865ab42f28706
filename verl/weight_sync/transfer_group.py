"""The process group of `collective`."""

import pickle
from datetime import timedelta

import torch
from torch import distributed as dist

from verl.utils.rendezvous import tcp_store, use_loopback_if_local
from verl.weight_sync.buckets import fastest, measured_bytes


class TransferGroup:
    """A process group of training rank 0 (rank 0 in this group) and all rollout ranks.

    Args:
        address: host and port on which rank 0 listens.
        rank, size: rank in this group, and its size.
        device: device of the tensors. GPU tensors are sent over NCCL.
        timeout: timeout of a transfer in seconds.

    Attributes:
        bandwidth: bytes per second of a broadcast; 0 before `measure`.
        layouts: pickled layout of each bucket of the last push.
    """

    def __init__(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout: float):
        wait = timedelta(seconds=timeout)
        self.rank, self.size, self.device = rank, size, device
        self.bandwidth = 0.0
        self.layouts: dict[tuple[bool, int], bytes] = {}
        host, port = address
        use_loopback_if_local(host)
        self.store = tcp_store(host, port, size, rank == 0, wait)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("control", self.store), rank, size, wait)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            torch.cuda.set_device(device)
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("data", self.store), rank, size, options)
        else:  # a separate group: control messages do not wait for a bucket
            self.data = dist.ProcessGroupGloo(dist.PrefixStore("data", self.store), rank, size, wait)

    def start_broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start to broadcast rank 0's tensor in place, on the group's device."""
        return self.data.broadcast(tensor, 0)

    def broadcast_bytes(self, content: bytes, size: int) -> bytes:
        """Broadcast rank 0's bytes, of a size that all ranks know, and return them."""
        tensor = torch.frombuffer(bytearray(content or size), dtype=torch.uint8)
        self.control.broadcast(tensor, 0).wait()
        return tensor.numpy().tobytes()

    def broadcast_object(self, value: object) -> object:
        """Broadcast rank 0's object and return it."""
        content = pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor([len(content)])
        self.control.broadcast(size, 0).wait()
        return pickle.loads(self.broadcast_bytes(content, int(size)))

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """All-gather: the numbers of all ranks."""
        tensor = torch.tensor(numbers)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.control.allgather([gathered], [tensor]).wait()
        return [each.tolist() for each in gathered]

    def measure(self) -> None:
        """Measure `bandwidth`: the best of three broadcasts. Collective."""
        tensor = torch.zeros(measured_bytes(self.device), dtype=torch.uint8, device=self.device)

        def broadcast() -> None:
            self.start_broadcast(tensor).wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.gather([0])  # it has reached all ranks

        self.bandwidth = len(tensor) / fastest(broadcast, self.device, ready=lambda: self.gather([0]))
