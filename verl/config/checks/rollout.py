"""Checks of generation: sampling, weight sync, determinism and router replay."""

from collections.abc import Iterator

from verl.config.errors import Problem, format_value
from verl.config.fields import flatten
from verl.config.schema.ppo import Config
from verl.config.schema.rollout import LOWEST_TEMPERATURE, RolloutConfig
from verl.engines.traits import strategy_traits
from verl.rollout.traits import built_in_engines, check_speculation, engine_traits


def has_separate_rollout(config: Config) -> bool:
    """Whether the rollout has separate devices, which asynchronous training needs and `placement=auto` chooses."""
    return config.rollout_is_separate or config.trainer.max_staleness > 0


def placement_is_open(config: Config) -> bool:
    """Whether the devices of the roles are still to be chosen, by `placement=auto` or for asynchronous training."""
    return config.placement.auto or (config.trainer.max_staleness > 0 and not config.rollout_is_separate)


def check_asynchronous(config: Config) -> Iterator[Problem]:
    """What asynchronous training does not support, and the hosts of its rollout."""
    rollout, groups = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    if k := config.trainer.max_staleness:
        missing_hosts = rollout.nnodes and config.placement.rollout_devices is None  # a problem of `_check_hosts`
        if not (config.rollout_is_separate or config.placement.auto or missing_hosts):
            fix = "use placement=auto, or set placement.actor_devices and placement.rollout_devices"
            if config.trainer.nnodes * config.trainer.n_gpus_per_node == 1:
                fix += ", with trainer.n_gpus_per_node=2 or more"
            message = f"{k}, but generation overlaps training only on separate devices: {fix}"
            yield Problem("trainer.async.max_staleness", message)
        conflicts = {
            "rollout.deterministic=true generates with the weights that are trained: turn it off": (
                rollout.deterministic
            ),
            "algorithm.shuffle_rewards permutes the rewards of a whole batch: use false": (
                config.algorithm.shuffle_rewards
            ),
            "trainer.on_bad_steps=rollback would lose the prompts in the queue: use stop": (
                config.trainer.on_bad_steps == "rollback"
            ),
            "algorithm.filter_groups.at_limit=fill fills one batch at a time: use error": (
                groups.enable and groups.at_limit == "fill"
            ),
        }
        yield from (
            Problem("trainer.async.max_staleness", f"{k}, but {message}")
            for message, is_set in conflicts.items()
            if is_set
        )
    yield from _check_hosts(config)


def _check_hosts(config: Config) -> Iterator[Problem]:
    """`rollout.nnodes` and `hybrid_engine` agree with the placement."""
    rollout, devices = config.actor_rollout_ref.rollout, config.placement.rollout_devices
    if not config.actor_rollout_ref.hybrid_engine and not has_separate_rollout(config):
        message = "false, but placement.rollout_devices gives the rollout no separate devices: set it, or use true"
        yield Problem("actor_rollout_ref.hybrid_engine", message)
    if rollout.nnodes and devices is None:
        message = (
            "the hosts of training and rollout must have the same number of processes, unless every host runs both: "
            "use trainer.n_gpus_per_node, or nnodes=trainer.nnodes"
        )
        yield Problem(f"{_ROLLOUT}n_gpus_per_node", f"{rollout.n_gpus_per_node}, but {message}")
    elif rollout.nnodes and rollout.n_gpus_per_node and len(devices) != rollout.nnodes * rollout.n_gpus_per_node:
        message = f"placement.rollout_devices has {len(devices)} devices: set only one of them"
        yield Problem(f"{_ROLLOUT}nnodes", f"{rollout.nnodes} x {rollout.n_gpus_per_node} processes, but {message}")


_ROLLOUT = "actor_rollout_ref.rollout."
_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORDS = _ROLLOUT + "enable_rollout_routing_replay"


def check_sampling(config: Config) -> Iterator[Problem]:
    """Temperatures, stop strings and lengths of responses."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if rollout.temperature < LOWEST_TEMPERATURE:
        yield Problem(
            _ROLLOUT + "temperature",
            f"found {rollout.temperature}, expected float >= {LOWEST_TEMPERATURE:g}: greedy decoding gives every "
            f"prompt {rollout.n} equal responses (for greedy validation use {_ROLLOUT}val_kwargs.do_sample=false)",
        )
    if val.do_sample and val.temperature < LOWEST_TEMPERATURE:
        yield Problem(
            _ROLLOUT + "val_kwargs.temperature",
            f"found {val.temperature} with do_sample=true: use a temperature of at least {LOWEST_TEMPERATURE:g}, or "
            "do_sample=false",
        )
    if "" in rollout.stop:
        yield Problem(
            _ROLLOUT + "stop", "found an empty string, which would stop every response before its first token"
        )
    lengths = {
        "prompt": (rollout.prompt_length, config.data.max_prompt_length),
        "response": (rollout.response_length, config.data.max_response_length),
    }
    for name, (rollout_length, data_length) in lengths.items():
        if rollout_length != data_length:
            message = (
                f"found {rollout_length}, but data.max_{name}_length is {data_length}: set only data.max_{name}_length"
            )
            yield Problem(f"{_ROLLOUT}{name}_length", message)


def check_weight_sync(config: Config) -> Iterator[Problem]:
    """`weight_sync` agrees with the placement."""
    rollout, separate = config.actor_rollout_ref.rollout, has_separate_rollout(config)
    key, method = _ROLLOUT + "weight_sync", rollout.weight_sync
    if separate and method not in ("auto", "collective"):
        yield Problem(key, f"found {method}, but the rollout has separate devices: use auto or collective")
    if not separate and method == "collective":
        yield Problem(
            key, f"found {method}, but rollout and training share devices: use auto, or set placement.rollout_devices"
        )


_MERGES = "generation merges the adapters and training does not"
_WHOLE = "log-probs in training are those of the full distribution"
_ROUNDS = {
    "tensor_parallel_size": (1, "sums over ranks round differently"),
    "ulysses_sequence_parallel_size": (1, "attention over ranks rounds differently"),
}
_NEEDED = {
    "rollout.dtype": ("auto", "generation uses the dtype of training"),
    "rollout.tensor_model_parallel_size": (1, "sums over ranks round differently"),
    **{f"rollout.{name}": (off, _WHOLE) for name, off in RolloutConfig.filters().items()},
    "rollout.speculative.method": (None, "a step of several tokens rounds differently"),
    "model.use_liger": (False, "generation does not have these kernels"),
    "model.use_remove_padding": (True, "attention is batch-invariant only over packed sequences"),
    "model.lora_rank": (0, _MERGES),
    "model.lora_adapter_path": (None, _MERGES),
    **{f"actor.fsdp_config.{name}": needed for name, needed in _ROUNDS.items()},
    **{f"ref.fsdp_config.{name}": needed for name, needed in _ROUNDS.items()},
}
"""Key of `actor_rollout_ref` -> the value that `rollout.deterministic` needs, and why."""


def check_deterministic(config: Config) -> Iterator[Problem]:
    """Settings that `rollout.deterministic` does not support: generation and training would compute differently."""
    policy, name = config.actor_rollout_ref, config.actor_rollout_ref.rollout.name
    if not policy.rollout.deterministic:
        return
    needed, values = dict(_NEEDED), flatten(policy.model_dump())
    if not engine_traits(name).batch_invariant:
        engine = next(other for other, traits in built_in_engines().items() if traits.batch_invariant)
        needed["rollout.name"] = (engine, "other engines use other GEMM and attention kernels")
    for key, (value, reason) in needed.items():
        if values[key] != value:
            message = f"found {format_value(values[key])}, but rollout.deterministic=true needs {format_value(value)}"
            yield Problem(f"actor_rollout_ref.{key}", f"{message}: {reason}")
    for key in ("actor.fsdp_config.dtype", "ref.fsdp_config.dtype"):
        if values[key] in ("fp64", "float64"):
            message = f"found {format_value(values[key])}, but log-probs of sampling are float32: use fp32 or bf16"
            yield Problem(f"actor_rollout_ref.{key}", f"{message} with rollout.deterministic")
    if config.rollout_is_separate:
        yield Problem(
            "placement.rollout_devices",
            f"found {config.placement.rollout_devices}, but rollout.deterministic=true generates with the actor's "
            "forward pass: leave it unset, or turn deterministic off",
        )


def check_speculative(config: Config) -> Iterator[Problem]:
    """The rollout engine verifies drafts, on one device."""
    rollout, method = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.speculative.method
    try:
        check_speculation(rollout.name, method)
    except ValueError as error:
        yield Problem(_ROLLOUT + "speculative.method", str(error))
    if method is not None and rollout.tensor_model_parallel_size > 1:
        message = f"{rollout.tensor_model_parallel_size}, but drafts are verified on one device: use 1, or "
        yield Problem(_ROLLOUT + "tensor_model_parallel_size", message + "rollout.speculative.method=null")


def check_filters(config: Config) -> Iterator[Problem]:
    """The training engine computes log-probs over the tokens that the filters keep."""
    policy = config.actor_rollout_ref
    lacking = [s for s in (policy.actor.strategy, policy.ref.strategy) if not strategy_traits(s).token_filters]
    if lacking and policy.rollout.filters_log_probs:
        message = f"true, but strategy={lacking[0]} computes log-probs over all tokens: use false, strategy=fsdp, or "
        yield Problem(_ROLLOUT + "truncated_log_probs", message + "turn the filters off")


def check_router_replay(config: Config) -> Iterator[Problem]:
    """Settings that contradict `actor.router_replay`."""
    policy = config.actor_rollout_ref
    mode, records = policy.actor.router_replay.mode, policy.rollout.enable_rollout_routing_replay
    if mode == "disabled" and not records:
        return
    if not strategy_traits(policy.actor.strategy).router_replay:
        message = f"strategy={policy.actor.strategy} does not support router replay: use strategy=fsdp, or disabled"
        yield Problem(_MODE, f"{mode!r}, but {message}")
    if mode == "R3" and not records:
        yield Problem(_MODE, f"'R3' replays the experts that the rollout has recorded: set {_RECORDS}=true, or use R2")
    if records and engine_traits(policy.rollout.name).records_routing is False:
        message = f"true, but rollout.name={policy.rollout.name} does not report the experts that it chooses: use "
        yield Problem(_RECORDS, message + "rollout.name=native, or router_replay.mode=R2, which records in training")
    if mode == "R2" and records:
        yield Problem(_RECORDS, "true, but router_replay.mode=R2 replays what training records: use false, or R3")
    if policy.rollout.deterministic:
        message = "true, but mixtures of experts have no batch-invariant kernels: use false"
        yield Problem("actor_rollout_ref.rollout.deterministic", message)


def rollout_notes(config: Config) -> Iterator[str]:
    """Settings of generation that are valid but may be surprising."""
    rollout = config.actor_rollout_ref.rollout
    val, buckets = rollout.val_kwargs, rollout.checkpoint_engine
    if rollout.mode == "sync":
        yield f"{_ROLLOUT}mode: sync is the same as async"
    if val.temperature > 0 and not val.do_sample:
        yield f"{_ROLLOUT}val_kwargs.temperature={val.temperature} has no effect with do_sample=false"
    if val.n > 1 and not val.do_sample:
        yield f"{_ROLLOUT}val_kwargs.n={val.n} with do_sample=false generates {val.n} equal responses per prompt"
    if buckets != type(buckets)() and not has_separate_rollout(config):
        key = f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes"
        yield f"{key} has no effect where the rollout engine runs in the process of the trainer"
    yield from _tool_notes(rollout)


def _tool_notes(rollout: RolloutConfig) -> Iterator[str]:
    """Tools are set, but the loop of all rows without the column agent_name calls none."""
    paths = ("tool_config_path", "function_tool_path")
    keys = [f"{_ROLLOUT}multi_turn.{name}" for name in paths if getattr(rollout.multi_turn, name) is not None]
    if keys and rollout.agent.default_agent_loop in ("single_turn", "single_turn_agent"):
        yield (
            f"{' and '.join(keys)}: prompts describe the tools, but no tool is called, except for rows with the column "
            f"agent_name: set {_ROLLOUT}multi_turn.enable=true"
        )
