"""Tools and interactions of multi-turn rollouts. Names are loaded at first use.

The decorator `function_tool` is in the module of that name: `from verl.tools.function_tool import function_tool`.
"""

import importlib

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


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'verl.tools' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted(__all__)
