"""Agents that are trained: a Python function, or a program that is run once per sample."""

import asyncio
import inspect
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from verl.config import schema
from verl.processes.child import helper_environment
from verl.registry import load_object

#: extra_info of the trial of the reward function before training
TRIAL_INFO = {"agent_score": 0.0, "agent_error": None, "agent_info": {}, "num_turns": 2}

_ARGUMENTS = ("sample", "base_url", "api_key", "model")
#: bytes of an environment variable that every system accepts
_LARGEST_VARIABLE = 100_000
_POLL = 0.2  # seconds until a program that is stopped ends


@dataclass(frozen=True)
class AgentCall:
    """The arguments of an agent.

    Args:
        sample: the columns of the sample.
        base_url: base URL for the OpenAI client; every sample has its own.
        api_key: token of the server.
        model: name of the model.
    """

    sample: dict[str, Any]
    base_url: str
    api_key: str
    model: str


class Agent(Protocol):
    """Runs once per sample."""

    def start(self, call: AgentCall) -> "Future[Any]":
        """Start the agent without waiting for it. Cancelling the future stops it."""


def load_agent(config: schema.ServerAgentConfig) -> Agent:
    """The agent of `rollout.server.agent`. Raises ValueError if there is none, or two."""
    if bool(config.path) == bool(config.command):
        number = "both" if config.path else "neither"
        raise ValueError(
            "rollout.mode=server: expected rollout.server.agent.path (a Python file with the function "
            f"{config.name!r}) or rollout.server.agent.command (a program), found {number}"
        )
    if config.command:
        return CommandAgent(config.command)
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
    return AsyncAgent(function) if inspect.iscoroutinefunction(function) else FunctionAgent(function)


class AsyncAgent:
    """An `async` function. All its calls share one event loop, so that they can share a client."""

    def __init__(self, function: Callable):
        self.function = function
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()

    def start(self, call: AgentCall) -> "Future[Any]":
        coroutine = self.function(call.sample, call.base_url, call.api_key, call.model)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class FunctionAgent:
    """A plain function, in a thread per call. If it is stopped, its thread is abandoned; its next call of the policy
    fails."""

    def __init__(self, function: Callable):
        self.function = function

    def start(self, call: AgentCall) -> "Future[Any]":
        return in_thread(lambda: self.function(call.sample, call.base_url, call.api_key, call.model))


class CommandAgent:
    """A program. It receives OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and VERL_SAMPLE (JSON) as environment
    variables. The last line of its output is the result, as JSON, if it is a number or an object."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)

    def start(self, call: AgentCall) -> "Future[Any]":
        stopped = threading.Event()
        future = in_thread(lambda: self._run(call, stopped))
        future.add_done_callback(lambda _: stopped.set())
        return future

    def _run(self, call: AgentCall, stopped: threading.Event) -> Any:
        sample = json.dumps(call.sample, default=_plain)
        if len(sample) > _LARGEST_VARIABLE:
            raise ValueError(f"VERL_SAMPLE has {len(sample):,} characters, more than an environment variable can hold")
        values = {"OPENAI_BASE_URL": call.base_url, "OPENAI_API_KEY": call.api_key, "OPENAI_MODEL": call.model}
        process = subprocess.Popen(
            self.command,
            env=helper_environment() | values | {"VERL_SAMPLE": sample},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        output = None
        try:
            while output is None and not stopped.is_set():
                with suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=_POLL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                process.communicate()
        if output is None:
            return None  # it was stopped: the result is not used
        if process.returncode:
            raise RuntimeError(f"{self.command[0]} ended with status {process.returncode}: {errors.strip()[-500:]}")
        return _last_result(output)


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


def _last_result(output: str) -> Any:
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, int | float | dict) else None


def _plain(value: Any) -> Any:
    """A value of a column in a form that JSON can encode."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


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
