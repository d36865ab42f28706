"""Tool calls in a response, in OpenAI's form."""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.agents.tools.parsers import TOOL_PARSERS

if TYPE_CHECKING:
    from verl.server.service import ServedModel


async def split_tool_calls(
    model: "ServedModel", text: str, token_ids: Sequence[int]
) -> tuple[str, list[dict[str, Any]]]:
    """Split a response into its content and its tool calls. Without a readable call, the content is the whole text."""
    content, found = await TOOL_PARSERS[model.tool_parser](model.tokenizer).extract_tool_calls(token_ids)
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in found
        if call.error is None
    ]
    return (content.strip() if calls else text), calls
