"""Training engines: one model, its optimizer and its checkpoints. Names are loaded at first use."""

import importlib

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


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'verl.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted(__all__)
