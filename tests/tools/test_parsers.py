"""Parsers of tool calls: what is a call, and what the policy reads about text that is not one."""

import asyncio
import json

import pytest

from verl.agents.tools.parsers import TOOL_PARSERS, FunctionCall


class Tokenizer:
    """One token per character; 0 is eos."""

    eos_token_id = 0

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def parse(name: str, text: str) -> tuple[str, list[FunctionCall]]:
    parser = TOOL_PARSERS[name](Tokenizer())
    return asyncio.run(parser.extract_tool_calls([*map(ord, text), 0]))


def arguments(calls: list[FunctionCall]) -> list[tuple[str, dict]]:
    return [(call.name, call.read_arguments()) for call in calls]


def test_hermes():
    text = 'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    content, calls = parse("hermes", text + '<tool_call>{"name": "now"}</tool_call>')
    assert content == "Sure." and arguments(calls) == [("add", {"a": 1}), ("now", {})]
    assert parse("hermes", "no call") == ("no call", [])
    # arguments as text, as some models write them
    _, calls = parse("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>')
    assert arguments(calls) == [("add", {"a": 2})]


def test_a_call_within_a_thought_is_not_a_call():
    draft = '<think>maybe <tool_call>{"name": "a"}</tool_call></think>'
    assert parse("hermes", draft + "done")[1] == []
    assert arguments(parse("hermes", draft + '<tool_call>{"name": "b"}</tool_call>')[1]) == [("b", {})]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", "<tool_call>{name: add}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'expected a tool call as {"name"'),
        ("hermes", "<tool_call>[1]</tool_call>", 'expected a tool call as {"name"'),
        ("hermes", '<tool_call>{"name": "add"}', "no </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "as a JSON object, found"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "arguments are not JSON"),
        ("qwen", "<tool_call>add(1)</tool_call>", "expected <function=name>"),
        ("qwen", "<tool_call><function=add>1</function></tool_call>", "expected only <parameter=name>"),
        ("llama", '<|python_tag|>{"name": "add"', "not JSON"),
        ("llama", "<|python_tag|>print(1)", "not JSON"),
    ],
)
def test_text_that_is_not_a_call(name, text, error):
    (call,) = parse(name, text)[1]
    with pytest.raises(ValueError, match=error):
        call.read_arguments()


def test_qwen():
    text = "<tool_call>\n<function=run>\n<parameter=code>\nprint(1)\nx\n</parameter>\n<parameter=n>3</parameter>\n"
    content, calls = parse("qwen", f"Now. {text}</function>\n</tool_call>")
    assert content == "Now. " and arguments(calls) == [("run", {"code": "print(1)\nx", "n": "3"})]


def test_llama():
    one, two = {"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}
    expected = [("add", {"a": 1}), ("now", {})]
    joined = f"{json.dumps(one)}; {json.dumps(two)}"
    content, calls = parse("llama", f"hm<|python_tag|>{joined}<|eom_id|>")
    assert content == "hm" and arguments(calls) == expected
    assert arguments(parse("llama", joined + "<|eot_id|>")[1]) == expected
    assert parse("llama", "The answer is {x}.") == ("The answer is {x}.", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'), ("llama", '{"name": "f", "parameters": %s}')],
)
def test_a_call_that_is_nested_too_deeply_is_an_observation(name, text):
    deep = "[" * 20_000 + "]" * 20_000
    _, (call,) = TOOL_PARSERS[name](None).parse(text % deep)
    with pytest.raises(ValueError, match="the tool call is not JSON: maximum recursion depth"):
        call.read_arguments()
    with pytest.raises(ValueError, match="the arguments are not JSON"):
        FunctionCall("f", deep).read_arguments()
