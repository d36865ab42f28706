"""Worker: what runs on one rank. Its `@register`ed methods are what a worker group offers."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.registry import load_object
from verl.single_controller.dispatch import Coordinates, Layout


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its rank among all, its rank on its host, and where the ranks of the group meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def env(self) -> dict[str, str]:
        """The variables that `torch.distributed.init_process_group("env://")` and launchers' scripts read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class Worker:
    """Base class of workers. `rank`, `world_size`, `local_rank` and `env` are there already inside `__init__`.

    A worker made by hand, `MyWorker(...)`, is rank 0 of 1. One process per worker holds `env` in `os.environ`; a worker
    in the caller's own process leaves the caller's environment alone.
    """

    place = Place()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def env(self) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this worker."""
        return self.place.env

    def layout(self, mesh: str | None = None) -> Coordinates:
        """Where this rank sits in the mesh called `mesh` (None: the main one). Every rank its own dp group by default.

        A worker with tensor, sequence or pipeline parallelism, or with a second mesh for generation, overrides it.
        """
        if mesh is not None:
            raise ValueError(f"{type(self).__name__} has no mesh {mesh!r}: override Worker.layout(mesh) to name it")
        return Layout.grid(dp=self.world_size).coordinates[self.rank]


@dataclass(frozen=True)
class WorkerSpec:
    """A worker that is still to be made: its class and the keyword arguments of its constructor.

    cls: the class, or its address (path, name) as `verl.registry.load_object` takes it. A class from a file of the
    user's is given by address: each process loads the file itself. kwargs must be picklable for other processes.
    """

    cls: type[Worker] | tuple[str, str]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worker_class(self) -> type[Worker]:
        """The class. Raises ValueError when it is not a Worker."""
        cls = load_object(*self.cls) if isinstance(self.cls, tuple) else self.cls
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"expected a subclass of verl.single_controller.Worker, found {cls!r}")
        return cls

    def build(self, place: Place) -> Worker:
        """Make the worker. `place` is set before its `__init__` runs, so that the constructor knows its rank."""
        cls = self.worker_class
        worker = cls.__new__(cls)
        worker.place = place
        worker.__init__(**self.kwargs)
        return worker


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
