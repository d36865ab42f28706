"""One controller, many workers: dispatch -> execute -> collect. Only the package `ray` imports Ray."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.single_controller.dispatch": "Coordinates Dispatch Execute Layout register register_dispatch_mode",
    "verl.single_controller.local.cluster": "LocalWorkerGroup colocate",
    "verl.single_controller.worker": "Worker WorkerSpec",
    "verl.single_controller.worker_group": "Future WorkerDied WorkerError WorkerGroup WorkerTimeout",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
