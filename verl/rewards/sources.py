"""Which rule scores the rows of which data set."""

from collections.abc import Callable
from typing import Any

from verl.rewards.functions import REWARD_FUNCTION_REGISTRY, ScoreFunction, register_reward
from verl.rewards.rules.choice import multiple_choice
from verl.rewards.rules.gsm8k import gsm8k_strict
from verl.rewards.rules.maths import math_reward
from verl.rewards.sandbox.code_tests import code_reward

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
            "minerva_math",
            "olympiadbench",
        ],
        multiple_choice: [
            "cais/mmlu",
            "mmlu",
            "TIGER-Lab/MMLU-Pro",
            "Idavidrein/gpqa",
            "gpqa",
            "allenai/ai2_arc",
            "commonsense_qa",
        ],
        code_reward: ["codecontests", "apps", "codeforces", "taco", "livecodebench", "mbpp", "humaneval"],
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
            "Give a function of your own (reward.custom_reward_function.path=reward.py "
            "reward.custom_reward_function.name=compute_score), a built-in one (reward_function: "
            f"{', '.join(sorted(REWARD_FUNCTION_REGISTRY))}), or register a rule: "
            "verl.rewards.register_data_source(name, function)"
        )
    return RULES_BY_DATA_SOURCE[max(fitting, key=len)]


@register_reward("data_source")
def default_compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """The score by the rule of `data_source` (`RULES_BY_DATA_SOURCE`)."""
    rule = rule_for(data_source)
    return rule(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
