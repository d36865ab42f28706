"""What a reward function is: its accepted signatures, its registry, and the wrapper that gives all of them one call.

Three forms, told apart by the names of the parameters before anything runs:

- row:    `compute_score(data_source, solution_str, ground_truth, extra_info)`, called once per answer
- plugin: `f(sampled_response, reference_answer)`, called once per answer
- batch:  `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, lists of one length

A function returns a number or a bool, or a dict with "score" and further values (the batch form: a list of those).
It may be `async def`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.registry import Registry, did_you_mean

REWARD_FUNCTION_REGISTRY: Registry[Callable] = Registry("reward function")

_BOUNDED: list[Callable] = []
_OWN_SCALE: list[Callable] = []

# form -> (names it must take, names it may leave out)
_FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "row": (("data_source", "solution_str", "ground_truth"), ("extra_info",)),
    "plugin": (("sampled_response", "reference_answer"), ()),
    "batch": (("data_sources", "solution_strs", "ground_truths"), ("extra_infos",)),
}
# The names that say which form is meant; the other ones may be taken up by **kwargs.
_TELLTALE = {
    "row": {"solution_str", "ground_truth"},
    "plugin": {"sampled_response", "reference_answer"},
    "batch": {"solution_strs", "ground_truths"},
}


def _names(form: str) -> tuple[str, ...]:
    required, optional = _FORMS[form]
    return (*required, *optional)


ACCEPTED_FORMS = (
    "  compute_score(data_source, solution_str, ground_truth, extra_info)  one answer (extra_info may be left out)\n"
    "  f(sampled_response, reference_answer)  one answer, as a plugin\n"
    "  compute_score(data_sources, solution_strs, ground_truths, extra_infos)  lists, for reward_manager=batch only\n"
    "  further parameters need a default or a value in reward_kwargs; **kwargs is welcome; async def too"
)


def register_reward(name: str, *, bounded: bool = False, accuracy: bool = True) -> Callable[[Callable], Callable]:
    """Decorator: register a reward function under `name`. Refuses a wrong signature at once (ValueError).

    bounded: the function promises to end soon whatever text it is given, from any thread (the rules of this package
    do), so it is called without a deadline. accuracy: its score says how right an answer is, so that it is "acc" where
    the function gives none itself; False for a score on a scale of its own.
    """

    def decorate(func: Callable) -> Callable:
        _form(func)
        REWARD_FUNCTION_REGISTRY.register(name, func)
        if bounded:
            _BOUNDED.append(func)
        if not accuracy:
            _OWN_SCALE.append(func)
        return func

    return decorate


@dataclass(frozen=True)
class ScoreFunction:
    """A reward function of any form behind one keyword call; what the managers hold.

    func: the user's function. kwargs: the values of its further parameters. form: "row", "plugin" or "batch".
    route: for a function that only chooses among others by data source (`default_compute_score`): the choice, so that
    errors and deadlines are those of the function that really runs.
    """

    func: Callable
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    route: Callable[[str], "ScoreFunction"] | None = None
    form: str = field(init=False)
    is_async: bool = field(init=False)
    _takes: tuple[bool, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        form = _form(self.func)
        _check_kwargs(self.func, form, self.kwargs)
        parameters, takes_any = _parameters(self.func)
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "is_async", inspect.iscoroutinefunction(_body(self.func)))
        object.__setattr__(self, "_takes", tuple(n for n in _names(form) if takes_any or n in parameters))

    def __call__(self, *, data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
        """Call the function; for the batch form each argument is a list. Returns what the function returns."""
        return self.func(**self.arguments(data_source, solution_str, ground_truth, extra_info))

    def arguments(self, data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
        """The keyword arguments that this form takes, further ones included."""
        if self.form == "plugin":
            return {"sampled_response": solution_str, "reference_answer": ground_truth, **self.kwargs}
        given = (data_source, solution_str, ground_truth, extra_info)
        return {**{k: v for k, v in zip(_names(self.form), given) if k in self._takes}, **self.kwargs}

    def for_data_source(self, data_source: str) -> "ScoreFunction":
        """The function that scores rows of `data_source`: this one, or the one it routes to."""
        return self if self.route is None else self.route(data_source)

    @property
    def takes_extra_info(self) -> bool:
        """Whether the function is given extra_info, where facts about an answer stand that others found."""
        return self.form != "plugin" and _names(self.form)[-1] in self._takes

    @property
    def bounded(self) -> bool:
        """Whether the function ends soon by itself, so that no deadline is needed."""
        return any(self.func is known for known in _BOUNDED)

    @property
    def is_accuracy(self) -> bool:
        """Whether the score counts as "acc" where the function gives none itself."""
        return not any(self.func is known for known in _OWN_SCALE)

    @property
    def name(self) -> str:
        """The function's own name, with the class for a callable object."""
        body = _body(self.func)
        return body.__qualname__ if inspect.isfunction(body) else type(self.func).__name__

    @property
    def where(self) -> str:
        """`compute_score() at /path/reward.py:12`, for messages."""
        body = inspect.unwrap(_body(self.func))
        if not inspect.isfunction(body):
            return f"{self.name}()"
        return f"{self.name}() at {body.__code__.co_filename}:{body.__code__.co_firstlineno}"


def _body(func: Callable) -> Callable:
    """The plain function behind a partial, a bound method or a callable object (builtins stay what they are)."""
    while isinstance(func, partial):
        func = func.func
    if inspect.ismethod(func):
        return func.__func__
    return func if inspect.isroutine(func) or inspect.isclass(func) else type(func).__call__


def _parameters(func: Callable) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters that can be given by name, and whether **kwargs takes any other name."""
    parameters = inspect.signature(func).parameters
    by_name = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return by_name, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _form(func: Callable) -> str:
    """Which form `func` has; ValueError that prints the accepted forms and the found signature otherwise."""
    if not callable(func) or inspect.isclass(func):
        raise ValueError(f"a reward function must be callable, found {type(func).__name__}: {func!r}")
    parameters, takes_any = _parameters(func)
    forms = [form for form, names in _TELLTALE.items() if names <= parameters.keys()]
    if len(forms) != 1:
        raise _wrong_signature(func, "the names of its parameters fit none of the accepted forms")
    missing = [n for n in _FORMS[forms[0]][0] if n not in parameters and not takes_any]
    if missing:
        raise _wrong_signature(func, f"it does not take {', '.join(missing)}")
    return forms[0]


def _check_kwargs(func: Callable, form: str, kwargs: Mapping[str, Any]) -> None:
    """ValueError where `kwargs` and the further parameters of `func` do not fit each other."""
    parameters, takes_any = _parameters(func)
    reserved = [n for n in kwargs if n in _names(form)]
    if reserved:
        raise ValueError(f"reward_kwargs may not set {', '.join(reserved)}: the reward manager fills these in per row")
    further = [n for n in parameters if n not in _names(form)]
    for name in kwargs:
        if name not in further and not takes_any:
            raise ValueError(f"reward_kwargs: {func!r} has no parameter {name!r}: {did_you_mean(name, further)}")
    unset = [n for n in further if parameters[n].default is inspect.Parameter.empty and n not in kwargs]
    if unset:
        why = f"nothing fills in {', '.join(unset)}: give a default, or a value in reward_kwargs"
        raise _wrong_signature(func, why)


def _wrong_signature(func: Callable, why: str) -> ValueError:
    body = inspect.unwrap(_body(func))
    name = body.__qualname__ if inspect.isroutine(body) else type(func).__name__
    at = f" at {body.__code__.co_filename}:{body.__code__.co_firstlineno}" if inspect.isfunction(body) else ""
    return ValueError(
        f"reward function with a wrong signature: {why}\n"
        f"found:\n  {name}{inspect.signature(func)}{at}\naccepted:\n{ACCEPTED_FORMS}"
    )
