"""Scoring of answers: reward functions, the managers that call them, and their isolation.

Names are loaded at first use: a worker process that runs one rule must not pay for torch.
"""

import importlib

_HOME = {
    "REWARD_FUNCTION_REGISTRY": "verl.rewards.resolve",
    "RULES_BY_DATA_SOURCE": "verl.rewards.sources",
    "default_compute_score": "verl.rewards.sources",
    "register_data_source": "verl.rewards.sources",
    "resolve_reward_function": "verl.rewards.resolve",
    "ScoreFunction": "verl.rewards.functions",
    "register_reward": "verl.rewards.functions",
    "RewardError": "verl.rewards.outcome",
    "REWARD_MANAGER_REGISTRY": "verl.rewards.managers",
    "RewardManager": "verl.rewards.managers",
    "register_reward_manager": "verl.rewards.managers",
    "register": "verl.rewards.managers",
    "load_reward_manager": "verl.rewards.load",
}

__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'verl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted(__all__)
