"""Supervised examples: chats or prompt and response -> token ids with a mask of what is trained."""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from verl.data.chat_segments import encode_conversations
from verl.data.files import Rows, file_list, read_rows
from verl.data.sequences import build_sequences
from verl.data.settings import Config, SFTSettings, read_settings
from verl.data.tokenization import (
    CHUNK,
    ROUND_TRIPS,
    Message,
    TokenTable,
    as_chat_or_text,
    check_messages,
    check_round_trips,
    encode,
    encode_plain_prompts,
    prepare_tokenizer,
    truncate,
)
from verl.protocol import DataProto
from verl.registry import did_you_mean

logger = logging.getLogger("verl.data")

_PROMPT_COLUMNS = ("prompt", "question")
_RESPONSE_COLUMNS = ("response", "answer")


@dataclass(frozen=True)
class _Pair:
    """A prompt and its response as plain text."""

    prompt: str
    response: str


@dataclass(frozen=True)
class _Columns:
    """Where an example is in a row: a column of messages, or two columns with a way of keys into each."""

    messages: str | None = None
    prompt: str = ""
    prompt_path: tuple[str, ...] = ()
    response: str = ""
    response_path: tuple[str, ...] = ()


_Example = list[Message] | _Pair
_Encoded = tuple[list[int], list[int]]  # token ids, and 1 where a token is trained


class SFTDataset(Dataset):
    """One item per row of the files: what to read and what to imitate.

    A row is a chat (column `messages_key`, "messages" where it is not named) or a prompt and a response (columns
    `prompt_key` and `response_key`; where they are not named, `prompt` or `question`, and `response` or `answer`).
    With a chat template, prompt and response become a chat of two turns; without one they stay text, and the response
    gets an eos token at its end.

    Of a chat, every assistant turn is trained, from what follows the template's generation prompt to the eos token
    that ends the turn. Turns are rendered and tokenized one after another, as a rollout would meet them, so training
    sees the tokens that generation sees. An assistant message at the very start is read, not trained.

    `dataset[i]` is a dict: prompt_ids (all before the first trained token), response_ids (the rest), response_mask (1
    for a trained token, one per response token), index (the row's number in the files).

    Raises:
        ValueError: whatever is wrong with the files, the rows, the tokenizer or the settings, with file and row.
    """

    def __init__(self, data_files: str | Path | Sequence[str | Path], tokenizer: Any, config: Config | None = None):
        self.data_files = [str(path) for path in file_list(data_files)]
        self.tokenizer = tokenizer
        self.settings = read_settings(SFTSettings, config)
        self.rows = read_rows(self.data_files)
        prepare_tokenizer(tokenizer)
        self._columns = _find_columns(self.rows, self.settings)
        start = time.perf_counter()
        self._kept: list[int] = []  # item -> row
        self._ids = TokenTable()
        self._mask = TokenTable("b")
        self._tokenize_rows()
        logger.info("tokenized %s examples in %.1f s", f"{len(self):,}", time.perf_counter() - start)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of all rows: what the model's vocabulary must hold."""
        return self._ids.largest

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, prompt and response together."""
        return self._ids.longest

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids, mask = self._ids[item], self._mask[item]
        first = mask.index(1)
        return {
            "prompt_ids": ids[:first],
            "response_ids": ids[first:],
            "response_mask": mask[first:],
            "index": self._kept[item],
        }

    def _tokenize_rows(self) -> None:
        count = self.settings.rows_used(len(self.rows))
        if count < len(self.rows):
            logger.info("using the first %s of %s rows", f"{count:,}", f"{len(self.rows):,}")
        stride = max(count // ROUND_TRIPS, 1)
        overlong: dict[int, int] = {}  # row -> tokens
        rows = itertools.islice(enumerate(self.rows), count)
        while chunk := list(itertools.islice(rows, CHUNK)):
            indices = [index for index, _ in chunk]
            examples = [self._example(row, self.rows.where(index)) for index, row in chunk]
            encoded = self._encode(examples, indices[0])
            texts, all_ids = [_texts_of(example) for example in examples], [ids for ids, _ in encoded]
            check_round_trips(self.tokenizer, texts, all_ids, stride, indices, self.rows.where)
            for index, (ids, mask) in zip(indices, encoded):
                if len(ids) > self.settings.max_length:
                    overlong[index] = len(ids)
                self._keep(index, ids, mask)
        self._report(overlong, count)

    def _keep(self, index: int, ids: list[int], mask: list[int]) -> None:
        """Add a row, cut to the limit; a row with nothing left to train is not added."""
        limit, truncation = self.settings.max_length, self.settings.truncation
        if len(ids) > limit:
            if truncation == "error":
                return
            ids, mask = truncate(ids, limit, truncation), truncate(mask, limit, truncation)
        mask = [0, *mask[1:]]  # nothing comes before the first token, so nothing predicts it
        if 1 in mask:
            self._kept.append(index)
            self._ids.append(ids)
            self._mask.append(mask)

    def _example(self, row: Mapping[str, Any], where: str) -> _Example:
        """The row as a chat, or as two plain texts."""
        columns = self._columns
        if columns.messages is not None:
            return check_messages(row[columns.messages], where)
        response = _follow(row, columns.response, columns.response_path, where)
        if not isinstance(response, str) and response is not None:
            kind = type(response).__name__
            raise ValueError(
                f"{where}: the response (column {columns.response!r}) is no text: found {response!r} ({kind})"
            )
        if response is None or not response.strip():
            raise ValueError(f"{where}: the response (column {columns.response!r}) is missing: found {response!r}")
        prompt = as_chat_or_text(
            _follow(row, columns.prompt, columns.prompt_path, where),
            self.settings.prompt_format,
            self._has_template(),
            where,
        )
        if isinstance(prompt, str):
            return _Pair(prompt, response)
        return [*prompt, {"role": "assistant", "content": response}]

    def _has_template(self) -> bool:
        return self.settings.chat_template is not None or self.tokenizer.chat_template is not None

    def _encode(self, examples: list[_Example], first: int) -> list[_Encoded]:
        def where(i: int) -> str:
            return self.rows.where(first + i)

        pairs = [i for i, example in enumerate(examples) if isinstance(example, _Pair)]
        chats = [i for i, example in enumerate(examples) if not isinstance(example, _Pair)]
        if chats and not self._has_template():
            raise ValueError(
                f"{where(chats[0])}: the row is a chat, but the tokenizer has no chat template: give "
                "data.chat_template, or prompt and response as plain text"
            )
        result: list[_Encoded] = [([], [])] * len(examples)
        prompts = encode_plain_prompts(self.tokenizer, [examples[i].prompt for i in pairs], lambda k: where(pairs[k]))
        responses = encode(self.tokenizer, [examples[i].response for i in pairs], add_special_tokens=False)
        for i, prompt, response in zip(pairs, prompts, responses):
            ended = [*response, self.tokenizer.eos_token_id]
            result[i] = (prompt + ended, [0] * len(prompt) + [1] * len(ended))
        encoded_chats = encode_conversations(
            self.tokenizer,
            [examples[i] for i in chats],
            chat_template=self.settings.chat_template,
            template_kwargs=self.settings.apply_chat_template_kwargs,
            where=lambda k: where(chats[k]),
        )
        for i, encoded in zip(chats, encoded_chats):
            result[i] = encoded
        return result

    def _report(self, overlong: dict[int, int], count: int) -> None:
        limit = self.settings.max_length
        found = f"{len(overlong):,} of {count:,} rows longer than {limit:,} tokens"
        if overlong and self.settings.truncation == "error":
            row, length = next(iter(overlong.items()))
            raise ValueError(
                f"data.max_length: {found}, the first: {self.rows.where(row)}, with {length:,}; the longest has "
                f"{max(overlong.values()):,}. Raise the limit, or set data.truncation to left or right"
            )
        if not self._kept:
            raise ValueError(
                f"{', '.join(self.data_files)}: no row of {count:,} has a token to train within {limit:,} tokens"
            )
        if overlong:
            logger.info("truncated %s; %d left out, no trained token was left", found, count - len(self._kept))


def _find_columns(rows: Rows, settings: SFTSettings) -> _Columns:
    """The columns named in the settings, or those with a usual name. Raises ValueError that lists what there is."""
    if settings.messages_key is not None:
        return _Columns(messages=_require(rows, settings.messages_key, "messages_key"))
    named = settings.prompt_key is not None or settings.response_key is not None
    if not named and "messages" in rows.columns:
        return _Columns(messages="messages")
    prompt = _named_or_usual(rows, settings.prompt_key, "prompt_key", _PROMPT_COLUMNS)
    response = _named_or_usual(rows, settings.response_key, "response_key", _RESPONSE_COLUMNS)
    logger.info("examples: column %r is the prompt, column %r the response", prompt, response)
    return _Columns(
        prompt=prompt,
        prompt_path=tuple(settings.prompt_dict_keys or ()),
        response=response,
        response_path=tuple(settings.response_dict_keys or ()),
    )


def _require(rows: Rows, name: str, key: str) -> str:
    if name not in rows.columns:
        files = ", ".join(str(part.path) for part in rows.parts)
        raise ValueError(f"{files}: no column {name!r} (data.{key}): {did_you_mean(name, rows.columns)}")
    return name


def _named_or_usual(rows: Rows, name: str | None, key: str, usual: tuple[str, ...]) -> str:
    if name is not None:
        return _require(rows, name, key)
    for candidate in usual:
        if candidate in rows.columns:
            return candidate
    files = ", ".join(str(part.path) for part in rows.parts)
    raise ValueError(
        f"{files}: expected a column 'messages', or {' or '.join(_PROMPT_COLUMNS)} with "
        f"{' or '.join(_RESPONSE_COLUMNS)}; found {', '.join(rows.columns)}. Name the column in data.{key}"
    )


def _follow(row: Mapping[str, Any], column: str, path: tuple[str, ...], where: str) -> Any:
    """The value of a column, or what the keys `path` lead to inside it."""
    value = row[column]
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{where}: column {column!r} has no {'.'.join(path)!r}: found {value!r:.200}")
        value = value[key]
    return value


def _texts_of(example: _Example) -> list[str]:
    if isinstance(example, _Pair):
        return [example.prompt, example.response]
    return [message["content"] for message in example]


def collate_sft(items: Sequence[Mapping[str, Any]], pad_token_id: int) -> DataProto:
    """B items of `SFTDataset` -> a batch with the columns of a rollout: see `build_sequences`.

    Further keys of the items (index, uid) become object columns. Raises ValueError when there are no items.
    """
    if not items:
        raise ValueError("collate_sft: expected at least one item, found none")
    parts = ("prompt_ids", "response_ids", "response_mask")
    prompts, responses, masks = ([item[name] for item in items] for name in parts)
    others = {name: [item[name] for item in items] for name in items[0] if name not in parts}
    return DataProto.from_dict(build_sequences(prompts, responses, pad_token_id, masks), others)
