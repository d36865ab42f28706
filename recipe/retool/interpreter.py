"""The code interpreter of ReTool, and its reward."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from verl.agents.tools.python_tool import PythonTool
from verl.rewards.rules.maths import math_dapo

_FENCE = re.compile(r"(?s)\A\s*```\w*\n(.*?)(?:\n?```\s*)?\Z")


class CodeInterpreter(PythonTool):
    """`PythonTool` for code between fences too, that prints the value of a last line that is an expression."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await super().execute(instance_id, {**parameters, "code": printing(parameters["code"])}, **kwargs)


def printing(code: str) -> str:
    """The code without a fence, with `print` around a last expression that is no call of it.

    >>> printing("```python\\nx = 6\\nx * 7\\n```")
    'x = 6\\nprint(x * 7)'
    """
    code = match[1] if (match := _FENCE.match(code)) else code
    try:
        module = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the interpreter says so
        return code
    match module.body:
        case [*_, ast.Expr(ast.Call(ast.Name("print")))]:
            return code
        case [*before, ast.Expr() as last]:
            printed = ast.Expr(ast.Call(ast.Name("print", ast.Load()), [last.value], []))
            return "\n".join(ast.unparse(node) for node in (*before, printed))
    return code


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], code_bonus: float = 0.1
) -> dict[str, Any]:
    """1 for the right answer in the last box, otherwise -1, and `code_bonus` for each run of code, up to -0.6.

    ReTool (Feng et al. 2025, arXiv:2504.11536) has no bonus; public verl's recipe has it. Set 0 for the former.
    """
    boxed = "\\boxed{" + solution_str.rpartition("\\boxed{")[2] if "\\boxed{" in solution_str else ""
    result = dict(math_dapo(data_source, boxed, ground_truth, extra_info))
    if result["score"] < 0:
        runs = (extra_info["num_turns"] - 2) / 2
        result["score"] = min(-0.6, result["score"] + code_bonus * runs) if code_bonus else result["score"]
    return result
