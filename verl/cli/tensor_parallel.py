"""The engine of `verl serve --tensor-parallel-size`: rank 0 is this process, the other ranks are processes of its host.

They make the engine together and then follow rank 0, which gets the requests (`RolloutEngine.leading` and `follow`).
The server ends with an error if one of them fails: rank 0 alone cannot generate.
"""

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from verl.config import schema
from verl.engines.parallel import init_process_group
from verl.rollout.base import RolloutEngine, RolloutEnv, make_rollout_engine
from verl.rollout.traits import engine_traits
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.local.cluster import LocalWorkerGroup, make_pool
from verl.single_controller.worker import RankEnv, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import Future, WorkerError
from verl.trainer.startup.command_line import print_error
from verl.utils.device import resolve_device

_RANK_0_SECONDS = 10  # for the error of rank 0, if another rank has failed while they make the engine
_CPU_RANKS = 8  # processes on a CPU with fewer cores


@dataclass(frozen=True)
class ServedEngine:
    """The engine, and the settings from which each rank makes its own.

    Args:
        config: the `rollout` section; its `tensor_model_parallel_size` ranks hold the model together.
        model: the `model` section.
        device: auto, cpu or cuda.
        pad_token_id: for engines that pad.
        imports: files and modules that the other ranks import first.
        port: a free port, on which rank 0 listens for the others.
    """

    config: schema.RolloutEngineConfig
    model: schema.ModelConfig
    device: str
    pad_token_id: int
    imports: Sequence[str] = ()
    port: int = field(default_factory=free_port)

    @property
    def size(self) -> int:
        return self.config.tensor_model_parallel_size

    def make(self, rank: int) -> RolloutEngine:
        """The engine of one rank. Collective over the ranks."""
        size, on = self.size, resolve_device(self.device, rank)
        if size > 1 and not engine_traits(self.config.name).own_process:
            os.environ.update(RankEnv(rank, size, rank, size, master_port=self.port).env)
            init_process_group(on)
        env = RolloutEnv(rank, size, rank, on, self.pad_token_id, tp_rank=rank, tp_size=size)
        return make_rollout_engine(self.config.name, self.config, self.model, env)

    @contextmanager
    def serving(self) -> Iterator[RolloutEngine]:
        """Context in which the engine can generate. Raises ValueError for too few GPUs, or an engine or a model that
        does not support this size."""
        if self.size > 1:
            _check_devices(self.device, self.size)
        if self.size == 1 or engine_traits(self.config.name).own_process:
            yield self.make(0)
            return
        followers = _Followers(self)
        try:
            engine = self.make(0)
            followers.has_made = True
            with engine.leading():
                try:
                    yield engine
                finally:
                    followers.ending.set()
            torch.distributed.destroy_process_group()
        finally:
            followers.end()


class FollowingRank(Worker):
    """One of the ranks from 1 on."""

    def __init__(self, served: ServedEngine):
        self.served = served

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def follow(self) -> None:
        """Make the engine together with rank 0, and follow it until it has served."""
        self.served.make(1 + self.rank).follow()
        torch.distributed.destroy_process_group()


def _check_devices(device: str, size: int) -> None:
    """Raise ValueError unless there is a device for each rank."""
    on = resolve_device(device)
    if on.type == "cuda" and (torch.cuda.device_count() < size or ":" in device):
        gpus = f"--device {device}" if ":" in device else f"{torch.cuda.device_count()}"
        raise ValueError(f"--tensor-parallel-size {size}: expected {size} GPUs, found {gpus}")
    if on.type == "cpu" and size > (most := max(_CPU_RANKS, os.cpu_count() or 1)):
        raise ValueError(f"--tensor-parallel-size {size}: expected at most {most} processes on this CPU")


class _Followers:
    """The processes of the other ranks. This process ends with an error if one of them fails; until it has made its own
    engine (has_made), its own error takes precedence. ending: set when the ranks are about to end."""

    def __init__(self, served: ServedEngine):
        spec = WorkerSpec(FollowingRank, {"served": served}, tuple(served.imports))
        pool = make_pool({"rank": spec}, served.size - 1, timeout=math.inf, separate_process=True)
        self._group = LocalWorkerGroup(spec, served.size - 1, "rank", pool=pool)
        self.has_made = False
        self.ending = threading.Event()
        following = self._group.submit("follow")
        self._watch = threading.Thread(target=partial(self._end_with, following), daemon=True)
        self._watch.start()

    def _end_with(self, following: Future) -> None:
        try:
            following.get()
        except WorkerError as error:
            if self.ending.wait(0 if self.has_made else _RANK_0_SECONDS):
                return
            message = error.traceback.rstrip().splitlines()[-1] if error.traceback else error.message
            print_error(RuntimeError(f"tensor-parallel rank {1 + error.rank} has failed: {message}"))
            os._exit(1)  # rank 0 may wait in a collective

    def end(self) -> None:
        """End the processes."""
        self.ending.set()
        self._group.shutdown()
        self._watch.join()
