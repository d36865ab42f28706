"""One controller, many workers: dispatch -> execute -> collect. Only the package `ray` imports Ray."""

import importlib

from verl.single_controller.dispatch import Coordinates, Dispatch, Execute, Layout, register, register_dispatch_mode
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


def __getattr__(name: str):
    if name not in ("LocalWorkerGroup", "colocate"):  # loaded at first use
        raise AttributeError(f"module 'verl.single_controller' has no attribute {name!r}")
    return getattr(importlib.import_module("verl.single_controller.local.cluster"), name)
