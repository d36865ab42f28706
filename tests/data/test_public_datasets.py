"""Datasets written for public verl: their constructor, config, hooks and items work unchanged."""

import numpy as np
import pytest
import torch

from verl.config.schema import DataConfig
from verl.data.collate import PromptCollator, collate_fn
from verl.data.rlhf_dataset import RLHFDataset, create_custom_dataset, load_dataset_class

# As recipes write them. `verl.utils.dataset.rl_dataset` is where public verl has the class.
PUBLIC = '''
import torch
from torch.utils.data import Dataset

from verl.data.rlhf_dataset import RLHFDataset


class Plain(Dataset):
    """All from the config, with attributes; items with left-padded tensors."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.tokenizer, self.processor = data_files, tokenizer, processor
        self.max_prompt_length = config.max_prompt_length
        self.image_key = config.image_key
        self.public = config.return_raw_chat, config.filter_overlong_prompts_workers
        self.mine = config.get("mine", 7)
        self.enable_thinking = config.apply_chat_template_kwargs.get("enable_thinking", None)
        self.cls_name = config.custom_cls.name
        self.max_samples = max_samples

    def __len__(self):
        return 4 if self.max_samples < 0 else self.max_samples

    def __getitem__(self, i):
        ids = torch.tensor(self.tokenizer.encode("ab=", add_special_tokens=False))
        pad = torch.full((self.max_prompt_length - len(ids),), self.tokenizer.pad_token_id)
        return {
            "input_ids": torch.cat([pad, ids]),
            "attention_mask": torch.cat([torch.zeros_like(pad), torch.ones_like(ids)]),
            "position_ids": torch.arange(self.max_prompt_length),
            "raw_prompt": [{"role": "user", "content": "ab="}],
            "data_source": "own",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
            "index": i,
            "tools_kwargs": {},
        }


class Messages(RLHFDataset):
    """Items of the newer releases: messages only. The rows come from elsewhere."""

    def _read_files_and_tokenize(self):
        rows = [{"prompt": [{"role": "user", "content": text}], "answer": text} for text in ("ab=", "abcdef=", "b=")]
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe=None):
        if self.filter_overlong_prompts:
            dataframe = [row for row in dataframe if len(row[self.prompt_key][0]["content"]) <= self.max_prompt_length]
        return dataframe

    def __getitem__(self, item):
        row_dict = dict(self.dataframe[item])
        assert (self.return_raw_chat, self.return_full_prompt, self.image_key) == (True, False, "images")
        row_dict["raw_prompt"] = self._build_messages(row_dict)
        assert isinstance(self.tokenizer.apply_chat_template(row_dict["raw_prompt"], tokenize=True), list)
        row_dict["dummy_tensor"] = torch.tensor([0], dtype=torch.uint8)
        row_dict["data_source"], row_dict["index"] = "own", item
        row_dict["reward_model"] = {"style": "rule", "ground_truth": row_dict.pop("answer")}
        return row_dict

    def _build_messages(self, example):
        return example.pop(self.prompt_key)


class Suffixed(RLHFDataset):
    """Changes the messages in place, and the rows by the parent's hooks."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.select(range(2))

    def maybe_filter_out_long_prompts(self, dataframe):
        return dataframe.filter(lambda row: len(row["prompt"][0]["content"]) < 6, num_proc=2, desc="filter")

    def _build_messages(self, example):
        messages = example.pop(self.prompt_key)
        messages[-1]["content"] += "="
        return messages
'''
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def public(tmp_path, write, char_tokenizer):
    """public("Plain", **settings of the section data) -> the dataset, as a run creates it."""
    path = tmp_path / "public.py"
    path.write_text(PUBLIC)
    chats = [[{"role": "user", "content": text}] for text in ("abc", "abcdefg", "ab", "b")]
    rows = write("rows.jsonl", [{"prompt": chat, "answer": "x", "data_source": "own"} for chat in chats])
    char_tokenizer.chat_template = TEMPLATE

    def create(name, max_samples=-1, **settings):
        own = settings.pop("kwargs", {})
        section = DataConfig(**{"custom_cls": {"path": str(path), "name": name, "kwargs": own}, **settings})
        cls = load_dataset_class(str(path), name)
        return create_custom_dataset(cls, [rows], char_tokenizer, section.model_dump(), max_samples)

    return create


def test_a_dataset_of_its_own(public, char_tokenizer):
    dataset = public("Plain", max_prompt_length=5, apply_chat_template_kwargs={"enable_thinking": False})
    assert (dataset.max_prompt_length, dataset.image_key, dataset.mine) == (5, "images", 7)
    assert dataset.public == (True, 1)  # not supported, at their defaults
    assert dataset.enable_thinking is False and dataset.cls_name == "Plain" and dataset.processor is None
    assert (len(dataset), len(public("Plain", max_samples=2))) == (4, 2)
    assert (dataset.mine, public("Plain", kwargs={"mine": 9}).mine) == (7, 9)
    batch = PromptCollator(char_tokenizer, DataConfig())([dataset[0], dataset[3]])
    assert list(batch.non_tensor_batch["prompt_ids"]) == [char_tokenizer("ab=")["input_ids"]] * 2
    assert batch.non_tensor_batch["reward_model"][1]["ground_truth"] == "3"


def test_messages_are_tokenized_when_they_are_batched(public, char_tokenizer):
    dataset = public("Messages", max_prompt_length=5, filter_overlong_prompts=True)
    assert len(dataset) == 2 and not dataset.is_tokenized
    items = [dataset[0], dataset[1]]
    batch = PromptCollator(char_tokenizer, dataset.config)(items)
    assert [char_tokenizer.decode(ids) for ids in batch.non_tensor_batch["prompt_ids"]] == ["ab=", "b="]
    assert batch.non_tensor_batch["raw_prompt"][1] == [{"role": "user", "content": "b="}]
    assert "dummy_tensor" not in batch.non_tensor_batch
    as_array = {**items[0], "raw_prompt": np.array(items[0]["raw_prompt"], dtype=object)}
    assert (
        PromptCollator(char_tokenizer, dataset.config)([as_array]).non_tensor_batch["prompt_ids"][0]
        == (batch.non_tensor_batch["prompt_ids"][0])
    )


def test_batched_texts_go_through_a_template_if_there_is_one(char_tokenizer):
    item = {"raw_prompt": "ab", "data_source": "x", "reward_model": {}}
    for template, raw, expected in ((None, "ab", "ab"), (TEMPLATE + "=", [{"role": "user", "content": "ab"}], "ab=")):
        char_tokenizer.chat_template = template
        found = PromptCollator(char_tokenizer, DataConfig())([item])
        assert found.non_tensor_batch["raw_prompt"][0] == raw
        assert char_tokenizer.decode(found.non_tensor_batch["prompt_ids"][0]) == expected


def test_the_template_of_batched_messages_gets_its_arguments_and_the_tools(char_tokenizer, tmp_path):
    (tmp_path / "tools.py").write_text(
        "from verl.agents.tools.function_tool import function_tool\n\n\n@function_tool\n"
        'def add(a: int) -> int:\n    """Add.\n\n'
        '    Args:\n        a: one.\n    """\n    return a\n'
    )
    char_tokenizer.chat_template = "{{ tools[0].function.name }}{{ tone }}" + TEMPLATE
    data = DataConfig(apply_chat_template_kwargs={"tone": "="}, function_tool_path=str(tmp_path / "tools.py"))
    item = {"raw_prompt": [{"role": "user", "content": "ab"}], "data_source": "x", "reward_model": {}}
    (ids,) = PromptCollator(char_tokenizer, data)([item]).non_tensor_batch["prompt_ids"]
    assert char_tokenizer.decode(ids) == "add=ab"


def test_an_overlong_raw_prompt_is_truncated_as_told(public, char_tokenizer):
    items = [public("Messages")[1]]
    with pytest.raises(ValueError, match=r"item 0 of the batch: the prompt has 7 tokens, data\.max_prompt_length is 5"):
        PromptCollator(char_tokenizer, DataConfig(max_prompt_length=5))(items)
    batch = PromptCollator(char_tokenizer, DataConfig(max_prompt_length=5, truncation="left"))(items)
    assert char_tokenizer.decode(batch.non_tensor_batch["prompt_ids"][0]) == "cdef="
    with pytest.raises(ValueError, match="found no multi_modal_inputs: return both"):
        PromptCollator(char_tokenizer, DataConfig())([{**items[0], "multi_modal_data": {"image": [1]}}])


def test_the_hooks_of_the_parent(public, char_tokenizer):
    dataset = public("Suffixed")
    assert len(dataset) == 2 and isinstance(dataset, RLHFDataset) and dataset.is_tokenized
    for _ in range(2):  # messages that are changed in place are changed once
        assert [char_tokenizer.decode(dataset[i]["prompt_ids"]) for i in range(2)] == ["abc=", "ab="]
        assert [dataset[i]["index"] for i in range(2)] == [0, 2]
    assert dataset.longest_prompt == 4


def test_collate_fn_stacks_tensors(public):
    dataset = public("Plain", max_prompt_length=5)
    columns = collate_fn([dataset[0], dataset[1]])
    assert columns["input_ids"].shape == (2, 5) and columns["input_ids"].dtype == torch.int64
    assert columns["raw_prompt"].shape == (2,) and columns["extra_info"][1] == {"index": 1}
