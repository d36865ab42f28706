"""`load_reward_manager`: the reward of a run from plain values of its configuration."""

import inspect
from collections.abc import Mapping
from typing import Any

from verl.registry import did_you_mean, load_object
from verl.rewards.managers import REWARD_MANAGER_REGISTRY, RewardManager
from verl.rewards.resolve import resolve_reward_function

# What every manager is given by `load_reward_manager` itself.
_GIVEN = {"self", "tokenizer", "compute_score", "num_examine", "reward_fn_key"}


def load_reward_manager(
    tokenizer: Any,
    *,
    manager: str = "naive",
    manager_path: str | None = None,
    function_path: str | None = None,
    function_name: str | None = None,
    registered_function: str | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    manager_kwargs: Mapping[str, Any] | None = None,
    num_examine: int = 0,
    reward_fn_key: str = "data_source",
) -> RewardManager:
    """The reward manager of a run.

    manager: a name of REWARD_MANAGER_REGISTRY, or with `manager_path` (a file or a module) a class in there.
    function_path, function_name, registered_function, reward_kwargs: see `resolve_reward_function`.
    manager_kwargs: values of the manager's further parameters (timeout, on_error, max_resp_len, overlong_buffer ...).
    Raises ValueError for a name that is not there, a wrong signature, or a parameter that the manager does not have.
    """
    found = load_object(manager_path, manager) if manager_path else REWARD_MANAGER_REGISTRY[manager]
    if not (inspect.isclass(found) and issubclass(found, RewardManager)):
        raise ValueError(f"reward manager {manager!r}: expected a subclass of RewardManager, found {found!r}")
    kwargs = dict(manager_kwargs or {})
    accepted, takes_any = _parameters(found)
    for name in kwargs:
        if name not in accepted and not takes_any:
            raise ValueError(
                f"reward manager {manager!r} has no parameter {name!r}: {did_you_mean(name, accepted)}. A manager of "
                "one's own takes **kwargs and hands them on to RewardManager.__init__"
            )
    function = resolve_reward_function(function_path, function_name, registered_function, reward_kwargs)
    given = {"num_examine": num_examine, "reward_fn_key": reward_fn_key}
    return found(tokenizer=tokenizer, compute_score=function, **given, **kwargs)


def _parameters(manager: type) -> tuple[set[str], bool]:
    """The names that a manager's constructor takes, those for its base class included; and whether any goes."""
    names: set[str] = set()
    for cls in manager.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(cls.__init__).parameters
        names |= {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            return names - _GIVEN, False
    return names - _GIVEN, True
