"""What a trainer records of a step for `verl report`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms.kl import k3
from verl.protocol import DataProto
from verl.trainer.output.samples import choose_rows, generations

#: response tokens of a sample that are recorded
MAX_TOKENS = 512
#: zero-variance groups of a step that are recorded
_EXAMPLES = 3
#: name in the record -> column (B, T)
_PER_TOKEN = {
    "rollout_log_probs": "rollout_log_probs",
    "log_probs": "old_log_probs",
    "advantages": "advantages",
    "values": "values",
}


def step_record(batch: DataProto, tokenizer: Any, count: int, seed: int) -> dict[str, Any]:
    """Return what `verl report` shows of a step: distributions of scores and lengths, groups, and a few samples.

    Args:
        batch: a finished training batch.
        tokenizer: decodes prompts and tokens.
        count: number of samples with their tokens: the best, the worst, and others drawn at random.
        seed: seed of the draw.
    """
    columns = batch.tensors
    scores = columns["token_level_scores"].sum(1)
    lengths = columns["attention_mask"][:, columns["prompts"].shape[1] :].sum(1)
    rows = dict.fromkeys([int(scores.argmax()), int(scores.argmin()), *choose_rows(len(batch), count, seed)])
    rows = sorted(list(rows)[:count])
    samples = generations(batch, tokenizer, rows)
    return {
        "scores": distribution(scores.tolist()),
        "lengths": distribution(lengths.tolist()),
        "groups": _groups(batch, scores, tokenizer),
        "samples": [{**sample, **_tokens(batch, tokenizer, row)} for sample, row in zip(samples, rows)],
    }


def distribution(values: Sequence[float], bins: int = 20) -> list[tuple[float, int]]:
    """(value, count) of each value; if there are more than `bins` different ones, (centre, count) of equal bins."""
    finite = np.array([value for value in values if math.isfinite(value)])
    found, counts = np.unique(finite, return_counts=True)
    if len(found) > bins:
        counts, edges = np.histogram(finite, bins)
        found = (edges[1:] + edges[:-1]) / 2
    return [(_short(value), int(number)) for value, number in zip(found, counts) if number]


def _groups(batch: DataProto, scores: torch.Tensor, tokenizer: Any) -> dict[str, Any]:
    """Number of groups with several samples, and of those with zero variance, with examples."""
    members: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        members.setdefault(str(uid), []).append(row)
    groups = [rows for rows in members.values() if len(rows) > 1]
    equal = [rows[0] for rows in groups if len({scores[row].item() for row in rows}) == 1]
    examples = generations(batch, tokenizer, equal[:_EXAMPLES])
    names = ("input", "output", "gts", "score", "images")
    shown = [{name: sample[name] for name in names if name in sample} for sample in examples]
    return {"count": len(groups), "zero_variance": len(equal), "examples": shown}


def _tokens(batch: DataProto, tokenizer: Any, row: int) -> dict[str, Any]:
    """Texts of the first response tokens of a sample, and the columns of _PER_TOKEN that the batch has."""
    columns = batch.tensors
    width = columns["prompts"].shape[1]
    length = min(int(columns["attention_mask"][row, width:].sum()), MAX_TOKENS)
    ids = columns["responses"][row, :length].tolist()
    found: dict[str, Any] = {"tokens": tokenizer.batch_decode([[token] for token in ids])}
    found["mask"] = columns["response_mask"][row, :length].long().tolist()
    for name, column in _PER_TOKEN.items():
        if column in columns:
            found[name] = [_short(value) for value in columns[column][row, :length].tolist()]
    if {"ref_log_prob", "old_log_probs"} <= columns.keys():
        kl = k3((columns["old_log_probs"] - columns["ref_log_prob"])[row, :length])
        found["ref_kl"] = [_short(value) for value in kl.tolist()]
    return found


def _short(value: float) -> float | None:
    """Four significant digits; None for a value that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
