"""Prompts for RL: read, checked and tokenized once, before any model is loaded."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from verl.columns import COLUMNS
from verl.config import schema
from verl.data.dataset import (
    DatasetConfig,
    Encoded,
    overlong_figures,
    read_data_section,
    rows_to_use,
    tokenize_rows,
)
from verl.data.files import Rows, extra_info_column, file_list, read_rows
from verl.data.tokenization import (
    TokenTable,
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

_MEDIA_COLUMNS = ("images", "videos", "audios")


class RLHFDataset(Dataset):
    """Prompts of data files; one item per usable row.

    A row has a prompt (column `prompt_key`: chat messages or text) and what its reward needs: the columns
    `data_source, reward_model {"style", "ground_truth"}, ability, extra_info`, or only `answer`. Text becomes one user
    message if the tokenizer has a chat template, and stays plain text otherwise; `prompt_format` ("chat" or "text")
    overrides that. A number in `answer` becomes text.

    `dataset[i]` is a dict: prompt_ids (list of int), raw_prompt (messages or text), data_source, ability, reward_model,
    extra_info, index (the row's number in the files), and the other columns of the row.

    Args:
        data_files: one path or several: .parquet, .jsonl, .json.
        tokenizer: a Hugging Face tokenizer. A missing pad token is set.
        config: the `data` section (`schema.DataConfig`), or a mapping with some of its keys.
        processor: not supported yet.

    Raises:
        ValueError: invalid files, rows, tokenizer or settings; the message names file and row.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: DatasetConfig = None,
        processor: Any = None,
    ):
        if processor is not None:
            raise ValueError("RLHFDataset: image processors are not supported yet; remove the argument `processor`")
        self.data_files = [str(path) for path in file_list(data_files)]
        self.tokenizer = tokenizer
        self.config, self.chat_template = read_data_section(config, schema.Config)
        self.rows = read_rows(self.data_files)
        prepare_tokenizer(tokenizer)
        _check_columns(self.rows, self.config)
        self._extra_info = extra_info_column(self.rows)
        start = time.perf_counter()
        self._kept: list[int] = []  # item -> row
        self._prompt_ids = TokenTable()
        self._tokenize()
        logger.info("tokenized %s prompts in %.1f s", f"{len(self):,}", time.perf_counter() - start)
        self._other_columns = _other_columns(self.rows, self.config)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of all prompts: the model's vocabulary must contain it."""
        return self._prompt_ids.largest

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt in tokens."""
        return self._prompt_ids.longest

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._kept[item]
        row = self.rows[index]
        where = self.rows.where(index)
        return {name: row[name] for name in self._other_columns} | {
            "prompt_ids": self._prompt_ids[item],
            "data_source": self._data_source(row, index),
            "ability": row.get("ability") or "",
            "reward_model": _reward_model(row, where),
            "extra_info": row.get(self._extra_info) or {},
            "index": index,
            "raw_prompt": self._prompt(row, where),
        }

    def _data_source(self, row: Mapping[str, Any], index: int) -> str:
        """The row's own source; otherwise the column that selects the reward; otherwise the file type ("jsonl")."""
        for key in ("data_source", self.config.reward_fn_key):
            if key in row:
                if not isinstance(row[key], str) or not row[key]:
                    raise ValueError(f"{self.rows.where(index)}: expected a name in column {key!r}, found {row[key]!r}")
                return row[key]
        return self.rows.file_type(index)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        """Messages if the prompt goes through the chat template, otherwise text."""
        has_template = self.chat_template is not None or self.tokenizer.chat_template is not None
        return read_prompt(row[self.config.prompt_key], self.config.prompt_format, has_template, where)

    def _tokenize(self) -> None:
        """Check every row, tokenize its prompt, and keep the rows whose prompt fits."""
        config, overlong = self.config, {}  # row -> tokens
        count = rows_to_use(self.rows, config.train_max_samples)
        tokenized = tokenize_rows(
            self.tokenizer, self.rows, count, read=self._check_row, texts_of=_texts_of, encode=self._encode
        )
        for index, (ids, _) in tokenized:
            if len(ids) > config.max_prompt_length:
                overlong[index] = len(ids)
                if config.filter_overlong_prompts or config.truncation == "error":
                    continue
                ids = truncate(ids, config.max_prompt_length, config.truncation)
            self._kept.append(index)
            self._prompt_ids.append(ids)
        self._report_overlong(overlong, count)

    def _check_row(self, row: Mapping[str, Any], index: int) -> Prompt:
        """The prompt of a row. Raises ValueError if the row cannot be used."""
        where = self.rows.where(index)
        refuse_media(row, _MEDIA_COLUMNS, where)
        _reward_model(row, where)
        self._data_source(row, index)
        return self._prompt(row, where)

    def _encode(self, prompts: list[Prompt], where: Callable[[int], str]) -> list[Encoded]:
        encoded = encode_prompts(
            self.tokenizer,
            prompts,
            where,
            chat_template=self.chat_template,
            template_kwargs=self.config.apply_chat_template_kwargs,
        )
        return [(ids, []) for ids in encoded]

    def _report_overlong(self, overlong: dict[int, int], count: int) -> None:
        config = self.config
        if not overlong and self._kept:
            return
        found = f"{len(overlong):,} of {count:,} prompts longer than {config.max_prompt_length:,} tokens"
        if overlong and not config.filter_overlong_prompts and config.truncation == "error":
            raise ValueError(
                f"data.max_prompt_length: {found}; {overlong_figures(overlong, self.rows)}. Increase the limit, or "
                "set data.filter_overlong_prompts=True to drop them, or data.truncation to left, right or middle"
            )
        if not self._kept:
            what = f"{', '.join(self.data_files)}: none of the {count:,} rows is usable"
            if overlong:
                what += f"; {found}, the shortest has {min(overlong.values()):,}: increase data.max_prompt_length"
            raise ValueError(what)
        logger.info("%s %s", "dropped" if config.filter_overlong_prompts else "truncated", found)


def _check_columns(rows: Rows, config: schema.DataConfig) -> None:
    if config.prompt_key not in rows.columns:
        raise ValueError(
            f"{rows.names}: no column {config.prompt_key!r} for the prompt (data.prompt_key): "
            f"{did_you_mean(config.prompt_key, rows.columns)}"
        )
    if config.reward_fn_key != "data_source" and config.reward_fn_key not in rows.columns:
        raise ValueError(
            f"{rows.names}: no column {config.reward_fn_key!r} to select the reward by (data.reward_fn_key): "
            f"{did_you_mean(config.reward_fn_key, rows.columns)}"
        )
    if "reward_model" not in rows.columns and "answer" not in rows.columns:
        raise ValueError(
            f"{rows.names}: no ground truth to score against: expected a column 'reward_model' "
            '({"style": "rule", "ground_truth": ...}, or {"style": "model"} with a reward model) or a column '
            f"'answer'; found {', '.join(rows.columns)}"
        )


def _other_columns(rows: Rows, config: schema.DataConfig) -> list[str]:
    """The columns that items keep unchanged. Columns whose names the batch uses itself are dropped with a warning."""
    read = {config.prompt_key, "data_source", "ability", "reward_model", "extra_info", "extro_info"}
    others = [name for name in rows.columns if name not in read]
    reserved = [name for name in others if name in COLUMNS or name == "index"]
    if reserved:
        logger.warning("columns of the data files dropped, their names are reserved: %s", ", ".join(reserved))
    return [name for name in others if name not in reserved]


def _reward_model(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `reward_model` entry of a row. Raises ValueError if a rule could not score the row."""
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
        raise ValueError(f"{where}: the ground truth (column {column!r}) is missing: found {row[column]!r}")
    return reward_model


def _texts_of(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


# ---- from items to a batch ------------------------------------------------------------------------------------------


def collate_prompts(items: Sequence[Mapping[str, Any]]) -> DataProto:
    """B items of a dataset -> a batch of object columns. Tensors are added by generation.

    Args:
        items: mappings with `data_source`, `reward_model` and the token ids of the prompt in one of three forms:
            `prompt_ids`; `raw_prompt_ids`; left-padded `input_ids` with `attention_mask`. `extra_info`, `ability` and
            `raw_prompt` are optional. Other keys become columns.

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
    return row


_PROMPT_FORMS = ("prompt_ids", "raw_prompt_ids", "input_ids", "attention_mask", "position_ids")


def _prompt_ids(item: Mapping[str, Any], position: int) -> list[int]:
    if "prompt_ids" in item:
        ids = _as_list(item["prompt_ids"])
    elif "raw_prompt_ids" in item:
        ids = _as_list(item["raw_prompt_ids"])
    elif "input_ids" in item and "attention_mask" in item:
        ids = [i for i, real in zip(_as_list(item["input_ids"]), _as_list(item["attention_mask"])) if real]
    else:
        raise ValueError(
            f"dataset item {position} of the batch has no prompt token ids: expected 'prompt_ids', or "
            f"'raw_prompt_ids', or 'input_ids' with 'attention_mask'; found {', '.join(map(str, item))}"
        )
    if not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(
            f"dataset item {position} of the batch: expected a non-empty list of token ids, found {ids!r:.80}"
        )
    return ids


def _as_list(ids: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)


# ---- custom datasets ------------------------------------------------------------------------------------------------


def load_dataset_class(path: str | None, name: str | None) -> type[Dataset]:
    """Load a custom dataset class.

    The class is a torch `Dataset` with a length, is created as `cls(data_files=..., tokenizer=..., config=...)` with
    the `data` section as config (a mapping with attribute access), and its items are what `collate_prompts` takes.

    Args:
        path: a .py file or a module.
        name: the class in it.

    Raises:
        ValueError: only one of the two is set, there is no such file or name, or it is not a torch Dataset class.
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
    """Raise ValueError if the dataset is empty, or its first item is not what `collate_prompts` takes."""
    name = type(dataset).__name__
    if len(dataset) == 0:
        raise ValueError(f"{name}: the dataset has no items")
    try:
        collate_prompts([dataset[0]])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
