"""What chats of data files become: weights of turns, tools, tool calls, reasoning; text that a template drops."""

import json

import pytest

from tests.data.test_sft_dataset import segments
from tests.pages import ROOT
from verl.data.messages import read_message, with_settings
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.data.tokenization import check_messages, encode_prompts

#: as Qwen2.5: tool calls, arguments as objects; other roles are dropped
CALLS = (
    "{%- if tools -%}{{ '<tools>' + (tools | tojson) + '</tools>' }}{%- endif -%}{%- for m in messages -%}"
    "{%- if m.role in ['system', 'user', 'tool', 'assistant'] -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content -%}{{ m.content }}{%- endif -%}{%- for c in m.tool_calls or [] -%}"
    '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}'
    "{{ '}</tool_call>' }}{%- endfor -%}{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think></think>' }}{%- endif -%}{%- endif -%}"
)
CALLS = CALLS.replace(
    "{%- if m.content -%}",
    "{%- if m.role == 'assistant' and loop.last and enable_thinking is defined "
    "and not enable_thinking -%}{{ '<think></think>' }}{%- endif -%}{%- if m.content -%}",
)
#: as DeepSeek-V3: arguments as text
TEXT = (
    "{%- for m in messages -%}{{ m.role + ':' + m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ c.function.name + c.function.arguments }}{%- endfor -%}{{ '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
)
#: as Qwen3: the reasoning of the last turn alone, as a key or in the content
THINKS = (
    "{%- for m in messages -%}{%- set text = m.content.split('</think>')[-1].strip() -%}"
    "{%- set thought = m.reasoning_content or (m.content.split('</think>')[0].strip() if '</think>' in m.content) -%}"
    "{{ m.role + ':' }}{%- if loop.last and thought -%}{{ '<think>' + thought.replace('<think>', '') + '</think>' }}"
    "{%- endif -%}{{ text + '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}assistant:{%- endif -%}"
)
ASK = {"role": "user", "content": "One?"}
SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def say(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def call(arguments, name="add"):
    return {"id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments}}


def trained(tokenizer, rows, item=0, **config):
    """The texts in the loss of an item."""
    found = segments(tokenizer, SFTDataset(rows, tokenizer, config)[item])
    return [text for is_trained, text in found if is_trained]


# ---- which turns are trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["loss_mask", "loss", "trainable", "train", "training", "weight"])
@pytest.mark.parametrize("zero", [0, 0.0, False])
def test_a_turn_with_a_weight_of_zero_is_context(chat_tokenizer, key, zero):
    chat = [{**ASK, key: zero}, say("eins", **{key: zero}), ASK, say("zwei", **{key: type(zero)(1)}), ASK, say("drei")]
    item = SFTDataset([{"messages": chat}], chat_tokenizer)[0]
    start = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    assert segments(chat_tokenizer, item) == [
        (0, f"{start}eins<|im_end|>\n{start}"),
        (1, "zwei<|im_end|>"),
        (0, f"\n{start}"),
        (1, "drei<|im_end|>"),
    ]


@pytest.mark.parametrize("value", [0.5, 2, -1, "0", [1, 0], "false"])
def test_other_weights_are_refused(chat_tokenizer, value):
    rows = [{"messages": [ASK, say("eins")]}, {"messages": [ASK, say("eins", weight=value)]}]
    with pytest.raises(ValueError, match=r"row 1 .*: message 1: expected a weight of 0 or 1 \(false or true\), found"):
        SFTDataset(rows, chat_tokenizer)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{**ASK, "train": True}, say("eins")],
         r"message 0 \(user\): \{'train': True\}, but only assistant turns after the first"),
        ([say("Hi", weight=1), ASK, say("eins")],
         r"message 0 \(assistant\): \{'weight': 1\}, but only assistant turns after the first"),
        ([ASK, say("eins", weight=1, loss_mask=0)], "message 1: expected a weight of 0 or 1 .*'weight': 1"),
        ([ASK, say("eins", weight=0)],
         r"no assistant turn after the first message, or none that is trained.*assistant"),
        ([ASK, say("")], "message 1: the assistant turn has no text to train"),
        ([ASK, say(" \n"), ASK, say("zwei")], "message 1: the assistant turn has no text to train"),
    ],
)  # fmt: skip
def test_turns_that_cannot_be_trained_are_named(chat_tokenizer, chat, message):
    with pytest.raises(ValueError, match=f"row 0 .*{message}"):
        SFTDataset([{"messages": chat}], chat_tokenizer)


@pytest.mark.parametrize(("name", "value"), [("loss_mask", [0, 1]), ("weight", 0.5), ("train", False)])
def test_a_weight_of_a_row_is_refused(chat_tokenizer, name, value):
    trl = {"prompt": [ASK], "completion": [say("1")]}
    for row in ({"messages": [ASK, say("1")]}, {"prompt": "One?", "response": "1"}, trl):
        with pytest.raises(ValueError, match=f"row 1 .*: column '{name}': a row has no weight, found"):
            SFTDataset([{**row, name: 1}, {**row, name: value}], chat_tokenizer)


def test_an_empty_turn_may_be_context(chat_tokenizer):
    assert trained(chat_tokenizer, [{"messages": [ASK, say("", weight=0), ASK, say("zwei")]}]) == ["zwei<|im_end|>"]


# ---- tool calls -----------------------------------------------------------------------------------------------------

WRITTEN = '<tool_call>{"name": "add", "arguments": {"city": "P\\"ä", "n": null}}</tool_call><|im_end|>'


@pytest.mark.parametrize("arguments", [{"city": 'P"ä', "n": None}, '{"city": "P\\"\\u00e4", "n": null}'])
@pytest.mark.parametrize("keys", [{"content": None}, {"content": ""}, {}])
def test_tool_calls_of_any_form_are_rendered_once(write, chat_tokenizer, arguments, keys):
    chat_tokenizer.chat_template = CALLS
    turn = {"role": "assistant", "tool_calls": [call(arguments)], **keys}
    answer = {"role": "tool", "content": "42"}
    path = write("a.jsonl", [{"messages": [ASK, turn, answer, say("42")]}])
    assert trained(chat_tokenizer, path) == [WRITTEN, "42<|im_end|>"]
    bare = {**turn, "tool_calls": [call(arguments)["function"]]}
    assert trained(chat_tokenizer, [{"messages": [ASK, bare, answer, say("42")]}]) == [WRITTEN, "42<|im_end|>"]


@pytest.mark.parametrize("arguments", [{"city": "P", "n": None}, '{"city": "P", "n": null}'])
@pytest.mark.parametrize("operator", ["+", "~"])  # of an object, "+" fails and "~" writes what is not JSON
def test_a_template_that_reads_arguments_as_text(chat_tokenizer, arguments, operator):
    chat_tokenizer.chat_template = TEXT.replace("name + c", f"name {operator} c")
    rows = [{"messages": [ASK, say(None, tool_calls=[call(arguments)])]}]
    assert trained(chat_tokenizer, rows) == ['add{"city": "P", "n": null}<|im_end|>']


def test_a_template_that_writes_content_as_json(chat_tokenizer):
    chat_tokenizer.chat_template = TEXT.replace("m.content", "(m.content | tojson)")
    rows = [{"messages": [{"role": "user", "content": 'Wie "groß"?'}, say("8")]}]
    assert trained(chat_tokenizer, rows) == ['"8"<|im_end|>']


@pytest.mark.parametrize("mapped", [False, True])
def test_nulls_of_the_union_of_arrow_are_no_arguments(write, chat_tokenizer, monkeypatch, tmp_path, mapped):
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("verl.data.files.MAPPED_BYTES", 0 if mapped else 1 << 30)
    chat_tokenizer.chat_template = CALLS
    chats = [[ASK, say(None, tool_calls=[call(a)])] for a in ({"city": "P"}, {"n": 3, "box": {"a": 1}})]
    schema = {"type": "function", "function": SCHEMA}
    other = {"type": "function", "function": {"name": "sub", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    rows = [{"messages": chat, "tools": [tool], "answer": "x"} for chat, tool in zip(chats, (schema, other))]
    path = write("a.parquet", rows)
    expected = [
        '{"name": "add", "arguments": {"city": "P"}}',
        '{"name": "add", "arguments": {"n": 3, "box": {"a": 1}}}',
    ]
    for i in range(2):
        assert trained(chat_tokenizer, path, i) == [f"<tool_call>{expected[i]}</tool_call><|im_end|>"]
    prompts = [{"prompt": [*row["messages"], ASK], **{k: row[k] for k in ("tools", "answer")}} for row in rows]
    dataset = RLHFDataset(write("b.parquet", prompts), chat_tokenizer)
    for i in range(2):
        text = chat_tokenizer.decode(dataset[i]["prompt_ids"])
        assert expected[i] in text and "null" not in text
        assert text.startswith(f"<tools>{json.dumps([(schema, other)[i]])}</tools>")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{"function": {"arguments": {}}}], "expected tool calls like"),
        (["add"], "expected tool calls like"),
        ([call("{city")], "with arguments as an object or as its JSON text, found .*'{city'"),
        ([call([1])], "expected tool calls like"),
        ([call("[1]")], "expected tool calls like"),
        ([call('{"a": NaN}')], "expected tool calls like"),
    ],
)
def test_tool_calls_that_cannot_be_read(calls, message):
    with pytest.raises(ValueError, match=f"row 3: message 1: .*{message}"):
        check_messages([ASK, say(None, tool_calls=calls)], "row 3")
    assert read_message({"role": "assistant", "tool_calls": [call("")]}, "x")["tool_calls"] == [call({})]


# ---- what the template renders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "developer", "content": "Be brief."}, ASK, say("1")], r"message 0 \(developer\): .* its content"),
        ([ASK, say("1"), {"role": "observation", "content": "1"}, say("1")],
         r"message 2 \(observation\): .* its content"),
        ([ASK, say("1", reasoning_content="One."), ASK, say("1")],
         "the chat template does not read 'reasoning_content', so it has no effect"),
        ([ASK, say("1", reasoning="One.", weight=0), ASK, say("1")],
         "the chat template does not read 'reasoning', so it has no effect"),
    ],
)  # fmt: skip
def test_text_that_the_template_drops_is_named(chat_tokenizer, chat, message):
    """Also if the same text is elsewhere in the chat."""
    chat_tokenizer.chat_template = CALLS
    rows = [{"messages": [ASK, say("1")]}, {"messages": chat}]
    with pytest.raises(ValueError, match=f"row 1 .*: {message}"):
        SFTDataset(rows, chat_tokenizer)
    if chat[-2] != ASK:
        return
    prompts = [{"prompt": [*c["messages"][:-1]], "answer": "1"} for c in rows]
    with pytest.raises(ValueError, match=f"row 1 .*: {message}"):
        RLHFDataset(prompts, chat_tokenizer)


def test_tool_calls_that_the_template_drops_are_named(chat_tokenizer):
    """ChatML: such a turn is only its eos token."""
    turn = say("", tool_calls=[call({"city": "P"})])
    message = r"message 1 \(assistant\): the chat template does not render its tool call 'add'"
    for chat in ([ASK, turn], [ASK, turn, ASK, say("1")], [ASK, {**turn, "weight": 0}, ASK, say("add P")]):
        with pytest.raises(ValueError, match=f"row 0 .*: {message}"):
            SFTDataset([{"messages": chat}], chat_tokenizer)


@pytest.mark.parametrize("template", ["{{ m.content[:3] }}", "{{ m.content if m.content != 'One more?' }}"])
def test_a_template_that_drops_some_contents(chat_tokenizer, template):
    template = "{%- for m in messages -%}{{ m.role + ':' }}" + template + "<|im_end|>{%- endfor -%}"
    chat_tokenizer.chat_template = template + "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
    rows = [{"messages": [{"role": "user", "content": text}, say("1")]} for text in ("One", "One more?")]
    with pytest.raises(
        ValueError, match=r"row [01] .*: message 0 \(user\): the chat template does not render its content"
    ):
        SFTDataset(rows, chat_tokenizer)


STRIPS = "{%- for m in messages -%}{{ m.role + ':' + m.content.split('</think>')[-1] | trim }}<|im_end|>{%- endfor -%}"
STRIPS += "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
JSON = "{%- for m in messages -%}{{ m.role + ':' + (m.content if m.role != 'tool' else m.content | tojson) }}<|im_end|>"
JSON += "{%- endfor -%}{%- if add_generation_prompt -%}assistant:{%- endif -%}"


def test_what_templates_rewrite_by_design(chat_tokenizer):
    """Outer spaces, reasoning of earlier turns, and observations as JSON text."""
    chat_tokenizer.chat_template = STRIPS
    earlier = say("<think>so</think> eins ", weight=0)
    rows = [{"messages": [{"role": "user", "content": " One? "}, earlier, ASK, say(" zwei\n")]}] * 2
    assert trained(chat_tokenizer, rows, 1) == ["zwei<|im_end|>"]
    with pytest.raises(ValueError, match=r"message 3 \(assistant\): the chat template does not render its content"):
        SFTDataset([{"messages": [ASK, earlier, ASK, say("<think>so</think>zwei")]}], chat_tokenizer)
    chat_tokenizer.chat_template = JSON
    tool = {"role": "tool", "content": 'a "b"\nc'}
    rows = [{"messages": [ASK, say("eins"), tool, say("zwei")]}] * 2
    assert trained(chat_tokenizer, rows, 1) == ["eins<|im_end|>", "zwei<|im_end|>"]


def test_reasoning_is_rendered_where_the_template_knows_it(chat_tokenizer):
    chat_tokenizer.chat_template = THINKS
    last = say("zwei", reasoning_content="so")
    chat = [ASK, say("eins", reasoning_content="first", weight=0), ASK, last]
    item = SFTDataset([{"messages": chat}], chat_tokenizer)[0]
    assert segments(chat_tokenizer, item) == [
        (0, "user:One?<|im_end|>assistant:eins<|im_end|>user:One?<|im_end|>assistant:"),
        (1, "<think>so</think>zwei<|im_end|>"),
    ]
    assert trained(chat_tokenizer, [{"messages": [ASK, say("<think>so</think>zwei")]}]) == [
        "<think>so</think>zwei<|im_end|>"
    ]
    (ids,) = encode_prompts(chat_tokenizer, [check_messages([*chat[:2], ASK], "x")], str)
    assert chat_tokenizer.decode(ids) == "user:One?<|im_end|>assistant:eins<|im_end|>user:One?<|im_end|>assistant:"
    with pytest.raises(ValueError, match="message 1: expected reasoning_content to be text, found list"):
        check_messages([ASK, say("a", reasoning_content=["b"])], "x")
    with pytest.raises(ValueError, match=r"renders the messages before turn 3 differently.*loss_mask 0"):
        SFTDataset([{"messages": [ASK, say("eins", reasoning_content="a"), ASK, last]}], chat_tokenizer)


# ---- what a row sets for the template -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": SCHEMA}],
        [SCHEMA],
        json.dumps([SCHEMA]),
        [json.dumps({"type": "function", "function": SCHEMA})],
    ],
)
def test_tools_of_a_row_are_rendered(write, chat_tokenizer, tools):
    chat_tokenizer.chat_template = CALLS
    prompt = (
        f"<tools>{json.dumps([{'type': 'function', 'function': SCHEMA}])}</tools><|im_start|>user\nOne?<|im_end|>\n"
    )
    expected = [(0, prompt + "<|im_start|>assistant\n"), (1, "1<|im_end|>")]
    trl = {"prompt": [ASK], "completion": [say("1")]}
    for row in ({"messages": [ASK, say("1")]}, {"prompt": "One?", "response": "1"}, trl):
        item = SFTDataset(write("a.jsonl", [row | {"tools": tools}]), chat_tokenizer)[0]
        assert segments(chat_tokenizer, item) == expected
    for question in ("One?", [ASK]):
        row = {"prompt": question, "answer": "1", "tools": tools}
        dataset = RLHFDataset(write("b.jsonl", [row, row | {"tools": None}]), chat_tokenizer)
        assert chat_tokenizer.decode(dataset[0]["prompt_ids"]) == expected[0][1]
        assert chat_tokenizer.decode(dataset[1]["prompt_ids"]).startswith("<|im_start|>user")


#: the functions of a file, for the rows without a column `tools`
ADD = '''
from verl.agents.tools.function_tool import function_tool


@function_tool
def add(a: int) -> str:
    """Add one.

    Args:
        a: a number.
    """
    return str(a + 1)
'''


def test_the_tools_of_a_file_and_the_template_of_the_examples(chat_tokenizer, tmp_path):
    """`data.function_tool_path` of SFT, and the calls that its template writes are those that the rollout reads."""
    (tmp_path / "add.py").write_text(ADD)
    chat_tokenizer.chat_template = (ROOT / "examples" / "tools" / "chatml_tools.jinja").read_text()
    chat = [ASK, say("", tool_calls=[call({"a": 1})]), {"role": "tool", "content": "2"}, say("2")]
    dataset = SFTDataset([{"messages": chat}], chat_tokenizer, {"function_tool_path": str(tmp_path / "add.py")})
    (_, system), (_, called), (_, answered), (_, last) = segments(chat_tokenizer, dataset[0])
    assert '{"name": "add", "description": "Add one.", "parameters": ' in system
    assert system.endswith("<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n")
    assert called == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in answered and last == "2<|im_end|>"
    chat_tokenizer.chat_template = THINKS
    with pytest.raises(ValueError, match="the chat template does not read 'tools'"):
        SFTDataset([{"messages": [ASK, say("1")]}], chat_tokenizer, {"function_tool_path": str(tmp_path / "add.py")})


def test_thinking_of_a_row_is_rendered(chat_tokenizer):
    chat_tokenizer.chat_template = CALLS
    rows = [{"messages": [ASK, say("1")], "enable_thinking": value} for value in (False, True, None)]
    dataset = SFTDataset(rows, chat_tokenizer)
    ends = [
        segments(chat_tokenizer, dataset[i])[0][1].removeprefix("<|im_start|>user\nOne?<|im_end|>\n") for i in range(3)
    ]
    assert ends == ["<|im_start|>assistant\n<think></think>", "<|im_start|>assistant\n", "<|im_start|>assistant\n"]
    prompts = [{"prompt": "One?", "answer": "1", "enable_thinking": value} for value in (False, True)]
    dataset = RLHFDataset(prompts, chat_tokenizer)
    assert [chat_tokenizer.decode(dataset[i]["prompt_ids"]).endswith("</think>") for i in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": [SCHEMA]}, "the chat template does not read 'tools', so it has no effect"),
        ({"enable_thinking": False}, "the chat template does not read 'enable_thinking', so it has"),
        ({"enable_thinking": "no"}, "column 'enable_thinking': expected true or false, found 'no'"),
        ({"tools": "add"}, "column 'tools': Expecting value"),
        ({"tools": [{"name": 3}]}, "column 'tools': expected schemas of tools like"),
        ({"tools": {"add": 1}}, "column 'tools': "),
    ],
)
def test_columns_that_the_template_does_not_read_are_refused(chat_tokenizer, columns, message):
    first = dict.fromkeys(columns)
    for rows in (
        [{"messages": [ASK, say("1")], **each} for each in (first, columns)],
        [{"prompt": "One?", "response": "1", **each} for each in (first, columns)],
    ):
        with pytest.raises(ValueError, match=f"row 1 .*{message}"):
            SFTDataset(rows, chat_tokenizer)
    with pytest.raises(ValueError, match=f"row 1 .*{message}"):
        RLHFDataset([{"prompt": "One?", "answer": "1", **each} for each in (first, columns)], chat_tokenizer)


def test_tools_need_a_template_and_are_those_of_the_run(char_tokenizer):
    with pytest.raises(ValueError, match=r"row 0 .*tools: a prompt of plain text has no such column"):
        SFTDataset([{"prompt": "ab=", "response": "a", "tools": [SCHEMA]}], char_tokenizer)
    run = [{"type": "function", "function": {"name": "sub"}}]
    with pytest.raises(ValueError, match=r"expected the tools of the run, \['sub'\], found \['add'\]"):
        with_settings([ASK], {"tools": [SCHEMA]}, "row 0", run)


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_a_row_is_described_with_its_mask(chat_tokenizer):
    chat = [ASK, say("eins", weight=0), ASK, say("zwei"), ASK, say("x" * 500)]
    text = SFTDataset([{"messages": chat}], chat_tokenizer, {"max_length": 2048}).describe(0)
    context = r"<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    expected = context + r"eins<|im_end|>\n" + context + r"[train>zwei<|im_end|><train]\n" + context + "[train>"
    assert text == expected + "x" * 197 + "...<train]"
