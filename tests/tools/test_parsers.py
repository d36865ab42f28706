"""Parsers of tool calls: what is a call, and what the policy reads about text that is not one."""

import asyncio
import json

import pytest

from verl.agents.tools.parsers import TOOL_PARSERS, FunctionCall, extract_calls


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


CALLS = {"hermes": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'}
CALLS |= {"qwen": "<tool_call>\n<function=rm>\n</function>\n</tool_call>", "qwen3_coder": "<function=rm></function>"}
CALLS |= {"llama": '<|python_tag|>{"name": "rm", "parameters": {}}', "llama3_json": '{"name": "rm", "parameters": {}}'}
THOUGHTS = ["<think>maybe CALL", "<think>CALL</think>3", "I plan CALL no.\n</think>\n\n3", "CALL</think>"]
THOUGHTS += ["CALL [/THINK]"]
THOUGHTS += [
    "<think>a<think>b</think>CALL</think>",
    "[THINK]CALL[/THINK] 3",
    "<thinking>CALL</thinking>",
    "<think>CALL",
]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_only_outside_of_thoughts(name):
    for text in THOUGHTS:
        text = text.replace("CALL", CALLS[name])
        assert parse(name, text) == (text, []), text
        if name != "llama3_json":  # the call is the whole turn there, except for thoughts
            closed = "I use <tool_call>. </think>" if "think>" in text else "[/THINK]"
            assert arguments(parse(name, closed + CALLS[name])[1]) == [("rm", {})]
    assert arguments(parse(name, "plan</think>\n" + CALLS[name])[1]) == [("rm", {})]
    assert arguments(parse(name, "<think>plan</think>" + CALLS[name])[1]) == [("rm", {})]


@pytest.mark.parametrize("opening", ["<think>\n", "[THINK]"])
@pytest.mark.parametrize("name", CALLS)
def test_a_thought_that_the_prompt_opened_and_the_response_did_not_close(name, opening):
    parser, close = TOOL_PARSERS[name](Tokenizer()), opening.strip().replace("<", "</").replace("[", "[/")

    def calls(prompt: str, text: str) -> list:
        ids = ([*map(ord, each)] for each in (prompt, text))
        return asyncio.run(extract_calls(parser, Tokenizer(), *ids))[1]

    assert calls(opening, CALLS[name]) == calls(opening, "x" + CALLS[name]) == []
    assert [call.name for call in calls(opening, f"x{close}{CALLS[name]}")] == ["rm"]
    assert [call.name for call in calls(f"{opening}{close}\n\n", CALLS[name])] == ["rm"]


def test_think_tags_in_arguments_are_text():
    call = '<tool_call>{"name": "say", "arguments": {"text": "a <think> tag"}}</tool_call>'
    assert arguments(parse("hermes", call)[1]) == [("say", {"text": "a <think> tag"})]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", "<tool_call>{name: add}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'expected a tool call as {"name"'),
        ("hermes", "<tool_call>[1]</tool_call>", 'expected a tool call as {"name"'),
        ("hermes", '<tool_call>{"name": "add"}', "no </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "as a JSON object, found"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "arguments are not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "as a JSON object, found null"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no value of JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "Infinity is no value of JSON"),
        ("llama", '{"name": "add", "parameters": {"a": -Infinity}}', "-Infinity is no value of JSON"),
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


@pytest.mark.parametrize(
    ("text", "content", "made"),
    [
        ("Now. <function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "Now. ", [("f", {"a": "1"})]),
        ("<function=f><parameter=a>1</parameter></function>\n</tool_call>", "", [("f", {"a": "1"})]),
        ("<function=f></function><function=g></function>", "", [("f", {}), ("g", {})]),
        ("<tool_call><function=f></function>\n<function=g></function></tool_call>", "", [("f", {}), ("g", {})]),
        ("<function=f>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>", "", [("f", {"a": "1", "b": "2"})]),
        ("<function=f><parameter=a>1<parameter=b>2</parameter></function>", "", [("f", {"a": "1", "b": "2"})]),
    ],
)
def test_functions_that_qwen_writes_without_tool_call(text, content, made):
    """As vLLM's qwen3_coder parser reads them."""
    found, calls = parse("qwen", text)
    assert (found, arguments(calls)) == (content, made)


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
