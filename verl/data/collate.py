"""Collate functions: items of a dataset -> a batch of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config import schema
from verl.data.tokenization import encode_prompts, read_prompt, truncate
from verl.protocol import DataProto
from verl.tools.load import tool_schemas


class PromptCollator:
    """`collate_prompts`, also for items without token ids: their `raw_prompt`, messages or text, is tokenized.

    Args:
        tokenizer: a Hugging Face tokenizer.
        data: the section with prompt_format, max_prompt_length, truncation and apply_chat_template_kwargs.
    """

    def __init__(self, tokenizer: Any, data: schema.DataConfig):
        self.tokenizer, self.data = tokenizer, data
        self.tools = tool_schemas(data.tool_config_path, data.function_tool_path)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> DataProto:
        """B items -> a batch. Raises ValueError as `collate_prompts` does, and for a prompt that is too long."""
        return collate_prompts([self._with_token_ids(item, position) for position, item in enumerate(items)])

    def _with_token_ids(self, item: Any, position: int) -> Any:
        if not isinstance(item, Mapping) or item.get("raw_prompt") is None or any(key in item for key in TOKEN_KEYS):
            return item
        where, data = f"dataset item {position} of the batch", self.data
        given = item["raw_prompt"]
        given = given.tolist() if isinstance(given, np.ndarray) else given
        prompt = read_prompt(given, data.prompt_format, self.tokenizer.chat_template is not None, where)
        kwargs = data.apply_chat_template_kwargs
        (ids,) = encode_prompts(self.tokenizer, [prompt], lambda i: where, template_kwargs=kwargs, tools=self.tools)
        if len(ids) > data.max_prompt_length and data.truncation == "error":
            raise ValueError(
                f"{where}: the prompt has {len(ids):,} tokens, data.max_prompt_length is {data.max_prompt_length:,}: "
                "increase the limit, filter the prompts in the dataset, or set data.truncation to left, right or middle"
            )
        return {**item, "raw_prompt": prompt, "prompt_ids": truncate(ids, data.max_prompt_length, data.truncation)}


def collate_prompts(items: Sequence[Mapping[str, Any]]) -> DataProto:
    """B items of a dataset -> a batch of object columns. Tensors are added by generation.

    Args:
        items: mappings with `data_source`, `reward_model` and the token ids of the prompt in one of three forms:
            `prompt_ids`; `raw_prompt_ids`; `input_ids`, with `attention_mask` if they are padded. `extra_info`,
            `ability` and `raw_prompt` are optional. Other keys become columns.

    Raises:
        ValueError: no items, an item that does not have this form, or items with different keys.
    """
    if not items:
        raise ValueError("collate_prompts: expected at least one item, found none")
    rows = [_standard_item(item, position) for position, item in enumerate(items)]
    for position, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"dataset item {position} of the batch: expected the keys of item 0, differs in "
                f"{', '.join(sorted(row.keys() ^ rows[0].keys()))}"
            )
    return DataProto.from_dict(non_tensors={name: [row[name] for row in rows] for name in rows[0]})


def _standard_item(item: Any, position: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f"dataset item {position} of the batch: expected a dict, found {type(item).__name__}")
    for key in ("data_source", "reward_model"):
        if key not in item:
            raise ValueError(
                f"dataset item {position} of the batch has no {key!r}, which the reward needs: "
                f"found {', '.join(map(str, item))}"
            )
    if item.get("multi_modal_data"):
        raise ValueError(f"dataset item {position} of the batch: multi_modal_data is not supported yet: only text is")
    row = {"extra_info": {}, "ability": "", "raw_prompt": None}
    row |= {k: v for k, v in item.items() if k not in _PROMPT_FORMS}
    row["prompt_ids"] = _prompt_ids(item, position)
    return row


TOKEN_KEYS = ("prompt_ids", "raw_prompt_ids", "input_ids")
_PROMPT_FORMS = (*TOKEN_KEYS, "attention_mask", "position_ids", "dummy_tensor")


def _prompt_ids(item: Mapping[str, Any], position: int) -> list[int]:
    form = next((key for key in TOKEN_KEYS if key in item), None)
    if form is None:
        raise ValueError(
            f"dataset item {position} of the batch has no prompt token ids: expected 'prompt_ids', 'raw_prompt_ids', "
            f"'input_ids' (with 'attention_mask' if padded) or 'raw_prompt'; found {', '.join(map(str, item))}"
        )
    ids = _as_list(item[form])
    if form == "input_ids" and "attention_mask" in item:
        ids = [i for i, real in zip(ids, _as_list(item["attention_mask"])) if real]
    if not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(
            f"dataset item {position} of the batch: expected a non-empty list of token ids, found {ids!r:.80}"
        )
    return ids


def _as_list(ids: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)


def collate_fn(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Items of one form -> a dict of columns: tensors are stacked, other values become object arrays.

    The default collate function of public verl, for programs that call it. The trainers use `PromptCollator`.
    """
    columns: dict[str, Any] = {}
    for key in items[0]:
        values = [item[key] for item in items]
        if isinstance(values[0], Tensor):
            columns[key] = torch.stack(values)
        else:
            columns[key] = np.fromiter(values, dtype=object, count=len(values))
    return columns
