"""Prompts, responses and scores as text, for inspection."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algorithms.kl import k3
from verl.algorithms.masked import masked_mean
from verl.checkpoints.atomic import atomic_write
from verl.protocol import DataProto

#: fields of a sample; a value of the reward function with one of these names gets the prefix `reward_`
_FIELDS = {"input", "output", "gts", "score", "advantage", "length", "finish_reason", "data_source", "uid", "step"}
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


def generations(batch: DataProto, tokenizer: Any, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Return prompt, response and score of samples, as text.

    Args:
        batch: scored samples. A missing column (such as advantages in validation) gives no field.
        tokenizer: decodes prompts and responses.
        rows: indices of the samples; None: all.

    Returns:
        One mapping per sample: input, output, gts (the ground truth), score, every value that the reward function
        returned in addition to the score, advantage (mean over the response tokens), length (tokens), finish_reason,
        data_source and uid. All have the same keys.
    """
    columns, objects = batch.tensors, batch.non_tensor_batch
    width = columns["prompts"].shape[1]
    samples = []
    for i in range(len(batch)) if rows is None else rows:
        mask = columns["attention_mask"][i].bool()
        extras = {
            name.removeprefix("reward_"): plain(values[i])
            for name, values in objects.items()
            if name.startswith("reward_") and name != "reward_model"
        }
        sample = {
            "input": tokenizer.decode(columns["prompts"][i][mask[:width]], skip_special_tokens=True),
            "output": tokenizer.decode(columns["responses"][i][mask[width:]], skip_special_tokens=True),
            "gts": plain((objects["reward_model"][i] or {}).get("ground_truth")) if "reward_model" in objects else None,
            "score": columns["token_level_scores"][i].sum().item(),
            **{f"reward_{name}" if name in _FIELDS else name: value for name, value in extras.items()},
        }
        if "advantages" in columns:
            sample["advantage"] = masked_mean(columns["advantages"][i], columns["response_mask"][i]).item()
        sample["length"] = int(mask[width:].sum())
        sample |= {name: objects[name][i] for name in ("finish_reason", "data_source", "uid") if name in objects}
        samples.append(sample)
    return samples


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
    shown = [{name: sample[name] for name in ("input", "output", "gts", "score")} for sample in examples]
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


def plain(value: Any) -> Any:
    """A value of a reward function as JSON: numbers, text, lists and mappings; anything else as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return repr(value).encode("utf-8", "backslashreplace").decode()
    return value


def choose_rows(count: int, wanted: int, seed: int) -> list[int]:
    """Choose `wanted` of `count` rows at random, in ascending order; the same ones for the same seed."""
    return sorted(random.Random(seed).sample(range(count), min(wanted, count)))


def dump_generations(folder: str | Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """Write the samples of a step to <folder>/<step>.jsonl."""
    samples = [{**sample, "step": step} for sample in generations(batch, tokenizer)]
    write_jsonl(Path(folder) / f"{step}.jsonl", samples)


def write_jsonl(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        lines = (json.dumps(item, ensure_ascii=False, default=str) + "\n" for item in items)
        draft.write_text("".join(lines), encoding="utf-8")
