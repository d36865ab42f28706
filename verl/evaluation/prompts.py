"""Files of offline generation: reading the prompts, and writing them with their responses."""

import hashlib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.offline import GenerationConfig
from verl.data.dataset import Prompt, PromptDataset, rows_to_use
from verl.data.files import Rows, read_rows
from verl.data.forms import PROMPTS, find_column, note_columns
from verl.data.media import media_columns
from verl.data.media_files import relocated
from verl.data.media_source import FEWER_IMAGE_TOKENS
from verl.data.tokenization import TokenTable, refuse_media

RESPONSES = "responses"
"""The column with the responses in the output file."""


class PromptSet(PromptDataset):
    """The prompts to generate responses for: the first rows of files, checked and tokenized.

    A ground truth is not required. Prompts longer than rollout.prompt_length are neither truncated nor dropped, since
    that would change what is measured. All images are decoded, so that a bad one is found before generation.

    Args:
        processor: that of a vision-language model; without it, rows with images or videos are an error.

    Raises:
        ValueError: For invalid data, with file and row.
    """

    def __init__(self, config: GenerationConfig, tokenizer: Any, processor: Any = None):
        super().__init__(config.data.path, tokenizer, config.data, processor, GenerationConfig)
        rows = self.rows = read_rows(self.data_files)
        self.prompt_key = find_column(rows.columns, PROMPTS, self.config.prompt_key)
        note_columns(rows.names, rows.columns, {"prompt": self.prompt_key})
        rows.check_column(self.prompt_key, "prompt_key", " for the prompt")
        if RESPONSES in rows.columns:
            raise ValueError(
                f"{rows.names}: column {RESPONSES!r} already exists, and the responses are written to it: rename it"
            )
        count = rows_to_use(rows, self.config.max_samples)
        if count == 0:
            raise ValueError(f"data.max_samples=0: expected at least 1 of the {len(rows):,} prompts, or -1 for all")
        self.prompt_ids = TokenTable()
        for _, (ids, _) in self._tokenized_rows(rows, count, None):
            self.prompt_ids.append(ids)
        self._check_lengths(config.rollout.prompt_length)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The columns of prompts for a rollout. Images are decoded now."""
        ids = [self.prompt_ids[i] for i in indices]
        columns = {"prompt_ids": ids, "uid": [str(i) for i in indices]}
        if self.media is not None:
            prompts = (self._check_row(self.rows[i], self.rows, i) for i in indices)
            items = [self.media.columns(prompt, tokens) for prompt, tokens in zip(prompts, ids)]
            columns |= {name: [item[name] for item in items] for name in items[0]}
        return columns

    def digest(self) -> str:
        """Return a checksum of all token ids, which depends on the tokenizer and the chat template."""
        total = hashlib.sha256()
        for ids in self.prompt_ids:
            total.update(json.dumps(ids).encode())
        return total.hexdigest()[:16]

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> Prompt:
        refuse_media(row, self._refused, rows.location(index))
        return self._prompt(row, rows, index)

    def _check_and_decode(self, row: Mapping[str, Any], rows: Rows, index: int, decoded: Collection[int]) -> Prompt:
        return super()._check_and_decode(row, rows, index, [index])

    def _check_lengths(self, limit: int) -> None:
        lengths = [len(ids) for ids in self.prompt_ids]
        too_long = [i for i, length in enumerate(lengths) if length > limit]
        if too_long:
            first, longest = too_long[0], max(lengths)
            fixes = "raise the limit" if self.media is None else f"raise the limit, {FEWER_IMAGE_TOKENS}"
            raise ValueError(
                f"rollout.prompt_length: {len(too_long):,} of {len(lengths):,} prompts are longer than {limit:,} "
                f"tokens, the first: {self.rows.location(first)}, with {lengths[first]:,}; the longest has "
                f"{longest:,}: {fixes}, or remove these rows from the file"
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
    rows = [prompts.rows[i] for i in range(len(responses))] if prompts.media is not None else []
    moved = [_relocated(prompts, i, row, folder) for i, row in enumerate(rows)]
    for name in moved[0] if moved else ():
        values = [row[name] for row in moved]
        if values != [row[name] for row in rows]:
            number = table.column_names.index(name)
            table = table.set_column(number, name, pa.array(values, type=table.schema.field(name).type))
    if "data_source" not in table.column_names:  # the name that training gives the rows
        table = table.append_column("data_source", pa.array([prompts.rows.source(i) for i in range(len(responses))]))
    return table.append_column(RESPONSES, column)


def _lines(prompts: PromptSet, responses: list[list[str]], folder: Path | None) -> Iterator[str]:
    """folder: of the output; None: paths stay those of the input."""
    for i, (row, texts) in enumerate(zip(prompts.rows, responses)):
        moved = _relocated(prompts, i, row, folder) if folder is not None else {}
        try:
            row = {"data_source": prompts.rows.source(i), **row, **moved, RESPONSES: texts}
            yield json.dumps(row, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise ValueError(
                f"{prompts.rows.location(i)}: cannot be written as JSON ({error}): use a data.output_path that ends "
                "with .parquet"
            ) from error


def _relocated(prompts: PromptSet, index: int, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The columns of a row that may have paths of images and videos, which start from the folder of the output."""
    if prompts.media is None:
        return {}
    columns, start = (*media_columns(prompts.config), prompts.prompt_key), prompts.rows.folder(index)
    return {name: relocated(row[name], start, folder, name != prompts.prompt_key) for name in columns if name in row}
