"""Collate functions: items of a dataset -> a batch of prompts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl.agents.tools.load import tool_schemas
from verl.config import schema
from verl.data.images import FEWER_IMAGE_TOKENS
from verl.data.media import MediaPrompt, MediaReader
from verl.data.messages import with_settings
from verl.data.tokenization import encode_prompts, read_prompt, truncate
from verl.protocol import DataProto


class PromptCollator:
    """`collate_prompts`, also for items without token ids: their `raw_prompt`, messages or text, is tokenized.

    Args:
        data: the section with prompt_format, max_prompt_length, truncation and apply_chat_template_kwargs.
        processor: the processor of a vision-language model, for messages with images or videos.
    """

    def __init__(self, tokenizer: Any, data: schema.DataConfig, processor: Any = None):
        self.tokenizer, self.data = tokenizer, data
        self.tools = tool_schemas(data.tool_config_path, data.function_tool_path)
        self.media = None
        if processor is not None:
            kwargs = data.apply_chat_template_kwargs
            self.media = MediaReader(processor, tokenizer, data, template_kwargs=kwargs, tools=self.tools)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> DataProto:
        """B items -> a batch. Raises ValueError as `collate_prompts` does, and for a prompt that is too long."""
        return collate_prompts([self._with_token_ids(item, position) for position, item in enumerate(items)])

    def _with_token_ids(self, item: Any, position: int) -> Any:
        if not isinstance(item, Mapping) or item.get("raw_prompt") is None or any(key in item for key in TOKEN_KEYS):
            return item
        location, data = f"dataset item {position} of the batch", self.data
        raw_prompt = item["raw_prompt"]
        raw_prompt = raw_prompt.tolist() if isinstance(raw_prompt, np.ndarray) else raw_prompt
        media = self._media(item, raw_prompt, location)
        if media is not None:
            ids = self.media.token_ids(media)
            self._check_length(ids, location, FEWER_IMAGE_TOKENS)
            return {**item, "raw_prompt": media.messages, "prompt_ids": ids, **self.media.columns(media, ids)}
        prompt = read_prompt(raw_prompt, data.prompt_format, self.tokenizer.chat_template is not None, location)
        prompt = with_settings(prompt, item, location, self.tools)
        kwargs = data.apply_chat_template_kwargs
        (ids,) = encode_prompts(self.tokenizer, [prompt], lambda i: location, template_kwargs=kwargs, tools=self.tools)
        if data.truncation == "error":
            self._check_length(ids, location, "set data.truncation to left, right or middle")
        prepared = {**item, "raw_prompt": prompt, "prompt_ids": truncate(ids, data.max_prompt_length, data.truncation)}
        return prepared if self.media is None else prepared | self.media.columns(prompt, prepared["prompt_ids"])

    def _media(self, item: Mapping[str, Any], prompt: Any, location: str) -> MediaPrompt | None:
        """The prompt of an item with images or videos: in its messages, or in multi_modal_data."""
        if self.media is None:
            return None
        media = media_data(item.get("multi_modal_data")) or {}
        keys = {"images": self.data.image_key, "videos": self.data.video_key}
        row = {name: item[name] for name in ("tools", "enable_thinking") if name in item}
        row |= {keys[name]: values for name, values in media.items()}
        return self.media.read(row, prompt, Path(), location)

    def _check_length(self, ids: Sequence[int], location: str, fix: str) -> None:
        limit = self.data.max_prompt_length
        if len(ids) > limit:
            raise ValueError(
                f"{location}: the prompt has {len(ids):,} tokens, data.max_prompt_length is {limit:,}: increase the "
                f"limit, filter the prompts in the dataset, or {fix}"
            )


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
    row = {"extra_info": {}, "ability": "", "raw_prompt": None}
    row |= {k: v for k, v in item.items() if k not in _PROMPT_FORMS}
    row["prompt_ids"] = _prompt_ids(item, position)
    if "multi_modal_data" in item or "multi_modal_inputs" in item:
        row |= _media_columns(item, row["prompt_ids"], position)
    return row


def media_data(media: Any) -> dict[str, list[Any]] | None:
    """`multi_modal_data` with the keys images and videos, from those or from image and video, as vLLM calls them."""
    names = {"image": "images", "video": "videos"}
    return {names.get(k, k): list(v) if isinstance(v, list | tuple) else [v] for k, v in (media or {}).items()} or None


def _media_columns(item: Mapping[str, Any], prompt_ids: list[int], position: int) -> dict[str, Any]:
    data, inputs = media_data(item.get("multi_modal_data")), item.get("multi_modal_inputs") or None
    if (data is None) != (inputs is None):
        missing = "multi_modal_inputs" if inputs is None else "multi_modal_data"
        raise ValueError(
            f"dataset item {position} of the batch: expected multi_modal_data (images, videos) and multi_modal_inputs "
            f"(the tensors of the processor), found no {missing}: return both, or neither and the images in the "
            "messages of raw_prompt"
        )
    raw = _as_list(item.get("raw_prompt_ids", prompt_ids))
    return {"multi_modal_data": data, "multi_modal_inputs": inputs, "raw_prompt_ids": raw}


TOKEN_KEYS = ("prompt_ids", "raw_prompt_ids", "input_ids")
_PROMPT_FORMS = (*TOKEN_KEYS, "attention_mask", "position_ids", "dummy_tensor")


def _prompt_ids(item: Mapping[str, Any], position: int) -> list[int]:
    keys = [key for key in TOKEN_KEYS if key in item]
    if item.get("multi_modal_inputs") and len(keys) > 1 and "raw_prompt_ids" in keys:
        keys.remove("raw_prompt_ids")  # its placeholders are not expanded
    form = next(iter(keys), None)
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
    """Items of one form -> a dict of columns: tensors are stacked, other values become object arrays. The default
    collate function of public verl, for programs that call it; the trainers use `PromptCollator`."""
    columns: dict[str, Any] = {}
    for key in items[0]:
        values = [item[key] for item in items]
        if isinstance(values[0], Tensor):
            columns[key] = torch.stack(values)
        else:
            columns[key] = np.fromiter(values, dtype=object, count=len(values))
    return columns


def check_dataset(dataset: Dataset, collate: Callable[[list[dict[str, Any]]], DataProto] = collate_prompts) -> None:
    """Raise ValueError if the dataset is empty, or `collate` does not accept its first item."""
    name = type(dataset).__name__
    if len(dataset) == 0:
        raise ValueError(f"{name}: the dataset has no items")
    try:
        collate([dataset[0]])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
