"""Functions on dicts, metrics and timers under the names of public verl."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any

import numpy as np


def append_to_dict(data: dict[str, list], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list of its name, with the prefix, in place."""
    for name, value in new_data.items():
        data.setdefault(f"{prefix}{name}", []).append(value)


def union_two_dict(dict1: dict, dict2: Mapping) -> dict:
    """Add the entries of the second dict to the first, in place, and return it. ValueError if a value differs."""
    for name, value in dict2.items():
        if name in dict1 and dict1[name] != value:
            raise ValueError(f"union: {name!r} is {dict1[name]!r} in one dict and {value!r} in the other")
        dict1[name] = value
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """The values of each name in all dicts, which must have the same names."""
    return {name: [entry[name] for entry in list_of_dict] for name in (list_of_dict[0] if list_of_dict else ())}


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dict with a prefix before every name, unless the name has it."""
    return {name if name.startswith(prefix) else f"{prefix}{name}": value for name, value in data.items()}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists of metrics to numbers: the maximum or minimum if "max" or "min" is in the name, else the mean."""

    def reduce(name: str, values: Any) -> Any:
        return np.max(values) if "max" in name else np.min(values) if "min" in name else np.mean(values)

    return {name: reduce(name, values) for name, values in metrics.items()}


def rollout_trace_op(func: Callable) -> Callable:
    """Return the function: traces of rollouts are not recorded."""
    return func


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: raise TimeoutError if a call takes longer. The call then goes on in its thread, as threads cannot be
    stopped."""

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            executor = ThreadPoolExecutor(1)
            try:
                return executor.submit(func, *args, **kwargs).result(seconds)
            except FutureTimeoutError:
                raise TimeoutError(f"{func.__name__} took longer than {seconds} s") from None
            finally:
                executor.shutdown(wait=False)

        return call

    return decorate


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`. Other arguments mark ranges in a profiler and are ignored."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
