"""Agents that are trained: Python functions, called once per sample."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np

from verl.config import schema
from verl.registry import load_object

#: extra_info of the trial of the reward function before training
TRIAL_INFO = {"agent_score": 0.0, "agent_error": None, "agent_info": {}, "num_turns": 2}

_ARGUMENTS = ("sample", "base_url", "api_key", "model")


#: (sample, base_url, api_key, model) -> the result. Starts the agent without waiting; cancelling the future stops it
StartAgent = Callable[[dict[str, Any], str, str, str], "Future[Any]"]


def load_agent(config: schema.ServerAgentConfig) -> StartAgent:
    """The agent of `rollout.server.agent`. Raises ValueError if there is none.

    All calls of an `async` function share one event loop, so that they can share a client. A plain function has a
    thread per call; if it is stopped, its thread is abandoned, and its next call of the policy fails.
    """
    if not config.path:
        raise ValueError(
            f"rollout.mode=server: expected rollout.server.agent.path, a Python file with the function {config.name!r}"
        )
    function = load_object(config.path, config.name)
    if not callable(function):
        raise ValueError(f"rollout.server.agent: expected a function, found {config.name}={function!r}")
    try:
        inspect.signature(function).bind(*_ARGUMENTS)
    except TypeError as error:
        raise ValueError(
            f"rollout.server.agent: {config.name} in {config.path}: expected a function of "
            f"({', '.join(_ARGUMENTS)}): {error}"
        ) from None
    if not inspect.iscoroutinefunction(function):
        return lambda *arguments: in_thread(lambda: function(*arguments))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return lambda *arguments: asyncio.run_coroutine_threadsafe(function(*arguments), loop)


def in_thread(function: Callable[[], Any]) -> "Future[Any]":
    """Call a function in a new thread."""
    future: Future[Any] = Future()

    def work() -> None:
        with suppress(InvalidStateError):  # cancelled
            try:
                future.set_result(function())
            except InvalidStateError:
                raise
            except BaseException as error:  # also SystemExit of an agent
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=work, name="agent", daemon=True).start()
    return future


def read_result(result: Any) -> tuple[float | None, dict[str, Any]]:
    """Score and further values that an agent returned. Raises ValueError for anything but a number, a dict or None."""
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    score = values.pop("score", None)
    if isinstance(score, np.ndarray | np.generic) and score.ndim == 0:
        score = score.item()
    if score is None:
        return None, values
    if not isinstance(score, Real) or not math.isfinite(score):
        raise ValueError(f"the agent returned {result!r:.200}: expected a finite number, a dict with a score, or None")
    return float(score), values
