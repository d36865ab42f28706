"""All aliases of config fields: the names of `aliases.toml`, and here those whose value is computed."""

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.config.fields import Aliases, Lookup
from verl.config.public.upstream import upstream_engines

Computed = Callable[[Any, Lookup], dict[str, Any]]

_ARR = "actor_rollout_ref."

#: what `recompute_granularity=selective` can recompute
RECOMPUTED_MODULES = {"core_attn", "mlp", "moe"}

#: schema -> kind -> name -> field
_TABLES = tomllib.loads((Path(__file__).parent / "aliases.toml").read_text(encoding="utf-8"))

#: section of a model -> its FSDP section
_ROLES = {_ARR + "actor": _ARR + "actor.fsdp_config", _ARR + "ref": _ARR + "ref.fsdp_config", "critic": "critic.fsdp"}


def _of_roles(table: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
    """A table whose names begin with ROLE, for every section of a model; FSDP is its FSDP section."""
    return {
        name.replace("ROLE", role): _of_roles(value, {role: fsdp})
        if isinstance(value, dict)
        else value.replace("FSDP", fsdp).replace("ROLE", role)
        if isinstance(value, str)
        else value
        for role, fsdp in roles.items()
        for name, value in table.items()
    }


# ------------------------------------------------------------------------------------------------------ computed values
def _world_size(lookup: Lookup) -> int:
    """At least 1: that there are no processes is a problem of the keys that say so."""
    return max(1, _int(lookup("trainer.n_gpus_per_node")) * _int(lookup("trainer.nnodes")))


def _int(value: Any) -> int:
    if isinstance(value, bool) or not str(value).lstrip("-").isdigit():
        raise ValueError(f"found {value!r}, expected an int")
    return int(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"found {value!r}, expected bool")
    return value


def _per_gpu(key: str) -> Computed:
    def per_gpu(value: Any, lookup: Lookup) -> dict[str, Any]:
        total, ranks = _int(value), _world_size(lookup)
        if total % ranks:
            raise ValueError(f"{total} sequences over all GPUs are not divisible by {ranks} GPUs; use {key}")
        return {key: total // ranks}

    return per_gpu


def _one_of(key: str, choices: dict[str, Any]) -> Computed:
    """The settings of each value; of any other, `expected` is the error, or it stays."""

    def one_of(value: Any, lookup: Lookup) -> dict[str, Any]:
        if isinstance(value, str | int) and str(value) in choices and str(value) != "expected":
            return choices[str(value)]
        if "expected" in choices:
            raise ValueError(f"found {value!r}, expected {choices['expected']}")
        return {key: value}

    return one_of


def _values(table: dict[str, Any]) -> dict[str, Computed]:
    return {key: _one_of(key, choices) for key, choices in table.items()}


def _if_true(settings: dict[str, Any]) -> Computed:
    return lambda value, lookup: settings if _bool(value) else {}


_prox_log_probs = _if_true({_ARR + "actor.old_log_prob_pass": "always"})


def _vllm(value: Any, lookup: Lookup) -> dict[str, Any]:
    key = _ARR + "rollout.name"
    if _bool(value):
        return {key: "vllm"}
    for other in (key, "engine.actor_type"):
        if lookup(other) == "vllm":
            raise ValueError(f"false contradicts {other}=vllm; remove one of them")
    return {}


def _teacher(section: str) -> Computed:
    """The teacher of public verl's GKD is one server."""
    url = "distillation.teacher_models.teacher.server_url"
    return lambda value, lookup: {url: f"http://{value}:{lookup(section + 'server_port') or 15555}/v1"}


def _strategy(key: str) -> Computed:
    """Engines of public verl that this project lacks decide speed and memory only: `fsdp` takes their place."""
    return lambda value, lookup: {key: "fsdp" if value in upstream_engines("strategy") else value}


def _actor_type(value: Any, lookup: Lookup) -> dict[str, Any]:
    """A training engine, or a rollout engine that generates with the actor."""
    return {_ARR + ("rollout.name" if value in ("vllm", "sglang") else "actor.strategy"): value}


def _backend(value: Any, lookup: Lookup) -> dict[str, Any]:
    """`trainer.backend` is the executor; in the short form of the configuration it is the training engine."""
    if value in ("fsdp", "fsdp2", "megatron"):
        return {_ARR + "actor.strategy": value}
    return {"trainer.backend": value}


def _staleness(value: Any, lookup: Lookup) -> dict[str, Any]:
    """Samples generated ahead, as a fraction of those between two weight syncs -> staleness in updates."""
    return _ahead(value, _updates(lookup))


def _ahead(fraction: Any, updates: int) -> dict[str, Any]:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or fraction < 0:
        raise ValueError(f"found {fraction!r}, expected a number of at least 0")
    if updates < 1:
        raise ValueError(f"found {updates} updates between two weight syncs, expected at least 1")
    return {"trainer.async.max_staleness": math.ceil((1 + fraction) * updates) - 1}


def _updates(lookup: Lookup) -> int:
    """Updates between two weight syncs of public verl's fully asynchronous trainer."""
    updates = lookup("async_training.trigger_parameter_sync_step")
    return 1 if updates is None else _int(updates)


def _sync_step(value: Any, lookup: Lookup) -> dict[str, Any]:
    return {} if lookup("async_training.staleness_threshold") is not None else _staleness(0, lookup)


def _require_batches(value: Any, lookup: Lookup) -> dict[str, Any]:
    batch, expected = _int(lookup("data.train_batch_size")), _prompts_of_update(lookup)
    if batch not in (0, expected):
        raise ValueError(
            f"found {value}: an update has require_batches x ppo_mini_batch_size = {expected} prompts: set "
            f"data.train_batch_size={expected} (found {batch})"
        )
    return {}


def _prompts_of_update(lookup: Lookup) -> int:
    """Prompts of an update of public verl's fully asynchronous trainer."""
    return _int(lookup("async_training.require_batches") or 1) * _int(lookup(_ARR + "actor.ppo_mini_batch_size"))


def _is_fully_async(lookup: Lookup) -> bool:
    keys = ("staleness_threshold", "trigger_parameter_sync_step", "require_batches", "partial_rollout")
    keys += ("compute_prox_log_prob",)
    by_key = any(lookup(f"async_training.{key}") is not None for key in keys)
    return by_key or lookup("trainer.v1.trainer_mode") in ("separate_async", "fully_async")


def _train_batch_size(value: Any, lookup: Lookup) -> dict[str, Any]:
    """0 in the scripts of the fully asynchronous trainer, which has other keys for it."""
    is_computed = value == 0 and _is_fully_async(lookup)
    return {"data.train_batch_size": _prompts_of_update(lookup) if is_computed else value}


def _mini_batch_size(key: str) -> Computed:
    """Releases before 0.4 make one smaller mini-batch of a batch that is smaller than a mini-batch."""

    def at_most_a_batch(value: Any, lookup: Lookup) -> dict[str, Any]:
        batch = lookup("data.train_batch_size")
        is_larger = isinstance(value, int) and isinstance(batch, int) and 0 < batch < value
        return {key: batch if is_larger else value}

    return at_most_a_batch


def _gen_batch_size(value: Any, lookup: Lookup) -> dict[str, Any]:
    """1 in the same scripts: prompts are generated one by one, as with `trainer.async`."""
    return {} if value == 1 and _is_fully_async(lookup) else {"data.gen_batch_size": value}


def _rollout_steps(value: Any, lookup: Lookup) -> dict[str, Any]:
    """Prompts of the run -> steps."""
    batch = _int(lookup("data.train_batch_size")) or _prompts_of_update(lookup)
    if _int(value) < batch:
        raise ValueError(f"found {value}, expected at least the {batch} prompts of a step")
    return {"trainer.total_training_steps": _int(value) // batch}


def _total_steps(value: Any, lookup: Lookup) -> dict[str, Any]:
    """The length of the run, but for public verl's fully asynchronous trainer, which counts prompts."""
    by_prompts = lookup("rollout.total_rollout_steps") is not None
    return {} if by_prompts else {"trainer.total_training_steps": value}


def _rollout_test_freq(value: Any, lookup: Lookup) -> dict[str, Any]:
    """Weight syncs -> steps; -1: never."""
    return {"trainer.test_freq": _int(value) * (_updates(lookup) if _int(value) > 0 else 1)}


def _old_log_probs(value: Any, lookup: Lookup) -> dict[str, Any]:
    return _prox_log_probs(not _bool(value), lookup)


def _rollout_log_probs(value: Any, lookup: Lookup) -> dict[str, Any]:
    """`actor.use_rollout_log_probs`: only the asynchronous trainers of public verl compute no old log-probs with it."""
    sets = _old_log_probs(value, lookup)
    return sets if _is_fully_async(lookup) else {}


def _importance_cap(value: Any, lookup: Lookup) -> dict[str, Any]:
    """`actor.tis_imp_ratio_cap` of older releases: truncated importance weights per token; not positive: none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"found {value!r}, expected a number")
    section = "algorithm.rollout_correction."
    return {section + "rollout_is": "token", section + "rollout_is_threshold": value} if value > 0 else {}


def _trainer_mode(value: Any, lookup: Lookup) -> dict[str, Any]:
    if value in ("sync", "colocate_async"):  # generation overlaps training only on separate devices
        return {} if value == "sync" else {"trainer.async.max_staleness": 0}
    if value == "fully_async":
        section = "trainer.v1.fully_async."
        fraction, updates = lookup(section + "staleness_threshold"), lookup(section + "parameter_sync_step")
        return _ahead(0 if fraction is None else fraction, 1 if updates is None else _int(updates))
    if value != "separate_async":
        raise ValueError(f"found {value!r}: use sync, separate_async or fully_async (trainer.async.max_staleness)")
    ahead = lookup("trainer.v1.separate_async.num_warmup_batches")
    return {"trainer.async.max_staleness": 1 if ahead is None else _int(ahead)}


def _handled_elsewhere(value: Any, lookup: Lookup) -> dict[str, Any]:
    """Applied by the alias of another key."""
    return {}


def _fraction_of_lr(section: str, key: str) -> Computed:
    def fraction(value: Any, lookup: Lookup) -> dict[str, Any]:
        peak = lookup(section + "lr")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= peak:
            raise ValueError(f"found {value!r}, expected a number from 0 to {section}lr={peak}")
        return {section + key: value / peak if value else 0.0}

    return fraction


def _recomputed(section: str) -> Computed:
    """Modules that cannot be recomputed here keep their activations, which costs memory only."""
    key = section + "override_transformer_config.recompute_modules"
    return lambda value, lookup: {key: [name for name in value if name in RECOMPUTED_MODULES]}


def _test_freq(value: Any, lookup: Lookup) -> dict[str, Any]:
    """Scripts of the fully asynchronous trainer set the same number here and in `rollout.test_freq`, which it reads."""
    return {} if lookup("rollout.test_freq") == value else {"trainer.test_freq": -1 if value is False else value}


def _same(key: str) -> Computed:
    """Another name of a key, for which null means the default."""
    return lambda value, lookup: {key: value}


def _optimizer(section: str) -> dict[str, Computed]:
    """The keys of an `optim` section that only some engines of public verl read."""
    return {
        section + "lr_decay_steps": _same(section + "total_training_steps"),
        **{section + key: _fraction_of_lr(section, "min_lr_ratio") for key in ("min_lr", "lr_min")},
        **{section + key: _fraction_of_lr(section, "lr_warmup_init_ratio") for key in ("lr_warmup_init", "lr_start")},
    }


_COMPUTED = {
    **{section + "teacher.server_ip": _teacher(section + "teacher.") for section in ("", _ARR)},
    **{section + "teacher.server_port": _handled_elsewhere for section in ("", _ARR)},
    "model_engine": lambda value, lookup: {} if value == "dp" else _strategy(_ARR + "actor.strategy")(value, lookup),
    "trainer.v1.fully_async.staleness_threshold": _handled_elsewhere,
    "trainer.v1.fully_async.parameter_sync_step": _handled_elsewhere,
    _ARR + "actor.model_engine": _same(_ARR + "actor.strategy"),
    _ARR + "actor.use_rollout_log_probs": _rollout_log_probs,
    _ARR + "actor.tis_imp_ratio_cap": _importance_cap,
    "async_training.staleness_threshold": _staleness,
    "async_training.trigger_parameter_sync_step": _sync_step,
    "async_training.require_batches": _require_batches,
    "async_training.use_rollout_log_probs": _old_log_probs,
    "async_training.compute_prox_log_prob": _prox_log_probs,
    "rollout.total_rollout_steps": _rollout_steps,
    "rollout.test_freq": _rollout_test_freq,
    "data.train_batch_size": _train_batch_size,
    "data.gen_batch_size": _gen_batch_size,
    "trainer.v1.trainer_mode": _trainer_mode,
    "trainer.test_freq": _test_freq,
    "trainer.total_training_steps": _total_steps,
    "trainer.v1.separate_async.num_warmup_batches": _handled_elsewhere,
    "data.batch_size_per_gpu": lambda value, lookup: {"data.train_batch_size": _int(value) * _world_size(lookup)},
    "actor_rollout.use_vllm": _vllm,
    "engine.actor_type": _actor_type,
    "trainer.backend": _backend,
} | {
    key: _per_gpu(key + "_per_gpu")
    for key in (
        _ARR + "actor.ppo_micro_batch_size",
        _ARR + "ref.log_prob_micro_batch_size",
        _ARR + "rollout.log_prob_micro_batch_size",
        "critic.ppo_micro_batch_size",
        "critic.forward_micro_batch_size",
        "reward.reward_model.micro_batch_size",
    )
}
_COMPUTED |= {key: _mini_batch_size(key) for key in (_ARR + "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")}
_COMPUTED |= {key: _strategy(key) for key in (_ARR + "actor.strategy", _ARR + "ref.strategy", "critic.strategy")}
_COMPUTED |= {
    f"{role}.megatron.override_transformer_config.recompute_modules": _recomputed(role + ".megatron.")
    for role in _ROLES
}
_COMPUTED |= _values(_TABLES["rl"]["values"] | _of_roles(_TABLES["roles"]["values"], _ROLES))
_COMPUTED |= _optimizer(_ARR + "actor.optim.") | _optimizer("critic.optim.")

#: keys that do not accept null, and that are null in the configuration of some release of public verl
NULL_IS_DEFAULT = {
    "algorithm.filter_groups.metric",
    "algorithm.rollout_correction.rollout_is_threshold",
    "reward.custom_reward_function.name",
    *(f"{role}optim.{key}" for role in (_ARR + "actor.", "critic.", "") for key in ("min_lr_ratio", "lr_warmup_steps")),
}

RL = Aliases(
    _of_roles(_TABLES["roles"]["short"], _ROLES) | _TABLES["rl"]["short"],
    _of_roles(_TABLES["roles"]["deprecated"], _ROLES) | _TABLES["rl"]["deprecated"],
    _COMPUTED,
)


def _prm_path(value: Any, lookup: Lookup) -> dict[str, Any]:
    if value != (policy := lookup(_ARR + "model.path")):
        raise ValueError(
            f"found {value!r}: the reward model of PRIME starts as a copy of the policy {policy!r}: use it"
        )
    return {}


#: GKD has no advantages: any estimator is that of its settings, whose operator it removes
GKD = Aliases(
    RL.short,
    RL.deprecated,
    _COMPUTED | {"algorithm.adv_estimator": lambda value, lookup: {"algorithm.adv_estimator": "reinforce_plus_plus"}},
)

#: PRIME has its reward model in the section `prime`
PRIME = Aliases(
    RL.short,
    _TABLES["prime"]["deprecated"] | RL.deprecated,
    _COMPUTED
    | {
        "prime.path": _prm_path,
        "prime.enable": _handled_elsewhere,
        **_values(_TABLES["prime"]["values"]),
    },
)


def _chats(value: Any, lookup: Lookup) -> dict[str, Any]:
    """`data.multiturn`, the form of older releases: a column of chats, if it is enabled."""
    return {"data.messages_key": lookup("data.multiturn.messages_key") or "messages"} if _bool(value) else {}


def _cpu_offload(value: Any, lookup: Lookup) -> dict[str, Any]:
    if not _bool(value):
        return {}
    return {"engine.offload_policy" if _world_size(lookup) > 1 else "engine.param_offload": True}


SFT = Aliases(
    short=_of_roles(_TABLES["roles"]["short"], {"engine": "engine"}) | _TABLES["sft"]["short"],
    deprecated=_TABLES["sft"]["deprecated"],
    computed={
        **_values(_of_roles(_TABLES["roles"]["values"], {"engine": "engine"}) | _TABLES["sft"]["values"]),
        "engine.strategy": _strategy("engine.strategy"),
        "engine.megatron.override_transformer_config.recompute_modules": _recomputed("engine.megatron."),
        "data.multiturn.enable": _chats,
        "data.multiturn.messages_key": _handled_elsewhere,
        "engine.cpu_offload": _cpu_offload,
        "engine.offload_params": _handled_elsewhere,
        **_optimizer("optim."),
        "data.micro_batch_size": lambda value, lookup: {
            "data.micro_batch_size_per_gpu": max(_int(value) // _world_size(lookup), 1)
        },
    },
)

OFFLINE = Aliases(_TABLES["generation"]["short"], _TABLES["eval"]["deprecated"])

#: evaluation accepts the old name of the reward function without a warning
EVAL = Aliases(**_TABLES["eval"])
