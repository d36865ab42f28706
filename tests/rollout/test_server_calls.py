"""What the server reads from the bodies of calls, and the tool calls that it reads from responses."""

import json

import pytest
from starlette.testclient import TestClient

from examples.quickstart.tiny_model import bpe_tokenizer
from verl.rollout.request import Completion, Request, SamplingParams
from verl.server.app import make_app
from verl.server.episodes import comparable
from verl.server.protocol import ApiError, read_call
from verl.server.service import ServedModel

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}


def test_a_call_has_at_most_128_choices_and_128_prompts():
    assert read_call(True, {**CHAT, "n": 128}).n == 128
    assert len(read_call(False, {"model": "tiny", "prompt": ["a"] * 128}).prompts) == 128
    with pytest.raises(ApiError, match=r"n: .* less than or equal to 128, found 129"):
        read_call(True, {**CHAT, "n": 129})
    with pytest.raises(ApiError, match="prompt: expected at most 128 prompts, found 129"):
        read_call(False, {"model": "tiny", "prompt": ["a"] * 129})


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 5000 + "]" * 5000], ids=["digits", "depth"])
def test_arguments_that_json_does_not_read_remain_text(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    call = read_call(True, {**CHAT, "messages": [{"role": "assistant", "tool_calls": calls}]})
    assert call.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
    assert comparable(call.messages[0])["tool_calls"] == [("f", arguments)]


@pytest.fixture
def tokenizer():
    return bpe_tokenizer()


WRITTEN = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>[2, 3]</parameter></function></tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "opening", "text", "arguments"),
    [
        ("qwen", "", WRITTEN, {"a": 1, "b": [2, 3]}),
        ("qwen", "", WRITTEN.replace("<tool_call>", "").replace("</tool_call>", ""), {"a": 1, "b": [2, 3]}),
        ("qwen", "", WRITTEN.replace("[2, 3]", "x"), None),
        ("hermes", "", '<tool_call>{"name": "add", "arguments": {"a": "7"}}</tool_call>', {"a": 7}),
        ("hermes", "", '<tool_call>{"name": "other", "arguments": {"a": "7"}}</tool_call>', {"a": "7"}),
        ("hermes", "", '<tool_call>{"name": "add", "arguments": {"a": null}}</tool_call>', None),
        ("hermes", "", '<tool_call>{"name": "add", "arguments": null}</tool_call>', None),
        ("hermes", "", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None),
        ("hermes", "<think>\n", 'so <tool_call>{"name": "add"}</tool_call>', None),
        ("hermes", "", '<think>so <tool_call>{"name": "add"}</tool_call>', None),
        ("hermes", "<think>\n", 'so</think><tool_call>{"name": "add"}</tool_call>', {}),
    ],
)
def test_calls_have_the_types_of_the_schema_and_are_not_in_thoughts(
    tokenizer, parser, opening, text, arguments, stream
):
    ids = tokenizer(text)["input_ids"]

    class Engine:
        weight_version = 0

        async def generate(self, request: Request) -> Completion:
            return Completion(ids, [-0.5] * len(ids), "stop")

        def abort(self, request_ids) -> None: ...

    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template + opening
    model = ServedModel("tiny", tokenizer, SamplingParams(100, ()), len(tokenizer), 2048, parser)
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "number"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    with TestClient(make_app(model, "key", generator=Engine())) as client:
        body, headers = {**CHAT, "tools": [tool], "stream": stream}, {"Authorization": "Bearer key"}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    choices = [json.loads(line)["choices"][0] for line in lines]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == ([] if arguments is None else [arguments])
    assert choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert calls or "".join(message.get("content") or "" for message in messages) == text


@pytest.mark.parametrize("function", [3, {}, {"name": 3}, {"name": "f", "parameters": 3}])
def test_tools_of_another_form_are_an_error(function):
    tools = [{"type": "function", "function": function}]
    with pytest.raises(ApiError, match=r"tools\.0: .*expected schemas of tools like"):
        read_call(True, {**CHAT, "tools": tools})
