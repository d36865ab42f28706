"""A tool that runs Python written by the policy, isolated as the programs of the reward `code` are (docs/security.md).

tools:
  - class_name: verl.agents.tools.python_tool.PythonTool
    config: {timeout: 10, memory_limit_mb: 1024}
"""

import asyncio
from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.processes.isolation.program import Limits, run_program

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python script and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The script."}},
            "required": ["code"],
        },
    },
}


class PythonTool(BaseTool):
    """Runs each script in an empty folder and returns its output, and how it ended if it failed.

    Args:
        config: timeout, seconds per script (10), and memory_limit_mb, MiB (1024).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        if unknown := set(config) - {"timeout", "memory_limit_mb"}:
            raise ValueError(f"PythonTool: config: expected timeout and memory_limit_mb, found {', '.join(unknown)}")
        self._limits = Limits(float(config.get("timeout", 10)), int(config.get("memory_limit_mb", 1024)) << 20)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(_SCHEMA)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        finished = await asyncio.to_thread(run_program, parameters["code"], limits=self._limits)
        failure = f"{finished.stderr}\nThe script {finished.failure}." if finished.failure else ""
        return ToolResponse(text=finished.stdout + failure), 0.0, {}
