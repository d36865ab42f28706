"""Agent loops by name: registered ones, and those of a file (`rollout.agent.agent_loop_config_path`)."""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from verl.registry import load_object
from verl.rollout.agent_loop.base import AGENT_LOOPS, AgentLoop, register_agent_loop
from verl.rollout.agent_loop.public import AgentLoopBase, PublicLoop
from verl.tools.load import load_class, read_yaml_list


def make_agent_loop(name: str, config: BaseModel, tokenizer: Any) -> AgentLoop:
    """Make the loop registered under `name`, or listed under it in `agent.agent_loop_config_path`."""
    loops = read_loops(config.agent.agent_loop_config_path)
    if name not in loops:
        return AGENT_LOOPS[name](config, tokenizer)
    cls, kwargs = loops[name]
    if issubclass(cls, AgentLoopBase):
        return PublicLoop(cls, config, tokenizer, kwargs)
    return cls(config, tokenizer, **kwargs)


def read_loops(path: str | None) -> dict[str, tuple[type, dict[str, Any]]]:
    """The loops of a YAML file, `[{name, _target_, ...}]`: name -> class and further arguments.

    Raises:
        ValueError: an invalid file or entry, or a class without `run`.
    """
    loops: dict[str, tuple[type, dict[str, Any]]] = {}
    for position, entry in enumerate(read_yaml_list(path, None) if path else ()):
        where = f"{path}: [{position}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{where}: expected name and _target_, found {entry!r}")
        cls = load_class(entry, where, path, key="_target_")
        if not inspect.iscoroutinefunction(getattr(cls, "run", None)):
            raise ValueError(f"{where}: expected a class with `async def run`, found {cls.__name__}")
        loops[entry["name"]] = cls, {k: v for k, v in entry.items() if k not in ("name", "_target_")}
    return loops


@register_agent_loop("server_agent")
def _server_agent(config: BaseModel, tokenizer: Any) -> AgentLoop:
    """Agents that call the policy over HTTP. Its packages are optional."""
    try:
        return load_object("verl.rollout.server.agent_loop", "ServerAgentLoop")(config, tokenizer)
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ImportError(f"rollout.mode=server needs {error.name}: pip install starlette uvicorn") from error
