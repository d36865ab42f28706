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
    from verl.agents.tools.base_tool import BaseTool
    from verl.agents.tools.function_tool import FunctionTool
    from verl.agents.tools.interactions import BaseInteraction
    from verl.agents.tools.schemas import OpenAIFunctionToolSchema

Tool: TypeAlias = "BaseTool | FunctionTool"


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Tool]:
    """The tools of a YAML file and of a Python file, by name.

    Args:
        tool_config_path: YAML file, `tools: [{class_name, config, tool_schema}]`. `class_name` is
            `package.module.Class` or `path/to/file.py:Class`; a relative path is also looked for next to the YAML file.
        function_tool_path: Python file or module with functions decorated with `@function_tool`.

    Raises:
        ValueError: an invalid file or entry, or two tools with the same name.
    """
    tools: dict[str, Tool] = {}
    if tool_config_path is not None:
        for where, entry in _entries(tool_config_path, "tools", {"class_name", "config", "tool_schema"}):
            cls = load_class(entry, where, tool_config_path)
            schema = entry.get("tool_schema")
            read = None if schema is None else _read_schema(schema, where)
            with _code_of_user(where, cls.__name__):
                tool = cls(config=dict(entry.get("config") or {}), tool_schema=read)
            _add(tools, tool, where)
    if function_tool_path is not None:
        from verl.agents.tools.function_tool import function_tools_of

        with _code_of_user("function_tool_path", str(function_tool_path)):
            module = import_module(str(function_tool_path))
        own = function_tools_of(module)
        if not own:
            raise ValueError(f"{function_tool_path}: expected functions decorated with @function_tool, found none")
        for tool in own:
            _add(tools, tool, str(function_tool_path))
    return tools


def tool_schemas(tool_config_path: str | None, function_tool_path: str | None) -> list[dict[str, Any]]:
    """The schemas of the tools of both files, as the chat template receives them; empty without files."""
    tools = load_tools(tool_config_path, function_tool_path)
    return [tool.tool_schema.for_template() for tool in tools.values()]


def load_interactions(path: str | None) -> "dict[str, BaseInteraction]":
    """The interactions of a YAML file, `interaction: [{name, class_name, config}]`, by name; empty without a file."""
    found = {}
    for name, (cls, config) in interaction_classes(path).items():
        with _code_of_user(f"{path}: interaction {name!r}", cls.__name__):
            found[name] = cls(config=config)
    return found


def interaction_classes(path: str | None) -> "dict[str, tuple[type[BaseInteraction], dict[str, Any]]]":
    """Name -> class and config of the interactions of a YAML file; empty without a file."""
    interactions: dict[str, tuple[type[BaseInteraction], dict[str, Any]]] = {}
    if path is None:
        return interactions
    for where, entry in _entries(path, "interaction", {"name", "class_name", "config"}):
        cls = load_class(entry, where, path)
        name = entry.get("name") or cls.__name__.lower().removesuffix("interaction")
        if name in interactions:
            raise ValueError(f"{where}: there are two interactions {name!r}: rename one")
        interactions[name] = cls, {**(entry.get("config") or {}), "name": name}
    return interactions


def load_class(entry: Mapping[str, Any], where: str, config_path: str, key: str = "class_name") -> type:
    """The class that an entry names. Raises ValueError if there is none."""
    address = entry.get(key)
    if not isinstance(address, str) or not address:
        raise ValueError(f"{where}: expected {key}, such as my_tools.py:Calculator or my_package.tools.Calculator")
    path, separator, name = address.rpartition(":") if ".py:" in address else address.rpartition(".")
    if not separator:
        raise ValueError(f"{where}: {key}: expected package.module.Class or path/to/file.py:Class, found {address!r}")
    if path.endswith(".py") and not expanded(path).is_file():
        beside = expanded(config_path).parent / path
        path = str(beside) if beside.is_file() else path
    with _code_of_user(f"{where}: {key}", address):
        found = load_object(path, name)
    if not isinstance(found, type):
        raise ValueError(f"{where}: {key}: expected a class, found {found!r}")
    return found


@contextmanager
def _code_of_user(where: str, name: str) -> Iterator[None]:
    """Turn what the code of a tool raises while it is imported or constructed into a ValueError with its line."""
    try:
        yield
    except (ValueError, ImportError, SyntaxError):  # messages that are meant for users
        raise
    except (Exception, SystemExit) as error:
        from verl.agents.tools.runner import describe

        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{where}: {name} failed: {describe(error)} ({at.filename}:{at.lineno})") from error


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
    found = content if key is None else content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(found, list):
        below = f" below {key!r}" if key else ""
        raise ValueError(f"{path}: expected a list{below}, found {type(found).__name__}")
    return found


def _entries(path: str, key: str, known: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Yield (name for error messages, entry) of a list of mappings."""
    entries = []
    for position, entry in enumerate(read_yaml_list(path, key)):
        where = f"{path}: {key}[{position}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: expected a mapping, found {entry!r}")
        for name in entry:
            if name not in known:
                raise ValueError(f"{where}: unknown key {name!r}: {did_you_mean(name, known)}")
        entries.append((where, dict(entry)))
    return entries


def _read_schema(schema: Any, where: str) -> "OpenAIFunctionToolSchema":
    from verl.agents.tools.schemas import OpenAIFunctionToolSchema

    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except ValueError as error:
        raise ValueError(f"{where}: tool_schema: {error}") from error


def _add(tools: dict[str, Tool], tool: Tool, where: str) -> None:
    if tool.name in tools:
        raise ValueError(f"{where}: there are two tools {tool.name!r}: rename one")
    tools[tool.name] = tool
