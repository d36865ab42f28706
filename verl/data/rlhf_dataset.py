"""Prompts for RL: read, checked and tokenized once, before any model is loaded."""

import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset

from verl.columns import COLUMNS
from verl.config import schema
from verl.config.upstream import upstream_defaults
from verl.data.collate import collate_prompts
from verl.data.dataset import (
    DatasetConfig,
    Encoded,
    overlong_figures,
    read_data_section,
    rows_to_use,
    tokenize_rows,
)
from verl.data.files import (
    DEFAULT_SOURCE,
    Rows,
    RowTable,
    extra_info_column,
    file_list,
    read_rows,
    rows_in_memory,
)
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
from verl.tools.load import tool_schemas

logger = logging.getLogger("verl.data")

Prompt = str | list[dict[str, Any]]

_GROUND_TRUTH_KEY = schema.DataConfig().ground_truth_key
_NO_TRUTH = {"style": "none", "ground_truth": None}
_MEDIA_COLUMNS = ("images", "videos", "audios")


class RLHFDataset(Dataset):
    """Prompts of data files; one item per usable row.

    A row has a prompt (column `prompt_key`: chat messages or text) and what its reward needs: the columns
    `data_source, reward_model {"style", "ground_truth"}, ability, extra_info`, or only `answer` (the column
    `ground_truth_key`). Text becomes one user message if the tokenizer has a chat template, and stays plain text
    otherwise; `prompt_format` ("chat" or "text") overrides that. A number in `answer` becomes text.

    `dataset[i]` is a dict: prompt_ids (list of int), raw_prompt (messages or text), data_source, ability, reward_model,
    extra_info, index (the row's number in the files), and the other columns of the row.

    A subclass may override `__getitem__`, and as in public verl `_build_messages` (the prompt of a row),
    `_read_files_and_tokenize` (sets `self.dataframe`, a sequence of dicts) and `maybe_filter_out_long_prompts` (selects
    rows of it).

    Args:
        data_files: one path or several: .parquet, .jsonl, .json. Or the rows: a sequence of dicts, such as a list or a
            Hugging Face dataset.
        tokenizer: a Hugging Face tokenizer. A missing pad token is set.
        config: the `data` section (`schema.DataConfig`), or a mapping with some of its keys.
        processor: not supported yet.
        max_samples: number of rows to use, from the first on; -1: `config.train_max_samples`.

    Raises:
        ValueError: invalid files, rows, tokenizer or settings; the message names file and row.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: DatasetConfig = None,
        processor: Any = None,
        max_samples: int = -1,
    ):
        if processor is not None:
            raise ValueError("RLHFDataset: image processors are not supported yet; remove the argument `processor`")
        self._rows = rows_in_memory(data_files)
        self.data_files = [] if self._rows is not None else [str(path) for path in file_list(data_files)]
        self.tokenizer, self.processor = tokenizer, processor
        self.config, self.chat_template = read_data_section(config, schema.Config)
        self.max_samples = max_samples if max_samples >= 0 else self.config.train_max_samples
        self.prompt_key, self.truncation = self.config.prompt_key, self.config.truncation
        self.max_prompt_length = self.config.max_prompt_length
        self.filter_overlong_prompts = self.config.filter_overlong_prompts
        self.apply_chat_template_kwargs = self.config.apply_chat_template_kwargs
        self.tools = tool_schemas(self.config.tool_config_path, self.config.function_tool_path)
        prepare_tokenizer(tokenizer)
        self._tokenized: Rows | None = None
        self._read_files_and_tokenize()
        if type(self).__getitem__ is RLHFDataset.__getitem__:
            self._ensure_tokenized()

    def _read_files_and_tokenize(self) -> None:
        """Set `self.dataframe` to the rows to use."""
        self.dataframe = self.maybe_filter_out_long_prompts(self._rows or read_rows(self.data_files))

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
        _check_columns(rows, self.config)
        self._extra_info = extra_info_column(rows)
        self._other_columns = _other_columns(rows, self.config)
        self._prompt_ids = TokenTable()
        self._tokenized = rows.select(self._tokenize(rows))
        logger.info("tokenized %s prompts in %.1f s", f"{len(self._tokenized):,}", time.perf_counter() - start)
        return self._tokenized

    def _build_messages(self, example: dict[str, Any]) -> Any:
        """The prompt of a row: messages or text."""
        return example[self.prompt_key]

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
        row, where = self.dataframe[item], self.dataframe.where(item)
        return {name: row[name] for name in self._other_columns} | {
            "prompt_ids": self._prompt_ids[item],
            "data_source": self._data_source(row, self.dataframe, item),
            "ability": row.get("ability") or "",
            "reward_model": _reward_model(row, where, self.config.ground_truth_key),
            "extra_info": row.get(self._extra_info) or {},
            "index": self.dataframe.number(item),
            "raw_prompt": self._prompt(row, where),
        }

    def _data_source(self, row: Mapping[str, Any], rows: Rows, index: int) -> str:
        """The row's own source; otherwise the column that selects the reward; otherwise "default"."""
        for key in ("data_source", self.config.reward_fn_key):
            if key in row:
                if not isinstance(row[key], str) or not row[key]:
                    raise ValueError(f"{rows.where(index)}: expected a name in column {key!r}, found {row[key]!r}")
                return row[key]
        return DEFAULT_SOURCE

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        """Messages if the prompt goes through the chat template, otherwise text."""
        has_template = self.chat_template is not None or self.tokenizer.chat_template is not None
        if type(self)._build_messages is not RLHFDataset._build_messages:
            row = copy.deepcopy(row)  # it may change the messages in place
        return read_prompt(self._build_messages(row), self.config.prompt_format, has_template, where)

    def _tokenize(self, rows: Rows) -> list[int]:
        """Check every row and tokenize its prompt. Returns the indices of the rows whose prompt fits."""
        config, overlong, kept = self.config, {}, []  # overlong: row -> tokens
        count = rows_to_use(rows, self.max_samples)
        tokenized = tokenize_rows(
            self.tokenizer,
            rows,
            count,
            read=lambda row, index: self._check_row(row, rows, index),
            texts_of=_texts_of,
            encode=self._encode,
        )
        for index, (ids, _) in tokenized:
            if len(ids) > config.max_prompt_length:
                overlong[index] = len(ids)
                if config.filter_overlong_prompts or config.truncation == "error":
                    continue
                ids = truncate(ids, config.max_prompt_length, config.truncation)
            kept.append(index)
            self._prompt_ids.append(ids)
        self._report_overlong(overlong, rows, count, bool(kept))
        return kept

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> Prompt:
        """The prompt of a row. Raises ValueError if the row cannot be used."""
        where = rows.where(index)
        refuse_media(row, _MEDIA_COLUMNS, where)
        _reward_model(row, where, self.config.ground_truth_key)
        self._data_source(row, rows, index)
        return self._prompt(row, where)

    def _encode(self, prompts: list[Prompt], where: Callable[[int], str]) -> list[Encoded]:
        encoded = encode_prompts(
            self.tokenizer,
            prompts,
            where,
            chat_template=self.chat_template,
            template_kwargs=self.config.apply_chat_template_kwargs,
            tools=self.tools,
        )
        return [(ids, []) for ids in encoded]

    def _report_overlong(self, overlong: dict[int, int], rows: Rows, count: int, any_kept: bool) -> None:
        config = self.config
        if not overlong and any_kept:
            return
        found = f"{len(overlong):,} of {count:,} prompts longer than {config.max_prompt_length:,} tokens"
        if overlong and not config.filter_overlong_prompts and config.truncation == "error":
            raise ValueError(
                f"data.max_prompt_length: {found}; {overlong_figures(overlong, rows)}. Increase the limit, or "
                "set data.filter_overlong_prompts=True to drop them, or data.truncation to left, right or middle"
            )
        if not any_kept:
            what = f"{rows.names}: none of the {count:,} rows is usable"
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
    if config.ground_truth_key != _GROUND_TRUTH_KEY and config.ground_truth_key not in rows.columns:
        raise ValueError(
            f"{rows.names}: no column {config.ground_truth_key!r} for the ground truth (data.ground_truth_key): "
            f"{did_you_mean(config.ground_truth_key, rows.columns)}"
        )
    if config.reward_fn_key != "data_source" and config.reward_fn_key not in rows.columns:
        raise ValueError(
            f"{rows.names}: no column {config.reward_fn_key!r} to select the reward by (data.reward_fn_key): "
            f"{did_you_mean(config.reward_fn_key, rows.columns)}"
        )


def _other_columns(rows: Rows, config: schema.DataConfig) -> list[str]:
    """The columns that items keep unchanged. Columns whose names the batch uses itself are dropped with a warning."""
    read = {config.prompt_key, "data_source", "ability", "reward_model", "extra_info", "extro_info"}
    others = [name for name in rows.columns if name not in read]
    reserved = [name for name in others if name in COLUMNS or name == "index"]
    if reserved:
        logger.warning("columns of the data files dropped, their names are reserved: %s", ", ".join(reserved))
    return [name for name in others if name not in reserved]


def _reward_model(row: Mapping[str, Any], where: str, ground_truth_key: str) -> dict[str, Any]:
    """The `reward_model` entry of a row. Raises ValueError if a row of a file with ground truths has none."""
    if "reward_model" not in row and ground_truth_key not in row:
        return dict(_NO_TRUTH)
    if "reward_model" in row and ground_truth_key == _GROUND_TRUTH_KEY:  # another column was chosen by the user
        given, column = row["reward_model"], "reward_model"
        if not isinstance(given, Mapping):
            raise ValueError(f'{where}: expected reward_model {{"ground_truth": ...}}, found {given!r}')
        reward_model = {"style": "rule", "ground_truth": None} | {k: v for k, v in given.items() if v is not None}
    else:
        answer, column = row.get(ground_truth_key), ground_truth_key
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and answer == answer
        reward_model = {"style": "rule", "ground_truth": str(answer) if is_number else answer}
    truth = reward_model["ground_truth"]
    missing = truth is None or truth != truth or (isinstance(truth, str | list) and len(truth) == 0)
    if isinstance(truth, str) and not truth.strip():
        missing = True
    if reward_model["style"] == "rule" and missing:
        raise ValueError(f"{where}: the ground truth (column {column!r}) is missing: found {row.get(column)!r}")
    return reward_model


def _texts_of(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


# ---- custom datasets ------------------------------------------------------------------------------------------------


def load_dataset_class(path: str | None, name: str | None) -> type[Dataset]:
    """Load a custom dataset class.

    The class is a torch `Dataset` with a length, is created by `create_custom_dataset`, and its items are what
    `PromptCollator` takes.

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


def create_custom_dataset(
    cls: type[Dataset],
    data_files: Sequence[str],
    tokenizer: Any,
    settings: Mapping[str, Any],
    max_samples: int,
    *,
    schema: str = "ppo",
) -> Dataset:
    """Create a dataset as `cls(data_files=..., tokenizer=..., config=...)`, as public verl does.

    Args:
        cls: the class. `processor=None` and `max_samples` are passed if its constructor has such parameters.
        data_files: paths.
        tokenizer: a Hugging Face tokenizer.
        settings: the `data` section; it becomes `config`, with attribute access, `get` and the keys of public verl
            that are not supported, at their defaults.
        max_samples: number of rows to use; -1: all.
        schema: whose keys these are, "ppo" or "sft".
    """
    defaults = {key.partition("data.")[2]: v for key, v in upstream_defaults(schema).items() if key.startswith("data.")}
    public = {k: None if str(v).startswith("${") else v for k, v in defaults.items() if "." not in k}
    own = settings["custom_cls"]["kwargs"]
    config = OmegaConf.create({**public, **settings, **own, "train_max_samples": max_samples})
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    more = {"processor": None, "max_samples": max_samples}
    more = {name: value for name, value in more.items() if takes_any or name in parameters}
    return cls(data_files=list(data_files), tokenizer=tokenizer, config=config, **more)


def check_ground_truth(dataset: Dataset, function: str) -> None:
    """Raise ValueError if the rows of an RLHFDataset have no ground truth, which the reward function needs."""
    if isinstance(dataset, RLHFDataset) and dataset[0]["reward_model"] == _NO_TRUTH:
        rows = dataset.dataframe
        raise ValueError(
            f"{rows.names}: no ground truth to score against, which {function} needs: expected a column 'reward_model' "
            '({"style": "rule", "ground_truth": ...}) or a column \'answer\' (data.ground_truth_key); found '
            f"{', '.join(rows.columns)}. Add one, or use a reward that needs none: a custom function "
            "(reward.custom_reward_function.path), a reward model (reward.reward_model.enable=true), or "
            "reward.reward_function=format"
        )


def check_dataset(dataset: Dataset, collate: Callable[[list[dict[str, Any]]], DataProto] = collate_prompts) -> None:
    """Raise ValueError if the dataset is empty, or its first item is not what `collate` takes."""
    name = type(dataset).__name__
    if len(dataset) == 0:
        raise ValueError(f"{name}: the dataset has no items")
    try:
        collate([dataset[0]])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
