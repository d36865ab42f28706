"""RL post-training for large language models. Names are loaded at first use, so that `import verl` stays light."""

from verl import compat  # noqa: F401 (registers the import hook of public paths)
from verl.utils.lazy import lazy_names

__version__ = "0.1.0"

_HOME = {
    "verl.protocol": "DataProto",
    "verl.columns": "DataProtoValidationError",
    "verl.dataflow": "DataFlow Operator Pipeline HOLD",
    "verl.rewards.functions": "RewardFunction",
    "verl.env_check": "check_env",
    "verl.trainer": "PPOTrainer SFTTrainer",
    "verl.config": "load_config",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
