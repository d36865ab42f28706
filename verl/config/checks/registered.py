"""Names of engines, agent loops and tool parsers: whether they are registered, and their packages installed.

Keys are ends of dotted keys: "rollout.name" stands for `actor_rollout_ref.rollout.name`.
"""

from collections.abc import Callable, Collection, Mapping

from verl.config.errors import Problem
from verl.config.fields import Schema, derived_fields, differences, flatten
from verl.config.public.upstream import upstream_engines
from verl.engines.traits import built_in_strategies, strategy_traits
from verl.registry import did_you_mean
from verl.rollout.traits import built_in_engines, engine_traits

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
        config: the configuration.
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
