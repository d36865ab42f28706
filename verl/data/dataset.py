"""Shared by RLHFDataset and SFTDataset: the `data` section that they read, and tokenizing rows in chunks."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from omegaconf import OmegaConf
from torch.utils.data import Dataset

from verl.config.fields import Schema, Section
from verl.config.load import load_section
from verl.data.files import Rows
from verl.data.tokenization import CHUNK, ROUND_TRIPS, check_round_trips

logger = logging.getLogger("verl.data")

Example = TypeVar("Example")
Encoded = tuple[list[int], list[int]]
"""Token ids, and a mask of the tokens to train on (empty for a prompt)."""


class TokenizedDataset(Dataset):
    """RLHFDataset or SFTDataset: it reads files or rows, checks and tokenizes them."""


class HasGet(Protocol):
    """Any object with `get`."""

    def get(self, key: str, default: Any = None) -> Any: ...


DatasetConfig = Section | Mapping[str, Any] | HasGet | None


def read_data_section(config: DatasetConfig, schema: type[Schema]) -> tuple[Any, str | None]:
    """The `data` section of a schema, from the `config` argument of a dataset.

    A mapping may have more keys: `max_samples` replaces `train_max_samples`, and `chat_template`, or
    `custom_chat_template`, replaces the tokenizer's chat template.

    Args:
        config: the section itself, a mapping or OmegaConf node with some of its keys, an object with `get`, or None
            for the defaults.
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
    keys = [*section.model_fields, "max_samples", "chat_template", "custom_chat_template"]
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    settings = dict(config) if isinstance(config, Mapping) else {key: config.get(key, None) for key in keys}
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


def tokenize_rows(
    tokenizer: Any,
    rows: Rows,
    count: int,
    *,
    read: Callable[[Mapping[str, Any], int], Example],
    texts_of: Callable[[Example], list[str]],
    encode: Callable[[list[Example], Callable[[int], str]], Sequence[Encoded]],
    only: Collection[int] | None = None,
) -> Iterator[tuple[int, Encoded]]:
    """Tokenize the first `count` rows in chunks, and check on a sample of them that the tokenizer loses no text.

    Args:
        only: indices of the rows to tokenize; None: all of the first `count`.
        read: (row, its number) -> example; raises ValueError for an invalid row.
        texts_of: example -> its texts.
        encode: (examples, name of example i in errors) -> their token ids.

    Yields:
        The number of a row and its token ids.
    """
    stride = max(count // ROUND_TRIPS, 1)
    remaining = itertools.islice(enumerate(rows), count) if only is None else ((i, rows[i]) for i in sorted(only))
    while chunk := list(itertools.islice(remaining, CHUNK)):
        indices = [index for index, _ in chunk]
        examples = [read(row, index) for index, row in chunk]
        encoded = encode(examples, lambda i, indices=indices: rows.location(indices[i]))
        texts = [texts_of(example) for example in examples]
        check_round_trips(tokenizer, texts, [ids for ids, _ in encoded], stride, indices, rows.location)
        yield from zip(indices, encoded)


def describe_overlong(overlong: Mapping[int, int], rows: Rows) -> str:
    """The first overlong row and the length of the longest. overlong: row number -> tokens."""
    row, length = next(iter(overlong.items()))
    return f"the first is {rows.location(row)}, with {length:,}; the longest has {max(overlong.values()):,}"
