"""Files of offline generation: reading the prompts, and writing them with their responses."""

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.offline import GenerationConfig, GenerationDataConfig
from verl.data.files import Rows, read_rows
from verl.data.forms import PROMPTS, find_column, note_columns, read_prompt_column
from verl.data.media import MediaPrompt, MediaReader, media_columns, prompt_texts
from verl.data.media_files import relocated
from verl.data.media_source import FEWER_IMAGE_TOKENS
from verl.data.messages import with_settings
from verl.data.tokenization import (
    CHUNK,
    ROUND_TRIPS,
    TokenTable,
    check_round_trips,
    encode_prompts,
    prepare_tokenizer,
    read_prompt,
    refuse_media,
)
from verl.registry import did_you_mean

RESPONSES = "responses"
"""The column with the responses in the output file."""

Prompt = str | list[dict[str, Any]] | MediaPrompt


@dataclass(frozen=True)
class PromptSet:
    """The prompts to generate responses for: the first `len(prompt_ids)` rows of a dataset, tokenized.

    Attributes:
        media: reads images and videos; None for a text-only model.
    """

    rows: Rows
    prompt_ids: TokenTable
    read: Callable[..., Prompt]
    prompt_key: str
    media: MediaReader | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The columns of prompts for a rollout. Images are decoded now."""
        ids = [self.prompt_ids[i] for i in indices]
        columns = {"prompt_ids": ids, "uid": [str(i) for i in indices]}
        if self.media is not None:
            items = [self.media.columns(self.read(i), tokens) for i, tokens in zip(indices, ids)]
            columns |= {name: [item[name] for item in items] for name in items[0]}
        return columns

    def digest(self) -> str:
        """Return a checksum of all token ids, which depends on the tokenizer and the chat template."""
        total = hashlib.sha256()
        for i in range(len(self)):
            total.update(json.dumps(self.prompt_ids[i]).encode())
        return total.hexdigest()[:16]


def read_prompts(config: GenerationConfig, tokenizer: Any, processor: Any = None) -> PromptSet:
    """Read the files, check every row that is used, and tokenize its prompt.

    processor: that of a vision-language model; without it, rows with images or videos are an error.

    A ground truth is not required. Prompts longer than rollout.prompt_length are neither truncated nor dropped, since
    that would change what is measured.

    Raises:
        ValueError: For invalid data, with file and row.
    """
    data = config.data
    rows = read_rows(data.path)
    files = rows.names
    data = data.model_copy(update={"prompt_key": find_column(rows.columns, PROMPTS, data.prompt_key)})
    config = config.model_copy(update={"data": data})
    note_columns(files, rows.columns, {"prompt": data.prompt_key})
    if data.prompt_key not in rows.columns:
        raise ValueError(
            f"{files}: no column {data.prompt_key!r} for the prompt (data.prompt_key): "
            f"{did_you_mean(data.prompt_key, rows.columns)}"
        )
    if RESPONSES in rows.columns:
        raise ValueError(
            f"{files}: column {RESPONSES!r} already exists, and the responses are written to it: rename it"
        )
    prepare_tokenizer(tokenizer)
    count = len(rows) if data.max_samples < 0 else min(data.max_samples, len(rows))
    if count == 0:
        raise ValueError(f"data.max_samples=0: expected at least 1 of the {len(rows):,} prompts, or -1 for all")
    media = None
    if processor is not None:
        media = MediaReader(processor, tokenizer, data, template_kwargs=data.apply_chat_template_kwargs)
    reader = _reader(rows, data, tokenizer.chat_template is not None, media)
    prompts = PromptSet(rows, TokenTable(), reader, data.prompt_key, media)
    numbered = itertools.islice(enumerate(rows), count)
    while chunk := list(itertools.islice(numbered, CHUNK)):
        for ids in _encode(chunk, prompts, count, config, tokenizer):
            prompts.prompt_ids.append(ids)
    _check_lengths(prompts, config.rollout.prompt_length)
    return prompts


def _reader(
    rows: Rows, data: GenerationDataConfig, has_template: bool, media: MediaReader | None
) -> Callable[..., Prompt]:
    refused = ("audios",) if media else ("audios", "images", "videos", *media_columns(data))

    def read(index: int, row: Mapping[str, Any] | None = None) -> Prompt:
        row, location = rows[index] if row is None else row, rows.location(index)
        refuse_media(row, refused, location)
        prompt = read_prompt_column(row, data.prompt_key)
        media_prompt = None if media is None else media.read(row, prompt, rows.folder(index), location)
        if media_prompt is not None:
            return media_prompt
        return with_settings(read_prompt(prompt, data.prompt_format, has_template, location), row, location)

    return read


def _encode(
    chunk: list[tuple[int, dict[str, Any]]], prompt_set: PromptSet, count: int, config: GenerationConfig, tokenizer: Any
) -> list[list[int]]:
    """Tokenize the prompts of a chunk of rows. All images are decoded, so that a bad one is found before generation."""
    data, rows, prompts = config.data, prompt_set.rows, [prompt_set.read(index, row) for index, row in chunk]
    indices = [index for index, _ in chunk]
    encoded: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, MediaPrompt):
            prompt.decode()
            encoded[i] = prompt_set.media.token_ids(prompt)
    texts = [i for i in range(len(prompts)) if i not in encoded]
    kwargs = data.apply_chat_template_kwargs
    locations = [rows.location(index) for index in indices]
    text_ids = encode_prompts(
        tokenizer, [prompts[i] for i in texts], lambda k: locations[texts[k]], template_kwargs=kwargs
    )
    encoded |= dict(zip(texts, text_ids))
    ids = [encoded[i] for i in range(len(prompts))]
    check_round_trips(
        tokenizer, list(map(prompt_texts, prompts)), ids, max(count // ROUND_TRIPS, 1), indices, rows.location
    )
    return ids


def _check_lengths(prompts: PromptSet, limit: int) -> None:
    rows, lengths = prompts.rows, [len(prompts.prompt_ids[i]) for i in range(len(prompts))]
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if too_long:
        first, longest = too_long[0], max(lengths)
        fixes = "raise the limit" if prompts.media is None else f"raise the limit, {FEWER_IMAGE_TOKENS}"
        raise ValueError(
            f"rollout.prompt_length: {len(too_long):,} of {len(lengths):,} prompts are longer than {limit:,} tokens, "
            f"the first: {rows.location(first)}, with {lengths[first]:,}; the longest has {longest:,}: {fixes}, or "
            "remove these rows from the file"
        )


# ---- the output -----------------------------------------------------------------------------------------------------


def check_output(prompts: PromptSet, path: Path) -> None:
    """Check before generation that the rows can be written to a file of this type.

    Paths of images and videos are looked up by the writer; here at most those of the first row.

    Args:
        path: .parquet (keeps the types of the columns) or .jsonl.

    Raises:
        ValueError: If they cannot, or the folder is not writable.
    """
    check_folder("data.output_path", path.parent)
    if path.suffix == ".jsonl":
        for _ in _lines(prompts, [[""]] * len(prompts), None):
            pass
    else:
        try:
            pq.write_table(_table(prompts, [[""]], path.parent), io.BytesIO())
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"data.output_path: cannot write the rows as parquet, use a file that ends with .jsonl: {error}"
            ) from error


def write_output(prompts: PromptSet, responses: list[list[str]], path: Path) -> None:
    """Write the columns of the input and the responses, a list of texts for each prompt.

    Paths of images and videos start from the folder of the output, as in every data file.
    """
    with atomic_write(path) as draft:
        if path.suffix == ".jsonl":
            with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(_lines(prompts, responses, path.parent))
        else:
            pq.write_table(_table(prompts, responses, path.parent), draft)


def _table(prompts: PromptSet, responses: list[list[str]], folder: Path) -> pa.Table:
    """The first rows, as many as there are responses. folder: of the output."""
    table, column = prompts.rows.to_table().slice(0, len(responses)), pa.array(responses, type=pa.list_(pa.string()))
    for name in _media_column_names(prompts):
        values = [prompts.rows[i][name] for i in range(len(responses))]
        moved = [_relocate(prompts, i, name, value, folder) for i, value in enumerate(values)]
        if moved != values:
            number = table.column_names.index(name)
            table = table.set_column(number, name, pa.array(moved, type=table.schema.field(name).type))
    if "data_source" not in table.column_names:  # the name that training gives the rows
        table = table.append_column("data_source", pa.array([prompts.rows.source(i) for i in range(len(responses))]))
    return table.append_column(RESPONSES, column)


def _lines(prompts: PromptSet, responses: list[list[str]], folder: Path | None) -> Iterator[str]:
    """folder: of the output; None: paths stay those of the input."""
    names = _media_column_names(prompts) if folder is not None else ()
    for i, (row, texts) in enumerate(zip(prompts.rows, responses)):
        moved = {name: _relocate(prompts, i, name, row[name], folder) for name in names}
        try:
            row = {"data_source": prompts.rows.source(i), **row, **moved, RESPONSES: texts}
            yield json.dumps(row, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise ValueError(
                f"{prompts.rows.location(i)}: cannot be written as JSON ({error}): use a data.output_path that ends "
                "with .parquet"
            ) from error


def _media_column_names(prompts: PromptSet) -> list[str]:
    """The columns that may have paths of images and videos."""
    if prompts.media is None:
        return []
    return [name for name in (*media_columns(prompts.media.data), prompts.prompt_key) if name in prompts.rows.columns]


def _relocate(prompts: PromptSet, index: int, name: str, value: Any, folder: Path) -> Any:
    """A value of a column with media, whose paths start from the folder of the output."""
    return relocated(value, prompts.rows.folder(index), folder, is_source=name != prompts.prompt_key)
