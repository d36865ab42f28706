"""Files of offline generation: the prompts, the prompts with their responses, and shards of these to resume from."""

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.offline import GenerationConfig
from verl.data.dataset import Prompt, PromptDataset, describe_overlong, rows_to_use
from verl.data.files import Rows, read_rows
from verl.data.forms import PROMPTS, find_column, note_columns
from verl.data.media import media_columns
from verl.data.media_source import FEWER_IMAGE_TOKENS
from verl.data.tokenization import TokenTable, refuse_media
from verl.utils.paths import resolved

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
        overlong = {i: len(ids) for i, ids in enumerate(self.prompt_ids) if len(ids) > limit}
        if overlong:
            fixes = "raise the limit" if self.media is None else f"raise the limit, {FEWER_IMAGE_TOKENS}"
            raise ValueError(
                f"rollout.prompt_length: {len(overlong):,} of {len(self):,} prompts are longer than {limit:,} tokens; "
                f"{describe_overlong(overlong, self.rows)}: {fixes}, or remove these rows from the file"
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


#: keys of a content part or a source that may be a path
_PATH_KEYS = ("image", "images", "video", "videos", "path", "url", "image_url", "content")


def relocated(value: Any, folder: Path, target: Path, is_source: bool = True) -> Any:
    """A value of a row whose paths of images and videos start from another folder.

    Args:
        value: of a column with images, videos or chat messages.
        folder: where its relative paths start.
        target: where those of the result start. Paths that are absolute, and texts that are no file, are kept.
        is_source: whether a text may be a path; false for a column of prompts.
    """
    if isinstance(value, str):
        is_relative = is_source and not value.startswith(("data:", "http://", "https://", "file://", "~", "/"))
        is_moved = is_relative and _is_file(folder / value)
        return os.path.relpath(resolved(folder) / value, resolved(target)) if is_moved else value
    if isinstance(value, Mapping):
        names = [name for name in _PATH_KEYS if name in value and value.get("bytes") is None]
        return {**value, **{name: relocated(value[name], folder, target, name != "content") for name in names}}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [relocated(each, folder, target, is_source) for each in value]
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text that is no path
        return False


# ---- responses on disk during generation ----------------------------------------------------------------------------

# So that a run killed at any moment can resume:
#
#   <output>.parts/<digest>/settings.json      the settings of the responses; the digest is their checksum
#   <output>.parts/<digest>/part-00003.jsonl   a shard: the responses to one batch of prompts, one line per prompt
#   <output>                                   all responses, written after the last shard, which deletes the shards
#   <output>.settings.json                     the settings of the finished file, and counts
#
# Every file is written atomically. A run with other settings, prompts or model files has another digest, so responses
# of different runs are never mixed.

logger = logging.getLogger("verl.trainer")

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Responses:
    """The responses to one prompt. The attributes are the keys of a line of a shard.

    Attributes:
        tokens: Their lengths in tokens.
        finish_reasons: "stop" or "length".
    """

    responses: list[str]
    tokens: list[int]
    finish_reasons: list[str]


def settings_digest(settings: Settings) -> str:
    """Return a checksum of the settings, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def describe_changes(before: Settings, now: Settings) -> str:
    """Describe the settings that differ: `rollout.top_p: 1.0 -> 0.95, ...`."""
    differences = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, list) and isinstance(new, list):  # checksums and file sizes: not informative
            differences += [f"{key}: changed"] if old != new else []
        elif old != new:
            differences.append(f"{key}: {old} -> {new}")
    return ", ".join(differences)


def settings_file(output: Path) -> Path:
    """Return the path of the settings of a finished file."""
    return output.with_name(f"{output.name}.settings.json")


class ResponseShards:
    """The shards of one output file.

    Args:
        settings: Everything the responses depend on.
        n: Number of responses per prompt.
    """

    def __init__(self, output: Path, settings: Settings, *, prompts: int, prompts_per_shard: int, n: int):
        self.output = output
        self.settings = dict(settings)
        self.prompts, self.prompts_per_shard, self.n = prompts, prompts_per_shard, n
        self.folder = output.with_name(f"{output.name}.parts") / settings_digest(settings)

    def is_finished(self) -> bool:
        """Whether the output exists and was generated with these settings.

        Raises:
            ValueError: If it was generated with other settings. Existing files are never overwritten.
        """
        if not self.output.exists():
            return False
        state = "with unknown settings"
        if settings_file(self.output).is_file():
            recorded = json.loads(settings_file(self.output).read_text(encoding="utf-8"))["settings"]
            if recorded == self.settings:
                return True
            state = f"generated with other settings ({describe_changes(recorded, self.settings)})"
        raise ValueError(
            f"data.output_path: {self.output} already exists, {state}: choose another file, or delete this one"
        )

    def open(self) -> None:
        """Create the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / "settings.json") as draft:
            draft.write_text(json.dumps(self.settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def prompt_indices(self, shard: int) -> range:
        """Return the indices of the prompts of a shard."""
        return range(shard * self.prompts_per_shard, min((shard + 1) * self.prompts_per_shard, self.prompts))

    def missing(self) -> list[int]:
        """Return the shards that must be generated. Damaged shards are logged and included."""
        return [shard for shard in range(self._count) if not self._is_usable(shard)]

    def write(self, shard: int, responses: Sequence[Responses]) -> None:
        """Write the responses to the prompts of a shard."""
        with atomic_write(self._path(shard)) as draft:
            draft.write_text("".join(json.dumps(asdict(item)) + "\n" for item in responses), encoding="utf-8")

    def read(self) -> list[Responses]:
        """Return the responses to all prompts, in order. All shards must exist."""
        return [item for shard in range(self._count) for item in self._read(shard)]

    def finish(self, counts: Mapping[str, Any]) -> None:
        """Write the settings file of the output. Called before the output is written."""
        about = {"settings": self.settings, **counts}
        with atomic_write(settings_file(self.output)) as draft:
            draft.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def delete(self) -> None:
        """Delete the shards, if they exist. Those of other settings are kept."""
        if not self.folder.is_dir():
            return
        shutil.rmtree(self.folder)
        if not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    @property
    def _count(self) -> int:
        return -(-self.prompts // self.prompts_per_shard)

    def _path(self, shard: int) -> Path:
        return self.folder / f"part-{shard:05d}.jsonl"

    def _read(self, shard: int) -> list[Responses]:
        return [Responses(**json.loads(line)) for line in self._path(shard).read_text(encoding="utf-8").splitlines()]

    def _is_usable(self, shard: int) -> bool:
        if not self._path(shard).is_file():
            return False
        try:
            responses = self._read(shard)
        except (ValueError, TypeError) as error:
            logger.warning("%s is damaged and will be generated again: %s", self._path(shard), error)
            return False
        complete = len(responses) == len(self.prompt_indices(shard)) and all(
            len(r.responses) == self.n for r in responses
        )
        if not complete:
            logger.warning("%s is incomplete and will be generated again", self._path(shard))
        return complete
