"""Chat messages of data files: tool calls, the turns to train, and what their row sets for the chat template."""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from verl.agents.chat import REASONING
from verl.agents.tools.schemas import check_tool, read_json
from verl.data.forms import SYSTEMS

Message = dict[str, Any]

#: keys of a message that select whether it is trained
TRAINED = ("loss_mask", "loss", "trainable", "train", "training", "weight")


class Chat(list):
    """Messages with arguments of the chat template that their row sets: `tools`, `enable_thinking`."""

    def __init__(self, messages: Iterable[Message], settings: Mapping[str, Any]):
        super().__init__(messages)
        self.settings = dict(settings)

    def before(self, turn: int) -> "Chat":
        """The messages before a turn."""
        return Chat(self[:turn], self.settings)


def with_settings(messages: Any, row: Mapping[str, Any], location: str, tools: Sequence[Any] = ()) -> Any:
    """Messages with the system prompt of their row, and with what its columns `tools` and `enable_thinking` set. tools:
    those of the run. Raises ValueError for a prompt of plain text, columns that cannot be used, or other tools than
    those of the run."""
    messages, settings = with_system(messages, row), {}
    if (value := row.get("tools")) is not None and len(value):
        settings["tools"] = _read_tools(value, f"{location}: column 'tools'")
        names, expected = ({tool["function"]["name"] for tool in each} for each in (settings["tools"], tools))
        if tools and names != expected:
            problem = f"expected the tools of the run, {sorted(expected)}, found {sorted(names)}"
            raise ValueError(f"{location}: column 'tools': {problem}: remove the column, or load these tools")
    if (thinking := row.get("enable_thinking")) is not None:
        if not isinstance(thinking, bool):
            raise ValueError(f"{location}: column 'enable_thinking': expected true or false, found {thinking!r}")
        settings["enable_thinking"] = thinking
    if settings and isinstance(messages, str):
        raise ValueError(f"{location}: {', '.join(settings)}: a prompt of plain text has no such column: remove it")
    return Chat(messages, settings) if settings else messages


def with_system(messages: Any, row: Mapping[str, Any]) -> Any:
    """Messages or text that begin with the system prompt in a column of their row, unless the chat has one."""
    text = next((row[name] for name in SYSTEMS if isinstance(row.get(name), str) and row[name].strip()), None)
    is_text = isinstance(messages, str)
    if text is None or (messages.startswith(text) if is_text else messages[0]["role"] in ("system", "developer")):
        return messages
    return f"{text}\n\n{messages}" if is_text else [{"role": "system", "content": text}, *messages]


def _read_tools(value: Any, location: str) -> list[dict[str, Any]]:
    """Schemas of tools as a chat template expects them, from objects or JSON text."""
    try:
        tools = read_json(value) if isinstance(value, str) else value
        tools = [read_json(tool) if isinstance(tool, str) else tool for tool in tools]
        return [check_tool(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{location}: {error}") from error


def read_message(message: Mapping[str, Any], location: str) -> Message:
    """A message without keys whose value is None, with content, and with tool calls whose arguments are objects. Raises
    ValueError for a tool call without a name, or whose arguments are neither an object nor its JSON text."""
    message = {key: value for key, value in message.items() if value is not None}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_read_call(call, location) for call in calls]
    return {"content": "", **message} if calls or any(map(message.get, REASONING)) else message


def _read_call(call: Any, location: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name, arguments = function["name"], function.get("arguments") or {}
        arguments = read_json(arguments) if isinstance(arguments, str) else arguments
        if isinstance(name, str) and name and isinstance(arguments, Mapping):
            call = {"type": "function", **{key: value for key, value in call.items() if key == "id" and value}}
            return {**call, "function": {"name": name, "arguments": dict(arguments)}}
    example = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
    problem = f"expected tool calls like {example}, with arguments as an object or as its JSON text"
    raise ValueError(f"{location}: {problem}, found {call!r:.200}")


def trained_turns(chat: Sequence[Message], location: str) -> list[int]:
    """The assistant turns to train: those after the first message, unless one of `TRAINED` is 0. Raises ValueError for
    a value that is neither 0 nor 1, values that differ, 1 for a message that cannot be trained, a turn without text, or
    no turn."""
    turns = []
    for turn, message in enumerate(chat):
        values = {name: message[name] for name in TRAINED if message.get(name) is not None}
        prefix, is_turn = f"{location}: message {turn}", message["role"] == "assistant" and turn > 0
        if any(value not in (0, 1) for value in values.values()) or len({*map(bool, values.values())}) > 1:
            raise ValueError(f"{prefix}: expected a weight of 0 or 1 (false or true), found {values}")
        if any(values.values()) and not is_turn:
            problem = "only assistant turns after the first message are trained: set it to 0, or remove it"
            raise ValueError(f"{prefix} ({message['role']}): {values}, but {problem}")
        if is_turn and all(values.values()):
            turns.append(turn)
            if not any(shape_of(message)[1:]):
                raise ValueError(f"{prefix}: the assistant turn has no text to train: remove it, or set loss_mask to 0")
    if not turns:
        problem = "no assistant turn after the first message, or none that is trained"
        raise ValueError(f"{location}: the chat has {problem}; its roles: {[message['role'] for message in chat]}")
    return turns


def with_json_calls(chat: Iterable[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as JSON text."""

    def call(entry: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(entry["function"]["arguments"], ensure_ascii=False)
        return {**entry, "function": {**entry["function"], "arguments": arguments}}

    return [m | {"tool_calls": [*map(call, m["tool_calls"])]} if m.get("tool_calls") else m for m in chat]


def reads_json_calls(tokenizer: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the chat template renders arguments of tool calls that are JSON text, but not those that are objects."""
    call = {"id": "call12345", "type": "function", "function": {"name": "call_name", "arguments": {"key": "mark"}}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for form in (list, with_json_calls):
        with contextlib.suppress(Exception):  # templates fail in their own ways on a form that they do not read
            text = tokenizer.apply_chat_template(form(chat), **settings)
            is_json = "{'" not in text and '\\"' not in text
            if is_json and all(word in text for word in ("call_name", "key", "mark")):
                return form is with_json_calls
    return False


def marked(message: Message, turn: int, is_trained: bool) -> tuple[Message, dict[str, str]]:
    """A message of `read_message` with a mark in each of its texts, and what each mark stands for. Only a trained
    message has marks in its reasoning, which templates drop from earlier turns."""
    marks: dict[str, str] = {}

    def mark(text: str, name: str) -> str:
        marks[key := f"mark{turn}x{len(marks)}x"] = name
        return f"{text.rstrip()} {key}"

    def mark_call(call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = {"name": mark(name, f"tool call {name!r}")}
        return {**call, "function": function | {"arguments": {**arguments, "mark": mark("", f"arguments of {name!r}")}}}

    result = dict(message)
    for key in ("content", *(REASONING if is_trained else ())):
        if isinstance(text := message.get(key), str) and text.split("</think>")[-1].strip():
            result[key] = mark(text, key)
    if isinstance(message["content"], list):  # with images
        result["content"] = [*message["content"], {"type": "text", "text": mark("", "content")}]
    if message.get("tool_calls"):
        result["tool_calls"] = [*map(mark_call, message["tool_calls"])]
    return result, marks


def shape_of(message: Message) -> tuple:
    """What decides how a template treats a message, apart from its texts."""
    texts = (bool(str(message.get(key) or "").strip()) for key in ("content", *REASONING))
    return message["role"], *texts, len(message.get("tool_calls") or ())


def missing_content(chat: Sequence[Message], text: str, trained: Collection[int]) -> list[tuple[int, str]]:
    """(turn, "content") of the messages whose content is not in a text, as it is or escaped as in JSON. Of an earlier
    turn, without its thought. Without /think and /no_think, which some templates remove."""
    contents = ((turn, m["content"]) for turn, m in enumerate(chat) if isinstance(m["content"], str))
    contents = ((turn, text if turn in trained else text.split("</think>")[-1]) for turn, text in contents)
    parts = [
        (turn, part.strip()) for turn, content in contents for part in re.split("</?think>|/(?:no_)?think", content)
    ]
    return [(t, "content") for t, p in parts if p not in text and json.dumps(p, ensure_ascii=False)[1:-1] not in text]
