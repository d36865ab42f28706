"""Forms of data that people have: the names of their columns, and chats and prompts that are written differently.

These are the only names: training, SFT, generation and evaluation find their columns by them, unless a key names one.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.choices import CHOICES, read_choices

logger = logging.getLogger("verl.data")

CHATS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "problem", "instruction", "query", *CHATS)
TRUTHS = (
    *("answer", "ground_truth", "final_answer", "expected_answer", "answers", "golden_answers", "answerKey"),
    *("test", "tests", "test_cases", "input_output", "solution"),
)
RESPONSES = ("response", "completion", "output", "solution", "answer", "answers", "chosen")
SYSTEMS = ("system", "system_prompt")
_INPUTS = ("input", "context")  # the rest of an instruction (Alpaca, Dolly)
_TOOLS = ("function", "functions")
_UNREAD = ("context", "passage", "article", "history", "starter_code")
#: columns beside the prompt that belong to it, or may belong to it
COMPANIONS = {*SYSTEMS, *CHOICES, *_TOOLS, *_UNREAD}
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
_STANDARD_ROLES = ("system", "user", "assistant", "tool")
_CALLS = ("function_call", "tool_call")  # roles of messages that are a tool call, as JSON text


def find_column(columns: Sequence[str], names: Sequence[str], key: str) -> str:
    """The column of a setting: `key` if it is there or not the default (the first name), otherwise a usual name."""
    return key if key in columns or key != names[0] else usual_column(columns, names) or key


def usual_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of `names` that is a column, also with other capitals, as `Question` in a CSV; None if none is."""
    present = {column.lower(): column for column in columns} | {column: column for column in columns}
    return next((present[form] for name in names for form in (name, name.lower()) if form in present), None)


def as_messages(value: Any) -> Any:
    """A chat as messages with role and content: JSON text is parsed, `from` and `value` (ShareGPT) are renamed, text
    parts (OpenAI) are joined, calls get their place, and a list with one chat (BFCL) is that chat. Other values are
    returned as they are."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            decoded = json.loads(value)
        except ValueError:
            return value
        if not all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in decoded):
            return value
        value = decoded
    if not isinstance(value, list | tuple):
        return value
    if len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return [_as_message(message) if isinstance(message, Mapping) else message for message in value]


def _as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(message)
    if "from" in message and message.get("role") is None:
        role = message.pop("from")
        message |= {"role": _ROLES.get(str(role).lower(), role), "content": message.pop("value", None)}
    role = message.get("role")
    if str(role).lower() in _STANDARD_ROLES:
        message["role"] = role.lower()
    elif role in _CALLS:
        message |= {"role": "assistant"} | _read_calls(message.get("content"))
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
        message["content"] = "".join(str(part.get("text", "")) for part in parts)
    return message


def _read_calls(text: Any) -> dict[str, Any]:
    """The tool calls of a message that is one, as JSON text; a text that is none stays the content."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return {"content": text}
    return {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


def read_prompt_column(row: Mapping[str, Any], column: str) -> Any:
    """The prompt of a row: text or messages, with choices that it does not name, and the `input` of an instruction."""
    prompt = as_messages(row[column])
    if isinstance(prompt, str):
        inputs = [row.get(name) for name in _INPUTS] if column == "instruction" else []
        prompt = "\n\n".join([prompt, *(text for text in inputs if isinstance(text, str) and text.strip())])
        return prompt + _missing_choices(row, prompt)
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if isinstance(last, Mapping) and last.get("role") == "user" and isinstance(last.get("content"), str):
        prompt = [*prompt[:-1], {**last, "content": last["content"] + _missing_choices(row, last["content"])}]
    return prompt


def _missing_choices(row: Mapping[str, Any], prompt: str) -> str:
    """The lines of the choices of a row, unless the prompt names all of them; "" for a row without choices."""
    choices = read_choices(row)
    is_named = all(text in prompt for text in choices.values())
    return "" if is_named else "".join(f"\n{label}. {text}" for label, text in choices.items())


def note_columns(names: str, columns: Sequence[str], used: Mapping[str, str]) -> None:
    """Log which columns are read, if they are not the default ones. used: what they are for -> column."""
    companions = {
        "rest of the prompt": _INPUTS if used.get("prompt") == "instruction" else (),
        "choices": CHOICES if "prompt" in used else (),
        "system prompt": SYSTEMS,
    }
    read = {use: name for use, names in companions.items() for name in names if name in columns}
    used = {**used, **read}
    logger.info("%s: %s", names, ", ".join(f"{use} from column {name!r}" for use, name in used.items()))
    for name in {*_TOOLS} & {*columns}:
        logger.warning("%s: tools in the column %r are not shown to the model: rename it to 'tools'", names, name)
    for name in {*_UNREAD} & {*columns} - {*used.values()}:
        logger.warning(
            "%s: the column %r is not shown to the model: what it needs of it belongs into the prompt", names, name
        )
