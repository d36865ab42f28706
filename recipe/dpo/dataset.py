"""Preferences: pairs of responses to a prompt, or single responses with a label -> token ids.

A pair is two samples of SFT, so that `SFTDataset` checks and tokenizes them: row 2i is the chosen response of pair i,
and row 2i + 1 the rejected one.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from verl.config import schema
from verl.data.dataset import rows_to_use
from verl.data.files import Rows, SelectedRows, read_rows
from verl.data.forms import CHATS, PROMPTS, RESPONSES, as_messages, note_columns, read_prompt_column
from verl.data.messages import Message
from verl.data.sequences import build_sequences
from verl.data.sft_dataset import SampleColumns, SFTDataset
from verl.protocol import DataProto

logger = logging.getLogger("verl.data")

_TURN = re.compile(r"\n\n(Human|Assistant):")  # of HH-RLHF
_ROLES = {"Human": "user", "Assistant": "assistant"}
_PROMPT, _RESPONSE = "prompt", "response"  # columns of a side

Text = str | list[Message]


class PreferenceDataset(SFTDataset):
    """Preferences of data files; one item per row.

    A row is a pair (columns `chosen_key` and `rejected_key`), or a response with a label. Responses are text or the
    messages after the prompt. Without a column of prompts, both responses are whole chats or texts, of which the prompt
    is the common beginning (UltraFeedback, HH-RLHF).

    `dataset[i]` is a dict: samples, two samples of `SFTDataset` for a pair (chosen, rejected) and one for a label;
    labels, 1 or 0 for each; margin, of a pair; index.

    Args:
        *args, **kwargs: those of `SFTDataset`; config is a `schema.PreferenceDataConfig`.

    Raises:
        ValueError: as `SFTDataset`; a row whose responses are equal, that differs from its pair in a user message, or
            whose label or margin is not a number.
    """

    root_schema = schema.DPOConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        kept = {row: entry for entry, row in enumerate(self._kept)}
        size = self.rows.size
        pairs = [range(start, start + size) for start in range(0, len(self.rows), size)]
        self._items = [[kept[row] for row in pair] for pair in pairs if all(row in kept for row in pair)]

    @property
    def is_paired(self) -> bool:
        return self.rows.size == 2

    @property
    def prompt_column(self) -> str | None:
        return self.rows.prompt_key

    def _read(self) -> tuple["PreferenceRows", SampleColumns]:
        rows = self._rows or read_rows(self.data_files)
        rows = rows.select(range(rows_to_use(rows, self.config.train_max_samples)))
        self.config = self.config.model_copy(update={"train_max_samples": -1})
        return PreferenceRows(rows, self.config, self._has_template()), SampleColumns(None, (_PROMPT,), (_RESPONSE,))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, item: int) -> dict[str, Any]:
        samples = [super(PreferenceDataset, self).__getitem__(entry) for entry in self._items[item]]
        row = self.rows.rows[samples[0].pop("index") // self.rows.size]
        label, margin = row.get(self.config.label_key), row.get(self.config.margin_key)
        return {
            "samples": samples,
            "labels": [1.0, 0.0] if self.is_paired else [float(label)],
            "margin": float(margin) if self.is_paired and margin is not None else 0.0,
            "index": item,
        }

    def describe(self, item: int) -> str:
        return " | ".join(super(PreferenceDataset, self).describe(entry) for entry in self._items[item])


class PreferenceRows(SelectedRows):
    """The sides of preferences as rows with a prompt and a response; other columns are kept.

    Attributes:
        rows: the preferences.
        size: rows of one preference: 2 for a pair, 1 for a labeled response.
        prompt_key: the column of prompts; None: the prompt is the common beginning of the responses.
    """

    def __init__(self, rows: Rows, config: schema.PreferenceDataConfig, has_template: bool):
        self.rows, self._config, self._has_template = rows, config, has_template
        pair = (config.chosen_key, config.rejected_key)
        self.size = 2 if {*pair} & {*rows.columns} else 1
        names = pair if self.size == 2 else (config.label_key,)
        for name, key in zip(names, ("chosen_key", "rejected_key") if self.size == 2 else ("label_key",)):
            rows.check_column(name, key, "; a preference is a pair, or a response with a label")
        self.prompt_key = self._find(config.prompt_key, "prompt_key", [name for name in PROMPTS if name not in CHATS])
        if self.size == 1:
            responses = ("completion", *(name for name in RESPONSES if name not in ("chosen", "completion")), *CHATS)
            self._response = self._find(config.response_key, "response_key", responses)
            if self._response is None:
                raise ValueError(
                    f"{rows.names}: no column of responses: set data.response_key; columns: {', '.join(rows.columns)}"
                )
            names = (self._response, *names)
        used = {"prompt": self.prompt_key or f"{names[0]} (the common beginning)", **{name: name for name in names}}
        note_columns(rows.names, rows.columns, used, config)
        super().__init__(rows, [row for row in range(len(rows)) for _ in range(self.size)])
        self._hidden = {*names, self.prompt_key, *CHATS, config.label_key, config.margin_key}
        self.columns = (_PROMPT, _RESPONSE, *(name for name in rows.columns if name not in self._hidden))

    def _find(self, name: str | None, key: str, usual: Sequence[str]) -> str | None:
        if name is not None:
            return self.rows.check_column(name, key)
        return next((column for column in usual if column in self.rows.columns), None)

    def __getitem__(self, row: int) -> dict[str, Any]:
        index, side = divmod(row, self.size)
        return self._sides(index)[side]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.rows)):
            yield from self._sides(index)

    def number(self, row: int) -> int:
        return self.rows.number(row // self.size)

    def _sides(self, index: int) -> list[dict[str, Any]]:
        row, location = self.rows[index], self.rows.location(index)
        prompt = read_prompt_column(row, self.prompt_key) if self.prompt_key is not None else None
        rest = {name: value for name, value in row.items() if name not in self._hidden}
        config = self._config
        if self.size == 2:
            _check_number(row.get(config.margin_key, 0.0), location, f"column {config.margin_key!r}")
            prompt, *responses = split_pair(
                prompt, row[config.chosen_key], row[config.rejected_key], self._has_template, location
            )
        else:
            _check_number(row[config.label_key], location, f"column {config.label_key!r}", (0, 1))
            prompt, response = split_response(prompt, row[self._response], self._has_template, location)
            responses = [response]
        return [{_PROMPT: as_context(prompt), _RESPONSE: as_text(response), **rest} for response in responses]


def _check_number(value: Any, location: str, name: str, allowed: Sequence[int] = ()) -> None:
    if not isinstance(value, int | float | None) or (allowed and value not in allowed):
        expected = " or ".join(map(str, allowed)) if allowed else "a number"
        raise ValueError(f"{location}: {name}: expected {expected}, found {value!r:.80}")


def split_pair(prompt: Any, chosen: Any, rejected: Any, has_template: bool, location: str) -> tuple[Text, Text, Text]:
    """The prompt, the chosen and the rejected response of a pair, each text or messages.

    Args:
        prompt: None, or what comes before both responses. It is ignored if both are chats that contain it.
        chosen, rejected: responses, or whole chats or texts.
        has_template: whether texts of HH-RLHF become chats.
        location: of the row, in errors.

    Raises:
        ValueError: the responses are equal, or a response is missing.
    """
    sides = [_read_side(side, has_template) for side in (chosen, rejected)]
    for name, side in zip(("chosen", "rejected"), sides):
        if not isinstance(side, str | list) or not side:
            raise ValueError(f"{location}: {name}: expected a response, text or chat messages, found {side!r:.80}")
    if sides[0] == sides[1]:
        raise ValueError(f"{location}: chosen and rejected are equal: {chosen!r:.80}: remove the row")
    chats = [isinstance(side, list) and side[0]["role"] != "assistant" for side in sides]
    if isinstance(sides[0], str) != isinstance(sides[1], str) and (prompt is None or any(chats)):
        raise ValueError(f"{location}: one of chosen and rejected is a text and the other one a chat: use one form")
    if prompt is not None and not all(chats):
        return prompt, *sides
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides)))
    if isinstance(sides[0], str):  # up to a turn of HH-RLHF, or to a whole word
        marks = [match.end() for match in _TURN.finditer(sides[0][:common]) if match[1] == "Assistant"]
        common = marks[-1] if marks else sides[0].rfind(" ", 0, common) + 1
    common = min(common, len(sides[0]) - 1, len(sides[1]) - 1)
    if common < 1:
        raise ValueError(
            f"{location}: chosen and rejected have no common beginning, which is the prompt: set data.prompt_key"
        )
    starts = [side[common] for side in sides]
    if isinstance(sides[0], list) and (roles := {each["role"] for each in starts}) != {"assistant"}:
        raise ValueError(
            f"{location}: chosen and rejected first differ in message {common}, of {' and '.join(sorted(roles))}: "
            "expected both to be assistant messages, since the messages before it are the prompt"
        )
    return sides[0][:common], sides[0][common:], sides[1][common:]


def split_response(prompt: Any, response: Any, has_template: bool, location: str) -> tuple[Text, Text]:
    """The prompt and the response of a row with a label. Without a prompt, the response is a chat; its last message is
    the response. Raises ValueError for another form."""
    response = _read_side(response, has_template)
    if isinstance(response, list) and response and response[0]["role"] != "assistant":
        return response[:-1], response[-1:]
    if prompt is None:
        raise ValueError(f"{location}: no prompt: expected a column of prompts, or a response that is a whole chat")
    return prompt, response


def _read_side(side: Any, has_template: bool) -> Any:
    side = as_messages(side)
    if not has_template or not isinstance(side, str) or not side.startswith("\n\nHuman:"):
        return side
    _, *parts = _TURN.split(side)
    return [{"role": _ROLES[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2])]


def as_context(prompt: Text) -> Text:
    """A prompt none of whose assistant messages is trained."""
    if isinstance(prompt, str):
        return prompt
    return [{**m, "loss_mask": 0} if m.get("role") == "assistant" else m for m in prompt]


def as_text(response: Text) -> Text:
    """A response of one message with nothing but a text as this text."""
    if isinstance(response, str) or len(response) != 1:
        return response
    message = {key: value for key, value in response[0].items() if value is not None}
    return message["content"] if message.keys() == {"role", "content"} else response


# ---- batches --------------------------------------------------------------------------------------------------------


def collate_preferences(items: Sequence[Mapping[str, Any]], pad_token_id: int, scores: bool = False) -> DataProto:
    """N items of `PreferenceDataset` -> a batch with the columns of a rollout, and `label`, `pair_weight`, `margin`.
    scores: for a reward model: a prompt is the whole dialogue, and the response its last token again, whose value is
    its score."""
    if not items:
        raise ValueError("collate_preferences: expected at least one item, found none")
    samples = [sample for item in items for sample in item["samples"]]
    prompts, responses, masks = ([s[name] for s in samples] for name in ("prompt_ids", "response_ids", "response_mask"))
    if scores:
        prompts = [[*prompt, *response] for prompt, response in zip(prompts, responses)]
        responses, masks = [prompt[-1:] for prompt in prompts], None
    columns = build_sequences(prompts, responses, pad_token_id, masks)
    repeats = [len(item["samples"]) for item in items]
    columns["label"] = torch.tensor([label for item in items for label in item["labels"]])
    columns["margin"] = torch.tensor([item["margin"] for item in items]).repeat_interleave(torch.tensor(repeats))
    columns["pair_weight"] = torch.ones(len(samples))
    names = [name for name in samples[0] if name == "multi_modal_inputs"]
    others = {name: [sample[name] for sample in samples] for name in names}
    others["uid"] = [str(item.get("uid", item["index"])) for item in items for _ in item["samples"]]
    return DataProto.from_dict(columns, others)
