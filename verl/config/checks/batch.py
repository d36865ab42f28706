"""Checks of batches, and of the ranks that share them."""

import math
from collections.abc import Iterator

from verl.config.checks.algorithm import may_have_critic
from verl.config.checks.rollout import placement_is_open
from verl.config.checks.run import ModelRole, model_roles
from verl.config.errors import Problem
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.rollout import RolloutEngineConfig
from verl.config.schema.sft import SFTConfig
from verl.rollout.traits import engine_traits

_ACTOR = "actor_rollout_ref.actor."
_CANDIDATES = 10_000  # numbers tried for a hint

#: keys of a `fsdp_config` or `megatron` section whose product is the model-parallel size
_MODEL_PARALLEL_SIZES = (
    *("ulysses_sequence_parallel_size", "tensor_parallel_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)


def check_batches(config: Config) -> Iterator[Problem]:
    """A batch is a number of whole mini-batches."""
    batch, actor = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    critic = config.critic.ppo_mini_batch_size
    if batch % actor:
        yield _uneven_batch(batch, _ACTOR, actor)
    if batch % critic and critic != actor and may_have_critic(config):
        yield _uneven_batch(batch, "critic.", critic)


def _uneven_batch(batch: int, prefix: str, mini: int) -> Problem:
    below, above = batch // mini * mini, (batch // mini + 1) * mini
    batches = " or ".join(str(size) for size in (below, above) if size)
    return Problem(
        "data.train_batch_size",
        f"{batch} is not a multiple of {prefix}ppo_mini_batch_size={mini}: use a mini-batch of "
        f"{_divisors_near(batch, mini)}, or a batch of {batches}",
    )


def _divisors_near(number: int, size: int) -> str:
    """The nearest divisors of a number below and above `size`, among the `_CANDIDATES` numbers around it."""
    lower = range(min(size - 1, number), max(size - 1 - _CANDIDATES // 2, 0), -1)
    upper = range(size + 1, min(size + _CANDIDATES // 2, number) + 1)
    nearest = [next((d for d in candidates if number % d == 0), None) for candidates in (lower, upper)]
    return " or ".join(str(d) for d in nearest if d) or f"1 or {number}"


def check_ranks(config: Config) -> Iterator[Problem]:
    """Every data-parallel rank must get the same number of samples of each mini-batch."""
    if placement_is_open(config):
        return
    devices, reported = config.placement, set()
    for role in model_roles(config):
        numbers = [0] if role.name in devices.local_roles else devices[f"{role.name}_devices"]
        problems = [*_check_role(config, role, numbers or devices.actor_devices)]
        if role.name == "critic":  # its sizes are by default those of the actor
            problems = [each for each in problems if each.message not in reported and may_have_critic(config)]
        reported |= {problem.message for problem in problems if problem.key.endswith("ppo_mini_batch_size")}
        yield from problems


def _check_role(config: Config, role: ModelRole, devices: list[int] | None) -> Iterator[Problem]:
    """The sizes of one role divide its ranks, and the ranks a mini-batch. devices: None: all."""
    n = config.actor_rollout_ref.rollout.n
    ranks = len(devices) if devices else config.trainer.nnodes * config.trainer.n_gpus_per_node
    yield from _check_model_parallel(role, ranks)
    mini, ranks = role.section.get("ppo_mini_batch_size"), _data_parallel_ranks(role, ranks)
    if mini is not None and ranks and mini * n % ranks:
        step = ranks // math.gcd(n, ranks)
        fitting = " or ".join(str(m) for m in (mini // step * step, mini // step * step + step) if m)
        yield Problem(
            f"{role.prefix}ppo_mini_batch_size",
            f"{mini} prompts x {n} samples = {mini * n} responses are not divisible by {ranks} ranks: "
            f"use {fitting} prompts",
        )


def _data_parallel_ranks(role: ModelRole, ranks: int) -> int:
    """Ranks with different rows; 0 if the model-parallel size does not divide the ranks."""
    return 0 if ranks % role.engine.ranks_with_same_rows else ranks // role.engine.ranks_with_same_rows


def _check_model_parallel(role: ModelRole, ranks: int) -> Iterator[Problem]:
    """The model-parallel size divides the ranks, and the size of FSDP's groups those that it shards over."""
    engine, section = role.engine, role.engine_key
    if not (isinstance(engine, MegatronConfig) or ranks == 1 or ranks % engine.tensor_parallel_size):
        size, sharding = engine.fsdp_size, ranks // engine.tensor_parallel_size
        if size > 0 and sharding % size:
            message = f"{size} does not divide the {sharding} ranks that FSDP shards over: use a divisor, or -1 for all"
            yield Problem(f"{section}.fsdp_size", message)
    if not _data_parallel_ranks(role, ranks):
        sizes = {key: engine[key] for key in _MODEL_PARALLEL_SIZES if key in engine and engine[key] > 1}
        group = " x ".join(f"{key}={size}" for key, size in sizes.items())
        message = f"{ranks} ranks are not divisible by the model-parallel size {engine.ranks_with_same_rows} ({group})"
        yield Problem(f"{section}.{next(iter(sizes))}", message)


def shard_notes(config: Config | SFTConfig) -> Iterator[str]:
    """One process is not sharded."""
    role, processes = model_roles(config)[0], config.trainer.nnodes * config.trainer.n_gpus_per_node
    if processes == 1 and not isinstance(role.engine, MegatronConfig) and role.engine.fsdp_size > 1:
        yield f"{role.engine_key}.fsdp_size={role.engine.fsdp_size} has no effect with one process"


def check_rollout_ranks(config: Config) -> Iterator[Problem]:
    """The tensor-parallel size divides the number of rollout ranks, if known."""
    trainer, placement = config.trainer, config.placement
    devices = placement.rollout_devices if config.rollout_is_separate else placement.actor_devices
    ranks = len(devices) if devices else trainer.nnodes * trainer.n_gpus_per_node
    rollout = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout."
    yield from _check_tensor_parallel(prefix, rollout, None if placement_is_open(config) else ranks)


def check_generation_ranks(config: GenerationConfig) -> Iterator[Problem]:
    """The same without training."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    yield from _check_tensor_parallel("rollout.", config.rollout, ranks)


def _check_tensor_parallel(prefix: str, rollout: RolloutEngineConfig, ranks: int | None) -> Iterator[Problem]:
    """A custom engine is checked when it is made. ranks: None if not known."""
    key, size = f"{prefix}tensor_model_parallel_size", rollout.tensor_model_parallel_size
    if size > 1 and not engine_traits(rollout.name).tensor_parallel:
        yield Problem(
            key,
            f"{size} is not supported by {prefix}name={rollout.name}, which generates with the whole model on every "
            "device: use 1, or name=native",
        )
    elif ranks is not None and ranks % size:
        fitting = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield Problem(key, f"{size} does not divide the number of ranks that generate, {ranks}: use {fitting}")


def check_sft_ranks(config: SFTConfig) -> Iterator[Problem]:
    """Every data-parallel rank must get the same number of samples of a batch."""
    batch, (role,) = config.data.train_batch_size, model_roles(config)
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    yield from _check_model_parallel(role, processes)
    ranks = _data_parallel_ranks(role, processes)
    if ranks and batch % ranks:
        fitting = " or ".join(str(size) for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size)
        yield Problem("data.train_batch_size", f"{batch} samples are not divisible by {ranks} ranks: use {fitting}")
