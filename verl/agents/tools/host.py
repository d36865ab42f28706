"""Runs tools and interactions in the process that holds their instances, and the interface of what calls it.

The host runs in a worker process (`verl.agents.tools.worker`), or in the process of the rollout with
`rollout.multi_turn.tool_isolation=none`. An exception of a tool becomes an observation.
"""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.function_tool import FunctionTool
from verl.agents.tools.load import Stopped, describe, load_interactions, load_tools
from verl.agents.tools.schemas import ToolResponse, read_arguments, result_text
from verl.registry import did_you_mean

_THREADS = 64  # for functions that are not async


@dataclass(frozen=True)
class ToolSettings:
    """The tools that a host loads, and how it truncates responses."""

    # tool_config_path, function_tool_path, interaction_config_path: see `verl.agents.tools.load`
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    interaction_config_path: str | None = None
    max_response_length: int = 256  # longer responses of tools are truncated, in characters
    truncate_side: str = "middle"  # see `truncate_text`


class ToolFailure(Exception):
    """A call failed; `timed_out` if it exceeded its time limit."""

    def __init__(self, message: str, timed_out: bool = False):
        super().__init__(message)
        self.timed_out = timed_out


def late(seconds: float) -> ToolFailure:
    """The failure of a call that exceeded its time limit."""
    return ToolFailure(f"timed out after {seconds:g} s", timed_out=True)


class ToolRunner(Protocol):
    """Calls methods of a `ToolHost`."""

    async def call(self, trajectory: str, method: str, arguments: Mapping[str, Any], seconds: float | None) -> Any:
        """Call `ToolHost.<method>(trajectory, **arguments)`.

        Args:
            trajectory: id of the trajectory.
            method: the method.
            arguments: its other arguments.
            seconds: time limit; None: no limit.

        Raises:
            ToolFailure: the call failed.
        """

    def forget(self, trajectory: str) -> None:
        """End a trajectory. Its process is available to others."""

    def close(self) -> None:
        """End all processes."""


@dataclass(frozen=True)
class Observation:
    """The message that the policy reads after a call, and the reward of the call."""

    text: str
    reward: float = 0.0
    failed: bool = False  # the text starts with "error: "
    timed_out: bool = False  # whether it failed by its time limit


@dataclass(frozen=True)
class Rewards:
    """The rewards of the tools at the end of a trajectory, by name of the tool."""

    rewards: dict[str, float]  # result of `calc_reward`
    errors: dict[str, str]  # descriptions of failed calls of `create`, `calc_reward` or `release`


@dataclass(frozen=True)
class Reply:
    """The reply of an interaction."""

    text: str  # the message of the user
    ends: bool  # whether the interaction has ended
    reward: float | None  # of the turn; None if there is none


def truncate_text(text: str, limit: int, side: str) -> str:
    """At most `limit` characters of a text, and a note if it was longer.

    Args:
        side: what is removed, as in public verl 0.9.1: "left" keeps the end, "right" the start, "middle" half of each.
            Older releases keep the named side.
    """
    if len(text) <= limit:
        return text
    if side == "right":
        return text[:limit] + "...(truncated)"
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def failure(message: str, timed_out: bool = False) -> Observation:
    """The observation of a failed call."""
    return Observation(f"error: {message}", failed=True, timed_out=timed_out)


class ToolHost:
    """Tools and interactions, and their instances: one per trajectory, created before its first call."""

    def __init__(self, settings: ToolSettings):
        self.settings = settings
        self.tools = load_tools(settings.tool_config_path, settings.function_tool_path)
        self.interactions = load_interactions(settings.interaction_config_path)
        self._instances: dict[tuple[str, str], str] = {}
        self._creating: dict[tuple[str, str], asyncio.Lock] = {}  # concurrent calls of a turn share an instance
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tool")

    async def execute(
        self, trajectory: str, name: str, parameters: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> Observation:
        """Run one call of a tool. kwargs: the entry of the tool in the sample's `tools_kwargs`."""
        try:
            result = await self._execute(trajectory, name, dict(parameters), kwargs)
            observation = read_result(result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also sys.exit() of a tool
            observation = failure(describe(error))
        limit, side = self.settings.max_response_length, self.settings.truncate_side
        text = truncate_text(observation.text, limit, side)
        return Observation(text, observation.reward, observation.failed)

    async def rewards(self, trajectory: str, kwargs: Mapping[str, Mapping[str, Any]]) -> Rewards:
        """End a trajectory. All its instances are released, also if a tool fails. kwargs: the sample's `tools_kwargs`;
        a tool named there has an instance even if it was not called."""
        names = dict.fromkeys([name for owner, name in self._instances if owner == trajectory] + list(kwargs))
        tools = [tool for name in names if isinstance(tool := self.tools.get(name), BaseTool)]
        result = Rewards({}, {})
        await asyncio.gather(*(self._end(trajectory, tool, kwargs.get(tool.name) or {}, result) for tool in tools))
        return result

    async def _end(self, trajectory: str, tool: BaseTool, kwargs: Mapping[str, Any], result: Rewards) -> None:
        """Add the reward of one instance, or the error of its tool, and release it."""
        try:
            instance = await self._instance(trajectory, tool, kwargs)
            try:
                reward = await tool.calc_reward(instance, **(kwargs.get("calc_reward_kwargs") or {}))
                result.rewards[tool.name] = finite("calc_reward", reward)
            finally:
                del self._instances[trajectory, tool.name]
                await tool.release(instance, **(kwargs.get("release_kwargs") or {}))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also sys.exit() of a tool
            result.errors[tool.name] = describe(error)

    async def start(self, trajectory: str, name: str, kwargs: Mapping[str, Any]) -> Any:
        """Start an interaction. Returns the first observation of an environment."""
        return await self.interactions[name].start_interaction(trajectory, **kwargs)

    async def respond(
        self, trajectory: str, name: str, messages: Sequence[dict[str, Any]], kwargs: Mapping[str, Any]
    ) -> Reply:
        """The reply of an interaction to the last message."""
        reply = await self.interactions[name].generate_response(trajectory, list(messages), **kwargs)
        if not isinstance(reply, tuple) or len(reply) < 3:
            raise TypeError(f"expected (should_terminate, text, reward, metrics), found {type(reply).__name__}")
        ends, text, reward, *_ = reply
        reward = None if reward is None else finite("reward", reward)
        return Reply("" if text is None else str(text), bool(ends), reward)

    async def finish(self, trajectory: str, name: str) -> float | None:
        """End an interaction. Returns the reward that it gives at the end, if there is one."""
        reward = await self.interactions[name].finalize_interaction(trajectory)
        return None if reward is None else finite("reward", reward)

    async def _execute(self, trajectory: str, name: str, parameters: dict[str, Any], kwargs: Mapping[str, Any]) -> Any:
        if name not in self.tools:
            raise ValueError(f"there is no tool {name!r}: {did_you_mean(name, self.tools)}")
        tool = self.tools[name]
        parameters = read_arguments(parameters, tool.tool_schema.function.parameters.model_dump())
        if isinstance(tool, FunctionTool):
            inspect.signature(tool.func).bind(**parameters)
            if tool.is_async:
                return await tool.func(**parameters)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: _call(tool.func, parameters))
        instance = await self._instance(trajectory, tool, kwargs)
        return with_response(await tool.execute(instance, parameters, **(kwargs.get("execute_kwargs") or {})))

    async def _instance(self, trajectory: str, tool: BaseTool, kwargs: Mapping[str, Any]) -> str:
        key = trajectory, tool.name
        if key not in self._instances:
            async with self._creating.setdefault(key, asyncio.Lock()):
                try:
                    if key not in self._instances:
                        self._instances[key] = await self._create(trajectory, tool, kwargs)
                finally:
                    self._creating.pop(key, None)
        return self._instances[key]

    async def _create(self, trajectory: str, tool: BaseTool, kwargs: Mapping[str, Any]) -> str:
        arguments = kwargs.get("create_kwargs") or {}
        parameters = inspect.signature(tool.create).parameters
        accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        nested = {"create_kwargs": arguments} if accepts_any or "create_kwargs" in parameters else {}
        unpacked = arguments if accepts_any else {k: v for k, v in arguments.items() if k in parameters or not nested}
        instance = await tool.create(trajectory, **unpacked, **nested)
        return instance[0] if isinstance(instance, tuple) else instance


def _call(func: Any, parameters: Mapping[str, Any]) -> Any:
    try:
        return func(**parameters)
    except (SystemExit, KeyboardInterrupt) as error:
        raise Stopped(describe(error)) from error
    except StopIteration as error:  # a future cannot hold it
        raise RuntimeError(describe(error)) from error


def with_response(result: Any) -> Any:
    """The result of `BaseTool.execute`, whose text is a ToolResponse; in older releases of public verl it is a str."""
    match result:
        case tuple((str(text), reward, Mapping() as metrics)):
            return ToolResponse(text=text), reward, metrics
    return result


def read_result(result: Any) -> Observation:
    """The observation of what a tool returned: text, or any other value as JSON text.

    A reward comes only from a ToolResponse: (ToolResponse, reward) or (ToolResponse, reward, metrics).

    Raises:
        ValueError: images or video, or a reward that is not a number.
    """
    reward = 0.0
    if isinstance(result, tuple) and result and isinstance(result[0], ToolResponse):
        result, *values = result
        if values and values[0] is not None:
            reward = finite("(ToolResponse, reward, metrics): reward", values[0])
    if isinstance(result, ToolResponse):
        if result.image or result.video:
            raise ValueError("images and video of tools are not supported")
        result = result.text or ""
    return Observation(result_text(result), reward)


def finite(name: str, value: Any) -> float:
    """A reward. Raises ValueError unless it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number as reward, found {value!r:.100}")
    return number


class ToolsInProcess:
    """A `ToolRunner` in this process. A tool that blocks cannot be stopped; breakpoints work."""

    def __init__(self, settings: ToolSettings):
        self.host = ToolHost(settings)

    async def call(self, trajectory: str, method: str, arguments: Mapping[str, Any], seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await getattr(self.host, method)(trajectory, **arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code
            if isinstance(error, TimeoutError) and deadline.expired():
                raise late(seconds) from error
            raise ToolFailure(describe(error)) from error

    def forget(self, trajectory: str) -> None:
        """See `ToolRunner.forget`."""

    def close(self) -> None:
        """See `ToolRunner.close`."""
