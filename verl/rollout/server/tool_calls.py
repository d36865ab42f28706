"""Tool calls in the text of a response."""

import json
import re
import uuid
from typing import Any

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split a response into its content and its tool calls, in OpenAI's form.

    A block that is not a call stays in the content.
    """
    calls = []

    def read(block: re.Match[str]) -> str:
        try:
            found = json.loads(block[1])
            function = {"name": str(found["name"]), "arguments": json.dumps(found.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, AttributeError):
            return block[0]
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return ""

    content = _BLOCK.sub(read, text)
    return (content.strip() if calls else text), calls
