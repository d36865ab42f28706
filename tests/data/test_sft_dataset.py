"""SFTDataset: which tokens are trained, in chats and in plain pairs."""

import copy
import itertools
import logging

import pytest

from verl.config.schema import SFTDataConfig
from verl.data.chat import encode_conversations
from verl.data.order import PromptSource
from verl.data.sft_dataset import SFTDataset, collate_sft

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
CHAT += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
CHAT += [{"role": "assistant", "content": "2"}]

NESTED = {"prompt_key": "info", "prompt_dict_keys": ["question"]}
NESTED |= {"response_key": "info", "response_dict_keys": ["answer"]}


def segments(tokenizer, item):
    """The text of an item cut where the mask changes: [(trained or not, text)]."""
    ids = item["prompt_ids"] + item["response_ids"]
    mask = [0] * len(item["prompt_ids"]) + item["response_mask"]
    starts = [0, *(t for t in range(1, len(ids)) if mask[t] != mask[t - 1]), len(ids)]
    return [(mask[a], tokenizer.decode(ids[a:b])) for a, b in itertools.pairwise(starts)]


def test_every_assistant_turn_is_trained_with_its_eos(write, chat_tokenizer):
    item = SFTDataset(write("a.parquet", [{"messages": CHAT}]), chat_tokenizer)[0]
    assert segments(chat_tokenizer, item) == [
        (0, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"),
        (1, "1<|im_end|>"),
        (0, "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"),
        (1, "2<|im_end|>"),
    ]
    assert item["response_ids"][-1] == chat_tokenizer.eos_token_id
    assert item["response_mask"][0] == 1 and item["index"] == 0


def test_the_tokens_before_a_turn_are_those_of_a_rollout(write, chat_tokenizer):
    """What is trained continues exactly the ids that generation would be given for the same messages."""
    item = SFTDataset(write("a.parquet", [{"messages": CHAT}]), chat_tokenizer)[0]
    text = chat_tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert item["prompt_ids"] == chat_tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "row, config",
    [
        ({"prompt": "One?", "response": "1"}, {}),
        ({"prompt": "One?", "answer": "1"}, {}),
        ({"question": "One?", "answer": "1"}, {}),
        ({"q": "One?", "a": "1", "answer": "x"}, {"prompt_key": "q", "response_key": "a"}),
        ({"prompt": [{"role": "user", "content": "One?"}], "response": "1"}, {}),
        ({"info": {"question": "One?", "answer": "1"}}, NESTED),
        ({"chat": CHAT[1:3]}, {"messages_key": "chat"}),
    ],
)
def test_the_forms_of_a_row_give_the_same_item(write, chat_tokenizer, row, config):
    item = SFTDataset(write("a.jsonl", [row]), chat_tokenizer, config)[0]
    expected = [(0, "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"), (1, "1<|im_end|>")]
    assert segments(chat_tokenizer, item) == expected


def test_plain_text_without_a_template(write, char_tokenizer):
    item = SFTDataset(write("a.jsonl", [{"prompt": "abc=", "response": "cba"}]), char_tokenizer)[0]
    assert item["prompt_ids"] == char_tokenizer("abc=")["input_ids"]
    assert item["response_ids"] == [*char_tokenizer("cba")["input_ids"], char_tokenizer.eos_token_id]
    assert item["response_mask"] == [1, 1, 1, 1]


def test_an_opening_assistant_message_and_a_trailing_question_are_not_trained(write, chat_tokenizer):
    chat = [{"role": "assistant", "content": "Hi"}, *CHAT[1:3], {"role": "user", "content": "Two?"}]
    item = SFTDataset(write("a.jsonl", [{"messages": chat}]), chat_tokenizer)[0]
    assert [text for trained, text in segments(chat_tokenizer, item) if trained] == ["1<|im_end|>"]
    assert "Two?" not in chat_tokenizer.decode(item["response_ids"])


def test_truncation_by_hand(write, char_tokenizer):
    path = write("a.jsonl", [{"prompt": "abc=", "response": "cba"}])  # 4 + 3 + eos
    with pytest.raises(ValueError, match=r"1 of 1 samples longer than 6 tokens.*line 1, with 8"):
        SFTDataset(path, char_tokenizer, {"max_length": 6})
    right = SFTDataset(path, char_tokenizer, {"max_length": 6, "truncation": "right"})[0]
    assert segments(char_tokenizer, right) == [(0, "abc="), (1, "cb")]
    left = SFTDataset(path, char_tokenizer, {"max_length": 6, "truncation": "left"})[0]
    assert segments(char_tokenizer, left) == [(0, "c="), (1, "cba<eos>")]
    # the prompt is gone: the first token that is left has nothing before it, so it is read and not trained
    bare = SFTDataset(path, char_tokenizer, {"max_length": 3, "truncation": "left"})[0]
    assert segments(char_tokenizer, bare) == [(0, "b"), (1, "a<eos>")]


def test_rows_without_a_trained_token_left_are_counted(write, char_tokenizer, caplog):
    rows = [{"prompt": "abcdef=", "response": "a"}, {"prompt": "a=", "response": "a"}]
    with caplog.at_level(logging.INFO, logger="verl.data"):
        dataset = SFTDataset(write("a.jsonl", rows), char_tokenizer, {"max_length": 5, "truncation": "right"})
    assert [dataset[i]["index"] for i in range(len(dataset))] == [1]
    assert "truncated 1 of 2 samples longer than 5 tokens; dropped 1 of them" in caplog.text
    with pytest.raises(ValueError, match="none of the 1 rows has a token in the loss within 5 tokens"):
        SFTDataset(write("b.jsonl", rows[:1]), char_tokenizer, {"max_length": 5, "truncation": "right"})


REWRITES = (
    "{%- for m in messages -%}{%- if not loop.last or m['role'] == 'user' -%}{{ m['role'] + ':' + m['content'][:1] }}"
    "{%- else -%}{{ m['role'] + ':' + m['content'] }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
)
OTHER_START = (
    "{%- for m in messages -%}{{ m['role'] + ':' + m['content'] }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<answer>{%- endif -%}"
)


@pytest.mark.parametrize(
    "template, contents, turn",
    [(REWRITES, ["x", "long answer", "y", "z"], 3), (OTHER_START, ["x", "a"], 1)],
)
def test_a_template_that_writes_a_prefix_differently_is_refused(chat_tokenizer, template, contents, turn):
    roles = ["user", "assistant"] * 2
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    message = f"chat 0: the chat template renders the messages before turn {turn} differently"
    with pytest.raises(ValueError, match=message):
        encode_conversations(chat_tokenizer, [chat], chat_template=template)


def test_a_template_that_ends_with_another_token_is_said_once(chat_tokenizer, caplog):
    chat_tokenizer.eos_token = "<|endoftext|>"
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        encoded = encode_conversations(chat_tokenizer, [CHAT[1:3]] * 3)
    assert all(chat_tokenizer.decode([t for t, m in zip(ids, mask) if m]) == "1<|im_end|>\n" for ids, mask in encoded)
    assert caplog.text.count("not with the eos token '<|endoftext|>'") == 1


PAIR = {"prompt": "a", "response": "b"}
INFO = {**PAIR, "info": {"q": "x"}}


@pytest.mark.parametrize(
    "rows, config, message",
    [
        ([{"messages": CHAT[:2]}], {}, r"line 1: .* no assistant turn after the first message.*\['system', 'user'\]"),
        ([{"messages": CHAT}, {"messages": []}], {}, "line 2: expected a list of chat messages"),
        ([PAIR, {"prompt": "a", "response": None}], {}, "line 2: the response .* is missing"),
        ([{"prompt": "a", "response": 2}], {}, r"line 1: the response .* is not text: found 2 \(int\)"),
        ([PAIR, {"prompt": "", "response": "b"}], {}, "line 2: the prompt is empty"),
        ([{"prompt": "a", "response": "x<|im_end|>y"}], {}, r"line 1: .* contains the eos token .* 2 times"),
        (
            [{"prompt": "a", "text": "b"}],
            {},
            "expected a column messages or conversations or .*, or prompt or question .* with response or completion",
        ),
        ([PAIR], {"prompt_key": "promt"}, r"no column 'promt' \(data.prompt_key\): did you mean 'prompt'"),
        ([PAIR], {"messages_key": "chat"}, "no column 'chat'"),
        ([INFO], {"prompt_key": "info", "prompt_dict_keys": ["r"]}, "line 1: column 'info' has no 'r'"),
        ([PAIR], {"truncation": "middle"}, r"data\.truncation: found 'middle' .*, expected one of error, left, right"),
    ],
)
def test_bad_rows_columns_and_settings_are_refused(write, chat_tokenizer, rows, config, message):
    with pytest.raises(ValueError, match=message):
        SFTDataset(write("a.jsonl", rows), chat_tokenizer, config)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"messages": CHAT}], "the row is a chat, but the tokenizer has no chat template"),
        ([{"prompt": "a=", "response": "aXY"}], "loses text: 'aXY' decodes to"),
    ],
)
def test_rows_that_the_tokenizer_does_not_read(write, char_tokenizer, rows, message):
    with pytest.raises(ValueError, match=message):
        SFTDataset(write("a.jsonl", rows), char_tokenizer)


def test_each_of_few_rows_is_decoded_without_an_unknown_token_too(write, char_tokenizer):
    tokenizer = copy.deepcopy(char_tokenizer)
    tokenizer.unk_token = None
    rows = [{"prompt": "a=", "response": text} for text in ("a", "aX")]
    with pytest.raises(ValueError, match=r"line 2.* loses text: 'aX'"):
        SFTDataset(write("a.jsonl", rows), tokenizer)


def test_the_config_may_be_a_section_or_a_mapping(write, char_tokenizer):
    path, section = write("a.jsonl", [{"prompt": "abc=", "response": "cba"}] * 3), SFTDataConfig(train_max_samples=2)
    for config in (section, section.model_dump(), {"max_samples": 2}):
        dataset = SFTDataset(path, char_tokenizer, config)
        assert len(dataset) == 2 and dataset.config == section


def test_a_batch_has_the_columns_of_a_rollout(write, char_tokenizer):
    rows = [{"prompt": "ab=", "response": "ba"}, {"prompt": "abc=", "response": "c"}]
    dataset = SFTDataset(write("a.jsonl", rows), char_tokenizer)
    batch = PromptSource(dataset, 2, shuffle=False, collate=lambda items: collate_sft(items, 0))()
    whole = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), (2, 7))
    shapes = {"prompts": (2, 4), "responses": (2, 3), "response_mask": (2, 3), **whole}
    assert {k: tuple(v.shape) for k, v in batch.tensors.items()} == shapes
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]
    assert list(batch.non_tensor_batch["uid"]) == ["0:0", "0:1"]
    with pytest.raises(ValueError, match="at least one item"):
        collate_sft([], 0)
