"""Score functions with the arguments and results of public verl's `verl.utils.reward_score` and its modules."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.registry import load_object
from verl.rewards.resolve import rule_for
from verl.rewards.rules import gsm8k
from verl.rewards.rules.accuracy import SEARCH_R1, match_normalized
from verl.rewards.rules.maths import geo3k, is_equivalent, math_dapo
from verl.utils.boxed import last_boxed


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """The score by the rule of the data source: a number, as in public verl; of `math_dapo` and `aime` a dict.

    Programs run in the sandbox of this machine, whatever the arguments about another sandbox are. A custom rule
    that returns a dict keeps it.

    Raises:
        NotImplementedError: The data source has no rule.
    """
    try:
        rule = rule_for(data_source)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None
    result = rule(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    is_number = rule.is_builtin and rule.func is not math_dapo and isinstance(result, Mapping)
    return float(result["score"]) if is_number else result


def get_custom_reward_fn(config: Any) -> Any:
    """The function of `custom_reward_function.path` and `name`, with its `reward_kwargs`; None without a path.

    Args:
        config: The settings of the run, with attribute access.
    """
    settings = getattr(config, "custom_reward_function", None) or config.reward.custom_reward_function
    if not settings.path:
        return None
    function = load_object(settings.path, settings.name or "compute_score")
    kwargs = dict(settings.get("reward_kwargs") or {}) if hasattr(settings, "get") else dict(settings.reward_kwargs)
    return partial(function, **kwargs) if kwargs else function


def gsm8k_number(solution_str: str, method: str = "strict") -> str | None:
    """The final number of a GSM8K response, as text; None if there is none. method: strict or flexible."""
    number = gsm8k.extract(solution_str, method)
    return None if number is None else str(number)


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the final number of the response equals the reference, `format_score` if it differs, 0 without one."""
    number = gsm8k.extract(solution_str, method)
    if number is None:
        return 0.0
    return score if number == gsm8k.parse_number(ground_truth) else format_score


def geo3k_score(solution_str: str, ground_truth: str, format_score: float = 0.1, **kwargs: Any) -> float:
    """Answer in a box and format, as for the data source `hiyouga/geometry3k`."""
    return geo3k("", solution_str, ground_truth, format_score=format_score)["score"]


def text_in_tags(solution_str: str) -> str | None:
    """The text of the last <answer>...</answer> of a response; None if there is none."""
    return SEARCH_R1.check(solution_str, ["-"]).answer.text


def matches_any(prediction: str, references: Any) -> int:
    """1 if the text equals one of the references without case, punctuation and articles, else 0."""
    accepted = [references] if isinstance(references, str) else references
    return int(any(match_normalized(prediction, text) for text in accepted))


def search_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for an accepted answer in the last tags, `format_score` for another one, 0 without tags.

    Args:
        ground_truth: {"target": [...]}.
    """
    prediction = text_in_tags(solution_str)
    if prediction is None:
        return 0.0
    return score if matches_any(prediction, ground_truth["target"]) else format_score


def math_score(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    """1 if the final answer equals the reference, else 0."""
    return float(is_equivalent(solution_str, ground_truth))


def math_equal(str1: str, str2: str, verbose: bool = False) -> bool:
    """Whether two mathematical expressions are equal."""
    return is_equivalent(f"\\boxed{{{str1}}}", str2)


def math_dapo_score(solution_str: str, ground_truth: str, **kwargs: Any) -> Any:
    """The score of the data source `math_dapo`, a dict."""
    return default_compute_score("math_dapo", solution_str, ground_truth)


def code_score(completion: str, test_cases: Any, continuous: bool = False) -> Any:
    """The score of the data source `codecontests`: the response's program against its tests."""
    return default_compute_score("codecontests", completion, test_cases)


def last_box(string: str) -> str | None:
    """The last \\boxed{...} of a text, with its braces; None if there is none."""
    inner = last_boxed(string)
    return None if inner is None else f"\\boxed{{{inner}}}"


def inside_box(s: str) -> str:
    """The contents of \\boxed{...}."""
    inner = last_boxed(s)
    if inner is None:
        raise ValueError(f"expected \\boxed{{...}}, found {s!r}")
    return inner
