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
import types
from collections.abc import Callable, Mapping
from typing import Any

from verl.agents.tools.schemas import OpenAIFunctionToolSchema


class FunctionTool:
    """A top-level function, `def` or `async def`, as a tool."""

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
        ValueError: a parameter without an annotation, of an unsupported type, or without a description; no docstring.
    """
    from transformers.utils import chat_template_utils  # not for tools that bring a schema

    for parameter in inspect.signature(func).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            name = f"function tool {func.__name__}: parameter {parameter.name!r}"
            raise ValueError(f"{name}: expected a named parameter: pass schema=... to the decorator")
    try:
        schema = chat_template_utils.get_json_schema(func)
    except (chat_template_utils.DocstringParsingException, chat_template_utils.TypeHintParsingException) as error:
        raise ValueError(f"function tool {func.__name__}: {error}") from error
    return OpenAIFunctionToolSchema.model_validate(schema)
