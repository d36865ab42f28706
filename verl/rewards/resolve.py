"""Selecting the reward function of a run: by path, by registered name, by data source, or as a weighted sum."""

import asyncio
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.registry import did_you_mean, load_object
from verl.rewards import judge  # noqa: F401 (registers its reward function)
from verl.rewards.functions import (
    ACCEPTED_FORMS,
    REWARD_FUNCTION_REGISTRY,
    ScoreFunction,
    is_reward_class,
    register_reward,
)
from verl.rewards.outcome import BadOutcome, read_outcome

# A rule module registers its reward functions when it is imported.
from verl.rewards.rules.accuracy import search_r1
from verl.rewards.rules.choice import multiple_choice
from verl.rewards.rules.gsm8k import gsm8k_strict
from verl.rewards.rules.maths import geo3k, math_dapo, math_reward
from verl.rewards.sandbox.code_tests import code_reward
from verl.rewards.sandbox.pool import Outcome

DEFAULT_FUNCTION_NAME = "compute_score"


# ---- by data source -------------------------------------------------------------------------------------------------

#: data source, or prefix of data sources -> rule. "aime" also matches "aime2024" and "aime_25", but not "aimed".
RULES_BY_DATA_SOURCE: dict[str, ScoreFunction] = {
    name: ScoreFunction(rule)
    for rule, names in {
        gsm8k_strict: ["openai/gsm8k", "gsm8k"],
        geo3k: ["hiyouga/geometry3k", "geo3k"],
        math_dapo: ["math", "aime"],
        math_reward: [
            "math500",
            "math_500",
            "math-500",
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
        search_r1: [
            "searchR1_nq",
            "searchR1_triviaqa",
            "searchR1_popqa",
            "searchR1_hotpotqa",
            "searchR1_2wikimultihopqa",
            "searchR1_musique",
            "searchR1_bamboogle",
        ],
        code_reward: ["codecontests", "apps", "codeforces", "taco", "livecodebench", "mbpp", "humaneval"],
    }.items()
    for name in names
}


def register_data_source(name_or_prefix: str, function: Callable) -> None:
    """Score the samples of a data source with `function`.

    Args:
        name_or_prefix: The data source. It also matches names that continue with a character other than a letter:
            "my/set" matches "my/set_v2", but not "my/settings". The longest match wins. Registering a name again
            replaces its rule.
        function: A reward function of the sample or plugin form.

    Raises:
        ValueError: If the name is empty, or the function takes lists.
    """
    if not name_or_prefix:
        raise ValueError("register_data_source: expected the name of a data source, found an empty string")
    rule = function if isinstance(function, ScoreFunction) else ScoreFunction(function)
    if rule.form == "batch":
        raise ValueError(
            f"register_data_source: {rule.location} takes lists: expected a function that scores one response"
        )
    RULES_BY_DATA_SOURCE[name_or_prefix] = rule


def rule_for(data_source: str) -> ScoreFunction:
    """Return the rule of a data source. Raises ValueError that lists the known data sources if there is none."""
    known = _longest_match(str(data_source).lower(), tuple(RULES_BY_DATA_SOURCE))
    if known is None:
        raise ValueError(
            f"no reward rule for data_source {data_source!r}; known: {', '.join(sorted(RULES_BY_DATA_SOURCE))}.\n"
            "Set a custom reward function (reward.custom_reward_function.path=reward.py "
            "reward.custom_reward_function.name=compute_score), select a built-in one "
            f"(reward.reward_function={' or '.join(sorted(REWARD_FUNCTION_REGISTRY))}), or register a rule: "
            "verl.rewards.register_data_source(name, function)"
        )
    return RULES_BY_DATA_SOURCE[known]


@functools.lru_cache(maxsize=1024)
def _longest_match(name: str, known: tuple[str, ...]) -> str | None:
    """The longest of the known names with which a data source begins, before a character that is no letter."""
    matching = [k for k in known if name.startswith(k.lower()) and not name[len(k) : len(k) + 1].isalpha()]
    return max(matching, key=len, default=None)


def _custom_rules() -> dict[str, ScoreFunction]:
    return {name: rule for name, rule in RULES_BY_DATA_SOURCE.items() if not rule.is_builtin}


@register_reward("data_source", needs_ground_truth=True)
def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt: Any = None
) -> Any:
    """Score with the rule of `data_source` (`RULES_BY_DATA_SOURCE`)."""
    rule = rule_for(data_source)
    return rule.func(**rule.arguments(data_source, solution_str, ground_truth, extra_info, prompt))


# ---- by name or path ------------------------------------------------------------------------------------------------


def resolve_reward_function(
    path: str | None = None,
    name: str | None = None,
    registered: str | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> ScoreFunction:
    """Return the reward function of a run. Without path and registered name: the rules by data source.

    Args:
        path: File or module of a custom reward function.
        name: Name of the function in `path`; default `compute_score`.
        registered: Name in REWARD_FUNCTION_REGISTRY.
        reward_kwargs: Values of the function's other parameters.

    Raises:
        ValueError: If the function does not exist or its signature is not supported.
    """
    kwargs = dict(reward_kwargs or {})
    if path and registered:
        raise ValueError(f"two reward functions: the registered {registered!r} and the file {path!r}; give one of them")
    if path:
        function = load_object(path, name or DEFAULT_FUNCTION_NAME, "reward.custom_reward_function.name")
        return as_score_function(function, kwargs)
    if name not in (None, DEFAULT_FUNCTION_NAME):
        raise ValueError(
            f"reward.custom_reward_function.name={name!r} without reward.custom_reward_function.path: expected the "
            f"file that defines it, with a function of one of these forms:\n{ACCEPTED_FORMS}"
        )
    if registered and registered != "data_source":
        function = as_score_function(REWARD_FUNCTION_REGISTRY[registered], kwargs)
        if function.func is weighted_sum:
            terms = tuple(term for *_, term in _parsed_terms(kwargs["rewards"]))
            func = _weighted_sum_async if any(term.is_async for term in terms) else weighted_sum
            rules = _custom_rules() if any(term.route for term in terms) else {}
            return replace(function, func=func, terms=terms, rules=rules)
        return function
    if kwargs:
        raise ValueError(
            f"reward_kwargs {sorted(kwargs)} without a reward function: the rules by data source take no parameters; "
            "set reward.custom_reward_function.path, or reward_function"
        )
    return ScoreFunction(default_compute_score, route=rule_for, rules=_custom_rules())


def as_score_function(function: Any, kwargs: Mapping[str, Any] | None = None) -> ScoreFunction:
    """Return a ScoreFunction of a function, or of an object of a RewardFunction subclass made with `kwargs`."""
    if isinstance(function, ScoreFunction):
        return function
    if is_reward_class(function):
        try:
            inspect.signature(function).bind(**(kwargs or {}))
        except TypeError as error:
            raise ValueError(f"{function.__name__}: {error}: set or remove it in reward_kwargs") from None
        return ScoreFunction(function(**(kwargs or {})), source=(function, dict(kwargs or {})))
    return ScoreFunction(function, kwargs or {})


@register_reward("model_score", bounded=True, accuracy=False)
def model_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return the score of the reward model, extra_info["rm_score"]. The default with reward_model.enable=true."""
    if "rm_score" not in extra_info:
        raise ValueError("model_score: the response has no reward model score: set reward.reward_model.enable=true")
    return extra_info["rm_score"]


@register_reward("agent_score", bounded=True)
def agent_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return the score that the agent returned, extra_info["agent_score"]. The default with rollout.mode=server."""
    if extra_info.get("agent_score") is None:
        raise ValueError(
            "agent_score: the agent returned no score: return one from the agent (rollout.mode=server), or set "
            "reward.custom_reward_function.path"
        )
    return extra_info["agent_score"]


@register_reward("format", bounded=True)
def format_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """Return 1.0 if the response is `<think>...</think><answer>...</answer>` and nothing else, otherwise 0.0.

    Format reward of DeepSeek-R1 (2025, arXiv:2501.12948, section 2.2).

    Args:
        tags: Tag names. Each tag must open and close exactly once, in this order, with content inside and only
            whitespace between and around the tags.
    """
    if not tags:
        raise ValueError("format: tags: expected at least one tag, found none")
    rest = solution_str
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if solution_str.count(opening) != 1 or solution_str.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if before.strip() or not closed or not inside.strip():
            return 0.0
    return float(not rest.strip())


# ---- weighted sum ---------------------------------------------------------------------------------------------------

_TERM_KEYS = ("name", "path", "weight", "label", "kwargs")


@register_reward("weighted")
def weighted_sum(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    prompt: Any = None,
    *,
    rewards: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the weighted sum of several rewards.

    Args:
        rewards: One mapping per term. `name`: a registered reward function ("data_source" is the rule of the sample's
            data source), or `path` and `name`: a custom one. Optional: `weight` (1.0), `kwargs`, `label` (the name).

    Returns:
        The sum as "score", the score of each term under its label, and the extra values of the terms; "acc" is that of
        the first.
    """
    calls = _term_calls(rewards, data_source, solution_str, ground_truth, extra_info, prompt)
    return _sum(calls, [function.func(**arguments) for *_, function, arguments in calls])


async def _weighted_sum_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    prompt: Any = None,
    *,
    rewards: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """`weighted_sum` of which a term is `async def`, such as the judge. The others run in threads."""
    calls, results = _term_calls(rewards, data_source, solution_str, ground_truth, extra_info, prompt), []
    for *_, function, arguments in calls:
        call = function.func if function.is_async else functools.partial(asyncio.to_thread, function.func)
        results.append(call(**arguments))
    return _sum(calls, await asyncio.gather(*results))


_TermCall = tuple[str, float, ScoreFunction, dict[str, Any]]


def _term_calls(rewards: Sequence[Mapping[str, Any]], data_source: str, *further: Any) -> list[_TermCall]:
    """(label, weight, function of the data source, its arguments) of each term for a sample."""
    terms = [(label, weight, term.for_data_source(data_source)) for label, weight, term in _parsed_terms(rewards)]
    return [(*term, term[2].arguments(data_source, *further)) for term in terms]


def _sum(calls: Sequence[_TermCall], returned: Sequence[Any]) -> dict[str, Any]:
    """The weighted sum of what the functions of the terms returned, with the score of each."""
    total, values = 0.0, {}
    for index, ((label, weight, function, _), result) in enumerate(zip(calls, returned)):
        try:
            score, extra = read_outcome(Outcome(result))
        except BadOutcome as bad:
            raise ValueError(f"reward {label!r}, {function.location}, {bad}") from None
        total += weight * score
        extra = {"acc": score, **extra} if index == 0 else {k: v for k, v in extra.items() if k != "acc"}
        values = {**extra, **values, label: score}  # of two terms with the same extra value, the first one's
    return {"score": total, **values}


def _parsed_terms(rewards: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, ScoreFunction]]:
    return _terms(json.dumps(list(map(dict, rewards))))


@functools.lru_cache(maxsize=64)
def _terms(rewards: str) -> list[tuple[str, float, ScoreFunction]]:
    """Parse a JSON list of rewards into (label, weight, function). Raises ValueError for an invalid entry."""
    terms: list[tuple[str, float, ScoreFunction]] = []
    for spec in json.loads(rewards):
        for key in spec:
            if key not in _TERM_KEYS:
                raise ValueError(f"weighted: a reward has no {key!r}: {did_you_mean(key, _TERM_KEYS)}")
        name, path = spec.get("name"), spec.get("path")
        registered = None if path else name or "data_source"
        term = resolve_reward_function(path, name if path else None, registered, spec.get("kwargs"))
        if term.form == "batch":
            raise ValueError(f"weighted: {term.location} takes lists: expected a function that scores one response")
        label = spec.get("label") or name or term.name
        if label in [known for known, *_ in terms]:
            raise ValueError(f"weighted: two rewards are labeled {label!r}; set label for one of them")
        weight = spec.get("weight", 1.0)
        if type(weight) not in (int, float) or not math.isfinite(weight):
            raise ValueError(f"weighted: weight of {label!r}: expected a finite number, found {weight!r}")
        terms.append((label, float(weight), term))
    if not terms:
        raise ValueError("weighted: rewards: expected at least one reward, found none")
    if any(term.is_async for *_, term in terms):
        for _, _, term in terms:
            if not (term.is_async or term.is_builtin):  # a thread cannot be stopped at a timeout
                raise ValueError(
                    f"weighted: {term.location} is a plain function, but another reward is async, as the judge is: "
                    "expected async def, or a built-in reward"
                )
    return terms
