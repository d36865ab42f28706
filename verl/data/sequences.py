"""Converts lists of token ids to the padded tensors of a batch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.columns import COLUMNS
from verl.protocol import DataProto


def build_sequences(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    pad_token_id: int,
    response_masks: Sequence[Sequence[int]] | None = None,
    *,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> dict[str, Tensor]:
    """Pad B prompts on the left and B responses on the right, so that every response starts in the same column.

    Args:
        prompt_ids, response_ids: B lists of token ids each, unpadded. A prompt has at least one token: the first
            response token is predicted from it. A response may be empty.
        pad_token_id: fills the padding. The masks define which positions are padding, not this id, so a token of the
            text may have the same id (pad = eos is common).
        response_masks: per response token, 1 where the policy sampled it and 0 for others (tool output, turns of a
            user). None is all ones.
        prompt_width, response_width: P and T. None is the longest of the batch. Set them for batches that are
            concatenated later.

    Returns:
        int64 tensors: prompts (B,P); responses (B,T); input_ids, attention_mask, position_ids (B,P+T);
        response_mask (B,T). position_ids count real tokens from 0; left padding has 0, right padding the last position.

    Raises:
        ValueError: no rows, lists of different length, an empty prompt, a row longer than its width.
    """
    batch_size = len(prompt_ids)
    if batch_size == 0:
        raise ValueError("build_sequences: expected at least one row, found none")
    if len(response_ids) != batch_size:
        raise ValueError(
            f"build_sequences: {batch_size} prompts but {len(response_ids)} responses: expected one per row"
        )
    for row, ids in enumerate(prompt_ids):
        if len(ids) == 0:
            raise ValueError(f"build_sequences: the prompt of row {row} has no tokens; it needs at least one")
    if response_masks is None:
        response_masks = [[1] * len(ids) for ids in response_ids]
    _check_masks(response_ids, response_masks)

    prompts, prompt_attention = _pad(prompt_ids, pad_token_id, prompt_width, "prompt", left=True)
    responses, response_attention = _pad(response_ids, pad_token_id, response_width, "response", left=False)
    response_mask, _ = _pad(response_masks, 0, responses.shape[1], "response mask", left=False)
    attention_mask = torch.cat([prompt_attention, response_attention], dim=1)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids_of(attention_mask),
        "response_mask": response_mask,
    }


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """Position ids of a padded batch: cumsum(attention_mask) - 1, at least 0. (B, L) -> (B, L) int64."""
    return (attention_mask.cumsum(dim=-1) - 1).clamp_min(0)


def concat_sequences(batches: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """Concatenate batches, padded to the widest prompt and response.

    Columns of the table are padded as `build_sequences` pads: ids by `pad_token_id`, routed_experts by -1, everything
    else by zeros. An object column that a batch lacks (a value that the reward function did not return) is None in its
    rows. `meta_info` is dropped: it describes one batch.
    """
    prompt_width, response_width = (max(batch.column(name).shape[1] for batch in batches) for name in _IDS[:2])
    objects = list(dict.fromkeys(name for batch in batches for name in batch.non_tensor_batch))
    widened = []
    for batch in batches:
        left = prompt_width - batch.column("prompts").shape[1]
        right = response_width - batch.column("responses").shape[1]
        tensors = {name: _widened(name, value, left, right, pad_token_id) for name, value in batch.tensors.items()}
        if "position_ids" in tensors and tensors["position_ids"].dim() == 2:
            tensors["position_ids"] = position_ids_of(tensors["attention_mask"])
        missing = np.full(len(batch), None, dtype=object)
        widened.append(DataProto(tensors, {name: batch.non_tensor_batch.get(name, missing) for name in objects}))
    return DataProto.concat(widened)


_IDS = ("prompts", "responses", "input_ids")


def _widened(name: str, values: Tensor, left: int, right: int, pad_token_id: int) -> Tensor:
    """Pad a column by `left` prompt and `right` response positions, as far as it has them."""
    dims = COLUMNS[name].dims if name in COLUMNS else "B"
    sides = (left if "P" in dims else 0, right if "T" in dims else 0)
    if not any(sides):
        return values
    if name == "routed_experts":
        return pad(values, (0, 0, 0, 0, *sides), value=-1)
    return pad(values, sides, value=pad_token_id if name in _IDS else 0)


def _check_masks(response_ids: Sequence[Sequence[int]], response_masks: Sequence[Sequence[int]]) -> None:
    if len(response_masks) != len(response_ids):
        raise ValueError(f"build_sequences: {len(response_ids)} responses but {len(response_masks)} response masks")
    for row, (ids, mask) in enumerate(zip(response_ids, response_masks)):
        if len(mask) != len(ids):
            raise ValueError(
                f"build_sequences: row {row} has {len(ids)} response tokens but a response mask of {len(mask)}; "
                "expected one value per token"
            )


def _pad(
    rows: Sequence[Sequence[int]], fill: int, width: int | None, name: str, *, left: bool
) -> tuple[Tensor, Tensor]:
    """Rows of different length -> (values, 1 where a value is real), both (B, width) int64."""
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(
            f"build_sequences: the {name} of row {lengths.index(longest)} has {longest} tokens, "
            f"more than the width of {width}; truncate it first or raise the limit"
        )
    column, length = torch.arange(width), torch.tensor(lengths)[:, None]
    real = column >= width - length if left else column < length
    values = torch.full((len(rows), width), fill, dtype=torch.int64)
    values[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)  # row after row, as the mask reads
    return values, real.long()
