"""Workers of the tests that start processes, loaded by address like a file of a user."""

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import numpy as np
import psutil
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Execute, Worker, register
from verl.single_controller.dispatch import Coordinates, Layout


class Echo(Worker):
    """Returns its arguments. tp: how many neighbouring ranks share rows."""

    def __init__(self, tp: int = 1):
        self.tp = tp

    def layout(self, mesh: str | None = None) -> Coordinates:
        return Layout.grid(dp=self.world_size // self.tp, tp=self.tp).coordinates[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def facts(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        given = os.environ.get("NCCL_SOCKET_IFNAME")
        parent = psutil.Process().parent()
        return {
            "pid": os.getpid(),
            "server": parent.pid if "verl.processes.fork_server" in parent.cmdline() else None,
            "rank": self.rank,
            "interface": given,
            "threads": torch.get_num_threads(),
            "draws": (random.random(), np.random.rand(), torch.rand(1).item()),
            **{n: os.environ[n] for n in names},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        """The batch, with the rank that had each row; then the rank overwrites its own copy."""
        out = batch.union(DataProto.from_dict({"rank": torch.full((len(batch),), self.rank)}))
        out = DataProto.from_dict({k: v.clone() for k, v in out.tensors.items()}, out.non_tensor_batch, out.meta_info)
        for tensor in batch.tensors.values():
            tensor.zero_()
        return out

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, batch: DataProto) -> dict:
        return {"x": (batch.batch["x"].sum().item(), len(batch))}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return time.monotonic()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_zero(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self, value: float) -> float:
        """The sum of value * (rank + 1) over the ranks, by gloo."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(tensor)
        return tensor.item()


class OnGpu(Worker):
    """Uses GPU LOCAL_RANK of those that its process sees."""

    def __init__(self):
        torch.cuda.set_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gpu(self) -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], str(torch.cuda.get_device_properties("cuda").uuid)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        """The sum of rank + 1 over the ranks, by NCCL."""
        dist.init_process_group("nccl")
        tensor = torch.tensor([self.rank + 1.0], device="cuda")
        dist.all_reduce(tensor)
        return tensor.item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        """Columns that lie on the GPU, one of them a view of another."""
        x = batch.batch["x"].to("cuda") * 2
        return DataProto.from_dict({"y": x, "head": x[:, :1]})


class Failing(Worker):
    """Fails on one rank while the others wait for it."""

    def __init__(self, fail_on_rank: int | None = None):
        if self.rank == fail_on_rank:
            raise RuntimeError(f"no such model, devices {os.environ.get('CUDA_VISIBLE_DEVICES')}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pids(self, grandchild: bool = False) -> tuple[int, int]:
        """This process and, when asked for, one that it starts."""
        child = subprocess.Popen(["sleep", "1000"]).pid if grandchild else 0
        return os.getpid(), child

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def print_and_log(self, text: str) -> str:
        """What arrives where stdout and stderr of this process go."""
        streams = (sys.stdout, sys.stderr)
        with tempfile.TemporaryFile() as file:
            kept = [os.dup(stream.fileno()) for stream in streams]
            for stream in streams:
                os.dup2(file.fileno(), stream.fileno())
            for stream in streams:
                print("printed", text, file=stream, flush=True)
            logging.getLogger("verl.x").warning("logged %s", text)
            for stream, descriptor in zip(streams, kept):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
                os.close(descriptor)
            file.seek(0)
            return file.read().decode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int, what: str) -> None:
        if self.rank == rank:
            read_the_file(what)
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_in_collective(self, rank: int) -> None:
        """All ranks but one call all_reduce; that one does not."""
        dist.init_process_group("gloo")
        if self.rank == rank:
            time.sleep(1000)
        dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def time_out_in_collective(self, rank: int, seconds: float) -> None:
        """All ranks call all_reduce in a process group with a timeout; one is late by more than that."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        if self.rank == rank:
            time.sleep(1000)
        dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang_with_the_lock(self, rank: int) -> None:
        """One rank sleeps in C and holds the GIL, so that no Python code can run in its process."""
        while self.rank == rank:
            ctypes.PyDLL(None).sleep(1000)  # a signal ends it early

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kill_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give_a_lock(self) -> object:
        return threading.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self, status: int) -> None:
        sys.exit(status)


class Slow(Worker):
    """Takes time to be constructed."""

    def __init__(self, seconds: float):
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ready(self) -> bool:
        return True


def read_the_file(name: str) -> str:
    raise FileNotFoundError(f"no file {name}")


class Talker(Worker):
    """Logs when it is constructed."""

    def __init__(self) -> None:
        logging.getLogger("verl.engines").info("rank %d has no value head", self.rank)
        logging.getLogger("verl.engines").warning("rank %d is short of memory", self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None
