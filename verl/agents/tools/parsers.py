"""Parsers of tool calls: the text of a turn -> its calls.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            (Qwen2.5, Qwen3, Hermes)
    qwen     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   (Qwen3-Coder)
             or the function alone, which that model also writes
    llama    {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or alone, several separated by ";"

Text of a thought is never a call: <think>...</think>, a thought that is not closed, and one that the prompt has opened.

A custom parser is a class with this constructor and `extract_tool_calls`, or a subclass that defines `parse`:

    @register_tool_parser("mine")
    class MyParser(ToolParser):
        def parse(self, text):
            return text, [FunctionCall("add", '{"a": 1}')]

Load its file with `imports=[path/to/file.py]` and select it with `rollout.multi_turn.format=mine`.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agents.tools.schemas import read_json
from verl.registry import Registry

_TOOL_CALL = r"<tool_call>.*?(?:</tool_call>|\Z)"
_BARE_FUNCTION = r"<function=.*?(?:</function>(?:\s*</tool_call>)?|\Z)"
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_NAMES = "think|thinking|thought|reasoning|seed:think"
_THOUGHT = rf"<(?P<tag>{_NAMES})>.*?(?:</(?P=tag)>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)"
_REST = rf"(?:(?!</(?:{_NAMES})>|\[/THINK\]).)*"
_TAG = re.compile(rf"<(/?)(?:{_NAMES})>|\[(/?)THINK\]")


@dataclass(frozen=True)
class FunctionCall:
    """A call that the policy wrote."""

    name: str
    arguments: str  # JSON text
    error: str | None = None  # why the text is not a call; the policy reads it
    tool_call_id: str | None = None  # for parsers of models whose calls have one

    def read_arguments(self) -> dict[str, Any]:
        """The arguments as they were written. Raises ValueError if the text is not a JSON object."""
        if self.error is not None:
            raise ValueError(self.error)
        try:
            arguments = read_json(self.arguments)
        except ValueError as error:
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

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """The parser of a name, under the name of public verl."""
        return TOOL_PARSERS[name](tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """Text without the calls, and the calls. A call that cannot be read has an `error`.

        Args:
            responses_ids: the tokens of the turn, its end token included.
            tools: the schemas, for parsers that read them.
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


async def extract_calls(
    parser: Any, tokenizer: Any, prompt_ids: Sequence[int], responses_ids: Sequence[int]
) -> tuple[str, list[FunctionCall]]:
    """`ToolParser.extract_tool_calls` of a response; no calls if it stays inside a thought that the prompt opened."""
    tail = tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False).rstrip()
    if opened := re.search(rf"(?:<({_NAMES})>|\[THINK\])\Z", tail):
        text = tokenizer.decode(list(responses_ids), skip_special_tokens=False)
        if (f"</{opened[1]}>" if opened[1] else "[/THINK]") not in text:
            return text, []
    return await parser.extract_tool_calls(responses_ids)


def _bad(message: str) -> FunctionCall:
    return FunctionCall("", "{}", message)


def _read_json_call(text: str) -> FunctionCall:
    """A call as JSON with "name" and "arguments" or "parameters"."""
    try:
        call = read_json(text)
    except ValueError as error:
        return _bad(f"the tool call is not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return _bad('expected a tool call as {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    return FunctionCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _outside_thoughts(text: str, pattern: str) -> tuple[str, list[str]]:
    """The text without what matches a pattern outside of thoughts, and these matches.

    A text whose first tag closes a thought starts inside it: the prompt has opened it.
    """
    first = _TAG.search(text)
    opened = first[0].replace("/", "") if first and "/" in first[0] else ""
    text, spans = opened + text, []
    for match in re.finditer(f"{_THOUGHT}|{_TAG.pattern}|(?P<call>{pattern})", text, re.DOTALL):
        if match["call"] is not None:
            spans.append(match.span())
        elif "/" in match[0][:2]:  # what precedes the end of a thought was inside it
            spans.clear()
    ends = [0, *(position for span in spans for position in span), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(ends)]
    return "".join(parts[::2]).removeprefix(opened), parts[1::2]


def _blocks(text: str, pattern: str, read: Callable[[str], list[FunctionCall]]) -> tuple[str, list[FunctionCall]]:
    """The calls in the blocks that match a pattern. A block without its end is an error."""
    content, blocks = _outside_thoughts(text, pattern)
    calls: list[FunctionCall] = []
    for block in blocks:
        if block.startswith("<tool_call>") and not block.endswith("</tool_call>"):
            calls.append(_bad("the tool call has no </tool_call>"))
            content += block
        else:
            calls += read(block.removeprefix("<tool_call>").removesuffix("</tool_call>").strip())
    return content, calls


@register_tool_parser("hermes")
class HermesToolParser(ToolParser):
    """JSON between <tool_call> and </tool_call>."""

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        return _blocks(text, _TOOL_CALL, lambda block: [_read_json_call(block)])


@register_tool_parser("qwen")
@register_tool_parser("qwen3_coder")
class QwenToolParser(ToolParser):
    """XML between <tool_call> and </tool_call>, or alone. The schema of the tool gives the types of the parameters."""

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        return _blocks(text, f"{_TOOL_CALL}|{_BARE_FUNCTION}", self._read_block)

    @staticmethod
    def _read_block(block: str) -> list[FunctionCall]:
        if not block.startswith("<function=") or _FUNCTION.sub("", block).strip():
            return [_bad("expected <function=name>...</function> in the tool call")]
        calls = []
        for name, body in _FUNCTION.findall(block):
            if _PARAMETER.sub("", body).strip():
                calls.append(_bad("expected only <parameter=name>value</parameter> in the function"))
            else:
                calls.append(FunctionCall(name, json.dumps(dict(_PARAMETER.findall(body)), ensure_ascii=False)))
        return calls


@register_tool_parser("llama")
@register_tool_parser("llama3_json")
class LlamaToolParser(ToolParser):
    """JSON objects after <|python_tag|>, or as the whole turn, separated by ";" or white space."""

    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        for end in self.ends:
            text = text.removesuffix(end)
        content, codes = _outside_thoughts(text, r"<\|python_tag\|>" + _REST)
        if not codes:
            content, codes = _outside_thoughts(text, r"\S" + _REST)
            if not codes or not codes[0].startswith('{"'):
                return text, []
        code = codes[0].removeprefix("<|python_tag|>")
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
