"""One controller, many workers: dispatch -> execute -> collect. Only the package `ray` imports Ray."""

from verl.single_controller.dispatch import Coordinates, Dispatch, Execute, Layout, register, register_dispatch_mode
from verl.single_controller.local.group import LocalWorkerGroup, colocate
from verl.single_controller.worker import Worker, WorkerSpec
from verl.single_controller.worker_group import Future, WorkerDied, WorkerError, WorkerGroup, WorkerTimeout

__all__ = [
    "Coordinates",
    "Dispatch",
    "Execute",
    "Future",
    "Layout",
    "LocalWorkerGroup",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerTimeout",
    "colocate",
    "register",
    "register_dispatch_mode",
]
