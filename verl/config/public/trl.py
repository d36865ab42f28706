"""TRL's arguments: the config key of each, suggested in errors about unknown keys, and the rules of a conversion.

A rule converts an argument whose value changes as well: batch sizes (TRL counts completions per device), steps (TRL
counts optimizer updates), and names of losses and schedules. docs/migrate_from_trl.md lists the arguments with notes.
"""

import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

_ARR = "actor_rollout_ref."
_ACTOR = _ARR + "actor."

_TABLES = tomllib.loads((Path(__file__).parent / "trl.toml").read_text(encoding="utf-8"))
RL, SFT, _SHORT = _TABLES["rl"], _TABLES["sft"], _TABLES["short"]


def key_of(name: str, schema: str | None) -> str | None:
    """Return the config key for an argument of TRL or a short name; None if it is neither.

    Args:
        name: the last part of an unknown key.
        schema: as in `upstream_key`: "ppo", "sft" or another.
    """
    return {"ppo": RL, "sft": SFT}.get(schema or "", {}).get(_SHORT.get(name, name))


# ---- conversion -----------------------------------------------------------------------------------------------------

TABLES: dict[str, Mapping[str, str]] = {"trl-grpo": RL, "trl-sft": SFT}
"""Kind -> argument -> key."""

Values = dict[str, Any]
Rule = Callable[[Any, Mapping[str, Any]], Values | str]
"""(value, all arguments) -> values of this project's keys, or the reason why the argument is not converted."""

#: kind -> defaults of TRL that differ from the defaults here
DEFAULTS: dict[str, Values] = _TABLES["defaults"]


def kind_of(arguments: Mapping[str, Any]) -> str | None:
    """The class that has these arguments: trl-grpo or trl-sft; None if they are not TRL's. Raises ValueError for those
    of PPOConfig, which TRL counts as experimental."""
    of_ppo = {"num_ppo_epochs", "kl_coef", "cliprange", "response_length", "reward_model_path", "vf_coef"}
    if names := sorted(of_ppo & set(arguments)):
        raise ValueError(f"{', '.join(names)}: a PPOConfig is not converted: expected a GRPOConfig or SFTConfig")
    for kind, names in (
        ("trl-grpo", {"num_generations", "max_completion_length", "beta", "loss_type", "reward_funcs"}),
        ("trl-sft", {"max_length", "max_seq_length", "packing", "assistant_only_loss", "completion_only_loss"}),
    ):
        if names & set(arguments):
            return kind
    return "trl-sft" if {"learning_rate", "per_device_train_batch_size"} & set(arguments) else None


def rules_of(kind: str, gpus: int) -> dict[str, Rule]:
    """Argument -> rule, for one kind. Arguments without a rule have the key of `TABLES` and the same value."""
    sft = kind == "trl-sft"
    optim = "optim." if sft else _ACTOR + "optim."

    def steps(key: str) -> Rule:
        return lambda value, arguments: _steps(key, value, arguments, kind)

    rules: dict[str, Rule] = {name: _one_of(known) for name, known in _TABLES["values"][kind].items()}
    rules |= {
        "adam_beta1": lambda value, arguments: {optim + "betas": [value, arguments.get("adam_beta2", 0.999)]},
        "adam_beta2": lambda value, arguments: {optim + "betas": [arguments.get("adam_beta1", 0.9), value]},
        "report_to": _trackers,
        "num_train_epochs": lambda value, arguments: _integer("trainer.total_epochs", Fraction(value)),
        "max_steps": lambda value, arguments: (
            {} if value < 0 else steps("trainer.total_training_steps")(value, arguments)
        ),
        "save_steps": steps("trainer.save_freq"),
        "eval_steps": steps("trainer.test_freq"),
        "seed": lambda value, arguments: {"trainer.seed": value},
        "logging_steps": lambda value, arguments: {} if value == 1 else "every step is logged",
        "resume_from_checkpoint": lambda value, arguments: (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": value}
            if isinstance(value, str)
            else {}  # a run resumes by default
        ),
        "metric_for_best_model": lambda value, arguments: (
            f"set trainer.save_best to a validation metric{'' if sft else ', such as val-core/DATASET/acc/mean@1'}"
        ),
        "gradient_accumulation_steps": _part_of_another,
    }
    if sft:
        return rules | {
            "per_device_train_batch_size": lambda value, arguments: {
                "data.train_batch_size": value * gpus * arguments["gradient_accumulation_steps"],
                "data.micro_batch_size_per_gpu": value,
                "data.use_dynamic_bsz": False,
            }
        }
    return rules | _grpo(gpus)


def _grpo(gpus: int) -> dict[str, Rule]:
    def batch(value: int, arguments: Mapping[str, Any]) -> Values | str:
        samples = Fraction(value * gpus, arguments["num_generations"])  # prompts per micro-batch of all GPUs
        update = samples * arguments["gradient_accumulation_steps"]
        total = update * _updates(arguments)
        if "generation_batch_size" in arguments:
            total = Fraction(arguments["generation_batch_size"], arguments["num_generations"])
        sizes = _integer("data.train_batch_size", total), _integer(_ACTOR + "ppo_mini_batch_size", update)
        wrong = next((size for size in sizes if isinstance(size, str)), None)
        return wrong or sizes[0] | sizes[1] | {_ACTOR + "ppo_micro_batch_size_per_gpu": value}

    def kl(value: float, arguments: Mapping[str, Any]) -> Values:
        return {_ACTOR + "use_kl_loss": value > 0} | ({_ACTOR + "kl_loss_coef": value} if value else {})

    return {
        "per_device_train_batch_size": batch,
        "steps_per_generation": _part_of_another,
        "generation_batch_size": _part_of_another,
        "beta": kl,
        "top_k": lambda value, arguments: {_ARR + "rollout.top_k": value or -1},
        "reward_funcs": lambda value, arguments: "set reward.custom_reward_function.path to the file of the function",
        "log_completions": lambda value, arguments: (
            {"trainer.log_samples": arguments.get("num_completions_to_print") or 4} if value else {}
        ),
        "num_completions_to_print": _part_of_another,
    }


def _updates(arguments: Mapping[str, Any]) -> Fraction:
    """Optimizer updates per generation and epoch."""
    accumulation = arguments["gradient_accumulation_steps"]
    return Fraction(arguments.get("steps_per_generation") or accumulation, accumulation)


def _steps(key: str, value: float, arguments: Mapping[str, Any], kind: str) -> Values | str:
    """TRL counts optimizer updates; a step here is a generation with its updates."""
    updates = _updates(arguments) * arguments.get("num_iterations", 1) if kind == "trl-grpo" else Fraction(1)
    if isinstance(value, float) and 0 < value < 1:
        return "found a fraction of the run, expected a number of steps"
    return _integer(key, Fraction(value) / updates)


def _integer(key: str, value: Fraction) -> Values | str:
    return {key: int(value)} if value.denominator == 1 else f"{key} would be {float(value):g}, expected an integer"


def _part_of_another(value: Any, arguments: Mapping[str, Any]) -> Values:
    """The rule of another argument reads this one."""
    return {}


def _one_of(known: Mapping[str, Values | str]) -> Rule:
    return lambda value, arguments: known.get(str(value), known["otherwise"])


def _trackers(value: Any, arguments: Mapping[str, Any]) -> Values | str:
    names = [value] if isinstance(value, str) else list(value)
    if names == ["all"]:
        return "name the trackers in trainer.logger"
    return {"trainer.logger": ["console", "jsonl", *(name for name in names if name != "none")]}
