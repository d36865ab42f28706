"""Arithmetic with a calculator: a tool that is a function.

    rollout.multi_turn.function_tool_path=examples/tools/calculator.py
    reward.custom_reward_function.path=examples/tools/calculator.py

A prompt is "What is 47*83-9?". The policy cannot multiply, but it can call the calculator and copy the result.
"""

import ast
import json
import operator
import re
from random import Random
from typing import Any

from verl.agents.tools.function_tool import function_tool

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPECTED = "expected numbers, + - * / and parentheses"
#: how people write operators -> how Python does
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "$": None})
#: fraction of the demonstrations of the warm-up that use the tool
WITH_TOOL = 0.3


@function_tool
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as "2*(3+4)".
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.translate(SIGNS))  # 1,200 is a number
    text = re.sub(r"(?<=[\d)\s])x(?=[\d(\s])", "*", text)  # 3 x 4 is a product
    try:
        tree = ast.parse(text.strip().removesuffix("="), mode="eval")
    except SyntaxError:
        raise ValueError(EXPECTED) from None
    return f"{_value(tree.body):.10g}"


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError(EXPECTED)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 if the last number of the response is the ground truth. The response includes the turns of tools."""
    last_turn = re.split(r"\bassistant\n", solution_str)[-1]
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", last_turn)
    return float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)


# ---- the toy task of run.py ---------------------------------------------------------------------------------------


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL."""
    expression = f"{random.randint(10, 99)}*{random.randint(10, 99)}{random.choice('+-')}{random.randint(1, 9)}"
    return {
        "data_source": "calculator",
        "prompt": [{"role": "user", "content": f"What is {expression}?"}],
        "reward_model": {"style": "rule", "ground_truth": calculator(expression)},
        "extra_info": {"expression": expression},
    }


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: a call and its result, or more often a guess."""
    task = row(random)
    if random.random() > WITH_TOOL:
        return [*task["prompt"], {"role": "assistant", "content": str(random.randint(100, 9999))}]
    call = json.dumps({"name": "calculator", "arguments": {"expression": task["extra_info"]["expression"]}})
    truth = task["reward_model"]["ground_truth"]
    return [
        *task["prompt"],
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": truth},
        {"role": "assistant", "content": truth},
    ]
