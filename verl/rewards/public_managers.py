"""Rewards of the whole batch: functions `reward_fn(batch)`, and reward managers written for public verl.

A manager of public verl is any class with one of these methods:

- `__call__(self, data, return_dict=False)`: returns the rewards (B, T), or {"reward_tensor": (B, T),
  "reward_extra_info": {name: B values}}. Its constructor takes (tokenizer, num_examine, compute_score, reward_fn_key,
  and further parameters, the values of `reward.reward_kwargs`).
- `async def run_single(self, data)`: returns {"reward_score": number, "reward_extra_info": {name: value}} for a batch
  of one sample. Its constructor takes (config, tokenizer, compute_score, reward_router_address,
  reward_model_tokenizer). The samples of a batch are scored concurrently.

A function returns rewards as `__call__` does, or one number per sample, which is placed at its last token.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl.columns import one_token_short
from verl.protocol import DataProto
from verl.rewards import managers, resolve
from verl.rewards.functions import COLUMN_FORMS, ScoreFunction, named_parameters
from verl.rewards.managers import (
    REWARD_MANAGER_REGISTRY,
    RewardManager,
    register,  # noqa: F401 (a name of public verl)
    reward_result,
    scores_single_samples,
)
from verl.rewards.outcome import RewardError
from verl.rewards.public_scores import default_compute_score
from verl.rewards.responses import reward_tensor
from verl.rewards.sandbox.calls import Isolation, call_async, remote_caller
from verl.rewards.sandbox.pool import Limits, Outcome, ProcessPool, describe_error

logger = logging.getLogger(__name__)


class ColumnsRewardManager(RewardManager):
    """Calls a function of the whole batch, or a manager of public verl, and checks what it returns.

    Args:
        compute_score: A function or callable object with the parameter `batch` or `data`.
        scores_with: The reward function that a manager calls; for messages. Default: `compute_score`.
        calls: The same function, as the manager has it, which remembers what it returned. Default: unknown.
        **kwargs: Arguments of RewardManager. There is one call per batch: `on_error` and `retries` do not apply, and
            `timeout` limits the whole batch, in a worker process.
    """

    forms = COLUMN_FORMS

    def __init__(
        self,
        *args: Any,
        scores_with: ScoreFunction | None = None,
        calls: "RecordedFunction | None" = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._call, self._calls = self.compute_score, calls
        if scores_with is not None:
            self.compute_score = scores_with
        for name, default in (("on_error", "raise"), ("retries", 0)):
            if (value := getattr(self, name)) != default:
                logger.warning("reward.%s=%s has no effect: %s scores whole batches", name, value, self._call.location)

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        returned = self._call_function(data)
        extra: Mapping[str, Any] = {}
        if isinstance(returned, Mapping):
            if "reward_tensor" not in returned:
                raise self._error(f"returned a dict without 'reward_tensor': it has {', '.join(map(repr, returned))}")
            returned, extra = returned["reward_tensor"], returned.get("reward_extra_info") or {}
        rewards = self._rewards(data, returned)
        if self._calls is not None:
            self._check_calls(rewards.sum(1))
        if not return_dict:
            return rewards
        values = {name: self._values(name, extra[name], len(data)) for name in extra}
        return {**reward_result(data, rewards, [], 0), "reward_extra_info": values}

    def _check_calls(self, rewards: torch.Tensor) -> None:
        """Warn if a manager that gave all samples of a batch one reward hides what its reward function said."""
        scores, failed = self._calls.take()
        if len(rewards) < 2 or rewards.unique().numel() > 1 or not (failed or len(set(scores)) > 1):
            return
        self._calls = None
        said = f"raised in {failed} calls" if failed else f"returned scores from {min(scores):g} to {max(scores):g}"
        logger.warning(
            "reward manager %s gave every sample of a batch the reward %g, and its reward function %s %s: an except "
            "clause of the manager may hide an error",
            *(self._call.name, rewards[0], self.compute_score.location, said),
        )

    def _call_function(self, data: DataProto) -> Any:
        """Call the function with a copy of the batch, which it may change. Returns its result."""
        function = self._call
        name = "batch" if function.form == "columns (batch)" else "data"
        keywords = {name: data.copy(), **({"return_dict": True} if function.accepts("return_dict") else {})}
        pool = self.isolation.pool_for(function)
        if pool is not None:
            limits = Limits(self.timeout, resident_bytes=self.isolation.memory_bytes)
            outcome = pool.run(remote_caller(function)({**keywords, **function.kwargs}), limits)
            if outcome.failure is not None:
                raise self._error(outcome.failure) from outcome.cause
            return outcome.value
        try:
            return function.func(**keywords, **function.kwargs)
        except Exception as error:  # any error of a user's function
            raise self._error(f"raised {describe_error(error)}") from error

    def _rewards(self, data: DataProto, returned: Any) -> torch.Tensor:
        """Rewards (B, T) float32 from scores (B, T) or (B,)."""
        width = data.column("responses").shape[1]
        try:
            scores = torch.as_tensor(np.asarray(returned) if isinstance(returned, list) else returned).float().cpu()
        except (TypeError, ValueError, RuntimeError):
            problem = f"returned {type(returned).__name__}: expected a tensor of shape (B={len(data)}, T={width})"
            raise self._error(problem) from None
        if scores.shape == (len(data),):
            rewards = reward_tensor(data, scores)
        elif scores.shape == (len(data), width):
            rewards = scores
        else:
            hint = one_token_short(tuple(scores.shape), (len(data), width))
            raise self._error(
                f"returned scores of shape {tuple(scores.shape)}: expected (B={len(data)}, T={width}), or "
                f"({len(data)},){hint}"
            )
        if not rewards.isfinite().all():
            row, token = rewards.isfinite().logical_not().nonzero()[0].tolist()
            number = f"{rewards[row, token]} for sample {row}, token {token}"
            raise self._error(f"returned {number}: expected finite numbers")
        return rewards

    def _values(self, name: str, values: Any, count: int) -> list[Any]:
        values = values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else list(values)
        if len(values) != count:
            raise self._error(
                f"returned {len(values)} values of reward_extra_info[{name!r}]: expected one for each of the {count} "
                "samples"
            )
        return values

    def _error(self, problem: str) -> RewardError:
        return RewardError(f"reward function {self._call.location} {problem}")


class SingleRewardManager(RewardManager):
    """Calls `run_single` of a manager of public verl once per sample, concurrently in one event loop.

    Args:
        compute_score: The reward function that the manager calls.
        manager: The object with `run_single`.
        **kwargs: Arguments of RewardManager.
    """

    def __init__(self, tokenizer: Any, compute_score: Callable | ScoreFunction, *, manager: Any, **kwargs: Any):
        super().__init__(tokenizer, compute_score, **kwargs)
        self.manager = manager

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        name = f"{type(self.manager).__name__}.run_single"
        scores, extras, failed = self.score_samples(
            len(data),
            lambda todo: self._outcomes(data, todo),
            lambda i, _, bad: f"reward manager {name} {bad}\n  sample {i} of {len(data)}",
        )
        rewards = reward_tensor(data, scores)
        return reward_result(data, rewards, extras, failed) if return_dict else rewards

    def _outcomes(self, data: DataProto, rows: Sequence[int]) -> Generator[tuple[int, None, Outcome]]:
        """The outcomes of samples, in their order."""

        async def score(row: int) -> Any:
            return await self.manager.run_single(data[row : row + 1].copy())

        calls = [functools.partial(score, row) for row in rows]
        outcomes = dict(call_async(calls, self.timeout, self.max_concurrency))
        for k in range(len(rows)):
            yield k, None, _as_outcome(outcomes[k])


def _as_outcome(outcome: Outcome) -> Outcome:
    """The outcome of a reward function, from the dict with "reward_score" and "reward_extra_info" of `run_single`."""
    if outcome.failure is not None:
        return outcome
    returned = outcome.value
    if not isinstance(returned, Mapping) or "reward_score" not in returned:
        return Outcome(failure=f"returned {returned!r:.200}: expected a dict with 'reward_score'")
    extra = {name: value for name, value in (returned.get("reward_extra_info") or {}).items() if name != "score"}
    return Outcome({**extra, "score": returned["reward_score"]})


# ---- names of public verl ---------------------------------------------------------------------------------------


class AbstractRewardManager:
    """Base class of public verl's managers with `__call__(data, return_dict)`. It has no methods."""


class RewardManagerBase:
    """Base class of public verl's managers with `run_single(data)`.

    Args:
        config: The settings of the run, with attribute access.
        tokenizer: Decodes the responses.
        compute_score: The reward function.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **kwargs: Any):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.init_class(config, tokenizer)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""
        return asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Override to initialize state that all instances share."""


class _RulesByDataSource(ScoreFunction):
    """The rules by data source, for a subclass that calls them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return default_compute_score(*args, **kwargs)


class _PublicConstructor:
    """The constructor of public verl's managers. compute_score: None: the rules by data source. overlong_buffer_cfg:
    see `overlong_buffer` of DAPORewardManager."""

    settings: Mapping[str, Any] = {}  # those of all managers, which the constructor of a subclass need not take

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        function = resolve.as_score_function(compute_score or resolve.resolve_reward_function())
        optional = {"max_resp_len": max_resp_len, "overlong_buffer": overlong_buffer_cfg}
        kwargs |= {name: value for name, value in optional.items() if value is not None}
        kwargs = {**self.settings, **kwargs}
        super().__init__(tokenizer, function, num_examine=num_examine, reward_fn_key=reward_fn_key, **kwargs)
        if function.func is resolve.default_compute_score:
            self.compute_score = _RulesByDataSource(function.func, route=function.route, rules=function.rules)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg


class NaiveRewardManager(_PublicConstructor, managers.NaiveRewardManager):
    """`naive` with the constructor of public verl."""


class _Verifying(_PublicConstructor):
    """The manager calls `verify`, which a subclass may override: the score of each sample, or a dict with "score"."""

    def verify(self, data: DataProto) -> list[Any]:
        """The scores of the reward function."""
        return super().__call__(data).sum(1).tolist()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        if type(self).verify is _Verifying.verify:
            return super().__call__(data, return_dict)
        scores = self.verify(data.copy())  # a `verify` of public verl may add columns
        verified = [dict(score) if isinstance(score, Mapping) else {"score": score} for score in scores]
        rewards = reward_tensor(data, torch.tensor([float(row.pop("score")) for row in verified]))
        return reward_result(data, rewards, verified, 0) if return_dict else rewards


class BatchRewardManager(_Verifying, managers.BatchRewardManager):
    """`batch` with the constructor of public verl."""


class DAPORewardManager(_PublicConstructor, managers.DAPORewardManager):
    """`dapo` with the constructor of public verl."""


class PrimeRewardManager(_Verifying, managers.PrimeRewardManager):
    """`prime` with the constructor of public verl."""


def get_reward_manager_cls(name: str) -> type:
    """The class that is registered under `name`."""
    return REWARD_MANAGER_REGISTRY[name]


# ---- construction ---------------------------------------------------------------------------------------------------

# Arguments of RewardManager that come from the settings.
_SHARED = set(named_parameters(RewardManager)[0]) - {"tokenizer", "compute_score", "num_examine", "reward_fn_key"}


def create_public_manager(
    cls: type,
    tokenizer: Any,
    function: ScoreFunction,
    *,
    common: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    config: Mapping[str, Any] | None,
) -> RewardManager:
    """Construct a manager of public verl, which calls `function` as `compute_score`, and adapt it.

    Args:
        common: num_examine and reward_fn_key (see RewardManager).
        kwargs: `reward.reward_kwargs`, and the settings shared by all managers. Mappings get attribute access.

    Raises:
        ValueError: The constructor does not accept the arguments.
    """
    parameters, accepts_any = named_parameters(cls)
    scores_samples = scores_single_samples(cls)
    shared = {name: kwargs[name] for name in _SHARED if name in kwargs}
    manager_kwargs = public_kwargs({k: v for k, v in kwargs.items() if k not in _SHARED}, parameters)
    is_default = function.func is resolve.default_compute_score
    called = replace(function, func=default_compute_score) if is_default else function
    isolation = Isolation(kwargs.get("isolation", "none"), kwargs.get("memory_limit_mb"))
    compute_score = _called_by_manager(called, isolation, kwargs.get("timeout"))
    calls = None if scores_samples or called.is_async else RecordedFunction(compute_score)
    arguments = {"tokenizer": tokenizer, "compute_score": calls or compute_score}
    if scores_samples:
        config = OmegaConf.create(dict(config or {}))
        arguments |= {"config": config, "reward_router_address": None, "reward_model_tokenizer": None}
    arguments |= common
    always = {"tokenizer", "compute_score", *({"config"} if scores_samples else {"num_examine", "reward_fn_key"})}
    passed = {name: v for name, v in arguments.items() if name in parameters or (accepts_any and name in always)}
    try:
        manager = cls(**passed, **manager_kwargs)
    except TypeError as error:
        raise ValueError(
            f"reward manager {cls.__name__}{inspect.signature(cls)} cannot be constructed: {error}. Passed: "
            f"{', '.join([*passed, *manager_kwargs])} (the last ones from reward.reward_kwargs)"
        ) from error
    function = _with_rule_if_any(function)
    if scores_samples:
        return SingleRewardManager(tokenizer, function, manager=manager, **common, **shared)
    return ColumnsRewardManager(tokenizer, manager, scores_with=function, calls=calls, **common, **shared)


def with_settings(cls: type, kwargs: dict[str, Any], accepted: Collection[str]) -> tuple[type, dict[str, Any]]:
    """A subclass of a manager of public verl that has the settings of all managers, and the arguments without them."""
    if not issubclass(cls, _PublicConstructor):
        return cls, kwargs
    settings = {name: value for name, value in kwargs.items() if name in _SHARED - set(accepted)}
    rest = {name: value for name, value in kwargs.items() if name not in settings}
    return type(cls.__name__, (cls,), {"settings": settings}), public_kwargs(rest, accepted)


def with_own_call(manager: RewardManager) -> RewardManager:
    """A manager whose class has the constructor of public verl, adapted if a subclass has its own `__call__`."""
    owner = next(cls for cls in type(manager).__mro__ if "__call__" in vars(cls))
    if not isinstance(manager, _PublicConstructor) or owner.__module__ in (__name__, managers.__name__):
        return manager
    common = {"num_examine": manager.num_examine, "reward_fn_key": manager.reward_fn_key}
    function = _with_rule_if_any(manager.compute_score)
    return ColumnsRewardManager(manager.tokenizer, manager, scores_with=function, **common, **manager.settings)


def public_kwargs(kwargs: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """`reward.reward_kwargs` for a constructor of public verl: mappings with attribute access, and its name of
    `overlong_buffer`."""
    renamed = {"overlong_buffer": "overlong_buffer_cfg"} if "overlong_buffer_cfg" in parameters else {}
    return {
        renamed.get(name, name): OmegaConf.create(dict(value)) if isinstance(value, Mapping) else value
        for name, value in kwargs.items()
    }


def _with_rule_if_any(function: ScoreFunction) -> ScoreFunction:
    """Let data sources without a rule through: a manager of public verl need not call the rules."""
    route = function.route
    if route is None:
        return function

    def rule_if_any(data_source: str) -> ScoreFunction:
        try:
            return route(data_source)
        except ValueError:
            return routed

    routed = replace(function, route=rule_if_any)
    return routed


class RecordedFunction:
    """A reward function that a manager calls, which remembers its scores and errors. A copy in another process has
    its own."""

    def __init__(self, function: Callable):
        self._function, self._scores, self._failed = function, [], 0
        functools.update_wrapper(self, function, updated=())  # not its attributes, which may have the names of ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            returned = self._function(*args, **kwargs)
        except Exception:
            self._failed += 1
            raise
        score = returned.get("score") if isinstance(returned, Mapping) else returned
        if isinstance(score, int | float):
            self._scores.append(float(score))
        return returned

    def take(self) -> tuple[list[float], int]:
        """The scores since the last call, and how many calls raised."""
        taken = self._scores, self._failed
        self._scores, self._failed = [], 0
        return taken

    def __reduce__(self) -> tuple:
        return RecordedFunction, (self._function,)


class IsolatedFunction:
    """A reward function that a manager of public verl calls, in a worker process. Picklable if the function is.

    Raises:
        RewardError: The function failed, or exceeded a limit.
    """

    def __init__(self, function: ScoreFunction, pool: ProcessPool, limits: Limits):
        self._function, self._pool, self._limits = function, pool, limits
        functools.update_wrapper(self, function.func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._function.func).bind(*args, **self._function.kwargs, **kwargs)
        keywords = {**dict(zip(bound.signature.parameters, bound.args)), **bound.kwargs}
        outcome = self._pool.run(remote_caller(self._function)(keywords), self._limits)
        if outcome.failure is not None:
            raise RewardError(f"reward function {self._function.location} {outcome.failure}") from outcome.cause
        return outcome.value

    def __reduce__(self) -> tuple:
        return functools.partial(self._function.func, **self._function.kwargs).__reduce__()


def _called_by_manager(function: ScoreFunction, isolation: Isolation, timeout: float | None) -> Callable:
    """The function as a manager calls it. An async function is called in this process, in the manager's event loop."""
    pool = None if function.is_async else isolation.pool_for(function)
    if pool is not None:
        return IsolatedFunction(function, pool, Limits(timeout, resident_bytes=isolation.memory_bytes))
    return functools.partial(function.func, **function.kwargs) if function.kwargs else function.func
