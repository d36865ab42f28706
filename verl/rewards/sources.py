"""Which rule scores which data set, and how the reward function of a run is found."""

from collections.abc import Callable, Mapping
from typing import Any

from verl.registry import load_object
from verl.rewards.accuracy import accuracy_reward
from verl.rewards.functions import ACCEPTED_FORMS, REWARD_FUNCTION_REGISTRY, ScoreFunction
from verl.rewards.gsm8k import gsm8k_flexible, gsm8k_strict
from verl.rewards.maths import math_reward

__all__ = [
    "REWARD_FUNCTION_REGISTRY",
    "RULES_BY_DATA_SOURCE",
    "accuracy_reward",
    "default_compute_score",
    "gsm8k_flexible",
    "register_data_source",
    "resolve_reward_function",
]

DEFAULT_FUNCTION_NAME = "compute_score"

# A name or the beginning of names: "math" also stands for "math_dapo" and "math500", not for "mathvista".
RULES_BY_DATA_SOURCE: dict[str, ScoreFunction] = {
    name: ScoreFunction(rule)
    for rule, names in {
        gsm8k_strict: ["openai/gsm8k", "gsm8k"],
        math_reward: [
            "math",
            "aime",
            "amc",
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "HuggingFaceH4/aime_2024",
            "math-ai/aime24",
            "math-ai/aime25",
            "numina",
        ],
    }.items()
    for name in names
}


def register_data_source(name_or_prefix: str, function: Callable) -> None:
    """Score the rows of a data source by `function` (any accepted form but lists).

    The name also stands for the names that begin with it and go on with something else than a letter: "my/set" for
    "my/set_v2", not for "my/settings". The longest fitting name wins; registering a name again replaces its rule.
    """
    if not name_or_prefix:
        raise ValueError("register_data_source: expected a data source's name, found an empty one")
    rule = function if isinstance(function, ScoreFunction) else ScoreFunction(function)
    if rule.form == "batch":
        raise ValueError(f"register_data_source: {rule.where} takes lists, expected a function of one answer")
    RULES_BY_DATA_SOURCE[name_or_prefix] = rule


def rule_for(data_source: str) -> ScoreFunction:
    """The rule of a data source; ValueError that lists the known ones, and the ways out, where there is none."""
    name = str(data_source).lower()
    fitting = [
        known
        for known in RULES_BY_DATA_SOURCE
        if name.startswith(known.lower()) and not name[len(known) : len(known) + 1].isalpha()
    ]
    if not fitting:
        raise ValueError(
            f"no reward rule for data_source {data_source!r}; known: {', '.join(sorted(RULES_BY_DATA_SOURCE))}.\n"
            "Give a function of your own (custom_reward_function.path=reward.py "
            f"custom_reward_function.name={DEFAULT_FUNCTION_NAME}), a built-in one (reward_function: "
            f"{', '.join(sorted(REWARD_FUNCTION_REGISTRY))}), or register a rule: "
            "verl.rewards.register_data_source(name, function)"
        )
    return RULES_BY_DATA_SOURCE[max(fitting, key=len)]


def default_compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """The score by the rule of `data_source` (`RULES_BY_DATA_SOURCE`)."""
    rule = rule_for(data_source)
    return rule(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)


def resolve_reward_function(
    path: str | None = None,
    name: str | None = None,
    registered: str | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> ScoreFunction:
    """The reward function of a run, ready to be called.

    path, name: a user's file or module, and the function in it (`compute_score` if not said). registered: a name of
    REWARD_FUNCTION_REGISTRY. Neither: the rules by data source. reward_kwargs: values of its further parameters.
    Raises ValueError for a function that is not there or has a wrong signature.
    """
    kwargs = dict(reward_kwargs or {})
    if path and registered:
        raise ValueError(f"two reward functions: the registered {registered!r} and the file {path!r}; give one of them")
    if path:
        return ScoreFunction(load_object(path, name or DEFAULT_FUNCTION_NAME), kwargs)
    if name not in (None, DEFAULT_FUNCTION_NAME):
        raise ValueError(
            f"custom_reward_function.name={name!r} without custom_reward_function.path: expected the file that "
            f"defines it, a function of one of these forms:\n{ACCEPTED_FORMS}"
        )
    if registered:
        return ScoreFunction(REWARD_FUNCTION_REGISTRY[registered], kwargs)
    if kwargs:
        raise ValueError(
            f"reward_kwargs {sorted(kwargs)} without a reward function to take them: the rules by data source take "
            "none; give custom_reward_function.path, or reward_function"
        )
    return ScoreFunction(default_compute_score, route=rule_for)
