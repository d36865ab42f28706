"""Names that scripts for public verl import, by module.

The value is the `module:name` (or module) that replaces it, or the end of the ImportError: what to use instead.
"""

ANY = "*"
"""Entry of a module for all names that it does not list."""

_WORKERS = (
    "workers are created from the configuration. Subclass verl.workers.policy.ActorWorker, "
    "verl.workers.critic.CriticWorker or verl.workers.engine_worker.EngineWorker instead"
)
_ENGINE = "the training engine is chosen by actor_rollout_ref.actor.strategy; see verl.engines.base.TrainEngine"
_ROLES = (
    "roles and their devices come from the configuration (section placement); a flow gets other roles from worker_specs"
)
_PLACEMENT = "devices are assigned by the configuration (section placement), or by verl.single_controller.ResourcePool"
_ROLLOUT = "rollout engines implement verl.rollout.base.RolloutEngine and are chosen by actor_rollout_ref.rollout.name"
_CONFIG = "the sections of the configuration are typed objects already: use config.actor_rollout_ref.actor directly"
_FSDP = "sharding and offloading are settings of actor_rollout_ref.actor.fsdp_config"
_SEQUENCE_PARALLEL = "sequence parallelism is the setting actor.ulysses_sequence_parallel_size"
_PROFILER = "profilers are not supported: trainer.logger records the seconds of every operator as timing_s/*"
_MEGATRON = "the Megatron engine is chosen by actor.strategy=megatron, and its settings are those of actor.megatron"

_CHECKPOINTS = "checkpoints are written by verl.checkpoints.store"
_RESULT = "return a pair (sum, count) from a loss, or a number"

_FUNCTIONAL = "verl.utils.py_functional:"
_SCHEMA = "verl.config.schema:"
_RULES = "verl.rewards.public_scores:"


def _same_names(module: str, *names: str) -> dict[str, str]:
    """Names that `module` has, too."""
    return {name: f"{module}:{name}" for name in names}


_TOOLS = {
    **_same_names("verl.agents.tools.load", "initialize_tools_from_config"),
    ANY: "tools are loaded by verl.agents.tools.load.load_tools",
}
_AGENT_LOOPS = {
    **_same_names("verl.agents.public", "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "DictConfigWrap"),
    **_same_names("verl.agents.public", "TokenOutput", "register"),
    ANY: "agent loops are in verl.agents",
}
_TIMERS = {**dict.fromkeys(("marked_timer", "simple_timer", "_timer"), _FUNCTIONAL + "marked_timer"), ANY: _PROFILER}
_REDUCE_METRICS = _same_names("verl.utils.py_functional", "reduce_metrics")
_BATCH_METRICS = _REDUCE_METRICS | _same_names(
    "verl.trainer.ppo.batch_functions",
    *("compute_data_metrics", "compute_timing_metrics", "compute_throughout_metrics"),
)
_DEFAULT_SCORE = _RULES + "default_compute_score"
_BOXES = {"last_boxed_only_string": _RULES + "last_box", "remove_boxed": _RULES + "inside_box"}
_MATH = {"compute_score": _RULES + "math_score", "is_equiv": _RULES + "math_equal", **_BOXES}
_MANAGER_REGISTRY = _same_names("verl.rewards.public_managers", "register", "get_reward_manager_cls")
_MANAGER_BASE = _same_names("verl.rewards.public_managers", "RewardManagerBase")
_ABSTRACT_MANAGER = _same_names("verl.rewards.public_managers", "AbstractRewardManager")
_MANAGERS = {
    kind: _same_names("verl.rewards.public_managers", f"{name}RewardManager")
    for kind, name in {"naive": "Naive", "batch": "Batch", "dapo": "DAPO", "prime": "Prime"}.items()
}
_SECTIONS = {
    **_same_names("verl.config.schema", "ActorConfig", "CriticConfig", "RolloutConfig", "PolicyLossConfig"),
    "FSDPActorConfig": _SCHEMA + "ActorConfig",
    "FSDPCriticConfig": _SCHEMA + "CriticConfig",
    "FSDPEngineConfig": _SCHEMA + "EngineConfig",
    "HFModelConfig": _SCHEMA + "ModelConfig",
    **dict.fromkeys(("FSDPOptimizerConfig", "OptimizerConfig"), _SCHEMA + "OptimConfig"),
    ANY: _CONFIG,
}
_WORKER = _same_names("verl.single_controller.worker", "Worker")
_WORKER_GROUP = {
    **_same_names("verl.single_controller.worker_group", "WorkerGroup"),
    **_same_names("verl.single_controller.cluster", "ResourcePool"),
}
_RLHF_DATASET = _same_names("verl.data.rlhf_dataset", "RLHFDataset")
_SFT_DATASET = _same_names("verl.data.sft_dataset", "SFTDataset")

PUBLISHED: dict[str, dict[str, str]] = {
    # ---- modules that exist here and lack some names
    "verl.protocol": {
        **_same_names("verl.utils.py_functional", "union_two_dict", "list_of_dict_to_dict_of_list"),
        "DataProtoFuture": "a method called with blocking=False returns verl.single_controller.Future",
        "BatchData": "use DataProto",
        "_padding_size_key": "Dispatch.DP_COMPUTE_PROTO adds and removes padding rows",
    },
    "verl.utils": {
        **_same_names("verl.utils.tokenizer", "hf_tokenizer", "hf_processor"),
        "torch_functional": "verl.algorithms.torch_functional",
    },
    "verl.utils.balance": {
        "rearrange_micro_batches": "verl.utils.balance.token_budget_micro_batches returns the rows of each micro-batch",
        "restore_dynamic_batch": "training engines return rows in the order of the batch",
        "prepare_dynamic_batch": "verl.utils.balance.token_budget_micro_batches returns the rows of each micro-batch",
    },
    "verl.tracking.tracking": {
        "ValidationGenerationsLogger": "set trainer.log_val_generations, which every tracker supports",
    },
    "verl.single_controller.ray": {
        "RayWorkerGroup": "verl.single_controller.ray.cluster:RayWorkerGroup",
        "RayClassWithInitArgs": "describe a worker with verl.single_controller.WorkerSpec",
        "create_colocated_worker_cls": "verl.single_controller.ray.cluster.colocate runs workers in one actor",
        "create_colocated_worker_cls_fused": "verl.single_controller.ray.cluster.colocate does the same",
        **dict.fromkeys(("split_resource_pool", "merge_resource_pool"), _PLACEMENT),
        **dict.fromkeys(("RayResourcePool", "SubRayResourcePool", "ResourcePoolManager"), _PLACEMENT),
    },
    "verl.trainer.local_trainer": {"LocalTrainer": "verl.trainer.local_trainer:LocalPPOTrainer"},
    "verl.trainer.ray_trainer": {
        "ResourcePoolManager": _PLACEMENT,
        "Role": _ROLES,
    },
    "verl.trainer.main_ppo": {
        "run_ppo": "call verl.trainer.main_ppo.main, or build a verl.trainer.ray_trainer.RayPPOTrainer",
        "TaskRunner": "build a verl.trainer.ray_trainer.RayPPOTrainer and call fit()",
        "create_rl_dataset": "verl.data.rlhf_dataset.RLHFDataset, or data.custom_cls for a custom one",
        "create_rl_sampler": "data.shuffle and data.seed define the order of the prompts",
    },
    # ---- trainer
    "verl.trainer.ppo.ray_trainer": {
        **_same_names("verl.trainer.ray_trainer", "RayPPOTrainer"),
        **_same_names("verl.algorithms.core_algos", "AdvantageEstimator"),
        **_same_names(
            "verl.trainer.ppo.batch_functions", "apply_kl_penalty", "compute_advantage", "compute_response_mask"
        ),
        **_BATCH_METRICS,
        **dict.fromkeys(("_timer", "marked_timer"), _FUNCTIONAL + "marked_timer"),
        "core_algos": "verl.algorithms.core_algos",
        "ResourcePoolManager": _PLACEMENT,
        "Role": _ROLES,
        "WorkerType": _WORKERS,
    },
    "verl.trainer.ppo.metric_utils": {
        **_BATCH_METRICS,
        "process_validation_metrics": "verl.trainer.output.metrics.validation_metrics takes a validation's batches",
        "bootstrap_metric": "verl.evaluation.statistics.bootstrap_means and bootstrap_intervals",
        "calc_maj_val": "verl.trainer.output.metrics.validation_metrics reports maj@N",
    },
    "verl.trainer.ppo.utils": {
        "need_critic": "verl.trainer.ppo.flow:needs_critic",
        "need_reference_policy": "verl.trainer.ppo.flow:needs_reference",
        **_same_names("verl.trainer.ppo.batch_functions", "need_reward_model"),
        "Role": _ROLES,
        "WorkerType": _WORKERS,
        "need_teacher_policy": "read config.distillation.enabled",
    },
    "verl.trainer.ppo.reward": {
        **_same_names("verl.rewards.load", "load_reward_manager"),
        **_same_names("verl.trainer.ppo.batch_functions", "compute_reward"),
        **_same_names("verl.rewards.public_scores", "get_custom_reward_fn"),
        "compute_reward_async": "reward functions run concurrently in worker processes: call compute_reward",
    },
    "verl.trainer.constants_ppo": {ANY: "variables of worker processes are set by trainer.worker_env"},
    "verl.utils.torch_dtypes": {ANY: "dtypes are settings: actor.fsdp_config.dtype and model_dtype"},
    "verl.tools.sandbox_fusion_tools": {ANY: "programs run in the local sandbox: see verl.rewards.sandbox.programs"},
    "verl.utils.reward_score.prime_code.testing_util": {ANY: "tests of programs are run by verl.rewards.sandbox"},
    "verl.utils.tensordict_utils": {ANY: "batches are verl.DataProto, which has these operations as methods"},
    "verl.trainer.config": {
        "AlgoConfig": _SCHEMA + "AlgorithmConfig",
        **_same_names("verl.config.schema", "KLControlConfig", "FilterGroupsConfig", "RolloutCorrectionConfig"),
        **_same_names("verl.config.schema", "CheckpointConfig"),
        "PFPPOConfig": "resampling of the batch by reward (PF-PPO) is not supported",
        ANY: _CONFIG,
    },
    # ---- rewards
    "verl.utils.reward_score": dict.fromkeys(("default_compute_score", "_default_compute_score"), _DEFAULT_SCORE),
    "verl.utils.reward_score.gsm8k": {
        "compute_score": _RULES + "gsm8k_score",
        "extract_solution": _RULES + "gsm8k_number",
    },
    "verl.utils.reward_score.geo3k": {"compute_score": _RULES + "geo3k_score"},
    "verl.utils.reward_score.math": _MATH,
    "verl.utils.reward_score.math_reward": _MATH,
    "verl.utils.reward_score.math_verify": {"compute_score": _RULES + "math_score"},
    "verl.utils.reward_score.math_dapo": {"compute_score": _RULES + "math_dapo_score", **_BOXES},
    "verl.utils.reward_score.prime_math": {"compute_score": _RULES + "math_score"},
    "verl.utils.reward_score.prime_code": {"compute_score": _RULES + "code_score"},
    "verl.utils.reward_score.sandbox_fusion": {
        ANY: "programs are run by verl.rewards.sandbox.code_tests on this machine",
    },
    "verl.workers.reward_manager": {
        **_MANAGER_REGISTRY,
        **_ABSTRACT_MANAGER,
        **{name: home for names in _MANAGERS.values() for name, home in names.items()},
    },
    "verl.workers.reward_manager.abstract": {
        **_ABSTRACT_MANAGER,
        "RawRewardFn": "verl.rewards.functions:ScoreFunction",
    },
    "verl.workers.reward_manager.registry": {
        **_MANAGER_REGISTRY,
        **_same_names("verl.rewards.managers", "REWARD_MANAGER_REGISTRY"),
    },
    **{f"verl.workers.reward_manager.{kind}": names for kind, names in _MANAGERS.items()},
    "verl.experimental.reward_loop.reward_manager": _MANAGER_REGISTRY | _MANAGER_BASE,
    "verl.experimental.reward_loop.reward_manager.base": _MANAGER_BASE,
    "verl.experimental.reward_loop.reward_manager.registry": _MANAGER_REGISTRY,
    # ---- data
    "verl.utils.dataset": {
        **_RLHF_DATASET,
        **_SFT_DATASET,
        "RMDataset": "training of reward models is not supported",
    },
    "verl.utils.dataset.rl_dataset": {
        **_RLHF_DATASET,
        "collate_fn": "verl.data.collate:collate_fn",
        "get_dataset_class": "verl.data.rlhf_dataset:load_dataset_class",
    },
    "verl.utils.dataset.sft_dataset": _SFT_DATASET,
    "verl.utils.dataset.multiturn_sft_dataset": {"MultiTurnSFTDataset": "verl.data.sft_dataset:SFTDataset"},
    # ---- utils
    "verl.utils.metric": _REDUCE_METRICS | dict.fromkeys(("Metric", "AggregationType"), _RESULT),
    "verl.utils.metric.utils": _REDUCE_METRICS,
    "verl.utils.model": {
        **_same_names("verl.algorithms.torch_functional", "compute_position_id_with_mask"),
        ANY: "models are loaded by verl.engines.loading",
    },
    "verl.utils.config": {ANY: _CONFIG},
    **{f"verl.utils.{name}": _TIMERS for name in ("debug", "profiler", "profiler.performance", "debug.performance")},
    "verl.utils.import_utils": {
        **dict.fromkeys(("load_extern_type", "load_extern_object"), "verl.registry:load_object"),
        ANY: "optional packages are imported where they are used",
    },
    "verl.utils.logger": {"LocalLogger": "trainer.logger selects the trackers", ANY: "use logging.getLogger"},
    "verl.utils.logging_utils": {"set_basic_config": "verl.utils.log:setup_logging"},
    "verl.utils.flops_counter": {ANY: "trainer.logger records tokens per second as perf/throughput"},
    "verl.utils.checkpoint": {ANY: _CHECKPOINTS},
    "verl.utils.checkpoint.checkpoint_manager": {ANY: _CHECKPOINTS},
    "verl.utils.checkpoint.fsdp_checkpoint_manager": {ANY: _CHECKPOINTS},
    "verl.utils.fsdp_utils": {ANY: _FSDP},
    "verl.utils.ulysses": {ANY: _SEQUENCE_PARALLEL},
    "verl.utils.megatron_utils": {ANY: _MEGATRON},
    "verl.utils.ray_utils": {ANY: "Ray is used by verl.single_controller.ray only"},
    "verl.utils.rollout_trace": {
        **_same_names("verl.utils.py_functional", "rollout_trace_op"),
        ANY: "traces of agent loops are not recorded; trainer.rollout_data_dir saves samples",
    },
    "verl.utils.memory_utils": {ANY: "perf/max_memory_allocated_gb is recorded at every step"},
    "verl.utils.distributed": {ANY: "process groups are made by the training engine (verl.engines.parallel)"},
    "verl.utils.npu_utils": {ANY: "NPUs are not supported"},
    "verl.utils.attention_utils": {ANY: "padding is removed by verl.modeling.packing"},
    # ---- workers
    "verl.single_controller.base": {
        **_WORKER,
        **_WORKER_GROUP,
        "ClassWithInitArgs": "describe a worker with verl.single_controller.WorkerSpec",
    },
    "verl.single_controller.base.worker": {
        **_WORKER,
        ANY: "use self.env of verl.single_controller.Worker for rank and world size",
    },
    "verl.single_controller.base.worker_group": _WORKER_GROUP,
    "verl.single_controller.ray.base": {
        "RayWorkerGroup": "verl.single_controller.ray.cluster:RayWorkerGroup",
        "func_generator": "verl.single_controller.WorkerGroup.call dispatches, executes and collects",
        ANY: _PLACEMENT,
    },
    **{
        f"verl.workers.config{name}": _SECTIONS
        for name in ("", ".actor", ".critic", ".engine", ".model", ".optimizer", ".rollout")
    },
    **{
        f"verl.workers.{name}": {ANY: _WORKERS}
        for name in ("fsdp_workers", "engine_workers", "actor", "actor.dp_actor")
    },
    "verl.workers.megatron_workers": {ANY: _MEGATRON},
    "verl.workers.actor.megatron_actor": {ANY: _MEGATRON},
    "verl.workers.engine": {ANY: _ENGINE},
    "verl.workers.sharding_manager": {ANY: "weights are sent to the rollout engine by verl.weight_sync"},
    "verl.workers.sharding_manager.fsdp_ulysses": {ANY: _SEQUENCE_PARALLEL},
    "verl.workers.rollout_base": {ANY: _ROLLOUT},
    "verl.workers.utils": {ANY: "losses are in verl.algorithms, batches with padding in verl.data.sequences"},
    "verl.workers.utils.losses": {ANY: "losses are in verl.algorithms"},
    "verl.workers.utils.padding": {ANY: "padding is removed and restored by verl.modeling.packing"},
    "verl.models.transformers.monkey_patch": {ANY: "verl.modeling modifies models as the configuration requires"},
    "verl.third_party.vllm": {ANY: _ROLLOUT},
    "verl.experimental.agent_loop": _AGENT_LOOPS,
    "verl.experimental.agent_loop.agent_loop": _AGENT_LOOPS,
    "verl.experimental.agent_loop.tool_agent_loop": {
        "ToolAgentLoop": "select it with rollout.agent.default_agent_loop=tool_agent; see verl.agents.MultiTurnLoop",
    },
    "verl.experimental.agent_loop.tool_parser": {
        **_same_names("verl.agents.tools.parsers", "ToolParser", "FunctionCall", "HermesToolParser")
    },
    "verl.experimental.reward_loop": {ANY: "reward managers are in verl.rewards.managers"},
    "verl.experimental.dataset.sampler": {ANY: "data.shuffle and data.seed define the order of the prompts"},
    "verl.tools.tool_registry": _TOOLS,
    "verl.tools.utils.tool_registry": _TOOLS,
    "verl.interactions.base": {"BaseInteraction": "verl.agents.tools.base_tool:BaseInteraction"},
    "verl.base_config": {"BaseConfig": "verl.config.fields:Section"},
}
