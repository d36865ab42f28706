"""Load the tools and interactions of the files that the configuration names."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.registry import did_you_mean, import_module, load_object
from verl.utils.paths import expanded, resolved

if TYPE_CHECKING:  # most runs have no tools
    from verl.agents.tools.base_tool import BaseInteraction, BaseTool
    from verl.agents.tools.function_tool import FunctionTool
    from verl.agents.tools.schemas import OpenAIFunctionToolSchema

Tool: TypeAlias = "BaseTool | FunctionTool"


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Tool]:
    """The tools of a YAML file and of a Python file, by name.

    Args:
        tool_config_path: YAML file, `tools: [{class_name, config, tool_schema}]`. `class_name` is
            `package.module.Class` or `path/to/file.py:Class`; a relative path is also looked for next to the YAML file.
            An entry `{mcp: {...}}` has the tools of an MCP server (`verl.agents.tools.mcp_client`).
        function_tool_path: Python file or module with functions decorated with `@function_tool`.

    Raises:
        ValueError: an invalid file or entry, or two tools with the same name.
    """
    tools: dict[str, Tool] = {}
    if tool_config_path is not None:
        for location, entry in _entries(tool_config_path, "tools", {"class_name", "config", "tool_schema", "mcp"}):
            if "mcp" in entry:
                from verl.agents.tools.mcp_client import tools_of_server

                for tool in tools_of_server(entry["mcp"], location):
                    _add(tools, tool, location)
                continue
            cls = load_class(entry, location, tool_config_path)
            tool_schema = _read_schema(entry.get("tool_schema"), location)
            with _code_of_user(location, cls.__name__):
                tool = cls(config=dict(entry.get("config") or {}), tool_schema=tool_schema)
            _add(tools, tool, location)
    if function_tool_path is not None:
        from verl.agents.tools.function_tool import function_tools_of

        with _code_of_user("function_tool_path", str(function_tool_path)):
            module = import_module(str(function_tool_path))
        module_tools = function_tools_of(module)
        if not module_tools:
            raise ValueError(f"{function_tool_path}: expected functions decorated with @function_tool, found none")
        for tool in module_tools:
            _add(tools, tool, str(function_tool_path))
    return tools


def initialize_tools_from_config(tools_config_file: str) -> list[Tool]:
    """The tools of a YAML file, under the name of public verl."""
    return list(load_tools(tools_config_file, None).values())


def tool_schemas(tool_config_path: str | None, function_tool_path: str | None) -> list[dict[str, Any]]:
    """The schemas of the tools of both files, as the chat template receives them; empty without files."""
    tools = load_tools(tool_config_path, function_tool_path)
    for server in {tool.server for tool in tools.values() if hasattr(tool, "server")}:
        server.close()
    return [tool.tool_schema.for_template() for tool in tools.values()]


def load_interactions(path: str | None) -> "dict[str, BaseInteraction]":
    """The interactions of a YAML file, `interaction: [{name, class_name, config}]`, by name; empty without a file.

    What has no `generate_response` is a class or function that makes an environment with the arguments `config`.
    """
    from verl.agents.tools.environments import Environment

    interactions = {}
    for name, (cls, config) in interaction_classes(path).items():
        with _code_of_user(f"{path}: interaction {name!r}", cls.__name__):
            interactions[name] = Environment(config, cls) if is_environment(cls) else cls(config=config)
    return interactions


def is_environment(cls: Any) -> bool:
    """Whether an interaction of the file is an environment."""
    return not hasattr(cls, "generate_response")


def interaction_classes(path: str | None) -> "dict[str, tuple[type[BaseInteraction], dict[str, Any]]]":
    """Name -> class and config of the interactions of a YAML file; empty without a file."""
    interactions: dict[str, tuple[type[BaseInteraction], dict[str, Any]]] = {}
    if path is None:
        return interactions
    for location, entry in _entries(path, "interaction", {"name", "class_name", "config", "action"}):
        cls = load_class(entry, location, path, functions=True)
        name = entry.get("name") or cls.__name__.lower().removesuffix("interaction")
        if name in interactions:
            raise ValueError(f"{location}: there are two interactions {name!r}: rename one")
        interactions[name] = cls, {**(entry.get("config") or {}), "name": name}
        if isinstance(action := entry.get("action"), str):
            action = load_class(entry, location, path, "action", functions=True)
        if action is not None:
            interactions[name][1]["action"] = action
    return interactions


def load_class(
    entry: Mapping[str, Any], location: str, config_path: str, key: str = "class_name", functions: bool = False
) -> Any:
    """The class, or the function if they are allowed, that an entry names. Raises ValueError if there is none."""
    address = entry.get(key)
    if not isinstance(address, str) or not address:
        raise ValueError(f"{location}: expected {key}, such as my_tools.py:Calculator or my_package.tools.Calculator")
    path, separator, name = address.rpartition(":") if ".py:" in address else address.rpartition(".")
    if not separator:
        raise ValueError(
            f"{location}: {key}: expected package.module.Class or path/to/file.py:Class, found {address!r}"
        )
    path = beside(config_path, path) if path.endswith(".py") else path
    with _code_of_user(f"{location}: {key}", address):
        cls = load_object(path, name)
    if not (isinstance(cls, type) or (functions and callable(cls))):
        raise ValueError(f"{location}: {key}: expected a class, found {cls!r}")
    return cls


def beside(config_path: str | None, path: str) -> str:
    """The path, or that of the file beside the one that names it, if only this exists."""
    neighbor = expanded(config_path or "").parent / path
    return str(neighbor) if neighbor.is_file() and not expanded(path).is_file() else path


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


@contextmanager
def _code_of_user(location: str, name: str) -> Iterator[None]:
    """Turn what the code of a tool raises while it is imported or constructed into a ValueError with its line."""
    try:
        yield
    except (ValueError, ImportError, SyntaxError):  # messages that are meant for users
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{location}: {name} failed: {describe(error)} ({frame.filename}:{frame.lineno})") from error


def read_yaml_list(path: str, key: str | None) -> list[Any]:
    """The list below `key` of a YAML file; without a key, the file is the list.

    Raises:
        ValueError: there is no such file, or it has another form.
    """
    file = expanded(path)
    if not file.is_file():
        raise ValueError(f"no file {str(path)!r} (looked at {resolved(file)})")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a YAML file: {error}") from error
    entries = content if key is None else content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        suffix = f" below {key!r}" if key else ""
        raise ValueError(f"{path}: expected a list{suffix}, found {type(entries).__name__}")
    return entries


def _entries(path: str, key: str, keys: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name for error messages, entry) of a list of mappings."""
    entries = []
    for position, entry in enumerate(read_yaml_list(path, key)):
        location = f"{path}: {key}[{position}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{location}: expected a mapping, found {entry!r}")
        for name in entry:
            if name not in keys:
                raise ValueError(f"{location}: unknown key {name!r}: {did_you_mean(name, keys)}")
        entries.append((location, dict(entry)))
    return entries


def _read_schema(schema: Any, location: str) -> "OpenAIFunctionToolSchema | None":
    from verl.agents.tools.schemas import OpenAIFunctionToolSchema

    try:
        return None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValueError as error:
        raise ValueError(f"{location}: tool_schema: {error}") from error


def _add(tools: dict[str, Tool], tool: Tool, location: str) -> None:
    if tool.name in tools:
        raise ValueError(f"{location}: there are two tools {tool.name!r}: rename one")
    tools[tool.name] = tool
