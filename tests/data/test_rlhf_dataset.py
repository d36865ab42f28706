"""RLHFDataset: forms of prompts, errors at start-up, and items to batches."""

import logging

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.config.schema import DataConfig
from verl.data.collate import check_dataset, collate_prompts
from verl.data.order import PromptSource
from verl.data.rlhf_dataset import RLHFDataset, check_ground_truth, load_dataset_class


def row(prompt="a=", truth="b", **more):
    return {"data_source": "toy", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


# ---- what comes out -------------------------------------------------------------------------------------------------


def test_the_form_of_published_examples(write, chat_tokenizer):
    path = write("a.jsonl", [{"prompt": "How many?", "answer": "4"}, {"prompt": "And now?", "answer": 5}])
    dataset = RLHFDataset(data_files=[path], tokenizer=chat_tokenizer, config={"max_prompt_length": 512})
    assert len(dataset) == 2
    item = dataset[0]
    text = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(item["prompt_ids"]) == text
    assert item["raw_prompt"] == [{"role": "user", "content": "How many?"}]
    assert item["data_source"] == "a"  # the name of the file
    assert item["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert (item["extra_info"], item["ability"], item["index"]) == ({"answer": "4"}, "", 0)
    assert dataset[1]["reward_model"]["ground_truth"] == "5"


def test_the_column_of_the_ground_truth_can_be_named(write, char_tokenizer):
    rows = [{"prompt": "a=", "solution": 7, "reward_model": {"style": "rule", "ground_truth": "8"}}]
    path = write("a.jsonl", rows)
    for key, truth in ({}, "8"), ({"ground_truth_key": "solution"}, "7"):
        assert RLHFDataset(path, char_tokenizer, config=key)[0]["reward_model"]["ground_truth"] == truth


def test_columns_of_a_chat_file_travel_along(write, chat_tokenizer):
    info = {"split": "train", "index": 7}
    path = write("a.parquet", [row(CHAT, "4", ability="math", extra_info=info, level=3)])
    item = RLHFDataset(path, chat_tokenizer)[0]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(item["prompt_ids"]) == expected
    assert item["raw_prompt"] == CHAT
    assert (item["data_source"], item["ability"], item["level"]) == ("toy", "math", 3)
    assert item["extra_info"] == {"ability": "math", "level": 3} | info


def test_extro_info_is_read_as_extra_info(write, char_tokenizer, caplog):
    item = RLHFDataset(write("a.jsonl", [row("abc=", extro_info={"k": 1})]), char_tokenizer)[0]
    assert item["extra_info"] == {"k": 1} and "extro_info" not in item
    assert "the column 'extro_info' is read as 'extra_info'" in caplog.text
    item = RLHFDataset(write("b.jsonl", [row("abc=", extro_info={"k": 1}, extra_info={"k": 2})]), char_tokenizer)[0]
    assert item["extra_info"] == {"k": 2} and "extro_info" not in item
    assert "the column 'extro_info' is ignored" in caplog.text


def test_a_plain_prompt_stays_text_without_a_template_or_if_it_is_set(write, char_tokenizer, chat_tokenizer):
    path = write("a.parquet", [row("abc=")])
    item = RLHFDataset(path, char_tokenizer)[0]
    assert item["raw_prompt"] == "abc="
    assert item["prompt_ids"] == char_tokenizer("abc=")["input_ids"] and len(item["prompt_ids"]) == 4
    assert RLHFDataset(path, chat_tokenizer, {"prompt_format": "text"})[0]["raw_prompt"] == "abc="


def test_a_template_and_its_arguments_from_the_config(write, char_tokenizer):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mark }}"
    config = {"chat_template": template, "apply_chat_template_kwargs": {"mark": "="}}
    item = RLHFDataset(write("a.parquet", [row("abc")]), char_tokenizer, config)[0]
    assert char_tokenizer.decode(item["prompt_ids"]) == "abc="


def test_the_config_may_be_a_section_or_a_mapping(write, char_tokenizer):
    path = write("a.jsonl", [{"q": "ab=", "answer": "x"}])
    section = DataConfig(prompt_key="q")
    keys = {"prompt_key": "q", "return_raw_chat": True, "image_key": "images"}
    for config in (section, section.model_dump(), keys, OmegaConf.create({"prompt_key": "q"})):
        dataset = RLHFDataset(path, char_tokenizer, config)
        assert dataset[0]["raw_prompt"] == "ab="
        assert dataset.config == section


def test_a_section_reads_like_a_mapping():
    config = DataConfig(max_prompt_length=9)
    assert config["max_prompt_length"] == config.get("max_prompt_length", 1) == config.max_prompt_length == 9
    assert config.get("my_key", 7) == 7 and "my_key" not in config and {**config} == dict(config)


def test_rewards_may_be_chosen_by_another_column(write, char_tokenizer):
    rows = [{"prompt": "a=", "answer": "x", "task": "sums"}]
    item = RLHFDataset(write("a.jsonl", rows), char_tokenizer, {"reward_fn_key": "task"})[0]
    assert (item["data_source"], item["task"]) == ("sums", "sums")


def test_the_first_rows_alone(write, char_tokenizer):
    path = write("a.parquet", [row("a=", str(i)) for i in range(5)])
    assert len(RLHFDataset(path, char_tokenizer, {"train_max_samples": 3})) == 3
    assert len(RLHFDataset(path, char_tokenizer, {"train_max_samples": 3, "max_samples": 2})) == 2
    assert len(RLHFDataset(path, char_tokenizer, {"train_max_samples": 9})) == 5


def test_more_rows_than_one_chunk_keep_their_order(write, char_tokenizer):
    rows = [row("a" * (1 + i % 7) + "=", str(i)) for i in range(2100)]
    dataset = RLHFDataset(write("a.parquet", rows), char_tokenizer, {"max_prompt_length": 6, "truncation": "left"})
    for i in (0, 5, 6, 1023, 1024, 2099):
        item = dataset[i]
        assert item["reward_model"]["ground_truth"] == str(i) and item["index"] == i
        assert char_tokenizer.decode(item["prompt_ids"]) == ("a" * (1 + i % 7) + "=")[-6:]


# ---- too long -------------------------------------------------------------------------------------------------------

LONG = ["abc=", "abcdefg=", "ab=", "abcdef="]


def test_long_prompts_are_filtered_and_counted(write, char_tokenizer, caplog):
    path = write("a.parquet", [row(p, str(i)) for i, p in enumerate(LONG)])
    with caplog.at_level(logging.INFO, logger="verl.data"):
        dataset = RLHFDataset(path, char_tokenizer, {"max_prompt_length": 5, "filter_overlong_prompts": True})
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 2]
    assert "dropped 2 of 4 prompts longer than 5 tokens" in caplog.text


def test_long_prompts_are_an_error_unless_told_otherwise(write, char_tokenizer):
    path = write("a.parquet", [row(p) for p in LONG])
    with pytest.raises(ValueError, match=r"2 of 4 prompts longer than 5 tokens.*row 1 .*with 8; the longest has 8"):
        RLHFDataset(path, char_tokenizer, {"max_prompt_length": 5})


@pytest.mark.parametrize("how, expected", [("left", "defg="), ("right", "abcde"), ("middle", "abfg=")])
def test_long_prompts_are_truncated_as_told(write, char_tokenizer, caplog, how, expected):
    path = write("a.parquet", [row(p) for p in LONG])
    with caplog.at_level(logging.INFO, logger="verl.data"):
        dataset = RLHFDataset(path, char_tokenizer, {"max_prompt_length": 5, "truncation": how})
    assert len(dataset) == 4
    assert char_tokenizer.decode(dataset[1]["prompt_ids"]) == expected
    assert "truncated 2 of 4 prompts longer than 5 tokens" in caplog.text


def test_no_usable_row_left(write, char_tokenizer):
    path = write("a.parquet", [row(p) for p in LONG])
    message = "none of the 4 rows is usable; 4 of 4 prompts longer than 1 tokens, the shortest"
    with pytest.raises(ValueError, match=message):
        RLHFDataset(path, char_tokenizer, {"max_prompt_length": 1, "filter_overlong_prompts": True})


# ---- refused at start-up --------------------------------------------------------------------------------------------


ANSWERED = [*CHAT, {"role": "assistant", "content": "4"}]
SOLVED = [{"prompt": "a=", "solution": 7}, {"prompt": "b=", "reward_model": {"ground_truth": "8"}}]
REFUSED = [
    # rows
    ([{"promt": "a=", "answer": "x"}], {}, "no column 'prompt' for the prompt.*did you mean 'promt'"),
    ([{"prompt": "a=", "answer": " "}], {}, "line 1: the ground truth .* is missing: found ' '"),
    ([row(), row(truth=None)], {}, r"line 2: the ground truth \(column 'reward_model'\) is missing"),
    ([row(), {**row(), "reward_model": {"style": "rule"}}], {}, "line 2: the ground truth .* is missing"),
    ([row(), {**row(), "reward_model": "x"}], {}, "line 2: expected reward_model"),
    ([row(), row(prompt="  ")], {}, "line 2: the prompt is empty"),
    ([row(), row(prompt=None)], {}, "line 2: the prompt is empty"),
    ([row(), {**row(), "data_source": None}], {}, "line 2: expected a name in column 'data_source', found None"),
    ([row(), row(images=["x.png"])], {}, "line 2: column 'images' has images.*use a vision-language model"),
    ([row(), row(extra_info="text")], {}, "line 2: expected a dict in column 'extra_info', found 'text'"),
    ([row(), row([{"role": "user", "content": "\ud83d"}])], {}, "line 2: message 0: character 0 is .*half of"),
    ([{"prompt": "a", "answer": "a\udc80"}], {}, r"\(column 'answer'\): character 1 is '.udc80', half of a"),
    ([row(CHAT)], {}, r"line 1.*no chat template: use the tokenizer of an instruc.*config=[{].custom_chat_template.: "),
    # settings
    ([row()], {"max_prompt_lenght": 5},
     r"data\.max_prompt_lenght: unknown key; did you mean data\.max_prompt_length\?"),
    ([row()], {"truncation": "up"},
     r"data\.truncation: found 'up' \(str\), expected one of error, left, right, middle"),
    ([row()], {"max_prompt_length": 0}, r"data\.max_prompt_length: found 0, expected int >= 1"),
    ([row()], {"image_key": "pictures"}, r"no column 'pictures' \(data\.image_key\)"),
    ([row()], {"prompt_key": "question"}, r"no column 'question' for the prompt \(data.prompt_key\)"),
    ([row()], {"reward_fn_key": "data_sourc"},
     "no column 'data_sourc' to select the reward by.*did you mean 'data_sou"),
    (SOLVED, {"ground_truth_key": "solutoin"},
     r"'solutoin' for the ground truth \(data.ground_truth_key\): did you mean"),
    (SOLVED, {"ground_truth_key": "solution"}, r"line 2: the ground truth \(column 'solution'\) is missing"),
    ([row("abc=")], {"prompt_format": "chat"}, "line 1.*no chat template"),
    ([row()], {"train_max_samples": 0}, "none of the 0 rows is usable"),
]  # fmt: skip


@pytest.mark.parametrize("rows, config, message", REFUSED)
def test_bad_rows_and_settings_are_refused(write, char_tokenizer, rows, config, message):
    path = write("a.jsonl", rows)
    with pytest.raises(ValueError, match=message) as error:
        RLHFDataset(path, char_tokenizer, config)
    assert path in str(error.value) or "line" not in message


@pytest.mark.parametrize(
    "prompt, config, message",
    [
        (CHAT, {"prompt_format": "text"}, "prompt_format=text, but the prompt is a list"),
        (ANSWERED, {}, "the prompt ends with an assistant message"),
    ],
)
def test_chats_that_are_refused_with_a_template(write, chat_tokenizer, prompt, config, message):
    for columns in (row(prompt), {"messages": prompt, "solution": "4"}):
        with pytest.raises(ValueError, match=message):
            RLHFDataset(write("a.parquet", [columns]), chat_tokenizer, config)


def test_a_model_that_scores_needs_no_answer(write, char_tokenizer):
    path = write("a.jsonl", [{**row(), "reward_model": {"style": "model"}}])
    assert RLHFDataset(path, char_tokenizer)[0]["reward_model"] == {"style": "model", "ground_truth": None}


def test_rows_without_ground_truth_are_refused_only_if_the_reward_needs_it(write, char_tokenizer):
    dataset = RLHFDataset(write("a.jsonl", [{"prompt": "a="}]), char_tokenizer)
    assert dataset[0]["reward_model"] == {"style": "none", "ground_truth": None}
    with pytest.raises(ValueError, match=r"which gsm8k needs: expected a column 'reward_model'.*found prompt\. Add"):
        check_ground_truth(dataset, "gsm8k", is_needed=True)
    check_ground_truth(RLHFDataset(write("b.jsonl", [row()]), char_tokenizer), "gsm8k", is_needed=True)


def test_text_that_the_tokenizer_loses_is_refused_even_in_one_row_of_many(write, char_tokenizer):
    rows = [row("abc=") for _ in range(2400)]
    rows[1237] = row("abZ=")
    with pytest.raises(ValueError, match=r"row 1237 .*: the tokenizer loses text: 'abZ='"):
        RLHFDataset(write("a.parquet", rows), char_tokenizer)


def test_a_tokenizer_that_ends_prompts_with_eos_is_refused(write, char_tokenizer):
    from tokenizers.processors import TemplateProcessing

    eos = char_tokenizer.eos_token_id
    char_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", eos)]
    )
    with pytest.raises(ValueError, match="appends its eos token '<eos>'"):
        RLHFDataset(write("a.parquet", [row("abc=")]), char_tokenizer)


def test_columns_with_a_reserved_name_are_dropped_with_a_warning(write, char_tokenizer, caplog):
    path = write("a.parquet", [row(uid="u", responses="r", note="n")])
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        item = RLHFDataset(path, char_tokenizer)[0]
    assert "uid" not in item and "responses" not in item and item["note"] == "n"
    assert "only rewards get the columns uid, responses, whose names are reserved" in caplog.text
    assert item["extra_info"] == {"uid": "u", "responses": "r", "note": "n"}


# ---- items to a batch -----------------------------------------------------------------------------------------------


def test_a_batch_has_object_columns_only(write, char_tokenizer):
    dataset = RLHFDataset(write("a.parquet", [row("abc=", str(i)) for i in range(4)]), char_tokenizer)
    batch = PromptSource(dataset, 2, shuffle=False, collate=collate_prompts)()
    assert not batch.tensors and len(batch) == 2
    names = {"prompt_ids", "raw_prompt", "data_source", "reward_model", "extra_info", "ability", "index", "uid"}
    assert set(batch.non_tensor_batch) == names
    ids = batch.non_tensor_batch["prompt_ids"]  # of one length: still a list a row, not a matrix
    assert ids.shape == (2,) and ids[0] == char_tokenizer("abc=")["input_ids"]
    assert list(batch.non_tensor_batch["uid"]) == ["0:0", "0:1"]


def test_items_in_the_forms_of_other_datasets():
    shared = {"data_source": "s", "reward_model": {"ground_truth": "1"}}
    left_padded = {"input_ids": torch.tensor([0, 0, 5, 6]), "attention_mask": torch.tensor([0, 0, 1, 1])}
    left_padded["position_ids"] = torch.tensor([0, 0, 0, 1])
    for form in ({"prompt_ids": np.array([5, 6])}, {"raw_prompt_ids": [5, 6]}, left_padded):
        batch = collate_prompts([{**shared, **form}])
        assert batch.non_tensor_batch["prompt_ids"][0] == [5, 6]
        assert not batch.tensors and "input_ids" not in batch.non_tensor_batch
        assert batch.non_tensor_batch["extra_info"][0] == {}
    both = {**left_padded, "raw_prompt_ids": [5, 6], **shared}
    assert collate_prompts([both]).non_tensor_batch["prompt_ids"][0] == [5, 6]


@pytest.mark.parametrize(
    "item, message",
    [
        ([1], "item 1 of the batch: expected a dict, found list"),
        ({"prompt_ids": [1], "reward_model": {}}, "has no 'data_source'.*found prompt_ids, reward_model"),
        ({"prompt_ids": [1], "data_source": "s"}, "has no 'reward_model'"),
        ({"data_source": "s", "reward_model": {}, "raw_prompt": []}, "has no prompt token ids"),
        ({"data_source": "s", "reward_model": {}, "prompt_ids": []}, "expected a non-empty list of token ids"),
        ({"data_source": "s", "reward_model": {}, "prompt_ids": ["a"]}, "expected a non-empty list of token ids"),
        ({"data_source": "s", "reward_model": {}, "prompt_ids": [1], "more": 1}, "keys of item 0, differs in more"),
    ],
)
def test_items_that_break_the_contract(item, message):
    good = {"data_source": "s", "reward_model": {}, "prompt_ids": [1]}
    with pytest.raises(ValueError, match=message):
        collate_prompts([good, item])
    with pytest.raises(ValueError, match="at least one item"):
        collate_prompts([])


# ---- custom classes -------------------------------------------------------------------------------------------------

OWN = """
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.tokenizer = tokenizer
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return {"raw_prompt_ids": [i + 1], "data_source": "own", "reward_model": {"ground_truth": str(i)}}

class Broken(Numbers):
    def __getitem__(self, i):
        return {"raw_prompt_ids": [i]}

class Empty(Numbers):
    def __len__(self):
        return 0

def not_a_class(): ...
"""


def test_a_dataset_class_by_path(tmp_path, char_tokenizer):
    path = tmp_path / "own_dataset.py"
    path.write_text(OWN)
    dataset = load_dataset_class(str(path), "Numbers")([], char_tokenizer, {})
    check_dataset(dataset)
    batch = PromptSource(dataset, 3, seed=1, collate=collate_prompts)()
    assert sorted(ids[0] for ids in batch.non_tensor_batch["prompt_ids"]) == [1, 2, 3]
    for name, message in (("Broken", "dataset item 0 of the batch has no 'data_source'"), ("Empty", "has no items")):
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            check_dataset(load_dataset_class(str(path), name)([], char_tokenizer, {}))
    for name, message in (
        ("Number", "did you mean 'Numbers'"),
        ("not_a_class", r"'not_a_class' of .* is not a subclass of torch\.utils\.data\.Dataset"),
        (None, "expected both path and name"),
    ):
        with pytest.raises(ValueError, match=message):
            load_dataset_class(str(path), name)


# ---- columns of TRL -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "prompt", "truth"),
    [
        ({"prompt": CHAT, "solution": "$4$"}, CHAT, "$4$"),
        ({"messages": CHAT, "answer": 4}, CHAT, "4"),
        ({"messages": CHAT, "solution": "4"}, CHAT, "4"),
        ({"prompt": CHAT, "messages": [], "answer": "4", "solution": "2 + 2 = 4"}, CHAT, "4"),
    ],
)
def test_rows_of_trl_need_no_setting(write, chat_tokenizer, caplog, given, prompt, truth):
    with caplog.at_level(logging.INFO, "verl.data"):
        item = RLHFDataset(write("a.parquet", [given]), chat_tokenizer)[0]
    assert (item["raw_prompt"], item["reward_model"]["ground_truth"]) == (prompt, truth)
    column = ["messages", "prompt"]["prompt" in given], ["solution", "answer"]["answer" in given]
    said = f"prompt from column {column[0]!r}, ground truth from column {column[1]!r}"
    assert caplog.text.count(said) == (0 if {"prompt", "answer"} <= {*given} else 1)


def test_a_column_that_was_set_is_not_replaced(write, chat_tokenizer):
    path = write("a.jsonl", [{"messages": CHAT, "solution": "2", "label": "4"}])
    item = RLHFDataset(path, chat_tokenizer, {"ground_truth_key": "label"})[0]
    assert item["reward_model"]["ground_truth"] == "4"
    with pytest.raises(ValueError, match="no column 'question' for the prompt"):
        RLHFDataset(path, chat_tokenizer, {"prompt_key": "question"})
