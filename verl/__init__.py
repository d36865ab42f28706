"""RL post-training for large language models. Names are loaded at first use, so that `import verl` stays light."""

import importlib

from verl import compat  # noqa: F401 (registers the import hook of public paths)

__version__ = "0.1.0"

_HOME = {
    "DataProto": "verl.protocol",
    "DataProtoValidationError": "verl.columns",
    "DataFlow": "verl.dataflow",
    "Operator": "verl.dataflow",
    "Pipeline": "verl.dataflow",
    "HOLD": "verl.dataflow",
    "RewardFunction": "verl.rewards.functions",
    "check_env": "verl.env_check",
    "PPOTrainer": "verl.trainer.ppo_trainer",
    "SFTTrainer": "verl.trainer.sft",
    "load_config": "verl.config",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted(__all__)
