"""Tools and interactions of multi-turn rollouts. Names are loaded at first use.

The decorator is in the module of its name: `from verl.agents.tools.function_tool import function_tool`.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "BaseInteraction": "verl.agents.tools.interactions",
    "BaseTool": "verl.agents.tools.base_tool",
    "FunctionCall": "verl.agents.tools.parsers",
    "OpenAIFunctionToolSchema": "verl.agents.tools.schemas",
    "TOOL_PARSERS": "verl.agents.tools.parsers",
    "ToolParser": "verl.agents.tools.parsers",
    "ToolResponse": "verl.agents.tools.schemas",
    "register_tool_parser": "verl.agents.tools.parsers",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
