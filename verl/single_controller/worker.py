"""Worker: the object that runs on one rank. A worker group calls its `@register`ed methods."""

import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.registry import import_module, load_object
from verl.single_controller.dispatch import Coordinates, Dispatch, Layout, register

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass(frozen=True)
class RankEnv:
    """The distributed environment of one rank, with the names that `torchrun` uses."""

    rank: int = 0  # in the worker group
    world_size: int = 1
    local_rank: int = 0  # on this host
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"  # of rank 0, with a free port for `torch.distributed`
    master_port: int = 0

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that `torch.distributed.init_process_group("env://")` reads."""
        return {f.name.upper(): str(getattr(self, f.name)) for f in fields(self)}


class Worker:
    """Base class of workers.

    `rank`, `world_size`, `local_rank` and `env` are set before `__init__` runs. A worker constructed directly,
    `MyWorker(...)`, is rank 0 of 1. A worker in a separate process also finds `env` in `os.environ`; a
    worker in the caller's process does not change the caller's environment.
    """

    rank_env = RankEnv()
    _profile: "profile | None" = None  # running

    @property
    def rank(self) -> int:
        return self.rank_env.rank

    @property
    def world_size(self) -> int:
        return self.rank_env.world_size

    @property
    def local_rank(self) -> int:
        return self.rank_env.local_rank

    @property
    def env(self) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this worker."""
        return self.rank_env.env

    def layout(self, mesh: str | None = None) -> Coordinates:
        """The coordinates of this rank in a device mesh. By default every rank is a separate DP rank.

        Override it in a worker with tensor, sequence or pipeline parallelism, or with a second mesh for generation.

        Raises:
            ValueError: The worker has no mesh of this name.
        """
        if mesh is not None:
            raise ValueError(f"{type(self).__name__} has no mesh {mesh!r}: override Worker.layout(mesh) to name it")
        return Layout.grid(dp=self.world_size).coordinates[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self) -> None:
        """Record what this process computes until `stop_profile`. A recording that is running is dropped."""
        from torch.profiler import profile

        self.stop_profile(None)
        self._profile = profile(record_shapes=True)
        self._profile.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, prefix: str | None) -> None:
        """End the recording, and write it to `<prefix>_rank_<rank>.pt.trace.json.gz`. None: drop it."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        if recorded is not None and prefix is not None:
            path = Path(f"{prefix}_rank_{self.rank}.pt.trace.json.gz")
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))


@dataclass(frozen=True)
class WorkerSpec:
    """How to construct a worker in the process that will run it."""

    # the Worker class, or its address (path, name) as `verl.registry.load_object` takes it. A class from a user's file
    # is given by address, and each process loads the file itself.
    cls: type[Worker] | tuple[str, str]
    # keyword arguments of the constructor; picklable if the worker runs in another process
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # the user's files and modules, which each process imports first: they may register engines, losses and agent loops,
    # or define the model
    imports: tuple[str, ...] = ()
    # attributes that the worker has before its `__init__` runs
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worker_class(self) -> type[Worker]:
        """The class, loaded if it was given by address.

        Raises:
            ValueError: It is not a subclass of Worker.
        """
        cls = load_object(*self.cls) if isinstance(self.cls, tuple) else self.cls
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"expected a subclass of verl.single_controller.Worker, found {cls!r}")
        return cls

    def build(self, rank_env: RankEnv) -> Worker:
        """Construct the worker. `rank_env` is set before its `__init__` runs."""
        for address in self.imports:
            import_module(address)
        cls = self.worker_class
        worker = cls.__new__(cls)
        vars(worker).update(self.attributes, rank_env=rank_env)
        worker.__init__(**self.kwargs)
        return worker


#: the sockets of the last ports that `free_port` returned
_reserved: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A free port of this host, which the system gives to no other program while this process runs, or until 64 others.

    The port stays bound but does not listen, so that a server with SO_REUSEADDR, as those of torch, can listen there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("0.0.0.0", 0))
    _reserved.append(reserved)
    return reserved.getsockname()[1]
