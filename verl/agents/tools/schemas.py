"""The schema of a tool in the form of OpenAI's function calling, its arguments, and the response of a tool."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a function, in JSON schema."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function, in JSON schema."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function: name, description and parameters."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as the chat template receives it."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def for_template(self) -> dict[str, Any]:
        """The schema as a dict, without fields that were not given."""
        return {"type": self.type, **self.model_dump(exclude_unset=True, exclude_none=True)}


class ToolResponse(BaseModel):
    """The response of a tool. Only text is supported.

    Args:
        text: the text that the policy reads.
        image, video: not supported; a tool that returns one fails.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether there is neither text nor media."""
        return not (self.text or self.image or self.video)


def result_text(result: Any) -> str:
    """What a policy reads of a value that a tool or environment returned: text as it is, any other value as JSON."""
    if not isinstance(result, str):
        to_json = lambda value: value.tolist() if hasattr(value, "tolist") else str(value)  # noqa: E731
        result = json.dumps(result, ensure_ascii=False, default=to_json)
    return str.__str__(result)  # exact type: a subclass might not be importable in the trainer


def check_tool(tool: Any) -> dict[str, Any]:
    """A tool as the chat template receives it. Raises ValueError for one of another form."""
    function = tool.get("function") if isinstance(tool, dict) else None
    parameters = (function.get("parameters") or {}) if isinstance(function, dict) else None
    if not isinstance(parameters, dict) or not isinstance(function.get("name"), str):
        example = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise ValueError(f"expected schemas of tools like {example}, found {tool!r:.200}")
    return tool


# ---- arguments ------------------------------------------------------------------------------------------------------

_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}
_TYPES |= {"null": type(None)}


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN, Infinity, and text that is nested too deeply."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no value of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the types of `parameters` of a tool's schema, such as 5 for an integer that was written as "5".

    Raises:
        ValueError: a value of another type, null where it is not allowed, or a number that is not finite.
    """
    properties = schema.get("properties") or {}
    return {name: _read_argument(value, properties.get(name), name) for name, value in arguments.items()}


def _read_argument(value: Any, schema: Any, name: str) -> Any:
    options = [*_options(schema)]
    for convert in (False, True):
        for option in options or [{"type": "any"}]:
            with suppress(ValueError):
                return _fit(value, option, name, convert)
    expected = " or ".join(option["type"] for option in options) or "a finite number"
    raise ValueError(f"argument {name!r}: expected {expected}, found {json.dumps(value, ensure_ascii=False)[:100]}")


def _options(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema for each type that it allows; none if it allows every value."""
    if isinstance(schema, Mapping):
        for part in schema.get("anyOf") or schema.get("oneOf") or ():
            yield from _options(part)
        types = schema.get("type") or []
        for kind in [types] if isinstance(types, str) else types:
            yield from [{**schema, "type": kind}, {"type": "null"}][: 1 + bool(schema.get("nullable"))]


def _fit(value: Any, schema: Mapping[str, Any], name: str, convert: bool) -> Any:
    """A value of one type. convert: other types are read from text, and written as text."""
    kind = schema["type"]
    if convert and isinstance(value, str) and kind != "string":
        value = read_json(value.strip().lower() if kind in ("boolean", "null") else value)
    elif convert and kind == "string" and value is not None:
        value = json.dumps(value, ensure_ascii=False)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    wrong = isinstance(value, bool) and kind in ("integer", "number")
    wrong |= isinstance(value, float) and not math.isfinite(value)
    if wrong or not isinstance(value, _TYPES.get(kind, object)):
        raise ValueError(kind)
    if kind == "object":
        return read_arguments(value, schema)
    return [_read_argument(entry, schema.get("items"), name) for entry in value] if kind == "array" else value
