"""What the server reads from the bodies of calls."""

import pytest

from verl.server.episodes import comparable
from verl.server.protocol import ApiError, read_call

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
