"""From a batch to what a reward function sees of it: one `Row` per answer, and where its reward belongs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.columns import DataProtoValidationError
from verl.protocol import DataProto
from verl.rewards.outcome import Row
from verl.utils.decoding import decode_all


@dataclass(frozen=True)
class Answers:
    """The answers of a batch of B rows.

    lengths: (B,) int64, tokens of each response. positions: (B,) int64, the last token that the policy chose, where the
    reward belongs; 0 for an empty response. empty: how many responses have no token of the policy. width: T.
    """

    rows: list[Row]
    lengths: torch.Tensor
    positions: torch.Tensor
    empty: int
    width: int

    def reward_tensor(self, scores: list[float]) -> torch.Tensor:
        """(B, T) float32: each score at its row's position, 0 elsewhere."""
        tensor = torch.zeros(len(self.rows), self.width)
        tensor[torch.arange(len(self.rows)), self.positions] = torch.tensor(scores, dtype=torch.float32)
        return tensor


def read_answers(data: DataProto, tokenizer: Any, reward_fn_key: str) -> Answers:
    """Decode the responses (special tokens left out) and gather what their scoring needs.

    Reads responses (B, T), attention_mask (B, P + T), response_mask (B, T) where it is there, and the columns
    `reward_fn_key`, reward_model ({"ground_truth": ...}), and extra_info and uid where they are there. To what a row's
    extra_info holds, "response_length" (in tokens) is added, and "rm_score", the sum of rm_scores (B, T), where a
    reward model has given them. Raises DataProtoValidationError for a missing column, a
    row without ground truth, or responses without a token position.
    """
    responses = data.column("responses").cpu()
    width = responses.shape[1]
    if width == 0 and len(responses):
        raise DataProtoValidationError("column 'responses': expected at least one token position, found width 0")
    present = data.column("attention_mask").cpu()[:, -width:].bool()
    chosen = present & data.column("response_mask").cpu().bool() if "response_mask" in data else present
    lengths = present.sum(1)
    flat, ends = responses[present].tolist(), lengths.cumsum(0).tolist()
    ids = [flat[end - length : end] for end, length in zip(ends, lengths.tolist())]
    texts = decode_all(tokenizer, ids)
    steps = torch.arange(1, width + 1)
    positions = (chosen * steps).amax(1).sub(1).clamp(min=0)
    return Answers(
        rows=_rows(data, texts, lengths.tolist(), reward_fn_key),
        lengths=lengths,
        positions=positions,
        empty=int((~chosen.any(1)).sum()),
        width=width,
    )


def prompt_texts(data: DataProto, tokenizer: Any, numbers: list[int]) -> list[str]:
    """The decoded prompts of some rows, special tokens included: what the model was really given."""
    prompts = data.column("prompts").cpu()
    mask = data.column("attention_mask").cpu()[:, : prompts.shape[1]].bool()
    return decode_all(tokenizer, [prompts[i][mask[i]].tolist() for i in numbers], skip_special_tokens=False)


def _rows(data: DataProto, texts: list[str], lengths: list[int], reward_fn_key: str) -> list[Row]:
    sources, references = data.column(reward_fn_key), data.column("reward_model")
    extra_infos = data.column("extra_info") if "extra_info" in data else [None] * len(texts)
    uids = data.column("uid") if "uid" in data else [None] * len(texts)
    given = {"response_length": lengths}
    if "rm_scores" in data:
        given["rm_score"] = data.column("rm_scores").sum(1).tolist()
    rows = []
    for i, text in enumerate(texts):
        if not isinstance(references[i], Mapping) or "ground_truth" not in references[i]:
            raise DataProtoValidationError(
                f"column 'reward_model', row {i}: expected a mapping with 'ground_truth', found {references[i]!r}"
            )
        extra_info = {**(extra_infos[i] or {}), **{name: values[i] for name, values in given.items()}}
        truth = references[i]["ground_truth"]
        rows.append(Row(sources[i], text, truth, extra_info, number=i, total=len(texts), uid=uids[i]))
    return rows
