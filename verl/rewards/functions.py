"""Reward functions: the accepted signatures, the registry, and `ScoreFunction`, one interface to all of them.

Three forms are accepted. The parameter names decide which form a function has, before it is called:

- sample: `compute_score(solution_str, ground_truth)`, called once per response. Only the response is required, under
  one of its names (`_ROLES`); others are ground_truth, data_source, prompt, extra_info and any column of the data.
- batch:  `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, lists of equal length
- columns: `reward_fn(batch)` or `reward_fn(data)`, called with the whole batch, a DataProto

A function returns a number, a bool, or a dict with "score" and further values. The batch form returns a list of those,
the columns form what `verl.rewards.public_managers` describes.
Functions may be `async def`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from verl.registry import Registry, check_type, did_you_mean, location_of, signature


class RewardFunction(Protocol):
    """A reward function, for annotations and as base class of reward functions with state.

    A subclass overrides `__call__` with one of the accepted signatures. The class is also accepted in place of a reward
    function: it is constructed once, with `reward_kwargs`.

        class Rare(RewardFunction):
            def __init__(self, bonus=0.5):
                self.bonus, self.seen = bonus, set()

            def __call__(self, sampled_response, reference_answer):
                new = sampled_response not in self.seen
                self.seen.add(sampled_response)
                return float(sampled_response == reference_answer) + self.bonus * new
    """

    def __call__(self, *args: Any, **kwargs: Any) -> float | Mapping[str, Any] | Sequence[Any]:
        """Score one response, or a batch. The parameter names decide which (see the module docstring)."""
        ...


REWARD_FUNCTION_REGISTRY: Registry[Callable] = Registry("reward function", builtins_replaceable=True)

_TRAITS: dict[tuple[int, str], Callable] = {}  # (id of a registered function, trait) -> the function, so that it stays

_VALUES = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
# form -> value -> names of its parameter; the first that a function has is used. "solution_str" identifies the form.
_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "sample": {name: (name,) for name in _VALUES}
    | {
        "solution_str": ("solution_str", "response", "completion", "sampled_response"),
        "ground_truth": ("ground_truth", "reference_answer"),
    },
    "batch": {name: (f"{name}s",) for name in _VALUES},
    "columns (batch)": {"solution_str": ("batch",)},
    "columns (data)": {"solution_str": ("data",)},
}
COLUMN_FORMS = ("columns (batch)", "columns (data)")


ACCEPTED_FORMS = (
    "  compute_score(solution_str, ground_truth)  one response; solution_str may be named response or completion;\n"
    "    optional are ground_truth, data_source, prompt, extra_info and the columns of the data, by their names\n"
    "  compute_score(data_sources, solution_strs, ground_truths, extra_infos)  lists, with reward_manager=batch only\n"
    "  reward_fn(batch)  the whole batch, a DataProto; returns scores (B, T) or one per response\n"
    "  other parameters need a default or a value in reward_kwargs; **kwargs and async def are supported"
)


def register_reward(
    name: str, *, bounded: bool = False, accuracy: bool = True, needs_ground_truth: bool = False
) -> Callable[[Callable], Callable]:
    """Register a reward function under `name` (decorator).

    The name of a built-in function may be used: the registered function replaces it.

    Args:
        name: Value of `reward.reward_function` that selects the function.
        bounded: The function finishes quickly on any text and in any thread, as the built-in rules do. It is then
            called without a timeout.
        accuracy: The score measures correctness, so it is reported as "acc" if the function returns none. Set to False
            for scores on another scale.
        needs_ground_truth: Data without ground truth is an error before the run. Otherwise the function receives None.

    Raises:
        ValueError: If the signature is not one of the accepted forms.
    """

    def decorate(func: Callable) -> Callable:
        _form(func.__call__ if is_reward_class(func) else func)
        REWARD_FUNCTION_REGISTRY.register(name, func)
        traits = {"bounded": bounded, "no accuracy": not accuracy, "needs ground truth": needs_ground_truth}
        _TRAITS.update({(id(func), trait): func for trait, is_set in traits.items() if is_set})
        return func

    return decorate


def is_reward_class(candidate: Any) -> bool:
    """Whether `candidate` is a subclass of RewardFunction, which is constructed before it is called."""
    return inspect.isclass(candidate) and candidate is not RewardFunction and RewardFunction in candidate.__mro__


def check_registered(name: str | None, modules: Sequence[ModuleType]) -> None:
    """Check the function that `reward.reward_function=name` selects. modules: those of `imports`.

    Raises:
        ValueError: One of the modules defines a function of that name without registering it.
    """
    registered = REWARD_FUNCTION_REGISTRY.get(name)
    for module in modules:
        function = vars(module).get(name)
        if inspect.isfunction(function) and function.__module__ == module.__name__ and function is not registered:
            selected = f"{location_of(registered)} is registered" if registered else "nothing is registered"
            raise ValueError(
                f"reward.reward_function={name}: {selected} under this name, but {location_of(function)} is not: add "
                f"@register_reward({name!r}) (from verl.rewards import register_reward) above its def, or set "
                f"reward.custom_reward_function.path={module.__file__} reward.custom_reward_function.name={name} "
                "instead of reward.reward_function"
            )


@dataclass(frozen=True)
class ScoreFunction:
    """A reward function of any form behind one keyword call."""

    func: Callable  # the user's function
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # values of its other parameters (`reward_kwargs`)
    # for a function that dispatches by data source (`default_compute_score`): maps a data source to the function that
    # scores it, so that errors and timeouts refer to the function that actually runs
    route: Callable[[str], "ScoreFunction"] | None = None
    # for an object of a RewardFunction subclass: the class and its constructor arguments, from which another process
    # constructs its own object
    source: tuple[type, Mapping[str, Any]] | None = None
    terms: tuple["ScoreFunction", ...] = ()  # for a weighted sum: the functions that it calls
    # for a function that dispatches by data source, or a weighted sum with one: the custom rules that it may call, by
    # data source
    rules: Mapping[str, "ScoreFunction"] = field(default_factory=dict)
    form: str = field(init=False)  # "sample", "batch", "columns (batch)" or "columns (data)"
    is_async: bool = field(init=False)  # whether the function is `async def`
    _accepted: Mapping[str, str] = field(init=False, repr=False)  # parameter -> role
    _columns: Mapping[str, bool] = field(init=False, repr=False)  # parameter -> whether it has no default

    def __post_init__(self) -> None:
        form = _form(self.func)
        accepted, parameters = _accepted(self.func, form), named_parameters(self.func)[0]
        unset = [n for n in parameters if n not in accepted and n not in self.kwargs]
        required = {n: parameters[n].default is inspect.Parameter.empty for n in unset}
        takes_columns = not self._in_package and form not in COLUMN_FORMS
        is_async = inspect.iscoroutinefunction(_body(self.func))
        # past the check of a frozen dataclass
        vars(self).update(form=form, is_async=is_async, _accepted=accepted, _columns=required if takes_columns else {})
        _check_kwargs(self.func, accepted, self.kwargs, () if takes_columns else [n for n in unset if required[n]])

    def accepts(self, name: str) -> bool:
        """Whether the function has a parameter of this name."""
        return name in named_parameters(self.func)[0]

    def __call__(self, *, data_source: Any, solution_str: Any, **further: Any) -> Any:
        """Call the function and return its result. For the batch form each argument is a list. See `arguments`."""
        return self.func(**self.arguments(data_source, solution_str, **further))

    def arguments(
        self, data_source: Any, solution_str: Any, ground_truth: Any = None, extra_info: Any = None, prompt: Any = None
    ) -> dict[str, Any]:
        """Return the keyword arguments for `func`, `kwargs` included; columns of the data come from `extra_info`.

        Raises:
            ValueError: A parameter without default is not in `extra_info`.
        """
        values = dict(zip(_VALUES, (data_source, solution_str, ground_truth, extra_info, prompt)))
        keywords = {name: values[role] for name, role in self._accepted.items()}
        infos = (extra_info or ()) if self.form == "batch" else [extra_info or {}]
        for name, is_required in self._columns.items():
            if any(name in info for info in infos):
                column = [info.get(name) for info in infos]
                keywords[name] = column if self.form == "batch" else column[0]
            elif is_required:
                known = ", ".join(sorted({key for info in infos for key in info})) or "none"
                raise ValueError(
                    f"reward function {self.location}: no value for {name}: it is no column of the data (columns and "
                    f"keys of extra_info: {known}; `prompt` gets the prompt, whatever its column). Add a default, or "
                    f"set it in reward_kwargs\naccepted:\n{ACCEPTED_FORMS}"
                )
        return {**keywords, **self.kwargs}

    def for_data_source(self, data_source: str) -> "ScoreFunction":
        """Return the function that scores samples of `data_source`: this one, or the one it routes to."""
        return self if self.route is None else self.route(data_source)

    @property
    def accepts_extra_info(self) -> bool:
        """Whether the function receives extra_info, or the score of a reward model in it."""
        return self.form in COLUMN_FORMS or "extra_info" in self._accepted.values() or self.accepts("rm_score")

    @property
    def bounded(self) -> bool:
        """Whether the function needs no timeout (see `register_reward`)."""
        return self._has("bounded")

    @property
    def needs_ground_truth(self) -> bool:
        """Whether data without ground truth is an error (see `register_reward`)."""
        return self._has("needs ground truth")

    @property
    def _in_package(self) -> bool:
        return str(getattr(_body(self.func), "__module__", "")).startswith("verl.")

    @property
    def is_builtin(self) -> bool:
        """Whether this package defines the function, and all functions that it calls."""
        return self._in_package and not self.rules and all(term.is_builtin for term in self.terms)

    @property
    def is_accuracy(self) -> bool:
        """Whether the score is reported as "acc" if the function returns none."""
        return not self._has("no accuracy")

    def _has(self, trait: str) -> bool:
        registered = self.source[0] if self.source else self.func
        return (id(registered), trait) in _TRAITS

    @property
    def name(self) -> str:
        """The function's name; the class name for a callable object."""
        body = _body(self.func)
        return body.__qualname__ if inspect.isfunction(body) else type(self.func).__name__

    @property
    def location(self) -> str:
        """Name and location for messages: `compute_score() at /path/reward.py:12`."""
        body = inspect.unwrap(_body(self.func))
        return location_of(body) if inspect.isfunction(body) else f"{self.name}()"


def _body(func: Callable) -> Callable:
    """Return the function behind a partial, a bound method or a callable object. Builtins are returned unchanged."""
    while isinstance(func, partial):
        func = func.func
    if inspect.ismethod(func):
        return func.__func__
    return func if inspect.isroutine(func) or inspect.isclass(func) else type(func).__call__


def named_parameters(func: Callable) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be passed by name, and whether the function accepts **kwargs."""
    parameters = inspect.signature(func).parameters
    by_name = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return by_name, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _form(func: Callable) -> str:
    """Return the form of `func`. Raises ValueError with the accepted forms and the found signature otherwise."""
    if not callable(func) or inspect.isclass(func):
        raise ValueError(f"a reward function must be callable, found {type(func).__name__}: {func!r}")
    names = named_parameters(func)[0]
    forms = [form for form, roles in _ROLES.items() if any(name in names for name in roles["solution_str"])]
    forms = [form for form in forms if form not in COLUMN_FORMS] or forms  # `data` may be a column
    if len(forms) != 1:
        raise _wrong_signature(func, "its parameter names match none of the accepted forms")
    return forms[0]


def _accepted(func: Callable, form: str) -> dict[str, str]:
    """Parameter -> the role that it has. With **kwargs the first names of the roles, except `prompt`, are passed."""
    parameters, accepts_any = named_parameters(func)
    accepted = {}
    for role, names in _ROLES[form].items():
        name = next((name for name in names if name in parameters), None)
        if name is not None or (accepts_any and role != "prompt"):
            accepted[name or names[0]] = role
    return accepted


def _check_kwargs(func: Callable, accepted: Mapping[str, str], kwargs: Mapping[str, Any], unset: Sequence[str]) -> None:
    """Raise ValueError if `kwargs` do not match the other parameters of `func`. unset: those without a value."""
    parameters, accepts_any = named_parameters(func)
    reserved = [n for n in kwargs if n in accepted]
    if reserved:
        raise ValueError(
            f"reward_kwargs must not contain {', '.join(reserved)}: the reward manager passes these per sample"
        )
    typed, other = signature(func).parameters, [n for n in parameters if n not in accepted]
    for name, value in kwargs.items():
        if name in other:
            check_type(typed[name], value, f"reward_kwargs.{name}")
        elif not accepts_any:
            raise ValueError(f"reward_kwargs: {func!r} has no parameter {name!r}: {did_you_mean(name, other)}")
    if unset:
        reason = f"no value for {', '.join(unset)}: add a default, or set it in reward_kwargs"
        raise _wrong_signature(func, reason)


def _wrong_signature(func: Callable, reason: str) -> ValueError:
    body = inspect.unwrap(_body(func))
    name = body.__qualname__ if inspect.isroutine(body) else type(func).__name__
    location = location_of(body).partition(" at ")[2] if inspect.isfunction(body) else ""
    return ValueError(
        f"reward function with a wrong signature: {reason}\n"
        f"found:\n  {name}{inspect.signature(func)}{location and f' at {location}'}\naccepted:\n{ACCEPTED_FORMS}"
    )
