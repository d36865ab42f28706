"""Checks of the run and its models: names, checkpoints, rewards, templates, adapters and FP8."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from verl.config.errors import Problem, format_value
from verl.config.fields import Schema, Section, derived_fields, differences, flatten, to_flat_dict
from verl.config.public.upstream import upstream_engines
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.model import EngineConfig, ModelConfig
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig
from verl.engines.traits import built_in_strategies, strategy_traits
from verl.registry import did_you_mean
from verl.rollout.traits import built_in_engines, engine_traits
from verl.utils.redaction import not_saved

_ACTOR = "actor_rollout_ref.actor."
_TEMPLATES = "custom_chat_template"
_SET_FOR_WORKERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_SET_FOR_WORKERS |= {"CUDA_VISIBLE_DEVICES", "PYTHONPATH"}


@dataclass(frozen=True)
class ModelRole:
    """A model with its training engine, and the keys of their sections.

    Attributes:
        name: actor, ref or critic.
        prefix: of the keys of `section`, which has the optimizer of a trained model.
        engine: the section of the selected engine.
    """

    name: str
    prefix: str
    section: Any
    model_key: str
    model: ModelConfig
    engine_key: str
    engine: EngineConfig | MegatronConfig
    strategy: str


def model_roles(config: Config | SFTConfig) -> list[ModelRole]:
    """The actor, the reference and the critic, whether the run has them or not; of SFT, the actor."""
    if isinstance(config, SFTConfig):
        engine = config.engine.selected
        key = "engine.megatron" if isinstance(engine, MegatronConfig) else "engine"
        return [ModelRole("actor", "", config, "model", config.model, key, engine, config.engine.strategy)]
    policy, critic, roles = config.actor_rollout_ref, config.critic, []
    for name, section in (("actor", policy.actor), ("ref", policy.ref), ("critic", critic)):
        prefix, model_key, model = f"actor_rollout_ref.{name}.", "actor_rollout_ref.model", policy.model
        if name == "critic":
            prefix, model_key, model = "critic.", "critic.model", critic.model
        key = prefix + next(key for key, value in section if value is section.engine)
        roles.append(ModelRole(name, prefix, section, model_key, model, key, section.engine, section.strategy))
    return roles


def check_templates(config: Schema) -> Iterator[Problem]:
    """A chat template must read `messages`; the name of a file that does not exist would replace every prompt."""
    for key, text in flatten(config.model_dump(), type(config)).items():
        if key.rpartition(".")[2] == _TEMPLATES and text is not None and "messages" not in text:
            yield Problem(
                key,
                f"{format_value(text)} does not read `messages`: expected a Jinja template (in a YAML file: "
                f"`{_TEMPLATES}: |`, then its lines), or the path of a file *.jinja that exists",
            )


def check_zeros(config: Schema) -> Iterator[Problem]:
    """Fields that are a number of at least 1, or -1 for all."""
    for key, value in flatten(config.model_dump(), type(config)).items():
        everything = {"top_k": "all tokens", "fsdp_size": "all ranks"}.get(key.rpartition(".")[2])
        if everything and value == 0:
            yield Problem(key, f"found 0, expected int >= 1, or -1 for {everything}")


def check_secrets(config: Schema) -> Iterator[Problem]:
    """A configuration that was saved by a run has lost values that may be secrets."""
    for key in not_saved(to_flat_dict(config)):
        yield Problem(key, "its value was not saved with the configuration, since it may be a secret: set it again")


def check_run_name(config: Config | SFTConfig) -> Iterator[Problem]:
    """Names are components of the default folder of the run and must not contain `..` or be absolute."""
    trainer = config.trainer
    for key, name in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        path = PurePath(name)
        if not name.strip() or path.is_absolute() or ".." in path.parts:
            yield Problem(
                f"trainer.{key}",
                f"found {name!r}, expected a name or a relative path without '..'; trainer.default_local_dir sets the "
                "folder of the run",
            )


def check_resume(config: Config | SFTConfig) -> Iterator[Problem]:
    """`resume_mode=resume_path` has a path."""
    key, trainer = "trainer.resume_from_path", config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Problem(key, "null, but trainer.resume_mode=resume_path needs it: set it to a global_step_N folder")


def check_worker_env(config: Config | SFTConfig) -> Iterator[Problem]:
    """`worker_env` has no variable that each worker gets from its rank."""
    for name in _SET_FOR_WORKERS & config.trainer.worker_env.keys():
        yield Problem(f"trainer.worker_env.{name}", "is set for each worker from its rank: remove it")


def check_rewards(config: Config) -> Iterator[Problem]:
    """There is one reward function, and a file for a manager that is imported."""
    custom, registered = config.reward.custom_reward_function.path, config.reward.reward_function
    if custom and registered:
        message = f"{registered!r}, but reward.custom_reward_function.path={custom!r} is set as well: keep one"
        yield Problem("reward.reward_function", message)
    manager = config.reward.reward_manager
    if (manager.source == "importlib") != (manager.module.path is not None):
        yield Problem(
            "reward.reward_manager.module.path",
            "must be set if, and only if, reward.reward_manager.source is importlib",
        )


def check_dataset_class(config: Config | SFTConfig) -> Iterator[Problem]:
    """A custom dataset class has a file and a name."""
    path, name = config.data.custom_cls.path, config.data.custom_cls.name
    if (path is None) != (name is None):
        yield Problem("data.custom_cls.name", f"path is {path!r} and name is {name!r}: set both or neither")


def check_sampler(config: Config) -> Iterator[Problem]:
    """A custom sampler has a file and a name, and alone decides the order; each training file has a weight."""
    sampler, files, weights = config.data.sampler, config.data.train_files, config.data.train_weights
    if weights and len(weights) != len(files):
        message = f"expected one weight for each of data.train_files, found {len(weights)} for {len(files)}"
        yield Problem("data.train_weights", message)
    if weights and sampler.class_path:
        yield Problem("data.sampler.class_path", "decides the order, as data.train_weights does: remove one of them")
    if (sampler.class_path is None) != (sampler.class_name is None):
        yield Problem(
            "data.sampler.class_name",
            f"class_path is {sampler.class_path!r} and class_name is {sampler.class_name!r}: set both or neither",
        )


def check_adapters(config: Config | SFTConfig) -> Iterator[Problem]:
    """Adapters that train nothing; strategy=megatron has no models with images and no 8-bit optimizer."""
    for role in model_roles(config):
        model, key, engine = role.model, role.model_key, role.engine
        if role.name == "ref":  # its model is that of the actor
            continue
        optimizer = role.section.optim.optimizer
        if optimizer != "AdamW" and (isinstance(engine, MegatronConfig) or engine.tensor_parallel_size > 1):
            message = f"{optimizer} is not supported with strategy=megatron or tensor_parallel_size > 1: use AdamW"
            yield Problem(f"{role.prefix}optim.optimizer", message)
        if model.lora_rank and not model.lora_alpha:
            yield Problem(f"{key}.lora_alpha", f"found 0, expected float > 0 with lora_rank={model.lora_rank}")
        if model.freeze_vision_tower and isinstance(role.engine, MegatronConfig):
            message = "true, but strategy=megatron does not support vision-language models: use false, or strategy=fsdp"
            yield Problem(f"{key}.freeze_vision_tower", message)


_FP8 = {"lora_rank": (0,), "lora_adapter_path": (None,), "use_liger": (False,)}
_FP8 |= {"tensor_parallel_size": (1,), "expert_parallel_size": (1,), "tensor_model_parallel_size": (1,)}
_FP8 |= {"dtype": ("auto", "bf16", "bfloat16", "fp32", "float32")}
"""Key of a model or of its engines -> the values that `model.quantization=fp8` supports."""


def check_fp8(config: Config | SFTConfig | GenerationConfig) -> Iterator[Problem]:
    """Settings that `model.quantization=fp8` does not support."""
    values: dict[str, tuple[Any, tuple]] = {}
    sections: dict[str, Section] = {}
    generates_only = isinstance(config, GenerationConfig)
    for role in [] if generates_only else model_roles(config):
        if role.model.quantization == "fp8":
            sections |= {role.model_key: role.model, role.engine_key: role.engine}
            names = tuple(name for name, traits in built_in_strategies().items() if traits.model_parallel is False)
            values[f"{role.prefix or 'engine.'}strategy"] = role.strategy, names
    policy = config if generates_only else getattr(config, "actor_rollout_ref", None)
    if policy is not None and policy.model.quantization == "fp8":
        key = "rollout" if generates_only else "actor_rollout_ref.rollout"
        sections[key] = policy.rollout
        values[f"{key}.name"] = policy.rollout.name, tuple(n for n, each in built_in_engines().items() if each.fp8)
    for key, section in sections.items():
        values |= {f"{key}.{name}": (section[name], _FP8[name]) for name in _FP8.keys() & type(section).model_fields}
    for key, (value, supported) in values.items():
        if value not in supported:
            use = " or ".join(map(format_value, supported))
            yield Problem(key, f"{format_value(value)} is not supported with model.quantization=fp8: use {use}")


# ---- registered names -----------------------------------------------------------------------------------------------

# Keys are ends of dotted keys: "rollout.name" stands for `actor_rollout_ref.rollout.name`.

REGISTERED_KINDS: dict[str, str] = {
    "rollout.name": "rollout engine",
    "strategy": "training engine",
    "rollout.agent.default_agent_loop": "agent loop",
    "rollout.multi_turn.format": "tool parser",
}
"""End of a key -> the kind of object that is registered under its value."""

_TRAITS: dict[str, Callable] = {"rollout.name": engine_traits, "strategy": strategy_traits}


def check_registered(config: Schema, registered: Mapping[str, Collection[str]]) -> list[Problem]:
    """Names of engines and agent loops that nothing has registered. Call after `imports` are loaded.

    Args:
        registered: end of a key, as in `REGISTERED_KINDS` -> the registered names. Other keys are not checked.

    Returns:
        A problem for each unknown name, with the nearest and all registered names, and for each known one whose
        package is not installed.
    """
    problems = []
    for key, value in flatten(config.model_dump(), type(config)).items():
        end = next((end for end in registered if f".{key}".endswith(f".{end}")), None)
        if end is None:
            continue
        if value not in registered[end]:
            problems.append(Problem(key, _not_registered(key, value, end, registered[end])))
        elif end in _TRAITS and (missing := _TRAITS[end](value).missing_package()) is not None:
            problems.append(Problem(key, missing))
    derived = derived_fields(type(config)).keys() - differences(config).keys() if problems else ()
    return [problem for problem in problems if problem.key not in derived]


def check_built_in(config: Schema) -> list[Problem]:
    """Like `check_registered`, before the registries are imported: names that only `imports` could register."""
    built_in = {"rollout.name": built_in_engines(), "strategy": built_in_strategies()}
    return [] if config.imports else check_registered(config, built_in)


def _not_registered(key: str, name: str, end: str, names: Collection[str]) -> str:
    use, kind = " or ".join(sorted(names)), REGISTERED_KINDS[end]
    if end == "strategy" and name in (*upstream_engines("rollout.name"), *built_in_engines()):
        return (
            f"{name!r} is a rollout engine, and this key selects the training engine: use {use} here; the rollout "
            "engine is actor_rollout_ref.rollout.name"
        )
    if name in upstream_engines(key):
        return f"{name!r} is not supported yet: use {use}"
    return (
        f"there is no {kind} {name!r}: {did_you_mean(name, names)}. Custom ones are registered in a file of `imports`"
    )
