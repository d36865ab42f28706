"""Reward functions, the reward managers that call them, and the processes that isolate them.

Names are loaded at first use, so that a worker process which runs one rule does not import torch.
"""

from verl.utils.lazy import lazy_names

# `REWARD_FUNCTION_REGISTRY` is taken from `resolve`, because importing that module registers the built-in functions.
_HOME = {
    "REWARD_FUNCTION_REGISTRY": "verl.rewards.resolve",
    "RULES_BY_DATA_SOURCE": "verl.rewards.resolve",
    "default_compute_score": "verl.rewards.resolve",
    "register_data_source": "verl.rewards.resolve",
    "resolve_reward_function": "verl.rewards.resolve",
    "RewardFunction": "verl.rewards.functions",
    "ScoreFunction": "verl.rewards.functions",
    "register_reward": "verl.rewards.functions",
    "RewardError": "verl.rewards.outcome",
    "REWARD_MANAGER_REGISTRY": "verl.rewards.managers",
    "RewardManager": "verl.rewards.managers",
    "register_reward_manager": "verl.rewards.managers",
    "register": "verl.rewards.managers",
    "load_reward_manager": "verl.rewards.load",
    "as_reward_manager": "verl.rewards.load",
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
