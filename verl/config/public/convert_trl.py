"""Values of TRL's GRPOConfig, PPOConfig and SFTConfig -> values of this project's keys.

`trl.py` maps names to keys. Here are the arguments whose value changes as well: batch sizes (TRL counts completions per
device), steps (TRL counts optimizer updates), and names of losses and schedules.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from verl.config.public import trl

_ARR = "actor_rollout_ref."
_ACTOR, _OPTIM = _ARR + "actor.", _ARR + "actor.optim."

Values = dict[str, Any]
Rule = Callable[[Any, Mapping[str, Any]], Values | str]
"""(value, all arguments) -> values of this project's keys, or the reason why the argument is not converted."""

_RUN = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
}

#: kind -> defaults of TRL that differ from the defaults here
DEFAULTS: dict[str, Values] = {
    "trl-grpo": _RUN | {"num_generations": 8, "max_completion_length": 256, "beta": 0.0, "loss_type": "dapo"},
    "trl-ppo": _RUN
    | {"learning_rate": 3e-6, "num_ppo_epochs": 4, "kl_coef": 0.05, "cliprange_value": 0.2, "lam": 0.95}
    | {"response_length": 53, "temperature": 0.7, "num_mini_batches": 1},
    "trl-sft": _RUN | {"learning_rate": 2e-5},
}

_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def kind_of(arguments: Mapping[str, Any]) -> str | None:
    """The class that has these arguments: trl-grpo, trl-ppo or trl-sft; None if they are not TRL's."""
    for kind, names in (
        ("trl-grpo", {"num_generations", "max_completion_length", "beta", "loss_type", "reward_funcs"}),
        ("trl-ppo", {"num_ppo_epochs", "kl_coef", "cliprange", "response_length", "reward_model_path", "vf_coef"}),
        ("trl-sft", {"max_length", "max_seq_length", "packing", "assistant_only_loss", "completion_only_loss"}),
    ):
        if names & set(arguments):
            return kind
    return "trl-sft" if {"learning_rate", "per_device_train_batch_size"} & set(arguments) else None


def rules_of(kind: str, gpus: int) -> dict[str, Rule]:
    """Argument -> rule, for one kind. Arguments without a rule have the key that `trl.py` names, and the same value."""
    sft = kind == "trl-sft"
    optim = "optim." if sft else _OPTIM
    dtype = "engine.dtype" if sft else _ACTOR + "fsdp_config.dtype"

    def steps(key: str) -> Rule:
        return lambda value, given: _steps(key, value, given, kind)

    def strategy(key: str) -> Rule:
        known: dict[str, Values] = {"no": {key: -1}, "steps": {}}
        return lambda value, given: known.get(value, f"use {key}")

    rules: dict[str, Rule] = {
        "lr_scheduler_type": _schedule(optim),
        "adam_beta1": lambda value, given: {optim + "betas": [value, given.get("adam_beta2", 0.999)]},
        "adam_beta2": lambda value, given: {optim + "betas": [given.get("adam_beta1", 0.9), value]},
        "report_to": _trackers,
        "num_train_epochs": lambda value, given: _integer("trainer.total_epochs", Fraction(value)),
        "max_steps": lambda value, given: {} if value < 0 else steps("trainer.total_training_steps")(value, given),
        "save_steps": steps("trainer.save_freq"),
        "eval_steps": steps("trainer.test_freq"),
        "save_strategy": strategy("trainer.save_freq"),
        "eval_strategy": strategy("trainer.test_freq"),
        "seed": lambda value, given: {"trainer.seed": value},
        "logging_steps": lambda value, given: {} if value == 1 else "every step is logged",
        "resume_from_checkpoint": lambda value, given: (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": value}
            if isinstance(value, str)
            else {}  # a run resumes by default
        ),
        "load_best_model_at_end": lambda value, given: {"trainer.save_best": True} if value else {},
        "metric_for_best_model": lambda value, given: (
            f"set trainer.save_best to a validation metric{'' if sft else ', such as val-core/DATASET/acc/mean@1'}"
        ),
        "greater_is_better": lambda value, given: {"trainer.save_best_mode": "max" if value else "min"},
        "bf16": lambda value, given: {dtype: "bf16"} if value else {},
        "gradient_accumulation_steps": lambda value, given: {},  # part of the batch sizes
    }
    if sft:
        return rules | {
            "per_device_train_batch_size": lambda value, given: {
                "data.train_batch_size": value * gpus * given["gradient_accumulation_steps"],
                "data.micro_batch_size_per_gpu": value,
                "data.use_dynamic_bsz": False,
            },
        }
    rules["fp16"] = lambda value, given: {dtype: "fp16"} if value else {}
    return rules | (_ppo(gpus) if kind == "trl-ppo" else _grpo(gpus))


def _grpo(gpus: int) -> dict[str, Rule]:
    def batch(value: int, given: Mapping[str, Any]) -> Values | str:
        samples = Fraction(value * gpus, given["num_generations"])  # prompts per micro-batch of all GPUs
        update = samples * given["gradient_accumulation_steps"]
        total = update * _updates(given)
        if "generation_batch_size" in given:
            total = Fraction(given["generation_batch_size"], given["num_generations"])
        sizes = _integer("data.train_batch_size", total), _integer(_ACTOR + "ppo_mini_batch_size", update)
        wrong = next((size for size in sizes if isinstance(size, str)), None)
        return wrong or sizes[0] | sizes[1] | {_ACTOR + "ppo_micro_batch_size_per_gpu": value}

    def loss(value: str, given: Mapping[str, Any]) -> Values | str:
        if value in ("cispo", "sapo"):
            return {"algorithm.name": value}
        return {_ACTOR + "loss_agg_mode": _AGGREGATION[value]} if value in _AGGREGATION else "no such loss"

    def scale(value: Any, given: Mapping[str, Any]) -> Values | str:
        by_std = {"none": False, "False": False, "group": True, "True": True}.get(str(value))
        return "use none or group" if by_std is None else {"algorithm.norm_adv_by_std_in_grpo": by_std}

    def kl(value: float, given: Mapping[str, Any]) -> Values:
        return {_ACTOR + "use_kl_loss": value > 0} | ({_ACTOR + "kl_loss_coef": value} if value else {})

    is_level = {"token": {}, "sequence": {_ACTOR + "policy_loss.loss_mode": "gspo"}}
    return {
        "per_device_train_batch_size": batch,
        "steps_per_generation": lambda value, given: {},  # part of the batch sizes
        "generation_batch_size": lambda value, given: {},
        "beta": kl,
        "loss_type": loss,
        "scale_rewards": scale,
        "importance_sampling_level": lambda value, given: is_level.get(value, "use token or sequence"),
        "top_k": lambda value, given: {_ARR + "rollout.top_k": value or -1},
        "reward_funcs": lambda value, given: "set reward.custom_reward_function.path to the file of the function",
        "vllm_importance_sampling_correction": lambda value, given: (
            {"algorithm.rollout_correction.rollout_is": "token"} if value else {}
        ),
        "use_vllm": lambda value, given: {_ARR + "rollout.name": "vllm"} if value else {},
        "log_completions": lambda value, given: (
            {"trainer.log_samples": given.get("num_completions_to_print") or 4} if value else {}
        ),
        "num_completions_to_print": lambda value, given: {},  # part of log_completions
    }


def _ppo(gpus: int) -> dict[str, Rule]:
    def batch(value: int, given: Mapping[str, Any]) -> Values | str:
        prompts = value * gpus * given["gradient_accumulation_steps"]
        mini = _integer(_ACTOR + "ppo_mini_batch_size", Fraction(prompts, given["num_mini_batches"]))
        if isinstance(mini, str):
            return mini
        return {"data.train_batch_size": prompts, _ACTOR + "ppo_micro_batch_size_per_gpu": value} | mini

    def same(*keys: str) -> Rule:
        return lambda value, given: dict.fromkeys(keys, value)

    estimators = {"k1": "kl", "k3": "low_var_kl"}
    return {
        "per_device_train_batch_size": batch,
        "num_mini_batches": lambda value, given: {},  # part of the batch sizes
        "learning_rate": same(_OPTIM + "lr", "critic.optim.lr"),
        "num_ppo_epochs": same(_ACTOR + "ppo_epochs", "critic.ppo_epochs"),
        "kl_coef": lambda value, given: {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value},
        "kl_estimator": lambda value, given: (
            {"algorithm.kl_penalty": estimators[value]} if value in estimators else "use k1 or k3"
        ),
        "sft_model_path": same(_ARR + "model.path"),
        "reward_model_path": lambda value, given: {
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": value,
        },
    }


def _updates(given: Mapping[str, Any]) -> Fraction:
    """Optimizer updates per generation and epoch."""
    accumulation = given["gradient_accumulation_steps"]
    return Fraction(given.get("steps_per_generation") or accumulation, accumulation)


def _steps(key: str, value: float, given: Mapping[str, Any], kind: str) -> Values | str:
    """TRL counts optimizer updates; a step here is a generation with its updates. PPOConfig counts as here."""
    updates = _updates(given) * given.get("num_iterations", 1) if kind == "trl-grpo" else Fraction(1)
    if isinstance(value, float) and 0 < value < 1:
        return "found a fraction of the run, expected a number of steps"
    return _integer(key, Fraction(value) / updates)


def _integer(key: str, value: Fraction) -> Values | str:
    return {key: int(value)} if value.denominator == 1 else f"{key} would be {float(value):g}, expected an integer"


def _schedule(optim: str) -> Rule:
    names = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
    return lambda value, given: (
        {optim + "lr_scheduler_type": names[value]} if value in names else "use constant or cosine"
    )


def _trackers(value: Any, given: Mapping[str, Any]) -> Values | str:
    names = [value] if isinstance(value, str) else list(value)
    if names == ["all"]:
        return "name the trackers in trainer.logger"
    return {"trainer.logger": ["console", "jsonl", *(name for name in names if name != "none")]}


def table_of(kind: str) -> Mapping[str, str]:
    """Argument -> key, for one kind."""
    return {"trl-grpo": trl.RL, "trl-ppo": trl.PPO, "trl-sft": trl.SFT}[kind]
