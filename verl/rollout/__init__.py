"""Rollout: engines that generate responses. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.rollout.base": (
        "Completion Request RolloutEngine RolloutEnv RolloutStats SamplingParams ROLLOUT_ENGINES make_rollout_engine "
        "register_rollout_engine"
    ),
    "verl.rollout.traits": "EngineTraits",
    "verl.weight_sync": "WeightReceiver WeightSync SyncReport",
    "verl.agents": "AGENT_LOOPS AgentLoop GenerateFn Prompt Trajectory register_agent_loop",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
