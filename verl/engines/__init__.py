"""Training engines: one model, its optimizer and its checkpoints. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "ENGINES": "verl.engines.base",
    "EngineSpec": "verl.engines.base",
    "MetricSums": "verl.engines.metrics",
    "MicroBatching": "verl.engines.base",
    "Objective": "verl.engines.base",
    "TrainEngine": "verl.engines.base",
    "make_engine": "verl.engines.base",
    "register_train_engine": "verl.engines.base",
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
