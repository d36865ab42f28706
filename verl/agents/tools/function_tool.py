"""Functions as tools: the schema is that of the signature and the docstring.

    @function_tool
    def add(a: int, b: int) -> str:
        \"\"\"Add two integers.

        Args:
            a: the first integer.
            b: the second integer.
        \"\"\"
        return str(a + b)

Set `rollout.multi_turn.function_tool_path` to the file. `async def` functions run concurrently.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from verl.agents.tools.schemas import OpenAIFunctionToolSchema

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_PARAMETER = re.compile(r"^\s{0,8}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class FunctionTool:
    """A function as a tool.

    Args:
        func: a top-level function, `def` or `async def`.
        tool_schema: its schema.
    """

    def __init__(self, func: Callable, tool_schema: OpenAIFunctionToolSchema):
        self.func = func
        self.tool_schema = tool_schema
        self.name = tool_schema.function.name
        self.is_async = inspect.iscoroutinefunction(func)


_TOOLS: dict[Callable, FunctionTool] = {}


def function_tools_of(module: types.ModuleType) -> list[FunctionTool]:
    """The decorated functions of a module, those that it imports included."""
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    return [_TOOLS[func] for func in functions if func in _TOOLS]


def function_tool(
    name: str | Callable | None = None,
    *,
    schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
) -> Any:
    """Decorator: make a function a tool. Returns the function unchanged.

    Args:
        name: name of the tool; default: that of the function.
        schema: schema of the tool; default: `infer_schema`.
    """

    def decorate(func: Callable) -> Callable:
        tool_schema = infer_schema(func) if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        if isinstance(name, str):
            tool_schema = tool_schema.model_copy(
                update={"function": tool_schema.function.model_copy(update={"name": name})}
            )
        _TOOLS[func] = FunctionTool(func, tool_schema)
        return func

    return decorate(name) if callable(name) else decorate


def infer_schema(func: Callable) -> OpenAIFunctionToolSchema:
    """The schema of a function: types from the annotations, descriptions from a docstring in Google style.

    Raises:
        ValueError: a parameter without an annotation, of an unsupported type, or without a description.
    """
    summary, descriptions = _read_docstring(inspect.getdoc(func) or "")
    hints = typing.get_type_hints(func)
    properties, required = {}, []
    for parameter in inspect.signature(func).parameters.values():
        location = f"function tool {func.__name__}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{location}: expected a named parameter: pass schema=... to the decorator")
        if parameter.name not in hints:
            raise ValueError(f"{location} has no type annotation: add one")
        if parameter.name not in descriptions:
            raise ValueError(f"{location} has no description: add it below 'Args:' in the docstring")
        property_type = json_type(hints[parameter.name], location)
        properties[parameter.name] = property_type | {"description": descriptions[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": func.__name__, "description": summary, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def json_type(annotation: Any, location: str) -> dict[str, Any]:
    """JSON schema of a Python annotation. Raises ValueError for one without a JSON type."""
    if annotation is Any:
        return {}
    if annotation in _JSON_TYPES:
        return {"type": _JSON_TYPES[annotation]}
    origin, members = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        (first, *others) = [json_type(member, location) for member in members if member is not type(None)]
        nullable = {"nullable": True} if type(None) in members else {}
        return {"anyOf": [first, *others]} if others else first | nullable
    if origin is Literal:
        return {"type": _JSON_TYPES[type(members[0])], "enum": list(members)}
    if origin is list:
        return {"type": "array", "items": json_type(members[0], location)}
    if origin is dict:
        return {"type": "object"}
    raise ValueError(f"{location}: expected a type of JSON (str, int, float, bool, list, dict), found {annotation}")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before "Args:", and the description of each parameter."""
    head, _, section = text.partition("\nArgs:")
    descriptions: dict[str, str] = {}
    name, indent = "", None
    for line in section.splitlines():
        if line.strip() and not line[0].isspace():
            break  # the next section
        depth = len(line) - len(line.lstrip())
        match = _PARAMETER.match(line)
        if match and (indent is None or depth <= indent):
            name, indent = match[1], depth
            descriptions[name] = match[2].strip()
        elif line.strip() and name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return head.strip(), descriptions
