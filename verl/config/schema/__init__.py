"""The configuration schema: every section and field with its type, default and one line of help."""

from verl.utils.lazy import lazy_names

_HOME = {
    name: f"verl.config.schema.{module}"
    for module, names in {
        "actor": ("ActorConfig", "CriticConfig", "PolicyLossConfig", "RefConfig"),
        "algorithm": ("AlgorithmConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"),
        "data": ("CustomClassConfig", "DataConfig", "MediaSection"),
        "megatron": ("MegatronConfig", "MegatronTransformerConfig", "RefMegatronConfig"),
        "model": (
            *("ActorCheckpointConfig", "CheckpointConfig", "CriticCheckpointConfig", "CriticModelConfig"),
            *("CriticOptimConfig", "EngineConfig", "ModelConfig", "OptimConfig"),
        ),
        "offline": (
            *("EvalConfig", "EvalDataConfig", "EvalRewardConfig", "EvaluationConfig", "GenerationConfig"),
            *("GenerationDataConfig", "GenerationRolloutConfig", "OfflineTrainerConfig"),
        ),
        "ppo": ("ActorRolloutRefConfig", "Config"),
        "reward": (
            *("CustomRewardFunctionConfig", "ManagerModuleConfig", "RewardConfig", "RewardManagerConfig"),
            "RewardModelConfig",
        ),
        "rollout": (
            *("AgentConfig", "CheckpointEngineConfig", "EngineKwargs", "MultiTurnConfig", "RolloutConfig"),
            *("RolloutEngineConfig", "SamplingConfig", "ServerAgentConfig", "ServerConfig", "ValSamplingConfig"),
        ),
        "sft": (
            *("SFTCheckpointConfig", "SFTConfig", "SFTDataConfig", "SFTEngineConfig", "SFTOptimConfig"),
            "SFTTrainerConfig",
        ),
        "trainer": ("PlacementConfig", "RayConfig", "RunConfig", "TrainerConfig"),
    }.items()
    for name in names
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
