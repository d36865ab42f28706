"""Binding by name: the parameter names of a function declare the columns and settings that it reads.

@register_adv_est("mine")
def mine(token_level_rewards, response_mask, uid, *, temperature=1.0): ...

arguments = bind_arguments(mine, batch_columns, {"temperature": 0.5})
advantages, returns = mine(**arguments)
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from verl.registry import check_type, did_you_mean, signature

# parameter names of public verl -> column
ALIASES = {"index": "uid"}
# parameters that receive all settings, or all columns
ALL_AT_ONCE = ("config", "columns")


class Settings(Mapping):
    """Read-only settings: `s.gamma`, `s["gamma"]`, `s.get("gamma", 1.0)`. Nested mappings are `Settings` too."""

    def __init__(self, values: Mapping[str, Any]):
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return Settings(value) if isinstance(value, Mapping) and not isinstance(value, Settings) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(f"no setting is called {name!r}: {did_you_mean(name, self._values)}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings are read-only: cannot set {name!r}")

    def __reduce__(self):  # copy and pickle through the constructor: `__getattr__` needs `_values`
        return Settings, (dict(self._values),)

    def __repr__(self) -> str:
        return f"Settings({dict(self._values)!r})"


def bind_arguments(
    fn: Callable, columns: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments for `fn`: each parameter by name from the columns, otherwise from the settings.

    - A column that is None counts as missing. A setting that is None leaves the parameter at its default. An int for
      a parameter whose default or annotation is a float becomes a float.
    - A parameter with a default that is neither a column nor a setting keeps its default. So an optional column is
      passed if it is present.
    - `index` is the column `uid`. `columns` receives all columns, read-only. `config` receives the argument `config`,
      by default the settings with an empty `global_batch_info`, as a read-only `Settings`.
    - `*args` and `**kwargs` receive nothing.

    Raises:
        ValueError: if a parameter without a default is neither a column nor a setting.
    """
    columns = {name: column for name, column in columns.items() if column is not None}
    arguments = {}
    for parameter in _named_parameters(fn):
        name = ALIASES.get(parameter.name, parameter.name)
        if parameter.name in columns:
            arguments[parameter.name] = columns[parameter.name]
        elif name in columns:
            arguments[parameter.name] = columns[name]
        elif parameter.name == "config":
            arguments[parameter.name] = Settings({"global_batch_info": {}, **settings} if config is None else config)
        elif parameter.name == "columns":
            arguments[parameter.name] = MappingProxyType(columns)
        elif settings.get(parameter.name) is not None:
            arguments[parameter.name] = _as_declared(parameter, settings[parameter.name])
        elif parameter.default is parameter.empty:
            raise ValueError(_missing(fn, parameter, columns, settings))
    return arguments


def _as_declared(parameter: inspect.Parameter, value: Any) -> Any:
    """`my_temp=3` of a parameter `my_temp=2.0` is 3.0: an int would change the dtype of integer tensors."""
    is_float = isinstance(parameter.default, float) or parameter.annotation in (float, "float")
    return float(value) if is_float and type(value) is int else value


def required_columns(fn: Callable, settings_names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that `fn` requires, in the order of its signature.

    These are the parameters without a default that are neither keyword-only (settings) nor in `settings_names`.
    """
    settings_names = set(settings_names)
    return tuple(
        ALIASES.get(parameter.name, parameter.name)
        for parameter in _named_parameters(fn)
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.KEYWORD_ONLY
        and parameter.name not in settings_names
        and parameter.name not in ALL_AT_ONCE
    )


def reads_all_columns(fn: Callable) -> bool:
    """Whether `fn` has the parameter `columns`, and so may read any of them."""
    return "columns" in inspect.signature(fn).parameters


def optional_columns(fn: Callable, present: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of `present` that `fn` has an optional parameter for."""
    optional = {ALIASES.get(p.name, p.name) for p in _named_parameters(fn) if p.default is not p.empty}
    return tuple(name for name in present if name in optional)


def missing_settings(fn: Callable, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the required settings of `fn` that have no value in `settings`."""
    return tuple(
        parameter.name
        for parameter in _named_parameters(fn)
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.default is parameter.empty
        and settings.get(parameter.name) is None
    )


def check_settings(name: str, fn: Callable, settings: Mapping[str, Any], key: str, extra: Mapping[str, Any]) -> None:
    """Raise ValueError if `fn` lacks a required setting, has no parameter for an extra one, or one of another type.

    Args:
        name: names `fn` in messages.
        fn: the function that gets the settings.
        settings: all settings, the extra ones included.
        key: configuration key of the extra ones.
        extra: those that the user added for this function.
    """
    if missing := missing_settings(fn, settings):
        raise ValueError(f"{name} needs the setting {missing[0]!r}: set {key}.{missing[0]}")
    keywords = {p.name for p in _named_parameters(fn) if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
    unknown = [] if "config" in parameter_names(fn) else sorted(extra.keys() - keywords)
    if unknown:
        raise ValueError(f"{key}.{unknown[0]}: {name} has no such setting: {did_you_mean(unknown[0], keywords)}")
    parameters = signature(fn).parameters
    for setting, value in extra.items():
        if setting in parameters:
            check_type(parameters[setting], value, f"{key}.{setting}")


def parameter_names(fn: Callable) -> set[str]:
    """Return the names of all parameters of `fn`."""
    return {parameter.name for parameter in _named_parameters(fn)}


def _named_parameters(fn: Callable) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise ValueError(
            f"{_name(fn)} has positional-only parameters {positional}: arguments are passed by name, so remove the '/'"
        )
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _missing(fn: Callable, parameter: inspect.Parameter, columns: Mapping, settings: Mapping) -> str:
    noun = "setting" if parameter.kind is parameter.KEYWORD_ONLY or parameter.name in settings else "column or setting"
    problem = f"the {noun} is null" if parameter.name in settings else f"there is no {noun} of that name"
    return (
        f"{_name(fn)} requires {parameter.name!r}, but {problem}; "
        f"columns: {', '.join(sorted(columns)) or '(none)'}; settings: {', '.join(sorted(settings)) or '(none)'}"
    )


def _name(fn: Callable) -> str:
    definition = fn if inspect.isfunction(fn) or inspect.isclass(fn) or inspect.ismethod(fn) else type(fn)
    return f"{definition.__module__}.{definition.__qualname__}"
