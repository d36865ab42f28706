"""The configuration schema: every section and field with its type, default and one line of help."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.config.schema.actor": "ActorConfig CriticConfig PolicyLossConfig RefConfig",
    "verl.config.schema.algorithm": "AlgorithmConfig FilterGroupsConfig KLControlConfig RolloutCorrectionConfig",
    "verl.config.schema.data": "CustomClassConfig DataConfig MediaSection",
    "verl.config.schema.distillation": "DistillationConfig DistillationLossConfig TeacherConfig",
    "verl.config.schema.megatron": "MegatronConfig MegatronTransformerConfig RefMegatronConfig",
    "verl.config.schema.model": (
        "ActorCheckpointConfig CheckpointConfig CriticCheckpointConfig CriticModelConfig CriticOptimConfig "
        "EngineConfig ModelConfig OptimConfig"
    ),
    "verl.config.schema.offline": (
        "EvalConfig EvalDataConfig EvalRewardConfig EvaluationConfig GenerationConfig GenerationDataConfig "
        "GenerationRolloutConfig OfflineTrainerConfig"
    ),
    "verl.config.schema.ppo": "ActorRolloutRefConfig Config",
    "verl.config.schema.reward": (
        "CustomRewardFunctionConfig ManagerModuleConfig RewardConfig RewardManagerConfig RewardModelConfig"
    ),
    "verl.config.schema.rollout": (
        "AgentConfig AgentRolloutConfig CheckpointEngineConfig EngineKwargs MultiTurnConfig RolloutConfig "
        "RolloutEngineConfig SamplingConfig ServerAgentConfig ServerConfig SpeculativeConfig ValSamplingConfig"
    ),
    "verl.config.schema.sft": (
        "DPOConfig PreferenceDataConfig PreferenceLossConfig RMConfig SFTCheckpointConfig SFTConfig SFTDataConfig "
        "SFTEngineConfig SFTOptimConfig SFTTrainerConfig"
    ),
    "verl.config.schema.trainer": "PlacementConfig RayConfig RunConfig TrainerConfig",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
