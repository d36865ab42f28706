"""The base classes of datasets of prompts and of samples: files or rows, checked and tokenized in chunks."""

import copy
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset

from verl.config.fields import Schema, Section
from verl.config.load import load_section
from verl.config.schema.data import DataConfig
from verl.data.bad_rows import usable_rows
from verl.data.columns import data_source, extra_info_column, other_columns, reward_columns, reward_info, reward_model
from verl.data.files import Rows, file_list, rows_digest, rows_in_memory
from verl.data.forms import as_messages, read_prompt_column
from verl.data.media import MediaPrompt, MediaReader, media_columns, prompt_texts, rows_to_decode
from verl.data.messages import with_settings
from verl.data.tokenization import check_tokenizer, encode_prompts, prepare_tokenizer, read_prompt

logger = logging.getLogger("verl.data")

_CHUNK = 1024  # rows tokenized at a time
_ROUND_TRIPS = 1000  # evenly spaced rows of a dataset that are decoded again, to check that no text is lost

Prompt = str | list[dict[str, Any]] | MediaPrompt
Encoded = tuple[list[int], list[int]]
"""Token ids, and a mask of the tokens to train on (empty for a prompt)."""


DatasetConfig = Section | Mapping[str, Any] | None


class TokenizedDataset(Dataset):
    """A dataset that reads files or rows, checks and tokenizes them. bad_rows: rows that were dropped
    (`data.max_bad_rows`), and the reason of each."""

    bad_rows: Mapping[int, str] = {}

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: DatasetConfig,
        processor: Any,
        schema: type[Schema],
    ):
        self._rows = rows_in_memory(data_files)
        self.data_files = [] if self._rows is not None else [str(path) for path in file_list(data_files)]
        self.tokenizer, self.processor = tokenizer, processor
        self.config, self.chat_template = read_data_section(config, schema)
        self.tools = self._load_tools()
        prepare_tokenizer(tokenizer)
        self.media, self._refused = None, ("audios", "images", "videos", *media_columns(self.config))
        if processor is not None:
            kwargs = {"template_kwargs": self.config.apply_chat_template_kwargs, "chat_template": self.chat_template}
            self.media = MediaReader(processor, tokenizer, self.config, tools=self.tools, **kwargs)
            self._refused = ("audios",)

    def _load_tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    @property
    def rows_digest(self) -> str | None:
        """Of rows in memory; None for files."""
        return None if self._rows is None else rows_digest(self._rows)

    def _has_template(self) -> bool:
        return self.chat_template is not None or self.tokenizer.chat_template is not None

    # ---- checks and tokens ------------------------------------------------------------------------------------------

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> Any:
        """A row as an example. Raises ValueError if the row cannot be used."""
        raise NotImplementedError

    def _encode(self, examples: list[Any], location: Callable[[int], str]) -> Sequence[Encoded]:
        """Tokenize examples. location: the name of example i in errors."""
        raise NotImplementedError

    def _texts(self, example: Any) -> list[str]:
        return prompt_texts(example)

    def _check_and_decode(self, row: Mapping[str, Any], rows: Rows, index: int, decoded: Collection[int]) -> Any:
        """`_check_row`; images of the rows `decoded` are decoded."""
        example = self._check_row(row, rows, index)
        if isinstance(example, MediaPrompt) and index in decoded:
            example.decode()
        return example

    def _check_fully(self, rows: Rows, row: Mapping[str, Any], index: int) -> None:
        """Check a row, decode its images, and render it. Raises ValueError if the row cannot be used."""
        self._encode([self._check_and_decode(row, rows, index, [index])], lambda _: rows.location(index))

    def _drop_bad_rows(self, rows: Rows, count: int) -> Collection[int] | None:
        """The rows to tokenize of the first `count`: with `data.max_bad_rows`, those that can be used; None: all."""
        if not self.config.max_bad_rows:
            return None
        check, limit = partial(self._check_fully, rows), self.config.max_bad_rows
        kept, self.bad_rows = usable_rows(rows, range(count), check, limit)
        return kept

    def _tokenized_rows(self, rows: Rows, count: int, only: Collection[int] | None) -> Iterator[tuple[int, Encoded]]:
        """Check and tokenize the first `count` rows, or `only` some, in chunks; yields row numbers and token ids. On a
        sample of the rows, and on those with an unknown token, it is checked that the tokenizer loses no text."""
        stride, decoded = max(count // _ROUND_TRIPS, 1), rows_to_decode(count)
        unknown = self.tokenizer.unk_token_id
        remaining = itertools.islice(enumerate(rows), count) if only is None else ((i, rows[i]) for i in sorted(only))
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            indices = [index for index, _ in chunk]
            examples = [self._check_and_decode(row, rows, index, decoded) for index, row in chunk]
            encoded = self._encode(examples, lambda i, indices=indices: rows.location(indices[i]))
            texts = [
                (index, text)
                for index, example, (ids, _) in zip(indices, examples, encoded)
                if index % stride == 0 or (unknown is not None and unknown in ids)
                for text in self._texts(example)
            ]
            check_tokenizer(self.tokenizer, [t for _, t in texts], lambda i, texts=texts: rows.location(texts[i][0]))
            yield from zip(indices, encoded)


class PromptDataset(TokenizedDataset):
    """Prompts for training or for generation, in the column `prompt_key`."""

    prompt_key: str

    def _build_messages(self, example: dict[str, Any]) -> Any:
        """The prompt of a row: messages or text."""
        return read_prompt_column(example, self.prompt_key)

    def _prompt(self, row: Mapping[str, Any], rows: Rows, index: int) -> Prompt:
        """Messages if the prompt goes through the chat template, otherwise text."""
        location = rows.location(index)
        if type(self)._build_messages is not PromptDataset._build_messages:
            row = copy.deepcopy(row)  # it may change the messages in place
        messages = as_messages(self._build_messages(row))
        media_prompt = self.media.read(row, messages, rows.folder(index), location) if self.media is not None else None
        if media_prompt is not None:
            return media_prompt
        prompt = read_prompt(messages, self.config.prompt_format, self._has_template(), location)
        return with_settings(prompt, row, location, self.tools)

    def _read_columns(self, rows: Rows) -> None:
        """Set the names of the columns that `_item` reads."""
        self._extra_info = extra_info_column(rows)
        media = media_columns(self.config) if self.media else ()
        self._reward_columns = reward_columns(rows, self.prompt_key, media)
        self._other_columns = other_columns(rows, self._reward_columns)

    def _item(self, rows: Rows, index: int, token_ids: list[int], keys: DataConfig) -> dict[str, Any]:
        """The columns of a row for the rollout and the reward."""
        row = rows[index]
        prompt = self._prompt(row, rows, index)
        fields = {name: row[name] for name in self._other_columns} | {
            "prompt_ids": token_ids,
            "data_source": data_source(row, rows, index, keys.reward_fn_key),
            "ability": row.get("ability") or "",
            "reward_model": reward_model(row, rows.location(index), keys.ground_truth_key),
            "extra_info": reward_info(row, self._reward_columns, self._extra_info),
            "index": rows.number(index),
            "raw_prompt": prompt.messages if isinstance(prompt, MediaPrompt) else prompt,
        }
        return fields if self.media is None else fields | self.media.columns(prompt, token_ids)

    def _encode(self, prompts: list[Prompt], location: Callable[[int], str]) -> list[Encoded]:
        media = {i: self.media.token_ids(p) for i, p in enumerate(prompts) if isinstance(p, MediaPrompt)}
        texts = [i for i, prompt in enumerate(prompts) if i not in media]
        encoded = encode_prompts(
            self.tokenizer,
            [prompts[i] for i in texts],
            lambda k: location(texts[k]),
            chat_template=self.chat_template,
            template_kwargs=self.config.apply_chat_template_kwargs,
            tools=self.tools,
        )
        ids_by_index = media | dict(zip(texts, encoded))
        return [(ids_by_index.get(i, []), []) for i in range(len(prompts))]


def read_data_section(config: DatasetConfig, schema: type[Schema]) -> tuple[Any, str | None]:
    """The `data` section of a schema, from the `config` argument of a dataset.

    A mapping may have more keys: `max_samples` replaces `train_max_samples`, and `chat_template`, or
    `custom_chat_template`, replaces the tokenizer's chat template.

    Args:
        config: the section itself, a mapping or OmegaConf node with some of its keys, or None for the defaults.
        schema: the schema that declares the section.

    Returns:
        The section and the chat template (None: the tokenizer's).

    Raises:
        ConfigError: an unknown key of a mapping, or an invalid value.
    """
    if isinstance(config, Section):
        return config, None
    section = schema.model_fields["data"].annotation
    if config is None:
        return section(), None
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    settings = dict(config)
    for name in (settings.get("custom_cls") or {}).get("kwargs") or {}:  # settings of a subclass
        if name not in section.model_fields:
            settings.pop(name, None)
    max_samples = settings.pop("max_samples", None)
    templates = [settings.pop(key, None) for key in ("chat_template", "custom_chat_template")]
    if max_samples is not None:
        settings["train_max_samples"] = max_samples
    return load_section("data", settings, schema), templates[0] or templates[1]


def rows_to_use(rows: Rows, max_samples: int) -> int:
    """The number of rows to use, from the first on. max_samples: -1 uses all."""
    count = len(rows) if max_samples < 0 else min(max_samples, len(rows))
    if count < len(rows):
        logger.info("using the first %s of %s rows", f"{count:,}", f"{len(rows):,}")
    return count


def describe_overlong(overlong: Mapping[int, int], rows: Rows) -> str:
    """The first overlong row and the length of the longest. overlong: row number -> tokens."""
    row, length = next(iter(overlong.items()))
    return f"the first is {rows.location(row)}, with {length:,}; the longest has {max(overlong.values()):,}"
