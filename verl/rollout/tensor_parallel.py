"""Communication within a tensor-parallel group of rollout ranks.

Rank 0 leads: it gets the requests, decides what to compute, and samples. It sends every operation on the model to the
other ranks as a command, which they run with the same arguments (`on_every_rank`), so they need no scheduler and cannot
choose other tokens. A rank that fails leaves the group, so that the others do not wait for it: they raise an error that
names it. Matrices are split as by Shoeybi et al. (2019, arXiv 1909.08053).
"""

import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from verl.rollout.base import RolloutEnv

#: bytes of a command that are sent at once: its length, then its content; a longer one needs a second broadcast
_HEADER = 4096
_LENGTH = 8  # bytes of the length
#: the other ranks wait for rank 0, whose agent loops may wait for tools; the caller of the workers detects hangs
_TIMEOUT = timedelta(days=1)
_LEAVE_SECONDS = 5.0  # for a rank that leaves the group


class TensorParallel:
    """The ranks that hold a model together. Without a group, its methods do nothing.

    Args:
        rank, size: rank in the group, and its size.
        group: the process group, for tensors of the host and of the device; None if size is 1.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank = rank
        self.size = size
        self._group = group
        self._failure = ""  # what has failed first, on which rank

    @classmethod
    def from_env(cls, env: "RolloutEnv") -> "TensorParallel":
        """The group of a rank. Collective: every rollout rank calls it, since it makes the groups of all of them."""
        if env.tp_size == 1:
            return ALONE
        block = env.tp_size * env.tp_stride
        starts = [start + i for start in range(0, env.world_size, block) for i in range(env.tp_stride)]
        members = [range(start, start + block, env.tp_stride)[: env.tp_size] for start in starts]
        groups = [dist.new_group(ranks, timeout=_TIMEOUT) for ranks in members]
        return cls(env.tp_rank, env.tp_size, groups[env.tp_group])

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. Raises RuntimeError after a rank has failed."""
        if self._failure:
            raise RuntimeError(self._failure)
        return self._group

    @property
    def leads(self) -> bool:
        """Whether this rank gets the requests."""
        return self.rank == 0

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, so that the others get no further commands."""
        return bool(self._failure)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """For code that runs on every rank. If it fails on this one, leave the group: the others may wait for this one.

        A ValueError is an invalid setting, which all ranks find.

        Raises:
            RuntimeError: another rank has failed; the message names it.
        """
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            if self.size > 1:
                self._leave(error)
            raise

    def _leave(self, error: Exception) -> None:
        if self._failure:
            return
        mine = f"rank {self.rank} of the tensor-parallel group failed: {type(error).__name__}: {error}"
        key = f"tensor_parallel/{self._group.group_name}"
        try:
            self._failure = dist.distributed_c10d._get_default_store().compare_set(key, "", mine).decode()
        except RuntimeError:  # the process with the store has ended
            self._failure = mine
        # closes the connections; in a thread, since a communicator of GPUs may wait for its kernels
        leaving = threading.Thread(target=dist.destroy_process_group, args=(self._group,), daemon=True)
        self._group = None
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if self._failure != mine:
            raise RuntimeError(self._failure) from error

    # ---- tensors, on the host or the device ---------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place. Returns x."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Join the columns of all ranks: (B, N) -> (B, size N)."""
        if self.size == 1:
            return x
        every = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(every, x, group=self.group)
        return torch.cat(every, 1)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with that of rank 0."""
        if self.size > 1:
            dist.broadcast(x, dist.get_global_rank(self.group, 0), group=self.group)

    def smallest(self, value: int) -> int:
        """The smallest value of all ranks, for a decision that they must share."""
        if self.size == 1:
            return value
        least = torch.tensor(int(value))
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    # ---- commands -----------------------------------------------------------------------------------------------

    def send(self, command: object) -> None:
        """On rank 0: send a command to the other ranks, which `receive` it."""
        content = pickle.dumps(command)
        first = len(content).to_bytes(_LENGTH, "little") + content[: _HEADER - _LENGTH]
        with self.operation():
            self.broadcast(torch.frombuffer(bytearray(first.ljust(_HEADER, b"\0")), dtype=torch.uint8))
            if rest := content[_HEADER - _LENGTH :]:
                self.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def receive(self) -> Any:
        """On the other ranks: the next command of rank 0."""
        header = torch.empty(_HEADER, dtype=torch.uint8)
        with self.operation():
            self.broadcast(header)
            first = header.numpy().tobytes()
            length = int.from_bytes(first[:_LENGTH], "little")
            content = first[_LENGTH : _LENGTH + length]
            if rest := length - len(content):
                last = torch.empty(rest, dtype=torch.uint8)
                self.broadcast(last)
                content += last.numpy().tobytes()
        return pickle.loads(content)


#: a model on one device
ALONE = TensorParallel()


def on_every_rank(method: Callable) -> Callable:
    """Decorator of a method of an object with an attribute `tp`: rank 0 also runs it on the other ranks.

    Such a method must not call another one, and its arguments must be picklable.
    """

    @functools.wraps(method)
    def call(self, *args: Any) -> Any:
        if self.tp.size > 1 and self.tp.leads:
            self.tp.send((method.__name__, args))
        with self.tp.operation():
            return method(self, *args)

    return call
