"""Parsers of tool calls: the text of a turn -> its calls.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            (Qwen2.5, Qwen3, Hermes)
    qwen     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   (Qwen3-Coder)
    llama    {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or alone, several separated by ";"

A custom parser is a class with this constructor and `extract_tool_calls`, or a subclass that defines `parse`:

    @register_tool_parser("mine")
    class MyParser(ToolParser):
        def parse(self, text):
            return text, [FunctionCall("add", '{"a": 1}')]

Load its file with `imports=[path/to/file.py]` and select it with `rollout.multi_turn.format=mine`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.registry import Registry

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class FunctionCall:
    """A call that the policy wrote.

    Args:
        name: name of the tool.
        arguments: JSON text.
        error: why the text is not a call; the policy reads it.
    """

    name: str
    arguments: str
    error: str | None = None

    def read_arguments(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if the text is not a JSON object."""
        if self.error is not None:
            raise ValueError(self.error)
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"expected arguments as a JSON object, found {self.arguments[:100]}")
        return arguments


class ToolParser:
    """Finds the tool calls of a turn.

    Args:
        tokenizer: decodes the tokens of the turn.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        """The decorator `register_tool_parser`, under the name of public verl."""
        return register_tool_parser(name)

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        """Text without the calls, and the calls. A call that cannot be read has an `error`.

        Args:
            responses_ids: the tokens of the turn, its end token included.
        """
        ids = list(responses_ids)
        while ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return self.parse(self.tokenizer.decode(ids, skip_special_tokens=False))

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """`extract_tool_calls` of decoded text, special tokens included."""
        raise NotImplementedError(f"{type(self).__name__} defines neither parse() nor extract_tool_calls()")


#: name -> parser; `rollout.multi_turn.format` selects one
TOOL_PARSERS: Registry[Callable[[Any], ToolParser]] = Registry("tool parser", builtins_replaceable=True)


def register_tool_parser(name: str) -> Callable[[type], type]:
    """Decorator: register a parser as `rollout.multi_turn.format=<name>`."""
    return TOOL_PARSERS.register(name)


def _bad(message: str) -> FunctionCall:
    return FunctionCall("", "{}", message)


def _read_json_call(text: str) -> FunctionCall:
    """A call as JSON with "name" and "arguments" or "parameters"."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _bad(f"the tool call is not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return _bad('expected a tool call as {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    return FunctionCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _blocks(text: str, read: Callable[[str], FunctionCall]) -> tuple[str, list[FunctionCall]]:
    """The calls between <tool_call> and </tool_call>; text inside <think> is not searched."""
    visible = _THOUGHT.sub("", text)
    calls = [read(block.strip()) for block in _TOOL_CALL.findall(visible)]
    remaining = _TOOL_CALL.sub("", visible)
    if "<tool_call>" in remaining:
        calls.append(_bad("the tool call has no </tool_call>"))
    return _TOOL_CALL.sub("", text), calls


@register_tool_parser("hermes")
class HermesToolParser(ToolParser):
    """JSON between <tool_call> and </tool_call>."""

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """See `ToolParser.parse`."""
        return _blocks(text, _read_json_call)


@register_tool_parser("qwen")
@register_tool_parser("qwen3_coder")
class QwenToolParser(ToolParser):
    """XML between <tool_call> and </tool_call>. The schema of the tool gives the types of the parameters."""

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """See `ToolParser.parse`."""
        return _blocks(text, self._read_block)

    @staticmethod
    def _read_block(block: str) -> FunctionCall:
        match = _FUNCTION.fullmatch(block)
        if match is None:
            return _bad("expected <function=name>...</function> in the tool call")
        name, body = match.groups()
        if _PARAMETER.sub("", body).strip():
            return _bad("expected only <parameter=name>value</parameter> in the function")
        return FunctionCall(name, json.dumps(dict(_PARAMETER.findall(body))))


@register_tool_parser("llama")
@register_tool_parser("llama3_json")
class LlamaToolParser(ToolParser):
    """JSON objects after <|python_tag|>, or as the whole turn, separated by ";" or white space."""

    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        """See `ToolParser.parse`."""
        for end in self.ends:
            text = text.removesuffix(end)
        content, tag, code = text.partition("<|python_tag|>")
        if not tag:
            if not text.lstrip().startswith('{"'):
                return text, []
            content, code = "", text
        calls, decoder, position = [], json.JSONDecoder(), 0
        while (remaining := code[position:].lstrip(" \n\t;")) != "":
            position = len(code) - len(remaining)
            try:
                _, length = decoder.raw_decode(remaining)
            except (ValueError, RecursionError) as error:
                calls.append(_bad(f"the tool call is not JSON: {error}"))
                break
            calls.append(_read_json_call(remaining[:length]))
            position += length
        return content, calls
