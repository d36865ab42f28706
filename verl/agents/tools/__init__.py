"""Tools and interactions of multi-turn rollouts. Names are loaded at first use.

The decorator is in the module of its name: `from verl.agents.tools.function_tool import function_tool`.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.agents.tools.base_tool": "BaseInteraction BaseTool",
    "verl.agents.tools.parsers": "FunctionCall TOOL_PARSERS ToolParser register_tool_parser",
    "verl.agents.tools.schemas": "OpenAIFunctionToolSchema ToolResponse",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
