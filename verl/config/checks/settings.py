"""Checks across fields: values that are valid on their own but not together. Run before anything is loaded.

A check is a function of the typed configuration that yields problems; `load_config(extra_checks=[...])` takes more.
"""

import math
from collections.abc import Iterator
from pathlib import PurePath

from verl.config.checks.asynchronous import asynchronous, has_separate_rollout, placement_is_open
from verl.config.checks.critic import may_have_critic
from verl.config.checks.megatron import megatron, megatron_notes
from verl.config.checks.moe import router_replay
from verl.config.errors import Problem, format_value
from verl.config.fields import Schema, flatten, to_flat_dict
from verl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.model import EngineConfig
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.rollout import LOWEST_TEMPERATURE, RolloutConfig, RolloutEngineConfig
from verl.config.schema.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig
from verl.config.schema.trainer import RunConfig, TrainerConfig
from verl.utils.redaction import not_saved

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_TEMPLATES = "custom_chat_template"
_WITHOUT_TENSOR_PARALLELISM = ("hf",)  # built-in rollout engines
_CANDIDATES = 10_000  # numbers tried for a hint


def check_combinations(config: Schema) -> list[Problem]:
    """Every conflict between fields of a configuration."""
    problems = [*_templates(config), *_zeros(config)]
    match config:
        case Config():
            checks = (
                asynchronous,  # first: others depend on its placement
                _batches, _ranks, _rollout_ranks, _worker_env, _sampling, _weight_sync, _groups, _kl, _losses, _rewards,
                _kernels,
                _deterministic,
                _models,
                megatron,
                router_replay,
            )  # fmt: skip
            problems += [*_secrets(config), *_run_name(config.trainer), *_resume(config.trainer)]
            problems += [problem for check in checks for problem in check(config)]
        case GenerationConfig():
            ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
            problems += _tensor_parallel_rollout("rollout.", config.rollout, ranks)
        case SFTConfig():
            problems += [*_secrets(config), *_run_name(config.trainer), *_resume(config.trainer)]
            problems += [*_custom_class(config.data), *_sft_ranks(config), *_models(config)]
            problems += megatron(config)
    return problems


def notes_of(config: Schema) -> list[str]:
    """Warnings about settings that are valid but may be surprising. Logged once."""
    if not isinstance(config, Config):
        return [*megatron_notes(config)] if isinstance(config, SFTConfig) else []
    notes, val = [], config.actor_rollout_ref.rollout.val_kwargs
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        notes.append(
            f"the KL to the reference is applied twice: by algorithm.use_kl_in_reward and by {_ACTOR}use_kl_loss"
        )
    if val.temperature > 0 and not val.do_sample:
        notes.append(f"{_ROLLOUT}val_kwargs.temperature={val.temperature} has no effect with do_sample=false")
    if val.n > 1 and not val.do_sample:
        key = _ROLLOUT + "val_kwargs.n"
        notes.append(f"{key}={val.n} with do_sample=false generates {val.n} equal responses per prompt")
    policy, key = config.actor_rollout_ref, "checkpoint_engine.update_weights_bucket_megabytes"
    buckets = policy.rollout.checkpoint_engine
    if policy.rollout.lora_sync != "auto" and not policy.model.has_adapters:
        notes.append(f"{_ROLLOUT}lora_sync={policy.rollout.lora_sync} has no effect without LoRA")
    if buckets != type(buckets)() and not has_separate_rollout(config):
        notes.append(f"{_ROLLOUT}{key} has no effect where the rollout engine runs in the process of the trainer")
    if config.trainer.max_staleness and config.data.gen_batch_size not in (None, config.data.train_batch_size):
        notes.append("data.gen_batch_size has no effect with trainer.async.max_staleness > 0")
    return notes + [*dict.fromkeys(megatron_notes(config))] + _tool_notes(config.actor_rollout_ref.rollout)


def _tool_notes(rollout: RolloutConfig) -> list[str]:
    """Tools are set, but the loop of all rows without the column agent_name calls none."""
    paths = ("tool_config_path", "function_tool_path")
    given = [f"{_ROLLOUT}multi_turn.{name}" for name in paths if getattr(rollout.multi_turn, name) is not None]
    if not given or rollout.agent.default_agent_loop not in ("single_turn", "single_turn_agent"):
        return []
    return [
        f"{' and '.join(given)}: prompts describe the tools, but no tool is called, except for rows with the column "
        f"agent_name: set {_ROLLOUT}multi_turn.enable=true"
    ]


def _batches(config: Config) -> Iterator[Problem]:
    batch = config.data.train_batch_size
    updates = {_ACTOR: config.actor_rollout_ref.actor}
    if may_have_critic(config):
        updates["critic."] = config.critic
    seen = set()
    for prefix, update in updates.items():
        mini = update.ppo_mini_batch_size
        if batch % mini and mini not in seen:
            seen.add(mini)
            below, above = batch // mini * mini, (batch // mini + 1) * mini
            batches = " or ".join(str(size) for size in (below, above) if size)
            yield Problem(
                "data.train_batch_size",
                f"{batch} is not a multiple of {prefix}ppo_mini_batch_size={mini}: use a mini-batch of "
                f"{_divisors_near(batch, mini)}, or a batch of {batches}",
            )


#: keys of a `fsdp_config` or `megatron` section whose product is the model-parallel size
_MODEL_PARALLEL_SIZES = (
    *("ulysses_sequence_parallel_size", "tensor_parallel_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)


def _section(role: ActorConfig | RefConfig | CriticConfig, fsdp: str) -> str:
    """The name of the section of the selected engine."""
    return "megatron" if role.strategy == "megatron" else fsdp


def _ranks(config: Config) -> Iterator[Problem]:
    """Every data-parallel rank must get the same number of samples of each mini-batch."""
    if placement_is_open(config):
        return
    reported: set[tuple[int, int]] = set()
    trainer, policy, n = config.trainer, config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    for role, prefix, mini, engine, section in (
        ("actor", _ACTOR, policy.actor.ppo_mini_batch_size, policy.actor.engine, _section(policy.actor, "fsdp_config")),
        ("ref", "actor_rollout_ref.ref.", None, policy.ref.engine, _section(policy.ref, "fsdp_config")),
        ("critic", "critic.", config.critic.ppo_mini_batch_size, config.critic.engine, _section(config.critic, "fsdp")),
    ):
        if role == "critic" and not may_have_critic(config):
            continue
        devices = config.placement.model_dump()[f"{role}_devices"] or config.placement.actor_devices
        ranks = len(devices) if devices else trainer.nnodes * trainer.n_gpus_per_node
        sizes = {key: engine[key] for key in _MODEL_PARALLEL_SIZES if key in engine}
        yield from _shard_groups(f"{prefix}{section}", engine, ranks)
        if ranks % engine.ranks_with_same_rows:
            key = next(key for key, size in sizes.items() if size > 1)
            group = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
            what = f"{ranks} ranks are not divisible by the model-parallel size {engine.ranks_with_same_rows} ({group})"
            yield Problem(f"{prefix}{section}.{key}", what)
            continue
        ranks //= engine.ranks_with_same_rows
        if mini is not None and mini * n % ranks and (mini, ranks) not in reported:
            reported.add((mini, ranks))  # the critic's sizes default to the actor's
            step = ranks // math.gcd(n, ranks)
            fitting = " or ".join(str(m) for m in (mini // step * step, mini // step * step + step) if m)
            yield Problem(
                f"{prefix}ppo_mini_batch_size",
                f"{mini} prompts x {n} samples = {mini * n} responses are not divisible by {ranks} ranks: "
                f"use {fitting} prompts",
            )


def _shard_groups(section: str, engine: EngineConfig | MegatronConfig, ranks: int) -> Iterator[Problem]:
    """FSDP shards over groups of `fsdp_size` ranks, of those that a tensor-parallel group leaves."""
    if isinstance(engine, MegatronConfig) or ranks == 1 or ranks % engine.tensor_parallel_size:
        return
    size, sharding = engine.fsdp_size, ranks // engine.tensor_parallel_size
    if size > 0 and sharding % size:
        what = f"{size} does not divide the {sharding} ranks that FSDP shards over: use a divisor, or -1 for all"
        yield Problem(f"{section}.fsdp_size", what)


def _rollout_ranks(config: Config) -> Iterator[Problem]:
    trainer, placed = config.trainer, config.placement
    devices = placed.rollout_devices if config.rollout_is_separate else placed.actor_devices
    ranks = len(devices) if devices else trainer.nnodes * trainer.n_gpus_per_node
    rollout = config.actor_rollout_ref.rollout
    yield from _tensor_parallel_rollout(_ROLLOUT, rollout, None if placement_is_open(config) else ranks)


def _tensor_parallel_rollout(prefix: str, rollout: RolloutEngineConfig, ranks: int | None) -> Iterator[Problem]:
    """The tensor-parallel size divides the number of rollout ranks, if known. A custom engine is checked when it is
    made."""
    key, size = f"{prefix}tensor_model_parallel_size", rollout.tensor_model_parallel_size
    if size > 1 and rollout.name in _WITHOUT_TENSOR_PARALLELISM:
        yield Problem(
            key,
            f"{size} is not supported by {prefix}name={rollout.name}, which generates with the whole model on every "
            "device: use 1, or name=native",
        )
    elif ranks is not None and ranks % size:
        fitting = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield Problem(key, f"{size} does not divide the number of ranks that generate, {ranks}: use {fitting}")


def _sft_ranks(config: SFTConfig) -> Iterator[Problem]:
    """The same for an SFT batch."""
    batch, engine, ranks = config.data.train_batch_size, config.engine.selected, config.trainer.n_gpus_per_node
    yield from _shard_groups("engine", engine, ranks)
    sizes = " x ".join(f"engine.{key}" for key in _MODEL_PARALLEL_SIZES if key in engine)
    if ranks % engine.ranks_with_same_rows:
        yield Problem(
            "trainer.n_gpus_per_node",
            f"{ranks} ranks are not divisible by the model-parallel size {engine.ranks_with_same_rows} ({sizes})",
        )
    elif batch % (ranks := ranks // engine.ranks_with_same_rows):
        fitting = " or ".join(str(size) for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size)
        yield Problem("data.train_batch_size", f"{batch} samples are not divisible by {ranks} ranks: use {fitting}")


_SET_FOR_WORKERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_SET_FOR_WORKERS |= {"CUDA_VISIBLE_DEVICES", "PYTHONPATH"}


def _worker_env(config: Config) -> Iterator[Problem]:
    for name in _SET_FOR_WORKERS & config.trainer.worker_env.keys():
        yield Problem(f"trainer.worker_env.{name}", "is set for each worker from its rank: remove it")


def _secrets(config: Schema) -> Iterator[Problem]:
    for key in not_saved(to_flat_dict(config)):
        yield Problem(key, "its value was not saved with the configuration, since it may be a secret: set it again")


def _run_name(trainer: RunConfig) -> Iterator[Problem]:
    """Names are components of the default folder of the run and must not contain `..` or be absolute."""
    for key, name in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        path = PurePath(name)
        if not name.strip() or path.is_absolute() or ".." in path.parts:
            yield Problem(
                f"trainer.{key}",
                f"found {name!r}, expected a name or a relative path without '..'; trainer.default_local_dir sets the "
                "folder of the run",
            )


def _divisors_near(number: int, wanted: int) -> str:
    """The nearest divisors of a number below and above `wanted`, among the `_CANDIDATES` numbers around it."""
    lower = range(min(wanted - 1, number), max(wanted - 1 - _CANDIDATES // 2, 0), -1)
    upper = range(wanted + 1, min(wanted + _CANDIDATES // 2, number) + 1)
    nearest = [next((d for d in candidates if number % d == 0), None) for candidates in (lower, upper)]
    return " or ".join(str(d) for d in nearest if d) or f"1 or {number}"


def _sampling(config: Config) -> Iterator[Problem]:
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
    for name, (here, there) in lengths.items():
        if here != there:
            what = f"found {here}, but data.max_{name}_length is {there}: set only data.max_{name}_length"
            yield Problem(f"{_ROLLOUT}{name}_length", what)


def _weight_sync(config: Config) -> Iterator[Problem]:
    rollout, separate = config.actor_rollout_ref.rollout, has_separate_rollout(config)
    key, found = _ROLLOUT + "weight_sync", rollout.weight_sync
    if separate and found not in ("auto", "collective", "disk"):
        yield Problem(key, f"found {found}, but the rollout has separate devices: use auto, collective or disk")
    if not separate and found in ("collective", "disk"):
        yield Problem(
            key, f"found {found}, but rollout and training share devices: use auto, or set placement.rollout_devices"
        )
    if found == "disk" and rollout.weight_sync_dir is None:
        yield Problem(_ROLLOUT + "weight_sync_dir", "missing: weight_sync=disk needs a folder")
    if found == "disk" and rollout.lora_sync == "adapters" and config.actor_rollout_ref.model.has_adapters:
        yield Problem(_ROLLOUT + "lora_sync", "found adapters, but weight_sync=disk writes merged weights: use merged")
    if found != "disk" and rollout.weight_sync_dir is not None:
        what = f"{rollout.weight_sync_dir!r}, but weight_sync={found} writes no files: use weight_sync=disk, or null"
        yield Problem(_ROLLOUT + "weight_sync_dir", what)


def _groups(config: Config) -> Iterator[Problem]:
    enabled, n = config.algorithm.filter_groups.enable, config.actor_rollout_ref.rollout.n
    if enabled and n < 2:
        yield Problem(
            _ROLLOUT + "n",
            f"found {n}, but algorithm.filter_groups drops zero-variance groups: use 2 or more",
        )
    if enabled and config.algorithm.filter_groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.filter_groups.metric",
            "found seq_final_reward, the reward after the KL penalty, but groups are filtered before the penalty is "
            "computed: use seq_reward",
        )
    size, limit = config.data.gen_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    most = limit * (size or config.data.train_batch_size)
    if enabled and limit and most < config.data.train_batch_size:
        yield Problem(
            "algorithm.filter_groups.max_num_gen_batches",
            f"found {limit}, which is at most {most} prompts: too few for data.train_batch_size="
            f"{config.data.train_batch_size}",
        )
    if size is not None and size != config.data.train_batch_size and not enabled:
        yield Problem(
            "data.gen_batch_size",
            f"found {size}, which has no effect without algorithm.filter_groups.enable=true: use null",
        )


def _kl(config: Config) -> Iterator[Problem]:
    use = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if use and config.actor_rollout_ref.ref.enable is False:
        enabled = "algorithm.use_kl_in_reward" if config.algorithm.use_kl_in_reward else _ACTOR + "use_kl_loss"
        yield Problem(
            "actor_rollout_ref.ref.enable", f"false, but {enabled}=true needs the reference: change one of them"
        )


def _losses(config: Config) -> Iterator[Problem]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield Problem(_ACTOR + "policy_loss.dro_beta", "null, but the loss dro needs it: use a float > 0")
    lower, upper = loss.clip_cov_lb, loss.clip_cov_ub
    if lower >= upper:
        yield Problem(_ACTOR + "policy_loss.clip_cov_lb", f"found {lower}, expected less than clip_cov_ub={upper}")


def _rewards(config: Config) -> Iterator[Problem]:
    custom, registered = config.reward.custom_reward_function.path, config.reward.reward_function
    if custom and registered:
        what = f"{registered!r}, but reward.custom_reward_function.path={custom!r} is set as well: keep one"
        yield Problem("reward.reward_function", what)
    manager = config.reward.reward_manager
    if (manager.source == "importlib") != (manager.module.path is not None):
        yield Problem(
            "reward.reward_manager.module.path",
            "must be set if, and only if, reward.reward_manager.source is importlib",
        )
    yield from _custom_class(config.data)


def _kernels(config: Config) -> Iterator[Problem]:
    policy, critic = config.actor_rollout_ref, config.critic
    engines = {
        f"{_ACTOR}fsdp_config": (policy.model, policy.actor.fsdp_config),
        "actor_rollout_ref.ref.fsdp_config": (policy.model, policy.ref.fsdp_config),
        "critic.fsdp": (critic.model, critic.fsdp),
    }
    for section, (model, engine) in engines.items():
        if model.use_liger and engine.use_torch_compile:
            yield Problem(f"{section}.use_torch_compile", "true, but model.use_liger is true as well: use one of them")


def _models(config: Config | SFTConfig) -> Iterator[Problem]:
    """Adapters that train nothing; strategy=megatron has no models with images."""
    if isinstance(config, SFTConfig):
        models = {"model": (config.model, config.engine)}
    else:
        policy = config.actor_rollout_ref
        models = {
            "actor_rollout_ref.model": (policy.model, policy.actor),
            "critic.model": (config.critic.model, config.critic),
        }
    for name, (model, engine) in models.items():
        if model.lora_rank and not model.lora_alpha:
            yield Problem(f"{name}.lora_alpha", f"found 0, expected float > 0 with lora_rank={model.lora_rank}")
        if model.freeze_vision_tower and engine.strategy == "megatron":
            what = "true, but strategy=megatron does not support vision-language models: use false, or strategy=fsdp"
            yield Problem(f"{name}.freeze_vision_tower", what)


def _deterministic(config: Config) -> Iterator[Problem]:
    """Settings that `rollout.deterministic` does not support: generation and training would compute differently."""
    policy = config.actor_rollout_ref
    rollout, model = policy.rollout, policy.model
    if not rollout.deterministic:
        return
    sections = {"actor.fsdp_config": policy.actor.fsdp_config, "ref.fsdp_config": policy.ref.fsdp_config}
    required = {
        "rollout.name": (rollout.name, "native", "other engines use other GEMM and attention kernels"),
        "rollout.dtype": (rollout.dtype, "auto", "generation uses the dtype of training"),
        "rollout.tensor_model_parallel_size": (
            rollout.tensor_model_parallel_size,
            1,
            "sums over ranks round differently",
        ),
        **{
            f"rollout.{name}": (getattr(rollout, name), off, "log-probs in training are those of the full distribution")
            for name, off in rollout.filters().items()
        },
        "model.use_liger": (model.use_liger, False, "generation does not have these kernels"),
        "model.use_remove_padding": (
            model.use_remove_padding,
            True,
            "attention is batch-invariant only over packed sequences",
        ),
        "model.lora_rank": (model.lora_rank, 0, "generation merges the adapters and training does not"),
        "model.lora_adapter_path": (
            model.lora_adapter_path,
            None,
            "generation merges the adapters and training does not",
        ),
    }
    for name, engine in sections.items():
        if engine.dtype in ("fp64", "float64"):
            yield Problem(
                f"actor_rollout_ref.{name}.dtype",
                f"found {format_value(engine.dtype)}, but log-probs of sampling are float32: use fp32 or bf16 with "
                "rollout.deterministic",
            )
        required |= {
            f"{name}.use_torch_compile": (engine.use_torch_compile, False, "compiled layers round differently"),
            f"{name}.tensor_parallel_size": (engine.tensor_parallel_size, 1, "sums over ranks round differently"),
            f"{name}.ulysses_sequence_parallel_size": (
                engine.ulysses_sequence_parallel_size,
                1,
                "attention over ranks rounds differently",
            ),
        }
    if config.rollout_is_separate:
        yield Problem(
            "placement.rollout_devices",
            f"found {config.placement.rollout_devices}, but rollout.deterministic=true generates with the actor's "
            "forward pass: leave it unset, or turn deterministic off",
        )
    for key, (found, needed, why) in required.items():
        if found != needed:
            what = f"found {format_value(found)}, but rollout.deterministic=true needs {format_value(needed)}: {why}"
            yield Problem(f"actor_rollout_ref.{key}", what)


def _custom_class(data: DataConfig | SFTDataConfig) -> Iterator[Problem]:
    path, name = data.custom_cls.path, data.custom_cls.name
    if (path is None) != (name is None):
        yield Problem("data.custom_cls.name", f"path is {path!r} and name is {name!r}: set both or neither")


def _resume(trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[Problem]:
    key, mode = "trainer.resume_from_path", trainer.resume_mode
    if mode == "resume_path" and not trainer.resume_from_path:
        yield Problem(key, "null, but trainer.resume_mode=resume_path needs it: set it to a global_step_N folder")


def _templates(config: Schema) -> Iterator[Problem]:
    """A chat template must read `messages`; a file name does not, and would replace every prompt."""
    for key, text in flatten(config.model_dump(), type(config)).items():
        if key.rpartition(".")[2] == _TEMPLATES and text is not None and "messages" not in text:
            yield Problem(
                key,
                f"{format_value(text)} does not read `messages`: expected the text of a Jinja template (in a YAML "
                f"file: `{_TEMPLATES}: |`, then the lines of the template)",
            )


def _zeros(config: Schema) -> Iterator[Problem]:
    """Fields that are a number of at least 1, or -1 for all."""
    for key, value in flatten(config.model_dump(), type(config)).items():
        what = {"top_k": "all tokens", "fsdp_size": "all ranks"}.get(key.rpartition(".")[2])
        if what and value == 0:
            yield Problem(key, f"found 0, expected int >= 1, or -1 for {what}")
