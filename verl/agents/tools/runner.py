"""The interface of the runners of tools, and the types that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolSettings:
    """The tools that a host loads, and how it truncates responses.

    Args:
        tool_config_path, function_tool_path, interaction_config_path: see `verl.agents.tools.load`.
        max_response_length: longer responses of tools are truncated, in characters.
        truncate_side: see `truncate_text`.
    """

    tool_config_path: str | None = None
    function_tool_path: str | None = None
    interaction_config_path: str | None = None
    max_response_length: int = 256
    truncate_side: str = "middle"


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


class Stopped(Exception):
    """A SystemExit or KeyboardInterrupt of a function in a thread, which would end the executor."""


def describe(error: BaseException) -> str:
    """Type and message of an exception of user code."""
    if isinstance(error, Stopped):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # the message is user code too
        return type(error).__name__
