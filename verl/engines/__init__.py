"""Training engines: one model, its optimizer and its checkpoints. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.engines.base": "ENGINES EngineSpec MicroBatching Objective TrainEngine make_engine register_train_engine",
    "verl.engines.micro_batch": "MetricSums",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
