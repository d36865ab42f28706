"""The reward manager of a run, from plain configuration values or from an object given in Python."""

from collections.abc import Mapping
from typing import Any

from verl.registry import did_you_mean, load_object
from verl.rewards.functions import COLUMN_FORMS, named_parameters
from verl.rewards.managers import (
    REWARD_MANAGER_REGISTRY,
    BatchRewardManager,
    NaiveRewardManager,
    RewardManager,
    check_manager,
    is_public_manager,
    scores_single_samples,
)
from verl.rewards.public_managers import (
    ColumnsRewardManager,
    SingleRewardManager,
    create_public_manager,
    with_own_call,
    with_settings,
)
from verl.rewards.resolve import as_score_function, default_compute_score, resolve_reward_function

# Arguments that `load_reward_manager` passes itself.
_PASSED = {"self", "tokenizer", "compute_score", "num_examine", "reward_fn_key"}


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
    config: Mapping[str, Any] | None = None,
) -> RewardManager:
    """Create the reward manager of a run from plain configuration values.

    Args:
        manager: Name in REWARD_MANAGER_REGISTRY, or of a class in `manager_path`, a file or module.
        function_path, function_name, registered_function, reward_kwargs: See `resolve_reward_function`.
        manager_kwargs: Values of the manager's other parameters (timeout, on_error, max_resp_len, ...).
        num_examine, reward_fn_key: See RewardManager.
        config: The settings of the run, for managers of public verl with the parameter `config`.

    Raises:
        ValueError: For an unknown name, an unsupported signature, or a parameter that the manager does not have.
    """
    cls = load_object(manager_path, manager) if manager_path else REWARD_MANAGER_REGISTRY[manager]
    check_manager(manager, cls)
    kwargs = dict(manager_kwargs or {})
    function = resolve_reward_function(function_path, function_name, registered_function, reward_kwargs)
    passed = {"num_examine": num_examine, "reward_fn_key": reward_fn_key}
    if is_public_manager(cls):
        return create_public_manager(cls, tokenizer, function, kwargs=kwargs, config=config, common=passed)
    if function.form in COLUMN_FORMS and cls is NaiveRewardManager:  # the default manager
        cls = ColumnsRewardManager
    accepted, accepts_any = _constructor_parameters(cls)
    if not accepts_any:
        cls, kwargs = with_settings(cls, kwargs, accepted)
    for name in kwargs:
        if name not in accepted and not accepts_any:
            raise ValueError(
                f"reward manager {manager!r} has no parameter {name!r}: {did_you_mean(name, accepted)}. A custom "
                "manager takes **kwargs and passes them to RewardManager.__init__"
            )
    return with_own_call(cls(tokenizer=tokenizer, compute_score=function, **passed, **kwargs))


def _constructor_parameters(manager: type) -> tuple[set[str], bool]:
    """Return the parameter names of a manager and its base classes, and whether it accepts any name."""
    names: set[str] = set()
    for cls in manager.__mro__:
        if "__init__" in vars(cls):
            parameters, accepts_any = named_parameters(cls.__init__)
            names |= set(parameters)
            if not accepts_any:
                return names - _PASSED, False
    return names - _PASSED, True


def as_reward_manager(
    reward: Any, tokenizer: Any, reward_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
) -> RewardManager:
    """A reward given in Python as `reward_fn=`: a RewardManager, a manager of public verl, or a reward function.

    Args:
        reward: The object. It may also be a function of the whole batch that returns scores (B, T) or (B,).
        reward_kwargs: Values of the function's other parameters.
        **kwargs: Arguments of RewardManager.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(reward, RewardManager):
        return with_own_call(reward)
    if is_public_manager(type(reward)) and scores_single_samples(type(reward)):
        return SingleRewardManager(tokenizer, default_compute_score, manager=reward, **kwargs)
    function = as_score_function(reward, reward_kwargs)
    by_form = {"batch": BatchRewardManager, **dict.fromkeys(COLUMN_FORMS, ColumnsRewardManager)}
    return by_form.get(function.form, NaiveRewardManager)(tokenizer, function, **kwargs)
