"""The calculator of examples/tools: what it reads, and the demonstrations of its warm-up."""

import json
from random import Random

import pytest

from examples.tools import word_problems
from examples.tools.calculator import calculator, compute_score
from verl.agents.tools.parsers import HermesToolParser

VALUES = {"2*3+4": "10", " 12 × 34 − 5 ": "403", "12 x 34": "408", "(2+3)x4": "20", "1,200*3": "3600"}
VALUES |= {"81 * $38 + $79": "3157", "9 ÷ 4 =": "2.25", "-3+5": "2"}


@pytest.mark.parametrize("expression, value", VALUES.items())
def test_an_expression_as_people_write_it(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["1,20*3", "2**9", "abs(3)", "x", "2*", "3 apples", "73 pencils * $57 per pencil"]
)
def test_anything_else_is_an_error(expression):
    with pytest.raises(ValueError, match="expected numbers"):
        calculator(expression)


def test_a_demonstration_has_a_call_that_the_parser_reads_and_a_correct_answer():
    random, parser, shown = Random(0), HermesToolParser(None), []
    for _ in range(200):
        messages = word_problems.demonstration(random)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
        turn, result, answer = messages[2:]
        text, (call,) = parser.parse(turn["content"])
        assert text == "" and call.name == "calculator"
        assert calculator(**call.read_arguments()) == result["content"] == answer["content"]
        shown.append(sum(sign in json.loads(call.arguments)["expression"][1:] for sign in "+-*"))
    assert 40 < shown.count(2) < 80 and shown.count(1) + shown.count(2) == 200


def test_the_answer_to_a_problem_gets_the_reward():
    row = word_problems.row(Random(0))
    truth = row["reward_model"]["ground_truth"]
    assert row["prompt"][1]["content"].startswith("Hugo has 35 flowers, and then gets 65 packs of 17.")
    assert truth == "1140"
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "35+65*17"}}</tool_call>'
    assert compute_score("calculator", f"{call}\ntool\n{truth}\nassistant\n{truth}", truth, {}) == 1
    assert compute_score("calculator", f"{call}\ntool\n{truth}\nassistant\n", truth, {}) == 0
