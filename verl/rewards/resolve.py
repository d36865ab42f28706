"""How the reward function of a run is found: by address, by name, by data source; or several of them with weights."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.registry import did_you_mean, load_object
from verl.rewards import model_score  # noqa: F401 (their functions are registered by this)
from verl.rewards.functions import ACCEPTED_FORMS, REWARD_FUNCTION_REGISTRY, ScoreFunction, register_reward
from verl.rewards.outcome import BadOutcome, read_outcome
from verl.rewards.rules import accuracy, formats  # noqa: F401 (their functions are registered by this)
from verl.rewards.sandbox.pool import Outcome
from verl.rewards.sources import default_compute_score, rule_for

DEFAULT_FUNCTION_NAME = "compute_score"


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
            f"reward.custom_reward_function.name={name!r} without reward.custom_reward_function.path: expected the "
            f"file that defines it, a function of one of these forms:\n{ACCEPTED_FORMS}"
        )
    if registered and registered != "data_source":
        return ScoreFunction(REWARD_FUNCTION_REGISTRY[registered], kwargs)
    if kwargs:
        raise ValueError(
            f"reward_kwargs {sorted(kwargs)} without a reward function to take them: the rules by data source take "
            "none; give reward.custom_reward_function.path, or reward_function"
        )
    return ScoreFunction(default_compute_score, route=rule_for)


_PART_KEYS = ("name", "path", "weight", "label", "kwargs")


@register_reward("weighted")
def weighted_sum(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    rewards: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The sum of several rewards, each times its weight.

    rewards: for each one `name` (of REWARD_FUNCTION_REGISTRY; "data_source" is the rule of the row's data source), or
    `path` and `name` (a user's function); and, where wanted, `weight` (1.0), `kwargs`, and `label` (else the name).
    Returns the sum as the score, each reward by its label, and the extra values of the first one, whose acc counts.
    """
    total, values = 0.0, {}
    for number, (label, weight, part) in enumerate(_parts(json.dumps(list(map(dict, rewards))))):
        function = part.for_data_source(data_source)
        given = function(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        try:
            score, extra = read_outcome(Outcome(given))
        except BadOutcome as bad:
            raise ValueError(f"reward {label!r}, {function.where}, {bad}") from None
        total += weight * score
        if number == 0:
            values |= {"acc": score, **extra}
        values[label] = score
    return {"score": total, **values}


@lru_cache(maxsize=64)
def _parts(rewards: str) -> list[tuple[str, float, ScoreFunction]]:
    """(label, weight, function) of each reward of a list in JSON. ValueError for what is no such list."""
    parts: list[tuple[str, float, ScoreFunction]] = []
    for spec in json.loads(rewards):
        for key in spec:
            if key not in _PART_KEYS:
                raise ValueError(f"weighted: a reward has no {key!r}: {did_you_mean(key, _PART_KEYS)}")
        name, path = spec.get("name"), spec.get("path")
        registered = None if path else name or "data_source"
        part = resolve_reward_function(path, name if path else None, registered, spec.get("kwargs"))
        if part.is_async or part.form == "batch":
            raise ValueError(f"weighted: {part.where} is async or takes lists; expected a plain function of one answer")
        label = spec.get("label") or name or part.name
        if label in [known for known, *_ in parts]:
            raise ValueError(f"weighted: two rewards are called {label!r}; give one of them a label")
        parts.append((label, float(spec.get("weight", 1.0)), part))
    if not parts:
        raise ValueError("weighted: rewards: expected at least one reward, found none")
    return parts
