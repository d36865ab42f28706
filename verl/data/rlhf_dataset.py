"""Prompts for reinforcement learning: read, checked and tokenized once, before any model is loaded."""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from verl.columns import COLUMNS
from verl.data.files import Rows, file_list, read_rows
from verl.data.settings import Config, PromptSettings, read_settings
from verl.data.tokenization import (
    CHUNK,
    ROUND_TRIPS,
    TokenTable,
    check_round_trips,
    encode_prompts,
    prepare_tokenizer,
    read_prompt,
    refuse_media,
    truncate,
)
from verl.protocol import DataProto
from verl.registry import did_you_mean, load_object

logger = logging.getLogger("verl.data")

Prompt = str | list[dict[str, Any]]


class RLHFDataset(Dataset):
    """One item per usable row of the files.

    A row has a prompt (column `prompt_key`: chat messages, or text) and what its reward needs, either as the columns
    `data_source, reward_model {"style", "ground_truth"}, ability, extra_info` or as `answer` alone. Text becomes one
    user message where the tokenizer has a chat template, and stays plain text where it has none; `prompt_format` "chat"
    or "text" decides it by name. A number as `answer` becomes text.

    `dataset[i]` is a dict: prompt_ids (list of int), raw_prompt (messages or text), data_source, ability, reward_model,
    extra_info, index (the row's number in the files), and the row's other columns.

    Args:
        data_files: one path or several: .parquet, .jsonl, .json.
        tokenizer: a HuggingFace tokenizer. Its pad token is set when it has none.
        config: the settings of `PromptSettings`, as a dict or anything with `get`.
        processor: of images; not supported yet.

    Raises:
        ValueError: whatever is wrong with the files, the rows, the tokenizer or the settings, with file and row.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: Config | None = None,
        processor: Any = None,
    ):
        if processor is not None:
            raise ValueError("RLHFDataset: a processor is for images, which are not supported yet; leave it out")
        self.data_files = [str(path) for path in file_list(data_files)]
        self.tokenizer = tokenizer
        self.settings = read_settings(PromptSettings, config)
        self.rows = read_rows(self.data_files)
        prepare_tokenizer(tokenizer)
        _check_columns(self.rows, self.settings)
        start = time.perf_counter()
        self._kept: list[int] = []  # item -> row
        self._prompt_ids = TokenTable()
        self._tokenize_rows()
        logger.info("tokenized %s prompts in %.1f s", f"{len(self):,}", time.perf_counter() - start)
        self._passed_on = _further_columns(self.rows, self.settings)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of all prompts: what the model's vocabulary must hold."""
        return self._prompt_ids.largest

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self._prompt_ids.longest

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._kept[item]
        row = self.rows[index]
        where = self.rows.where(index)
        result = {name: row[name] for name in self._passed_on}
        result |= {
            "prompt_ids": self._prompt_ids[item],
            "data_source": self._data_source(row, index),
            "ability": row.get("ability") or "",
            "reward_model": _reward_model(row, where),
            "extra_info": row.get("extra_info") or {},
            "index": index,
        }
        if self.settings.return_raw_chat:
            result["raw_prompt"] = self._prompt(row, where)
        return result

    def _data_source(self, row: Mapping[str, Any], index: int) -> str:
        """The row's own source; else the column that chooses the reward; else the kind of file ("jsonl")."""
        for key in ("data_source", self.settings.reward_fn_key):
            if key in row:
                if not isinstance(row[key], str) or not row[key]:
                    raise ValueError(f"{self.rows.where(index)}: expected a name in column {key!r}, found {row[key]!r}")
                return row[key]
        return self.rows.file_type(index)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        """Messages where the prompt goes through the chat template, text where it does not."""
        return read_prompt(row[self.settings.prompt_key], self.settings.prompt_format, self._has_template(), where)

    def _has_template(self) -> bool:
        return self.settings.chat_template is not None or self.tokenizer.chat_template is not None

    def _tokenize_rows(self) -> None:
        """Check every row, tokenize its prompt, and keep the rows whose prompt fits."""
        settings = self.settings
        count = settings.rows_used(len(self.rows))
        if count < len(self.rows):
            logger.info("using the first %s of %s rows", f"{count:,}", f"{len(self.rows):,}")
        stride = max(count // ROUND_TRIPS, 1)
        overlong: dict[int, int] = {}  # row -> tokens
        rows = itertools.islice(enumerate(self.rows), count)
        while chunk := list(itertools.islice(rows, CHUNK)):
            indices = [index for index, _ in chunk]
            prompts = [self._check_row(row, index) for index, row in chunk]
            encoded = self._encode(prompts, indices[0])
            texts = [_texts_of(prompt) for prompt in prompts]
            check_round_trips(self.tokenizer, texts, encoded, stride, indices, self.rows.where)
            for index, ids in zip(indices, encoded):
                if len(ids) > settings.max_prompt_length:
                    overlong[index] = len(ids)
                    if settings.filter_overlong_prompts or settings.truncation == "error":
                        continue
                    ids = truncate(ids, settings.max_prompt_length, settings.truncation)
                self._kept.append(index)
                self._prompt_ids.append(ids)
        self._report_overlong(overlong, count)

    def _check_row(self, row: Mapping[str, Any], index: int) -> Prompt:
        """Refuse a row that could not be used; its prompt otherwise."""
        where = self.rows.where(index)
        settings = self.settings
        refuse_media(row, (settings.image_key, settings.video_key, settings.audio_key), where)
        _reward_model(row, where)
        self._data_source(row, index)
        return self._prompt(row, where)

    def _encode(self, prompts: list[Prompt], first: int) -> list[list[int]]:
        return encode_prompts(
            self.tokenizer,
            prompts,
            lambda i: self.rows.where(first + i),
            chat_template=self.settings.chat_template,
            template_kwargs=self.settings.apply_chat_template_kwargs,
        )

    def _report_overlong(self, overlong: dict[int, int], count: int) -> None:
        settings = self.settings
        if not overlong and self._kept:
            return
        found = f"{len(overlong):,} of {count:,} prompts longer than {settings.max_prompt_length:,} tokens"
        if overlong and not settings.filter_overlong_prompts and settings.truncation == "error":
            row, length = next(iter(overlong.items()))
            raise ValueError(
                f"data.max_prompt_length: {found}, the first: {self.rows.where(row)}, with {length:,}; the longest has "
                f"{max(overlong.values()):,}. Raise the limit, or set data.filter_overlong_prompts=True to leave "
                "them out, or data.truncation to left, right or middle"
            )
        if not self._kept:
            what = f"{', '.join(self.data_files)}: no usable row is left of {count:,}"
            if overlong:
                what += f"; {found}, the shortest has {min(overlong.values()):,}: raise data.max_prompt_length"
            raise ValueError(what)
        logger.info("%s %s", "filtered" if settings.filter_overlong_prompts else "truncated", found)


def _check_columns(rows: Rows, settings: PromptSettings) -> None:
    names = ", ".join(str(part.path) for part in rows.parts)
    if settings.prompt_key not in rows.columns:
        raise ValueError(
            f"{names}: no column {settings.prompt_key!r} for the prompt (data.prompt_key): "
            f"{did_you_mean(settings.prompt_key, rows.columns)}"
        )
    if settings.reward_fn_key != "data_source" and settings.reward_fn_key not in rows.columns:
        raise ValueError(
            f"{names}: no column {settings.reward_fn_key!r} to choose the reward by (data.reward_fn_key): "
            f"{did_you_mean(settings.reward_fn_key, rows.columns)}"
        )
    if "reward_model" not in rows.columns and "answer" not in rows.columns:
        raise ValueError(
            f"{names}: no answers to score against: expected a column 'reward_model' "
            '({"style": "rule", "ground_truth": ...}; {"style": "model"} where a model scores) or a column '
            f"'answer'; found {', '.join(rows.columns)}"
        )


def _further_columns(rows: Rows, settings: PromptSettings) -> list[str]:
    """The columns that travel with a row as they are. Names that the batch has a use for are left out, and said so."""
    own = {settings.prompt_key, "data_source", "ability", "reward_model", "extra_info"}
    further = [name for name in rows.columns if name not in own]
    taken = [name for name in further if name in COLUMNS or name == "index"]
    if taken:
        logger.warning("columns of the data files left out, the batch has its own of these names: %s", ", ".join(taken))
    return [name for name in further if name not in taken]


def _reward_model(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the reward needs of a row, in verl's form. Refuses a row that a rule could not score."""
    if "reward_model" in row:
        given, column = row["reward_model"], "reward_model"
        if not isinstance(given, Mapping):
            raise ValueError(f'{where}: expected reward_model {{"ground_truth": ...}}, found {given!r}')
        reward_model = {"style": "rule", "ground_truth": None} | {k: v for k, v in given.items() if v is not None}
    else:
        answer, column = row["answer"], "answer"
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and answer == answer
        reward_model = {"style": "rule", "ground_truth": str(answer) if is_number else answer}
    truth = reward_model["ground_truth"]
    missing = truth is None or truth != truth or (isinstance(truth, str | list) and len(truth) == 0)
    if isinstance(truth, str) and not truth.strip():
        missing = True
    if reward_model["style"] == "rule" and missing:
        raise ValueError(f"{where}: the answer (column {column!r}) is missing: found {row[column]!r}")
    return reward_model


def _texts_of(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


# ---- from items to a batch ------------------------------------------------------------------------------------------


def collate_prompts(items: Sequence[Mapping[str, Any]]) -> DataProto:
    """B items of a dataset -> a batch of object columns; tensors come with generation.

    An item is a mapping with `data_source`, `reward_model` and its prompt's token ids in one of three forms:
    `prompt_ids`; `raw_prompt_ids`; `input_ids` with `attention_mask`, padded on the left. Missing `extra_info` and
    `ability` are empty, a missing `raw_prompt` is None. Further keys travel along, one value per row.

    Raises:
        ValueError: no items, an item that breaks this contract, or items with different keys.
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
                f"dataset item {position} of the batch has no {key!r}, which the reward needs; "
                f"found {', '.join(map(str, item))}"
            )
    row = {"extra_info": {}, "ability": "", "raw_prompt": None}
    row |= {k: v for k, v in item.items() if k not in _FORMS_OF_PROMPT}
    row["prompt_ids"] = _prompt_ids(item, position)
    return row


_FORMS_OF_PROMPT = ("prompt_ids", "raw_prompt_ids", "input_ids", "attention_mask", "position_ids")


def _prompt_ids(item: Mapping[str, Any], position: int) -> list[int]:
    if "prompt_ids" in item:
        ids = _as_list(item["prompt_ids"])
    elif "raw_prompt_ids" in item:
        ids = _as_list(item["raw_prompt_ids"])
    elif "input_ids" in item and "attention_mask" in item:
        ids = [i for i, real in zip(_as_list(item["input_ids"]), _as_list(item["attention_mask"])) if real]
    else:
        raise ValueError(
            f"dataset item {position} of the batch has no token ids of its prompt: expected 'prompt_ids', or "
            f"'raw_prompt_ids', or 'input_ids' with 'attention_mask'; found {', '.join(map(str, item))}"
        )
    if not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(
            f"dataset item {position} of the batch: expected a non-empty list of token ids, found {ids!r:.80}"
        )
    return ids


def _as_list(ids: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)


# ---- a user's own dataset -------------------------------------------------------------------------------------------


def load_dataset_class(path: str | None, name: str | None) -> type[Dataset]:
    """A user's dataset class by address: `path` is a .py file or a module, `name` the class in it.

    It is made as `cls(data_files=..., tokenizer=..., config=...)`, is a torch `Dataset` with a length, and its items
    are what `collate_prompts` takes.

    Raises:
        ValueError: a missing half of the address, no such file or name, or a name that is not a torch Dataset class.
    """
    if not path or not name:
        raise ValueError(f"data.custom_cls: expected both path and name, found path={path!r}, name={name!r}")
    found = load_object(path, name)
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise ValueError(
            f"data.custom_cls: {name!r} of {path!r} is not a subclass of torch.utils.data.Dataset: {found!r}"
        )
    return found


def check_dataset(dataset: Dataset) -> None:
    """Look at the first item: does the dataset keep the contract of `collate_prompts`? Raises ValueError if not."""
    name = type(dataset).__name__
    if len(dataset) == 0:
        raise ValueError(f"{name}: the dataset has no items")
    try:
        collate_prompts([dataset[0]])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
