"""Files of offline generation: reading the prompts, and writing them with their responses."""

import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.offline import GenerationConfig
from verl.data.files import Rows, read_rows
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

_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True)
class PromptSet:
    """The prompts to generate responses for: the first `len(prompt_ids)` rows of a dataset, tokenized."""

    rows: Rows
    prompt_ids: TokenTable

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def digest(self) -> str:
        """Return a checksum of all token ids, which depends on the tokenizer and the chat template."""
        total = hashlib.sha256()
        for i in range(len(self)):
            total.update(json.dumps(self.prompt_ids[i]).encode())
        return total.hexdigest()[:16]


def read_prompts(config: GenerationConfig, tokenizer: Any) -> PromptSet:
    """Read the files, check every row that is used, and tokenize its prompt.

    A ground truth is not required. Prompts longer than rollout.prompt_length are neither truncated nor dropped, since
    that would change what is measured.

    Raises:
        ValueError: For invalid data, with file and row.
    """
    data = config.data
    rows = read_rows(data.path)
    files = rows.names
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
    prompt_ids = TokenTable()
    numbered = itertools.islice(enumerate(rows), count)
    while chunk := list(itertools.islice(numbered, CHUNK)):
        for ids in _encode(chunk, rows, count, config, tokenizer):
            prompt_ids.append(ids)
    _check_lengths(prompt_ids, rows, config.rollout.prompt_length)
    return PromptSet(rows, prompt_ids)


def _encode(
    chunk: list[tuple[int, dict[str, Any]]], rows: Rows, count: int, config: GenerationConfig, tokenizer: Any
) -> list[list[int]]:
    """Tokenize the prompts of a chunk of rows."""
    data, indices = config.data, [index for index, _ in chunk]
    has_template = tokenizer.chat_template is not None
    for index, row in chunk:
        refuse_media(row, _MEDIA, rows.where(index))
    prompts = [
        read_prompt(row[data.prompt_key], data.prompt_format, has_template, rows.where(index)) for index, row in chunk
    ]
    encoded = encode_prompts(
        tokenizer, prompts, lambda i: rows.where(indices[i]), template_kwargs=data.apply_chat_template_kwargs
    )
    texts = [[p] if isinstance(p, str) else [message["content"] for message in p] for p in prompts]
    check_round_trips(tokenizer, texts, encoded, max(count // ROUND_TRIPS, 1), indices, rows.where)
    return encoded


def _check_lengths(prompt_ids: TokenTable, rows: Rows, limit: int) -> None:
    lengths = [len(prompt_ids[i]) for i in range(len(prompt_ids))]
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if too_long:
        first, longest = too_long[0], max(lengths)
        raise ValueError(
            f"rollout.prompt_length: {len(too_long):,} of {len(lengths):,} prompts are longer than {limit:,} tokens, "
            f"the first: {rows.where(first)}, with {lengths[first]:,}; the longest has {longest:,}. Raise the limit, "
            "or remove these rows from the file"
        )


# ---- the output -----------------------------------------------------------------------------------------------------


def check_output(prompts: PromptSet, path: Path) -> None:
    """Check before generation that the rows can be written to a file of this type.

    Args:
        prompts: The prompts, whose columns are written.
        path: .parquet (keeps the types of the columns) or .jsonl.

    Raises:
        ValueError: If they cannot, or the folder is not writable.
    """
    check_folder("data.output_path", path.parent)
    no_responses = [[""]] * len(prompts)
    if path.suffix == ".jsonl":
        for _ in _lines(prompts, no_responses):
            pass
    else:
        try:
            pq.write_table(_table(prompts, no_responses).slice(0, 1), io.BytesIO())
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"data.output_path: cannot write the rows as parquet, use a file that ends with .jsonl: {error}"
            ) from error


def write_output(prompts: PromptSet, responses: list[list[str]], path: Path) -> None:
    """Write the columns of the input and the responses, a list of texts for each prompt."""
    with atomic_write(path) as draft:
        if path.suffix == ".jsonl":
            with draft.open("w", encoding="utf-8") as file:
                file.writelines(_lines(prompts, responses))
        else:
            pq.write_table(_table(prompts, responses), draft)


def _table(prompts: PromptSet, responses: list[list[str]]) -> pa.Table:
    column = pa.array(responses, type=pa.list_(pa.string()))
    return prompts.rows.to_table().slice(0, len(prompts)).append_column(RESPONSES, column)


def _lines(prompts: PromptSet, responses: list[list[str]]) -> Iterator[str]:
    for i, (row, texts) in enumerate(zip(prompts.rows, responses)):
        try:
            yield json.dumps({**row, RESPONSES: texts}, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise ValueError(
                f"{prompts.rows.where(i)}: cannot be written as JSON ({error}): use a data.output_path that ends "
                "with .parquet"
            ) from error
