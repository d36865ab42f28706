"""Rollout: engines that generate responses, and what synchronizes their weights. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "Completion": "verl.rollout.base",
    "EngineTraits": "verl.rollout.traits",
    "Request": "verl.rollout.base",
    "RolloutEngine": "verl.rollout.base",
    "RolloutEnv": "verl.rollout.base",
    "RolloutStats": "verl.rollout.base",
    "SamplingParams": "verl.rollout.base",
    "ROLLOUT_ENGINES": "verl.rollout.base",
    "make_rollout_engine": "verl.rollout.base",
    "register_rollout_engine": "verl.rollout.base",
    "WeightReceiver": "verl.weight_sync",
    "WeightSync": "verl.weight_sync",
    "SyncReport": "verl.weight_sync",
    "AGENT_LOOPS": "verl.agents",
    "AgentLoop": "verl.agents",
    "GenerateFn": "verl.agents",
    "Prompt": "verl.agents",
    "Trajectory": "verl.agents",
    "register_agent_loop": "verl.agents",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
