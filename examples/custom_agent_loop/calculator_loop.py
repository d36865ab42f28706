"""A custom agent loop, complete: the policy can use a calculator.

    python -m verl.trainer.main_ppo imports=[examples/custom_agent_loop/calculator_loop.py] \\
        actor_rollout_ref.rollout.agent.default_agent_loop=calculator ...

When the policy writes an expression and an equals sign, as in "12*3=", its turn ends there. The calculator appends the
value, "36", and the policy continues after it. The tokens of the calculator are in the response, so that the policy
reads them, and `response_mask` is 0 on them, so that it is not trained on them.
"""

import ast
import operator
import re
from dataclasses import replace
from typing import Any

from verl.rollout import AgentLoop, GenerateFn, Prompt, Trajectory, register_agent_loop
from verl.rollout.request import StopStrings

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = re.compile(r"[\d+\-*/(). ]{1,100}$")


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses; "?" for anything else.

    >>> calculate("2*(3+4)")
    '14'
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
        raise ValueError(f"not an expression: {expression!r}")

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        return "?"


@register_agent_loop("calculator")
class CalculatorLoop(AgentLoop):
    """One object serves all samples at once: `run` keeps its state in local variables."""

    def __init__(self, config: Any, tokenizer: Any):
        self.tokenizer = tokenizer
        self.stop = StopStrings((*config.stop, "="), tokenizer.decode)

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        trajectory = Trajectory(prompt)
        while (request := trajectory.next_request()) is not None:
            completion = await generate(replace(request, params=replace(request.params, stop=self.stop)))
            trajectory.add_completion(completion)
            text = self.tokenizer.decode(completion.token_ids)
            if completion.finish_reason != "stop" or not text.endswith("="):
                break
            expression = EXPRESSION.search(text[:-1])
            result = calculate(expression.group()) if expression else "?"
            trajectory.add_tokens(self.tokenizer.encode(result, add_special_tokens=False), author="calculator")
        return trajectory
