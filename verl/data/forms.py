"""Forms of data that people have: the names of their columns, and chats and prompts that are written differently.

These are the only names: training, SFT, generation and evaluation find their columns by them, unless a key names one.
"""

import json
import logging
import string
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger("verl.data")

CHATS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "problem", "instruction", "query", *CHATS)
TRUTHS = (
    *("answer", "ground_truth", "final_answer", "expected_answer", "answers", "golden_answers", "answerKey"),
    *("test", "tests", "test_cases", "input_output", "solution"),
)
RESPONSES = ("response", "completion", "output", "solution", "answer", "answers", "chosen")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}


def find_column(columns: Sequence[str], names: Sequence[str], key: str) -> str:
    """The column of a setting: `key` if it is there or not the default (the first name), otherwise a usual name."""
    return key if key in columns or key != names[0] else usual_column(columns, names) or key


def usual_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of `names` that is a column, also with other capitals, as `Question` in a CSV; None if none is."""
    present = {column.lower(): column for column in columns} | {column: column for column in columns}
    return next((present[form] for name in names for form in (name, name.lower()) if form in present), None)


def as_messages(value: Any) -> Any:
    """A chat as messages with role and content: JSON text is parsed, `from` and `value` (ShareGPT) are renamed, text
    parts (OpenAI) are joined, and a list with one chat (BFCL) is that chat. Other values are returned as they are."""
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
        message |= {"role": _ROLES.get(role, role), "content": message.pop("value", None)}
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
        message["content"] = "".join(str(part.get("text", "")) for part in parts)
    return message


def read_prompt_column(row: Mapping[str, Any], column: str) -> Any:
    """The prompt of a row: text, with the `input` of Alpaca and with `choices` that it does not name, or messages."""
    prompt = as_messages(row[column])
    if not isinstance(prompt, str):
        return prompt
    if column == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
        prompt = f"{prompt}\n\n{row['input']}"
    choices = row.get("choices") or ()
    labels = choices.get("label", ()) if isinstance(choices, Mapping) else string.ascii_uppercase
    texts = [str(text) for text in (choices.get("text", ()) if isinstance(choices, Mapping) else choices)]
    if not all(text in prompt for text in texts):
        prompt += "".join(f"\n{label}. {text}" for label, text in zip(labels, texts))
    return prompt


def note_columns(names: str, columns: Sequence[str], used: Mapping[str, str]) -> None:
    """Log which columns are read, if they are not the default ones. used: what they are for -> column."""
    appended = {"input": used.get("prompt") == "instruction", "choices": "prompt" in used}
    rest = [name for name in appended if appended[name] and name in columns]
    used = {**used, "rest of the prompt": rest[0]} if rest else used
    logger.info("%s: %s", names, ", ".join(f"{use} from column {name!r}" for use, name in used.items()))
    for name in {"function", "functions"} & {*columns}:
        logger.warning("%s: tools in the column %r are not shown to the model: rename it to 'tools'", names, name)
