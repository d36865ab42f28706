"""Prompts for RL: read, checked and tokenized once, before any model is loaded."""

import array
import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from verl.agents.tools.load import tool_schemas
from verl.config import schema
from verl.config.public.upstream import upstream_defaults
from verl.data.bad_rows import check_values
from verl.data.columns import NO_TRUTH, data_source, find_columns, reward_model
from verl.data.dataset import DatasetConfig, Prompt, PromptDataset, describe_overlong, rows_to_use
from verl.data.files import Rows, read_rows
from verl.data.images import FEWER_IMAGE_TOKENS
from verl.data.media import MediaPrompt
from verl.data.readers import RowTable
from verl.data.tokenization import TokenTable, refuse_media, truncate
from verl.registry import load_object
from verl.utils.tokenizer import with_id_lists

logger = logging.getLogger("verl.data")


class RLHFDataset(PromptDataset):
    """Prompts of data files; one item per usable row.

    A row has a prompt (column `prompt_key`: chat messages or text) and what its reward needs: the columns
    `data_source, reward_model {"style", "ground_truth"}, ability, extra_info`, or only `answer` (the column
    `ground_truth_key`). `messages` in place of `prompt` and `solution` in place of `answer` need no setting. A row
    without `data_source` gets the name of its file or dataset. Text becomes one user message if the tokenizer has a
    chat template, and stays plain text otherwise; `prompt_format` ("chat" or "text") overrides that. A number in
    `answer` becomes text.

    `dataset[i]` is a dict: prompt_ids (list of int), raw_prompt (messages or text), data_source, ability, reward_model,
    extra_info (with the other columns), index (the row's number in the files), and the other columns of the row. With
    a processor it also has multi_modal_data (decoded images and videos), multi_modal_inputs (the tensors of the
    processor) and raw_prompt_ids (with one placeholder for each image); the first two are None for a text-only row.

    A subclass may override `__getitem__`, and as in public verl `_build_messages` (the prompt of a row),
    `_read_files_and_tokenize` (sets `self.dataframe`, a sequence of dicts) and `maybe_filter_out_long_prompts` (selects
    rows of it).

    Args:
        data_files: one path or several: .parquet, .jsonl, .json, .csv, a folder or a dataset of the Hugging Face Hub.
            Or the rows: a sequence of dicts, such as a list or a Hugging Face dataset.
        tokenizer: a Hugging Face tokenizer. A missing pad token is set.
        config: the `data` section (`schema.DataConfig`), or a mapping with some of its keys.
        processor: the processor of a vision-language model; None: rows with images or videos are an error.
        max_samples: number of rows to use, from the first on; -1: `config.train_max_samples`.

    Raises:
        ValueError: invalid files, rows, tokenizer or settings; the message names file and row.
    """

    # what a `__getitem__` of public verl reads: items have the messages, and no prompt with its template as text
    return_raw_chat, return_full_prompt, need_tools_kwargs = True, False, False

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: DatasetConfig = None,
        processor: Any = None,
        max_samples: int = -1,
    ):
        super().__init__(data_files, tokenizer, config, processor, schema.Config)
        self.max_samples = max_samples if max_samples >= 0 else self.config.train_max_samples
        self.prompt_key, self.truncation = self.config.prompt_key, self.config.truncation
        self.max_prompt_length = self.config.max_prompt_length
        self.image_key, self.video_key = self.config.image_key, self.config.video_key
        self.filter_overlong_prompts = self.config.filter_overlong_prompts
        self.apply_chat_template_kwargs = self.config.apply_chat_template_kwargs
        self._tokenized: Rows | None = None
        self._read_files_and_tokenize()
        if type(self).__getitem__ is RLHFDataset.__getitem__:
            self._ensure_tokenized()

    def _load_tools(self) -> Sequence[Mapping[str, Any]]:
        return tool_schemas(self.config.tool_config_path, self.config.function_tool_path)

    def _read_files_and_tokenize(self) -> None:
        """Set `self.dataframe` to the rows to use."""
        rows = self._rows or read_rows(self.data_files)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def _ensure_tokenized(self) -> None:
        """Tokenize rows that a subclass has read or selected itself."""
        if not self.is_tokenized:
            self.dataframe = RLHFDataset.maybe_filter_out_long_prompts(self, self.dataframe)

    @property
    def is_tokenized(self) -> bool:
        """Whether all prompts are tokenized. False for a subclass with custom rows and items."""
        return self.dataframe is self._tokenized

    def maybe_filter_out_long_prompts(self, dataframe: Sequence[Mapping[str, Any]]) -> Rows:
        """Check and tokenize all rows. Returns the rows to use, without overlong prompts if these are filtered."""
        start = time.perf_counter()
        rows = dataframe if isinstance(dataframe, Rows) else Rows([RowTable(dataframe)])
        self.config = find_columns(rows, self.config)
        self.prompt_key = self.config.prompt_key
        self._read_columns(rows)
        self._prompt_ids = TokenTable()
        self._sources: dict[str, int] = {}  # name -> its number
        self._source_of_row = np.zeros(len(rows), dtype=np.int32)
        kept = self._tokenize(rows)
        self._tokenized, self._source_of_item = rows.select(kept), self._source_of_row[kept]
        logger.info("tokenized %s prompts in %.1f s", f"{len(self._tokenized):,}", time.perf_counter() - start)
        return self._tokenized

    def __len__(self) -> int:
        return len(self.dataframe)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of all prompts: the model's vocabulary must contain it."""
        return self._prompt_ids.largest

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt in tokens."""
        return self._prompt_ids.longest

    def __getitem__(self, item: int) -> dict[str, Any]:
        self._ensure_tokenized()
        return self._item(self.dataframe, item, self._prompt_ids[item], self.config)

    def items_by_source(self) -> dict[str, np.ndarray]:
        """The items of each data source, by which their reward is selected."""
        self._ensure_tokenized()
        items = {name: np.flatnonzero(self._source_of_item == i) for name, i in self._sources.items()}
        return {name: each for name, each in items.items() if len(each)}

    def items_by_file(self) -> dict[str, np.ndarray]:
        """The items of each file, by the name of its data source; by its path where two have the same."""
        self._ensure_tokenized()
        files, items = self.dataframe.files, self.dataframe.by_file()
        names = [file.source for file in files]
        names = [str(file.path) if names.count(file.source) > 1 else file.source for file in files]
        by_name = dict(zip(names, items))
        if len(by_name) < len(items) or not all(map(len, items)):
            raise ValueError(
                "data.train_weights: expected different files with at least one row each, found "
                + ", ".join(f"{len(each):,} of {name}" for name, each in zip(names, items))
            )
        return by_name

    def describe(self, item: int) -> tuple[str, list[str]]:
        """The text of a prompt as the model reads it, with special tokens, and lines about its images and videos."""
        self._ensure_tokenized()
        ids, rows = self._prompt_ids[item], self.dataframe
        prompt = self._prompt(rows[item], rows, item)
        if not isinstance(prompt, MediaPrompt):
            return self.tokenizer.decode(ids), []
        return self.tokenizer.decode(self.media.process(prompt)["raw_prompt_ids"]), prompt.describe()

    def _tokenize(self, rows: Rows) -> array.array:
        """Check the rows, and tokenize their prompts. Returns the indices of those that fit."""
        config, overlong, kept = self.config, {}, array.array("q")  # overlong: row -> tokens
        count = rows_to_use(rows, self.max_samples)
        only = self._drop_bad_rows(rows, count)
        for index, (ids, _) in self._tokenized_rows(rows, count, only):
            if len(ids) > config.max_prompt_length:
                overlong[index] = len(ids)
                if config.filter_overlong_prompts or config.truncation == "error":
                    continue
                if self.media is not None and isinstance(self._prompt(rows[index], rows, index), MediaPrompt):
                    raise ValueError(
                        f"{rows.location(index)}: the prompt has {len(ids):,} tokens with those of its images or "
                        f"videos, more than data.max_prompt_length={config.max_prompt_length:,}, and truncation would "
                        "cut an image: set data.filter_overlong_prompts=True, increase the limit, or "
                        f"{FEWER_IMAGE_TOKENS}"
                    )
                ids = truncate(ids, config.max_prompt_length, config.truncation)
            kept.append(index)
            self._prompt_ids.append(ids)
        self._report_overlong(overlong, rows, count if only is None else len(only), bool(kept))
        return kept

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> Prompt:
        """The prompt of a row. Raises ValueError if the row cannot be used."""
        location = rows.location(index)
        check_values(row, location)
        refuse_media(row, self._refused, location)
        reward_model(row, location, self.config.ground_truth_key)
        source = data_source(row, rows, index, self.config.reward_fn_key)
        source = str(row.get(self.config.reward_fn_key, source))
        self._source_of_row[index] = self._sources.setdefault(source, len(self._sources))
        if not isinstance(extra := row.get(self._extra_info) or {}, Mapping):
            raise ValueError(f"{location}: expected a dict in column {self._extra_info!r}, found {extra!r}")
        return self._prompt(row, rows, index)

    def _report_overlong(self, overlong: dict[int, int], rows: Rows, count: int, any_kept: bool) -> None:
        config = self.config
        if not overlong and any_kept:
            return
        summary = f"{len(overlong):,} of {count:,} prompts longer than {config.max_prompt_length:,} tokens"
        if overlong and not config.filter_overlong_prompts and config.truncation == "error":
            drop = "set data.filter_overlong_prompts=True to drop them"
            fix = f"{drop}, or data.truncation to left, right or middle"
            if self.media is not None:
                fix = f"{FEWER_IMAGE_TOKENS}, or {drop} (prompts with images are not truncated)"
            raise ValueError(
                f"data.max_prompt_length: {summary}; {describe_overlong(overlong, rows)}. Increase the limit, or {fix}"
            )
        if not any_kept:
            message = f"{rows.names}: none of the {count:,} rows is usable"
            if overlong:
                message += f"; {summary}, the shortest has {min(overlong.values()):,}: increase data.max_prompt_length"
            raise ValueError(message)
        logger.info("%s %s", "dropped" if config.filter_overlong_prompts else "truncated", summary)


# ---- custom datasets ------------------------------------------------------------------------------------------------


def load_dataset_class(path: str | None, name: str | None) -> type[Dataset]:
    """Load a custom dataset class.

    The class is a torch `Dataset` with a length, is created by `create_custom_dataset`, and `PromptCollator`
    accepts its items.

    Args:
        path: a .py file or a module.
        name: the class in it.

    Raises:
        ValueError: only one of the two is set, there is no such file or name, or it is not a torch Dataset class.
    """
    if not path or not name:
        raise ValueError(f"data.custom_cls: expected both path and name, found path={path!r}, name={name!r}")
    cls = load_object(path, name)
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ValueError(
            f"data.custom_cls: {name!r} of {path!r} is not a subclass of torch.utils.data.Dataset: {cls!r}"
        )
    return cls


def create_custom_dataset(
    cls: type[Dataset],
    data_files: Sequence[str],
    tokenizer: Any,
    settings: Mapping[str, Any],
    max_samples: int,
    *,
    schema: str = "ppo",
    processor: Any = None,
) -> Dataset:
    """Create a dataset as `cls(data_files=..., tokenizer=..., config=...)`, as public verl does.

    Args:
        cls: the class. `processor` and `max_samples` are passed if its constructor has such parameters.
        data_files: paths.
        settings: the `data` section; it becomes `config`, with attribute access, `get` and the keys of public verl
            that are not supported, at their defaults.
        max_samples: number of rows to use; -1: all.
        schema: whose keys these are, "ppo" or "sft".
        processor: the processor of a vision-language model.
    """
    defaults = {key.partition("data.")[2]: v for key, v in upstream_defaults(schema).items() if key.startswith("data.")}
    public = {k: None if str(v).startswith("${") else v for k, v in defaults.items() if "." not in k}
    kwargs = settings["custom_cls"]["kwargs"]
    config = OmegaConf.create({**public, **settings, **kwargs, "train_max_samples": max_samples})
    parameters = inspect.signature(cls).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    optional = {"processor": processor, "max_samples": max_samples}
    optional = {name: value for name, value in optional.items() if accepts_any or name in parameters}
    return cls(data_files=list(data_files), tokenizer=with_id_lists(tokenizer), config=config, **optional)


def check_ground_truth(dataset: Dataset, function: str, is_needed: bool) -> None:
    """Raise ValueError if the rows of an RLHFDataset have no ground truth, or warn if the function may ignore it."""
    if isinstance(dataset, RLHFDataset) and dataset[0]["reward_model"] == NO_TRUTH:
        rows = dataset.dataframe
        expected = (
            'expected a column \'reward_model\' ({"style": "rule", "ground_truth": ...}) or a column \'answer\' '
            f"(data.ground_truth_key); found {', '.join(rows.columns)}"
        )
        if not is_needed:
            logger.warning("%s: no ground truth: %s gets None: %s", rows.names, function, expected)
            return
        raise ValueError(
            f"{rows.names}: no ground truth to score against, which {function} needs: {expected}. Add one, or use a "
            "reward that needs none: a custom function (reward.custom_reward_function.path), a reward model "
            "(reward.reward_model.enable=true), or reward.reward_function=format"
        )
