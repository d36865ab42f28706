"""Tools and interactions of multi-turn rollouts. Names are loaded at first use.

The decorator `function_tool` is in the module of that name: `from verl.tools.function_tool import function_tool`.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "BaseInteraction": "verl.tools.interactions",
    "BaseTool": "verl.tools.base_tool",
    "FunctionCall": "verl.tools.parsers",
    "OpenAIFunctionToolSchema": "verl.tools.schemas",
    "TOOL_PARSERS": "verl.tools.parsers",
    "ToolParser": "verl.tools.parsers",
    "ToolResponse": "verl.tools.schemas",
    "register_tool_parser": "verl.tools.parsers",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
