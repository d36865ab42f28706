"""Reward functions, the reward managers that call them, and the processes that isolate them.

Names are loaded at first use, so that a worker process which runs one rule does not import torch.
"""

from verl.utils.lazy import lazy_names

# `REWARD_FUNCTION_REGISTRY` is taken from `resolve`, because importing that module registers the built-in functions.
_HOME = {
    "verl.rewards.resolve": (
        "REWARD_FUNCTION_REGISTRY RULES_BY_DATA_SOURCE default_compute_score register_data_source "
        "resolve_reward_function"
    ),
    "verl.rewards.functions": "RewardFunction ScoreFunction register_reward",
    "verl.rewards.outcome": "RewardError",
    "verl.rewards.managers": "REWARD_MANAGER_REGISTRY RewardManager register_reward_manager register",
    "verl.rewards.load": "load_reward_manager as_reward_manager",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
