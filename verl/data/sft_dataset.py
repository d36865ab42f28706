"""SFT samples: chats, or prompts with responses -> token ids with a loss mask."""

import itertools
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agents.tools.load import tool_schemas
from verl.config import schema
from verl.config.fields import Schema
from verl.data.chat import encode_conversations
from verl.data.dataset import DatasetConfig, Encoded, TokenizedDataset, describe_overlong, rows_to_use
from verl.data.files import Rows, read_rows
from verl.data.forms import CHATS, PROMPTS, RESPONSES, as_messages, note_columns, read_prompt_column, usual_column
from verl.data.images import FEWER_IMAGE_TOKENS, MediaError
from verl.data.media import MediaPrompt
from verl.data.messages import TRAINED, Message, with_settings
from verl.data.sequences import build_sequences
from verl.data.tokenization import (
    TokenTable,
    as_chat_or_text,
    check_encodable,
    check_messages,
    encode,
    encode_plain_prompts,
    refuse_media,
    truncate,
)
from verl.protocol import DataProto
from verl.tracking.formatting import format_line

logger = logging.getLogger("verl.data")

_PROMPTS = tuple(name for name in PROMPTS if name not in CHATS)


@dataclass(frozen=True)
class _Pair:
    """A prompt and its response as plain text."""

    prompt: str
    response: str


@dataclass(frozen=True)
class SampleColumns:
    """The columns of a sample: messages, or prompt and response, each a column and the path to a nested value."""

    messages: str | None = None
    prompt: tuple[str, ...] = ()
    response: tuple[str, ...] = ()


_Example = list[Message] | MediaPrompt | _Pair


class SFTDataset(TokenizedDataset):
    """SFT samples of data files; one item per row.

    A row is a chat (column `messages_key`) or a prompt with a response (columns `prompt_key` and `response_key`); the
    usual names (`verl.data.forms`) need no setting. With a chat template, prompt and
    response become a chat of two turns; without one they stay text, and the response ends with an eos token.

    In a chat the loss covers every assistant turn, from the end of the template's generation prompt to the eos token of
    the turn. Turns are rendered and tokenized one by one, so training sees the tokens that generation sees. An
    assistant message at the start of a chat is context only.

    With a processor, a row may have images and videos before its first token in the loss; they are decoded when the row
    is read, and `dataset[i]` also has multi_modal_inputs (None for a text-only row).

    `dataset[i]` is a dict: prompt_ids (all tokens before the first one in the loss), response_ids (the rest),
    response_mask (one per response token: 1 if it is in the loss), index (the row's number in the files).

    Args:
        data_files: one path or several: .parquet, .jsonl, .json, .csv, a folder or a dataset of the Hugging Face Hub.
            Or the rows: a sequence of dicts.
        tokenizer: a Hugging Face tokenizer. A missing pad token is set.
        config: the `data` section (`schema.SFTDataConfig`), or a mapping with some of its keys.
        processor: the processor of a vision-language model; None: rows with images or videos are an error.

    Raises:
        ValueError: invalid files, rows, tokenizer or settings; the message names file and row.
    """

    #: declares the section `data`
    root_schema: type[Schema] = schema.SFTConfig

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: Any,
        config: DatasetConfig = None,
        processor: Any = None,
    ):
        super().__init__(data_files, tokenizer, config, processor, self.root_schema)
        self.rows, self._columns = self._read()
        start = time.perf_counter()
        self._kept: list[int] = []  # item -> row
        self._ids = TokenTable()
        self._mask = TokenTable("b")
        count = rows_to_use(self.rows, self.config.train_max_samples)
        overlong = {}  # row -> tokens
        for index, (ids, mask) in self._tokenized_rows(self.rows, count, self._drop_bad_rows(self.rows, count)):
            if len(ids) > self.config.max_length:
                overlong[index] = len(ids)
            self._keep(index, ids, mask)
        self._report(overlong, count)
        logger.info("tokenized %s samples in %.1f s", f"{len(self._kept):,}", time.perf_counter() - start)

    def _load_tools(self) -> Sequence[Mapping[str, Any]]:
        return tool_schemas(self.config.tool_config_path, self.config.function_tool_path)

    def _read(self) -> tuple[Rows, SampleColumns]:
        """The rows of the files, and their columns."""
        rows = self._rows or read_rows(self.data_files)
        return rows, find_sample_columns(rows, self.config)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of the tokenized samples: the model's vocabulary must contain it."""
        return self._ids.largest

    @property
    def prompt_column(self) -> str | None:
        """The column of prompts, set or detected; None if the rows are chats, or the prompts are inside a column."""
        return self._columns.prompt[0] if len(self._columns.prompt) == 1 else None

    @property
    def longest_row(self) -> int:
        """Length of the longest sample in tokens, prompt and response together."""
        return self._ids.longest

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids, mask, row = self._ids[item], self._mask[item], self._kept[item]
        first = mask.index(1)
        fields = {
            "prompt_ids": ids[:first],
            "response_ids": ids[first:],
            "response_mask": mask[first:],
            "index": row,
        }
        if self.media is not None:
            fields["multi_modal_inputs"] = self.media.tensors(self._check_row(self.rows[row], self.rows, row), ids)
        return fields

    def describe(self, item: int) -> str:
        """The text of an item as the model reads it, with [train> and <train] around the tokens in the loss."""
        runs = itertools.groupby(zip(self._mask[item], self._ids[item]), key=operator.itemgetter(0))
        texts = ((trained, format_line(self.tokenizer.decode([token for _, token in run]))) for trained, run in runs)
        return "".join(f"[train>{text}<train]" if trained else text for trained, text in texts)

    def _keep(self, index: int, ids: list[int], mask: list[int]) -> None:
        """Add a sample, truncated to max_length; drop it if no token is left in the loss."""
        limit, truncation = self.config.max_length, self.config.truncation
        if len(ids) > limit:
            if truncation == "error":
                return
            row = self.rows[index]
            if self.media is not None and isinstance(self._check_row(row, self.rows, index), MediaPrompt):
                raise ValueError(
                    f"{self.rows.location(index)}: the sample has {len(ids):,} tokens with those of its images, "
                    f"more than data.max_length={limit:,}, and truncation would cut an image: increase the limit, or "
                    f"{FEWER_IMAGE_TOKENS}"
                )
            ids, mask = truncate(ids, limit, truncation), truncate(mask, limit, truncation)
        mask = [0, *mask[1:]]  # nothing predicts the first token
        if 1 in mask:
            self._kept.append(index)
            self._ids.append(ids)
            self._mask.append(mask)

    def _check_row(self, row: Mapping[str, Any], rows: Rows, index: int) -> _Example:
        """The row as a chat, with its images if it has any, or as two plain texts."""
        location = rows.location(index)
        refuse_media(row, self._refused, location)
        if weights := [name for name in TRAINED if row.get(name) not in (None, 1)]:
            fix = "set it in the assistant messages (0 or 1), or rename the column"
            raise ValueError(
                f"{location}: column {weights[0]!r}: a row has no weight, found {row[weights[0]]!r:.80}: {fix}"
            )
        if self.media is None:
            return self._chat_or_pair(row, location)
        columns = self._columns
        if columns.messages is not None:
            chat = row[columns.messages]
        else:
            chat, response = (_follow(row, path, location) for path in (columns.prompt, columns.response))
            chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat or ())
            chat.append({"role": "assistant", "content": response})
        prompt = self.media.read(row, as_messages(chat), rows.folder(index), location)
        if prompt is None:
            return self._chat_or_pair(row, location)
        roles = [message["role"] for message in prompt.messages]
        turns = [t for t, role in enumerate(roles) if role == "assistant" and t > 0]
        # a message with images or videos has a list of parts
        if any(not isinstance(message["content"], str) for message in prompt.messages[turns[0] if turns else 0 :]):
            raise MediaError(
                f"{location}: expected all images and videos before the first assistant turn, found the roles "
                f"{', '.join(roles)} with some after it: write one row per assistant turn"
            )
        return prompt

    def _chat_or_pair(self, row: Mapping[str, Any], location: str) -> _Example:
        """A text-only row."""
        columns = self._columns
        if self.tools and not row.get("tools"):  # as the column, so that a template without tools is refused
            row = {**row, "tools": self.tools}
        if columns.messages is not None:
            return with_settings(check_messages(row[columns.messages], location), row, location)
        response, name = _follow(row, columns.response, location), f"the response (column {columns.response[0]!r})"
        chat = as_messages(response)
        if isinstance(chat, list) and chat and isinstance(chat[0], Mapping) and "role" in chat[0]:
            prompt = _follow(row, columns.prompt, location) if chat[0]["role"] == "assistant" else []
            prompt = as_chat_or_text(prompt, "chat", True, location) if prompt else []
            return with_settings(check_messages([*prompt, *chat], location), row, location)
        if not isinstance(response, str) and response is not None:
            actual = f"{response!r} ({type(response).__name__})"
            raise ValueError(f"{location}: {name} is not text: found {actual}")
        if response is None or not response.strip():
            raise ValueError(f"{location}: {name} is missing: found {response!r}")
        check_encodable(response, f"{location}: {name}")
        prompt = _follow(row, columns.prompt, location)
        prompt = as_chat_or_text(prompt, self.config.prompt_format, self._has_template(), location)
        if not isinstance(prompt, str):
            prompt = [*prompt, {"role": "assistant", "content": response}]
        prompt = with_settings(prompt, row, location)
        return _Pair(prompt, response) if isinstance(prompt, str) else prompt

    def _texts(self, example: _Example) -> list[str]:
        return [example.prompt, example.response] if isinstance(example, _Pair) else super()._texts(example)

    def _encode(self, examples: list[_Example], location: Callable[[int], str]) -> list[Encoded]:
        pairs = [i for i, e in enumerate(examples) if isinstance(e, _Pair)]
        media = {i: e for i, e in enumerate(examples) if isinstance(e, MediaPrompt)}
        for example in media.values():
            self.media.render(example)
        chats = [i for i, example in enumerate(examples) if not isinstance(example, _Pair)]
        if chats and not self._has_template():
            raise ValueError(
                f"{location(chats[0])}: the row is a chat, but the tokenizer has no chat template: set "
                "model.custom_chat_template, or use plain text for prompt and response"
            )
        result: list[Encoded] = [([], [])] * len(examples)
        texts = [examples[i].prompt for i in pairs]
        prompts = encode_plain_prompts(self.tokenizer, texts, lambda k: location(pairs[k]))
        responses = encode(self.tokenizer, [examples[i].response for i in pairs], add_special_tokens=False)
        for i, prompt, response in zip(pairs, prompts, responses):
            with_eos = [*response, self.tokenizer.eos_token_id]
            result[i] = (prompt + with_eos, [0] * len(prompt) + [1] * len(with_eos))
        encoded_chats = encode_conversations(
            self.tokenizer,
            [media[i].messages if i in media else examples[i] for i in chats],
            chat_template=self.chat_template,
            template_kwargs=self.config.apply_chat_template_kwargs,
            location=lambda k: location(chats[k]),
            expanders={k: self.media.expander(media[i]) for k, i in enumerate(chats) if i in media},
        )
        for i, encoded in zip(chats, encoded_chats):
            result[i] = encoded
        return result

    def _report(self, overlong: dict[int, int], count: int) -> None:
        limit = self.config.max_length
        summary = f"{len(overlong):,} of {count:,} samples longer than {limit:,} tokens"
        if overlong and self.config.truncation == "error":
            raise ValueError(
                f"data.max_length: {summary}; {describe_overlong(overlong, self.rows)}. Increase the limit, or set "
                "data.truncation to left or right"
            )
        if not self._kept:
            files = ", ".join(self.data_files)
            raise ValueError(f"{files}: none of the {count:,} rows has a token in the loss within {limit:,} tokens")
        if overlong:
            dropped = count - len(self._kept)
            logger.info("truncated %s; dropped %d of them, whose response was truncated completely", summary, dropped)


def find_sample_columns(rows: Rows, config: schema.SFTDataConfig) -> SampleColumns:
    """The columns named in the config, otherwise those with a common name. Raises ValueError if there are none."""
    if config.messages_key is not None:
        return SampleColumns(messages=rows.check_column(config.messages_key, "messages_key"))
    has_names = config.prompt_key is not None or config.response_key is not None
    chat = usual_column(rows.columns, CHATS)
    if not has_names and chat is not None:
        note_columns(rows.names, rows.columns, {"chat": chat}, config)
        return SampleColumns(messages=chat)
    prompt = _named_or_common(rows, config.prompt_key, "prompt_key", _PROMPTS)
    response = _named_or_common(rows, config.response_key, "response_key", RESPONSES)
    note_columns(rows.names, rows.columns, {"prompt": prompt, "response": response}, config)
    paths = (prompt, *(config.prompt_dict_keys or ())), (response, *(config.response_dict_keys or ()))
    return SampleColumns(None, *paths)


def _named_or_common(rows: Rows, name: str | None, key: str, common: tuple[str, ...]) -> str:
    if name is not None:
        return rows.check_column(name, key)
    if (column := usual_column(rows.columns, common)) is not None:
        return column
    raise ValueError(
        f"{rows.names}: expected a column {' or '.join(CHATS)}, or {' or '.join(_PROMPTS)} with "
        f"{' or '.join(RESPONSES)}; found {', '.join(rows.columns)}. Set data.{key} to the name of the column"
    )


def _follow(row: Mapping[str, Any], path: tuple[str, ...], location: str) -> Any:
    """The value of a column, or a nested value in it. path: the column, and the keys."""
    column, *path = path
    value = row[column] if path else read_prompt_column(row, column)
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{location}: column {column!r} has no {'.'.join(path)!r}: found {value!r:.200}")
        value = value[key]
    return value


def collate_sft(items: Sequence[Mapping[str, Any]], pad_token_id: int) -> DataProto:
    """B items of `SFTDataset` -> a batch with the columns of a rollout (see `build_sequences`). Other keys of the items
    (index, uid) become object columns. Raises ValueError if there are no items."""
    if not items:
        raise ValueError("collate_sft: expected at least one item, found none")
    tensors = ("prompt_ids", "response_ids", "response_mask")
    prompts, responses, masks = ([item[name] for item in items] for name in tensors)
    others = {name: [item[name] for item in items] for name in items[0] if name not in tensors}
    return DataProto.from_dict(build_sequences(prompts, responses, pad_token_id, masks), others)
