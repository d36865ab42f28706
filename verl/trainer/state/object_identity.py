"""The fingerprint of a Python object, such as a reward function of a notebook: its source and the values bound to it.

Unlike `hash` and `pickle`, it is the same in every process, and another one after the source was edited.
"""

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: values that are compared; others, such as a list that the function fills, may change while the run goes on
_PLAIN = (bool, int, float, str, bytes, type(None))
_DEPTH = 4


def object_fingerprint(value: Any) -> list[Any]:
    """The fingerprint of a function, a class or an object, as `identity.fingerprint` gives that of a file."""
    text = "\n".join(_described(value, _DEPTH))
    name = getattr(value, "__name__", type(value).__name__)
    return [name, len(text), 0, hashlib.sha256(text.encode()).hexdigest()]


def _described(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | frozenset) and depth:
        for each in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            yield from _described(each, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _described(value.func, depth)
        yield from _described((value.args, tuple(sorted(value.keywords.items()))), depth)
    elif inspect.ismethod(value):
        yield value.__name__
        yield from _described(value.__self__, depth)
    elif inspect.isfunction(value):
        yield from _of_function(value, depth)
    elif isinstance(value, type):
        yield _source(value, value.__qualname__)
    else:
        yield _source(type(value), type(value).__qualname__)
        if depth:
            yield from _of_mapping({k: v for k, v in _attributes(value).items() if not k.startswith("_")}, depth)


def _of_function(function: Callable, depth: int) -> Iterator[str]:
    function = inspect.unwrap(function)
    code = function.__code__
    yield _source(function, f"{code.co_code.hex()} {[c for c in code.co_consts if isinstance(c, _PLAIN)]}")
    if depth:
        yield from _described(function.__defaults__ or (), depth - 1)
        yield from _of_mapping(function.__kwdefaults__ or {}, depth)
        cells = zip(code.co_freevars, function.__closure__ or ())
        yield from _of_mapping({name: cell.cell_contents for name, cell in cells if _is_set(cell)}, depth)


def _of_mapping(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Names and values that are plain, or functions."""
    for name in sorted(values):
        if isinstance(values[name], (*_PLAIN, tuple, frozenset, functools.partial)) or inspect.isroutine(values[name]):
            yield name
            yield from _described(values[name], depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    return vars(value) if hasattr(value, "__dict__") else {}


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _source(thing: Any, otherwise: str) -> str:
    """The source of a function or class; what else is known of one that was made by `exec`."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return otherwise
