"""Generation without training as a flow, and what it reads and writes.

prompts -> repeat -> gen -> decode -> write
"""

import hashlib
import io
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoints.atomic import make_folder_of, written_whole
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
from verl.dataflow import DataFlow, Operator
from verl.evaluation.shards import AnswerParts, Answers
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.trainer.ppo_operators import Roles, repeat
from verl.utils.decoding import decode_all

logger = logging.getLogger("verl.trainer")

RESPONSES = "responses"
"""The column of the answers."""

_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True)
class Questions:
    """The rows to be answered: the first `len(prompt_ids)` of `rows`, with the token ids of their prompts."""

    rows: Rows
    prompt_ids: TokenTable

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def digest(self) -> str:
        """A checksum of all token ids: another tokenizer or chat template gives another one."""
        total = hashlib.sha256()
        for i in range(len(self)):
            total.update(json.dumps(self.prompt_ids[i]).encode())
        return total.hexdigest()[:16]


def read_questions(config: GenerationConfig, tokenizer: Any) -> Questions:
    """Read the files, check every row that is used, and tokenize its prompt.

    No ground truth is asked for: it may come later. Raises ValueError with file and row for whatever is wrong; a prompt
    longer than rollout.prompt_length is not cut or left out, since that would change what is measured.
    """
    data = config.data
    rows = read_rows(data.path)
    names = ", ".join(str(part.path) for part in rows.parts)
    if data.prompt_key not in rows.columns:
        raise ValueError(
            f"{names}: no column {data.prompt_key!r} for the prompt (data.prompt_key): "
            f"{did_you_mean(data.prompt_key, rows.columns)}"
        )
    if RESPONSES in rows.columns:
        raise ValueError(f"{names}: there is a column {RESPONSES!r} already, where the answers belong: rename it")
    prepare_tokenizer(tokenizer)
    count = len(rows) if data.max_samples < 0 else min(data.max_samples, len(rows))
    if count == 0:
        raise ValueError(f"data.max_samples=0: there is nothing to answer of the {len(rows):,} rows")
    prompt_ids = TokenTable()
    numbered = itertools.islice(enumerate(rows), count)
    while chunk := list(itertools.islice(numbered, CHUNK)):
        for ids in _encode(chunk, rows, count, config, tokenizer):
            prompt_ids.append(ids)
    _check_lengths(prompt_ids, rows, config.rollout.prompt_length)
    return Questions(rows, prompt_ids)


def _encode(
    chunk: list[tuple[int, dict[str, Any]]], rows: Rows, count: int, config: GenerationConfig, tokenizer: Any
) -> list[list[int]]:
    """Token ids of the prompts of some rows."""
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
            "or take these rows out of the file"
        )


# ---- the flow -------------------------------------------------------------------------------------------------------


def build_generation_flow(
    questions: Questions, parts: AnswerParts, missing: Sequence[int], roles: Roles, tokenizer: Any
) -> DataFlow:
    """One pass answers one part; `missing` are the parts that are made, in this order.

    roles: "rollout" offers `generate_responses` (verl.workers.rollout.RolloutWorker); it may be filled in later.
    """
    return DataFlow(
        [
            Operator("prompts", prompts_of(questions, parts, missing), writes=("prompt_ids", "uid")),
            Operator("repeat", repeat(parts.n)),
            Operator("gen", generate(roles), reads=("prompt_ids", "uid"), writes=("response_ids", "finish_reason")),
            Operator("decode", decode(tokenizer), reads=("response_ids",), writes=("response",)),
            Operator("write", write(parts), reads=("response", "response_ids", "finish_reason")),
        ]
    )


def prompts_of(questions: Questions, parts: AnswerParts, missing: Sequence[int]) -> Callable[[], DataProto]:
    """The source: the prompts of the next missing part, whose number goes into meta_info["part"].

    The uid is the row's number, so an answer depends on neither the parts nor where the run was stopped.
    """
    left = iter(missing)

    def prompts() -> DataProto:
        part = next(left)
        rows = parts.rows_of(part)
        columns = {"prompt_ids": [questions.prompt_ids[row] for row in rows], "uid": [str(row) for row in rows]}
        return DataProto.from_dict(non_tensors=columns, meta_info={"part": part})

    return prompts


def generate(roles: Roles) -> Callable[[DataProto], DataProto]:
    """An answer to every row."""

    def gen(batch: DataProto) -> DataProto:
        return roles["rollout"].generate_responses(batch.select([], ["prompt_ids", "uid", "sample_index"], []))

    return gen


def decode(tokenizer: Any) -> Callable[[DataProto], DataProto]:
    """The answers as text, special tokens left out: what reward functions see in training too."""

    def decode_responses(batch: DataProto) -> DataProto:
        ids = [row.tolist() for row in batch.non_tensor_batch["response_ids"]]
        return DataProto.from_dict(non_tensors={"response": decode_all(tokenizer, ids)})

    return decode_responses


def write(parts: AnswerParts) -> Callable[[DataProto], None]:
    """Keep the part on disk."""

    def write_part(batch: DataProto) -> None:
        texts, ids, reasons = (batch.non_tensor_batch[name] for name in ("response", "response_ids", "finish_reason"))
        groups = [slice(start, start + parts.n) for start in range(0, len(batch), parts.n)]
        parts.write(
            batch.meta_info["part"],
            [Answers(list(texts[at]), [len(row) for row in ids[at]], list(reasons[at])) for at in groups],
        )

    return write_part


# ---- the output -----------------------------------------------------------------------------------------------------


def check_output(questions: Questions, path: Path) -> None:
    """Whether the rows can be written to a file of this kind, found out before hours of generation. ValueError if not.

    The kind is the ending: .parquet (columns keep their types) or .jsonl.
    """
    make_folder_of(path, "data.output_path")
    empty = [[""]] * len(questions)
    if path.suffix == ".jsonl":
        for _ in _lines(questions, empty):
            pass
    else:
        try:
            pq.write_table(_table(questions, empty).slice(0, 1), io.BytesIO())
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"data.output_path: the rows cannot be written as parquet, use a file that ends with .jsonl: {error}"
            ) from error


def write_output(questions: Questions, responses: list[list[str]], path: Path) -> None:
    """The columns of the input and the answers. responses: for every question a list of texts."""
    with written_whole(path) as draft:
        if path.suffix == ".jsonl":
            with draft.open("w", encoding="utf-8") as file:
                file.writelines(_lines(questions, responses))
        else:
            pq.write_table(_table(questions, responses), draft)


def _table(questions: Questions, responses: list[list[str]]) -> pa.Table:
    column = pa.array(responses, type=pa.list_(pa.string()))
    return questions.rows.to_table().slice(0, len(questions)).append_column(RESPONSES, column)


def _lines(questions: Questions, responses: list[list[str]]) -> Iterator[str]:
    for i, (row, texts) in enumerate(zip(questions.rows, responses)):
        try:
            yield json.dumps({**row, RESPONSES: texts}, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise ValueError(
                f"{questions.rows.where(i)}: cannot be written as JSON ({error}): use a data.output_path that ends "
                "with .parquet"
            ) from error
