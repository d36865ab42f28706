"""Files of offline generation: the prompts, the prompts with their responses, and those generated so far."""

import hashlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.agents.loop import SINGLE_TURN
from verl.agents.tools.load import tool_schemas
from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.data import DataConfig
from verl.config.schema.offline import GenerationConfig
from verl.data.columns import reward_model
from verl.data.dataset import Prompt, PromptDataset, describe_overlong, rows_to_use
from verl.data.files import Rows, read_rows
from verl.data.forms import PROMPTS, find_column, note_columns
from verl.data.images import FEWER_IMAGE_TOKENS
from verl.data.media import media_columns
from verl.data.tokenization import TokenTable, refuse_media
from verl.tracking.runs import json_line, read_lines
from verl.utils.disk import raise_disk_full
from verl.utils.paths import resolved

RESPONSES = "responses"
"""The column with the responses in the output file."""
TURNS, INFO = "turns", "trajectory_info"
"""Columns of the output of agent loops: the turns of each response; what its reward function gets, a JSON object."""
_TURN = pa.struct({"role": pa.string(), "content": pa.string(), "tokens": pa.int64()})


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
        self._turns = config.rollout.multi_turn
        super().__init__(config.data.path, tokenizer, config.data, processor, GenerationConfig)
        rows = self.rows = read_rows(self.data_files)
        self.prompt_key = find_column(rows.columns, PROMPTS, self.config.prompt_key)
        note_columns(rows.names, rows.columns, {"prompt": self.prompt_key}, self.config)
        rows.check_column(self.prompt_key, "prompt_key", " for the prompt")
        self.uses_loops = config.rollout.agent.default_agent_loop not in SINGLE_TURN or "agent_name" in rows.columns
        for name in (RESPONSES, TURNS, INFO) if self.uses_loops else (RESPONSES,):
            if name in rows.columns:
                raise ValueError(
                    f"{rows.names}: column {name!r} already exists, and the responses are written to it: rename it"
                )
        if self.uses_loops:
            self._read_columns(rows)
        count = rows_to_use(rows, self.config.max_samples)
        if count == 0:
            raise ValueError(f"data.max_samples=0: expected at least 1 of the {len(rows):,} prompts, or -1 for all")
        self.prompt_ids = TokenTable()
        for _, (ids, _) in self._tokenized_rows(rows, count, None):
            self.prompt_ids.append(ids)
        limit = config.rollout.prompt_length
        if overlong := {i: len(ids) for i, ids in enumerate(self.prompt_ids) if len(ids) > limit}:
            fixes = "raise the limit" if self.media is None else f"raise the limit, {FEWER_IMAGE_TOKENS}"
            raise ValueError(
                f"rollout.prompt_length: {len(overlong):,} of {len(self):,} prompts are longer than {limit:,} tokens; "
                f"{describe_overlong(overlong, rows)}: {fixes}, or remove these rows from the file"
            )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def _load_tools(self) -> Sequence[Mapping[str, Any]]:
        return tool_schemas(self._turns.tool_config_path, self._turns.function_tool_path)

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The columns of prompts for a rollout. Images are decoded now. Agent loops get those of training."""
        ids = [self.prompt_ids[i] for i in indices]
        items: list[dict[str, Any]] = [{}]
        if self.uses_loops:
            items = [self._item(self.rows, i, tokens, DataConfig()) for i, tokens in zip(indices, ids)]
        elif self.media is not None:
            prompts = (self._check_row(self.rows[i], self.rows, i) for i in indices)
            items = [self.media.columns(prompt, tokens) for prompt, tokens in zip(prompts, ids)]
        columns = {name: [item[name] for item in items] for name in items[0]}
        return {"prompt_ids": ids, "uid": [str(i) for i in indices]} | columns

    def digest(self) -> str:
        """Return a checksum of all token ids, which depends on the tokenizer and the chat template."""
        total = hashlib.sha256()
        for ids in self.prompt_ids:
            total.update(json.dumps(ids).encode())
        return total.hexdigest()[:16]

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> Prompt:
        refuse_media(row, self._refused, rows.location(index))
        if self.uses_loops:
            reward_model(row, rows.location(index), DataConfig().ground_truth_key)
        return self._prompt(row, rows, index)

    def _check_and_decode(self, row: Mapping[str, Any], rows: Rows, index: int, decoded: Collection[int]) -> Prompt:
        return super()._check_and_decode(row, rows, index, [index])


# ---- the output -----------------------------------------------------------------------------------------------------


def check_output(prompts: PromptSet, path: Path) -> None:
    """Check before generation that the rows can be written to a file of this type.

    Args:
        path: .parquet (keeps the types of the columns) or .jsonl.

    Raises:
        ValueError: If they cannot, or the folder is not writable.
    """
    check_folder("data.output_path", path.parent)
    if path.suffix == ".jsonl":
        for _ in _lines(prompts, [_NONE] * len(prompts), path.parent):
            pass
    else:
        try:
            pq.write_table(_table(prompts, [_NONE], path.parent), io.BytesIO())
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"data.output_path: cannot write the rows as parquet, use a file that ends with .jsonl: {error}"
            ) from error


def write_output(prompts: PromptSet, responses: "Sequence[Responses]", path: Path) -> None:
    """Write the columns of the input and the responses, a list of texts for each prompt; with agent loops, also the
    turns of each response and what its reward function gets. Paths of images are those of the input, in any folder."""
    with atomic_write(path) as draft:
        if path.suffix == ".jsonl":
            with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(_lines(prompts, responses, path.parent))
        else:
            pq.write_table(_table(prompts, responses, path.parent), draft)


_TEXTS = ("content", "role", "text", "type")


def _with_paths(value: Any, start: Path, folder: Path) -> Any:
    """A prompt or images of a row, for an output in `folder`: a path relative to `start` is absolute in another one."""
    if isinstance(value, str):
        is_relative = start != folder and not os.path.isabs(value) and os.path.isfile(start / value)
        return str(resolved(start / value)) if is_relative else value
    if isinstance(value, Mapping):
        is_text = {key: key in _TEXTS and isinstance(entry, str) for key, entry in value.items()}
        return {key: x if is_text[key] else _with_paths(x, start, folder) for key, x in value.items()}
    return [_with_paths(entry, start, folder) for entry in value] if isinstance(value, list) else value


def _moved(prompts: PromptSet, i: int, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The columns of a row as they are in an output in `folder`: the prompt, and its images and videos."""
    if prompts.media is None:
        return {}
    start, columns = prompts.rows.folder(i), {name: row[name] for name in media_columns(prompts.config) if name in row}
    content = _with_paths({"content": row[prompts.prompt_key]}, start, folder)["content"]
    return _with_paths(columns, start, folder) | {prompts.prompt_key: content}


def _table(prompts: PromptSet, responses: "Sequence[Responses]", folder: Path) -> pa.Table:
    """The first rows, as many as there are responses."""
    table, types = prompts.rows.to_table().slice(0, len(responses)), {RESPONSES: pa.string()}
    if prompts.uses_loops:
        types |= {TURNS: pa.list_(_TURN), INFO: pa.string()}
    if "data_source" not in table.column_names:  # the name that training gives the rows
        table = table.append_column("data_source", pa.array([prompts.rows.source(i) for i in range(len(responses))]))
    moved = [_moved(prompts, i, prompts.rows[i], folder) for i in range(len(responses) if prompts.media else 0)]
    for name in moved[0] if moved else ():
        at, values = table.column_names.index(name), [columns[name] for columns in moved]
        table = table.set_column(at, name, pa.array(values, type=table.schema.field(name).type))
    for name, kind in types.items():
        values = [getattr(item, name) for item in responses]
        table = table.append_column(name, pa.array(values, type=pa.list_(kind)))
    return table


def _lines(prompts: PromptSet, responses: "Sequence[Responses]", folder: Path) -> Iterator[str]:
    for i, (row, item) in enumerate(zip(prompts.rows, responses)):
        try:
            row = {"data_source": prompts.rows.source(i), **row, **_moved(prompts, i, row, folder)}
            row[RESPONSES] = item.responses
            row |= {TURNS: item.turns, INFO: item.trajectory_info} if prompts.uses_loops else {}
            yield json.dumps(row, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise ValueError(
                f"{prompts.rows.location(i)}: cannot be written as JSON ({error}): use a data.output_path that ends "
                "with .parquet"
            ) from error


# ---- responses on disk during generation ----------------------------------------------------------------------------

# So that a run killed at any moment can resume:
#
#   <output>.<digest>.partial.jsonl   the responses so far, one line per prompt; the digest is that of the settings
#   <output>                          all responses, written after the last batch; then the partial file is deleted
#   <output>.settings.json            the settings of the finished file, and counts
#
# A run with other settings, prompts or model files has another digest, so responses of different runs are never mixed.

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Responses:
    """The responses to one prompt. The attributes are keys of a line of the partial file.

    Attributes:
        tokens: How many tokens of each the policy sampled.
        finish_reasons: "stop" or "length".
        turns: Of agent loops: the turns of each, with role, content (text) and tokens (their number).
        trajectory_info: Of agent loops: what the reward function gets in extra_info, a JSON object for each.
    """

    responses: list[str]
    tokens: list[int]
    finish_reasons: list[str]
    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    trajectory_info: list[str] = field(default_factory=list)


_NONE = Responses([""], [0], ["stop"], [[]], ["{}"])


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


class SavedResponses:
    """The responses to the prompts of one output file that are generated already.

    Args:
        settings: Everything the responses depend on.
        n: Number of responses per prompt.
    """

    def __init__(self, output: Path, settings: Settings, *, prompts: int, n: int):
        self.output, self.settings, self.prompts, self.n = output, dict(settings), prompts, n
        self.path = output.with_name(f"{output.name}.{settings_digest(settings)}.partial.jsonl")

    def is_finished(self) -> bool:
        """Whether the output exists and was generated with these settings. Raises ValueError if it was with others:
        existing files are never overwritten."""
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

    def read(self) -> dict[int, Responses]:
        """Return prompt -> its responses. Damaged lines are skipped: these prompts are generated again."""
        saved = {}
        for line in read_lines(self.path):
            with suppress(KeyError, TypeError):  # other keys
                prompt, responses = line.pop("prompt"), Responses(**line)
                if len(responses.responses) == self.n:
                    saved[prompt] = responses
        return saved

    def missing(self) -> list[int]:
        """Return the prompts that have no responses."""
        saved = self.read()
        return [prompt for prompt in range(self.prompts) if prompt not in saved]

    def append(self, prompts: Sequence[int], responses: Sequence[Responses]) -> None:
        """Save the responses to some prompts; they are on disk when it returns."""
        lines = [json_line({"prompt": prompt, **asdict(item)}) for prompt, item in zip(prompts, responses)]
        advice = "Free some space and run the same command again"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with raise_disk_full(self.path.name, self.path.parent, advice), self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + "".join(lines))  # the last line may be that of a killed process
            file.flush()
            os.fsync(file.fileno())

    def finish(self, counts: Mapping[str, Any]) -> None:
        """Write the settings file of the output. Called before the output is written."""
        about = {"settings": self.settings, **counts}
        with atomic_write(settings_file(self.output)) as draft:
            draft.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
