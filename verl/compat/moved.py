"""Module paths of earlier releases and of public verl whose module has another path here."""

#: package -> the package that has its modules now: their names, as "old:new" where the name is another one
_TABLE = """
verl.rollout -> verl: agent_loop:agents server weight_sync
verl -> verl.agents: tools
verl.agents.tools -> verl.agents.tools: interactions:base_tool
verl.tools -> verl.agents.tools: base_tool interactions:base_tool function_tool host load parsers processes runner
verl.tools -> verl.agents.tools: schemas worker
verl.algorithms -> verl.algorithms: losses:kl covariance_losses:policy_losses
verl.batch -> verl.batch: padding:containers serialization:containers
verl.utils -> verl.batch: equality:containers
verl.checkpoints -> verl.checkpoints: boxes:shard_files
verl.utils -> verl.checkpoints: atomic shard_files checkpoint_store:store
verl.trainer.state -> verl.cli: verify_resume
verl.cli -> verl.cli: check:programs examples:programs merge:programs quickstart:programs report:runs
verl.cli.config -> verl.cli: commands:app
verl.cli.config -> verl.cli.config: convert:show explain:show
verl.algorithms -> verl.config: presets
verl.config -> verl.config: batch_words:describe no_effect:describe reference:describe
verl.config -> verl.config: node:fields tree:schema tree_actor:schema tree_data:schema tree_model:schema
verl.config -> verl.config: tree_offline:schema tree_rollout:schema tree_sft:schema tree_trainer:schema
verl.config.checks -> verl.config: settings:load
verl.config -> verl.config.checks: checks_critic:algorithm checks_megatron:megatron checks_asynchronous:rollout
verl.config -> verl.config.checks: checks_moe:rollout available:run supported:run
verl.config.checks -> verl.config.checks: critic:algorithm asynchronous:rollout moe:rollout registered:run
verl.config -> verl.config.public: aliases dialects:aliases convert hydra convert_trl:trl trl upstream
verl.config.public -> verl.config.public: convert_trl:trl
verl.data -> verl.data: chat_segments:chat dialogues:chat lazy_prompts:rlhf_dataset
verl.dataflow -> verl.dataflow: metrics:flow pipeline:flow watch:flow order:operator one_pass:run results:run
verl.engines -> verl.engines: model:loading offload:memory distributed:parallel tensor_parallel:parallel fsdp:sharding
verl.engines -> verl.engines: hf:torch_engine
verl.modeling -> verl.engines: value_head:loading
verl.engines.megatron -> verl.engines.megatron: offload:memory recompute:memory
verl.env_check -> verl.env_check: machine:check probe:packages report:packages
verl.utils -> verl.env_check: env_machine:check env_packages:packages env_report:packages import_probe:packages
verl.model_merger -> verl.model_merger: shard_pickle:fsdp verify:huggingface adapter_folder:lora writing:merge
verl.model_merger -> verl.model_merger: distributed_checkpoint:sources safetensors_folder:sources source:sources
verl.engines -> verl.modeling: attention fused_layers places:indexing layers layer_functions:layers_cpu
verl.engines -> verl.modeling: layer_kernels:layers_triton products:linear logits:log_probs
verl.engines -> verl.modeling: logits_kernels:log_probs_triton sequence_parallel prompt_sharing:shared_prefix
verl.engines.megatron -> verl.modeling: log_probs
verl.engines -> verl.modeling.batch_invariant: invariant:model
verl.invariant -> verl.modeling.batch_invariant: attention pieces:chunked functions:model kernels:triton_kernels
verl.modeling.batch_invariant -> verl.modeling.batch_invariant: scores:chunked linear:model
verl.planner -> verl.planner: fixes:search
verl.processes -> verl.processes: channel:child pool:child
verl.single_controller.local -> verl.processes: heartbeat:child
verl.utils -> verl.processes: subprocess_pool:child fork_server waiting:limits streams
verl.recipe.dapo -> verl.recipe.dapo: trainer:main_dapo
verl.recipe.dpo -> verl.recipe.dpo: offline:flow trainer:main_dpo config:worker
verl.recipe.prime -> verl.recipe.prime: trainer:main_prime config:worker
verl.rewards -> verl.rewards: results:outcome model_score:resolve sources:resolve answers:responses
verl.rewards -> verl.rewards.rules: accuracy choice formats gsm8k maths
verl.rewards -> verl.rewards.sandbox: assert_program calls code_tests isolation:pool program_boot programs
verl.rewards -> verl.rewards.sandbox: isolation_worker:worker
verl.rewards.sandbox -> verl.rewards.sandbox: alarm:calls
verl.rollout -> verl.rollout: gathering:base vision_models:checks stop_strings:request stopping:request
verl.rollout.hf -> verl.rollout.hf: factory:engine
verl.rollout -> verl.rollout.native: native_exact:batch_invariant native_exact_cuda:batch_invariant_cuda
verl.rollout -> verl.rollout.native: native_cuda:cuda_decoder joint_memory:model native_model:model
verl.rollout -> verl.rollout.native: native_paged:paged_scheduler native_plan:scheduler native_slots:scheduler
verl.rollout -> verl.rollout.native: native_torch:torch_decoder kernels:triton_kernels
verl.rollout.native -> verl.rollout.native: fused_parameters:model requests:scheduler
verl.rollout.sglang -> verl.rollout.sglang: filters:engine adapter_loader:loader capabilities:settings
verl.rollout.vllm -> verl.rollout.vllm: capabilities:settings experts:slices
verl.single_controller -> verl.single_controller: placement:cluster data_plane:remote_batch pickling:remote_batch
verl.single_controller -> verl.single_controller: remote_tensor:remote_batch diagnosis:worker_group
verl.single_controller -> verl.single_controller.local: local_group:cluster process_pool column_files:transport
verl.single_controller -> verl.single_controller.local: transport worker_process:worker_main
verl.single_controller.local -> verl.single_controller.local: group:cluster column_files:transport
verl.utils -> verl.single_controller.local: output:process_pool
verl.single_controller -> verl.single_controller.ray: ray_group:cluster
verl.single_controller.ray -> verl.single_controller.ray: heartbeats:actor_pool group:cluster runtime_env:cluster
verl.single_controller.ray -> verl.single_controller.ray: placement:actor_pool
verl.trainer -> verl.single_controller.ray: runtime_env:cluster
verl.tracking -> verl.tracking: summary:formatting earlier_runs:run_record step_files:runs thumbnails:trackers
verl.tracking -> verl.tracking.report: metric_names:report
verl.utils -> verl.tracking: alive:console headline:console progress:console curves trackers tracking
verl.cli -> verl.trainer: train:main_ppo
verl.experimental.fully_async_policy -> verl.trainer: fully_async_main:main_fully_async
verl.experimental.one_step_off_policy -> verl.trainer: main_ppo:main_one_step_off
verl.recipe.fully_async_policy -> verl.trainer: fully_async_main:main_fully_async
verl.recipe.one_step_off_policy -> verl.trainer: main_ppo:main_one_step_off
verl.recipe.r1 -> verl.trainer: main_eval
verl.trainer -> verl.trainer: main_ppo_sync:main_ppo fsdp_sft_trainer:sft_trainer
verl.trainer.guards -> verl.trainer: built_in:base
verl.trainer.output -> verl.trainer: step_report:view
verl.trainer -> verl.trainer.asynchronous: sample_buffer
verl.trainer -> verl.trainer.checks: agents unused_settings:config model_limits:models planning early_checks:preflight
verl.trainer -> verl.trainer.checks: preflight
verl.trainer.checks -> verl.trainer.checks: algorithm:config unused_settings:config model_config:models
verl.trainer.checks -> verl.trainer.checks: model_limits:models
verl.planner -> verl.trainer.checks: settings:planning
verl.trainer.startup -> verl.trainer.checks: recipe:preflight
verl.trainer -> verl.trainer.guards: validation_watch:early_stopping interruption
verl.trainer.state -> verl.trainer.guards: bad_steps validation_watch:early_stopping interruption operator_watch
verl.trainer.state -> verl.trainer.guards: quarantine restarts
verl.trainer -> verl.trainer.output: divergence metrics display:run_log run_log recording:samples samples
verl.trainer.output -> verl.trainer.output: display:run_log summary:run_log recording:samples
verl.trainer -> verl.trainer.ppo: batch_functions canary dynamic_sampling ppo_flow:flow ppo_operators:operators
verl.trainer -> verl.trainer.ppo: rollout_correction rollout_weights:weights
verl.trainer -> verl.trainer.startup: arguments command_line inputs setup:inputs launch roles torchrun
verl.trainer -> verl.trainer.state: checkpointing saved_state
verl.utils -> verl.utils: clock:coroutines threads:device lock:disk decoding:tokenizer
verl.rollout.weight_sync -> verl.weight_sync: adapters base in_process:base buckets collective transfer_group:collective
verl.rollout.weight_sync -> verl.weight_sync: factory replica:factory module_receiver checksums:verify
verl.rollout.weight_sync -> verl.weight_sync: loading:verify position_sums:verify
verl.weight_sync -> verl.weight_sync: transfer_group:collective replica:factory
verl.rollout.weight_sync -> verl.weight_sync.reshard: chunk_table chunks_triton grouping:plan plan copies:sync
verl.rollout.weight_sync -> verl.weight_sync.reshard: reshard:sync
verl.weight_sync.reshard -> verl.weight_sync.reshard: grouping:plan rank_plan:sync
verl.workers -> verl.workers: actor_rollout_ref:policy
"""


def read_renames(table: str) -> dict[str, str]:
    """Old dotted name -> new one, from lines such as `old -> new: name before:after`."""
    renames = {}
    for line in table.strip().splitlines():
        packages, names = line.split(": ", 1)
        old, new = packages.split(" -> ")
        for name in names.split():
            before, _, after = name.partition(":")
            renames[f"{old}.{before}"] = f"{new}.{after or before}"
    return renames


#: old module path -> new module path
MOVED = read_renames(_TABLE) | {
    # modules of public verl that exist here under another path
    "verl.trainer.ppo.core_algos": "verl.algorithms.core_algos",
    "verl.trainer.ppo.rollout_corr_helper": "verl.algorithms.rollout_correction",
    "verl.utils.torch_functional": "verl.algorithms.torch_functional",
    "verl.utils.seqlen_balancing": "verl.utils.balance",
    "verl.single_controller.base.decorator": "verl.single_controller.dispatch",
    "verl.utils.fs": "verl.utils.hdfs_io",
}


def _resolved(path: str) -> str:
    return _resolved(MOVED[path]) if path in MOVED else path


MOVED |= {old: _resolved(new) for old, new in MOVED.items()}  # a module may have moved more than once
