"""Forms of data that people have: the names of their columns, and chats and prompts that are written differently.

These are the only names: training, SFT, generation and evaluation find their columns by them, unless a key names one.
"""

import json
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.choices import CHOICES, read_choices, read_text

logger = logging.getLogger("verl.data")

_TABLES = tomllib.loads((Path(__file__).parent / "forms.toml").read_text(encoding="utf-8"))
_COLUMNS = {name: tuple(columns) for name, columns in _TABLES["columns"].items()}
CHATS, TRUTHS, RESPONSES, SYSTEMS = (_COLUMNS[name] for name in ("chats", "truths", "responses", "systems"))
_INPUTS, _TOOLS, _UNREAD, _PLACED = (_COLUMNS[name] for name in ("inputs", "tools", "unread", "placed"))
PROMPTS = ("prompt", "question", "problem", "instruction", "query", *CHATS)
_ROLES = _TABLES["roles"]
_MEDIA = re.compile(r"(?:\w+_)?(?:image|img|audio|video)s?_?\d*", re.IGNORECASE)
CHAT_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](?:role|from|content|value)['\"]\s*:")
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
    if isinstance(value, str) and CHAT_TEXT.match(value):
        decoded = read_text(value)
        if not isinstance(decoded, list) or not all(
            isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in decoded
        ):
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


def note_columns(names: str, columns: Sequence[str], used: Mapping[str, str], config: Any, usual: bool = False) -> None:
    """Log which columns are read, unless they are the `usual` ones, and which the model does not see. used: what they
    are for -> column. config: with image_key and video_key."""
    companions = {
        "rest of the prompt": _INPUTS if used.get("prompt") == "instruction" else (),
        "choices": CHOICES if "prompt" in used else (),
        "system prompt": SYSTEMS,
    }
    read = {use: name for use, names in companions.items() for name in names if name in columns}
    if read or not usual:
        logger.info("%s: %s", names, ", ".join(f"{use} from column {name!r}" for use, name in {**used, **read}.items()))
    visible = {*used.values(), *read.values(), *_PLACED, config.image_key, config.video_key}
    others = [name for name in columns if name not in visible]
    for name in others:
        if name in _TOOLS:
            advice = "tools in the column %r are not shown to the model: rename it to 'tools'"
        elif _MEDIA.fullmatch(name):
            advice = "media in the column %r are not shown to the model: set data.image_key or data.video_key"
        elif name.lower() in _UNREAD:
            advice = "the column %r is not shown to the model: what it needs of it belongs into the prompt"
        else:
            continue
        logger.warning(f"%s: {advice}", names, name)
    if others:
        logger.info("%s: not shown to the model: %s", names, ", ".join(others))
