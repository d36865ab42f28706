"""Prompts, responses and scores of samples: as text, and as the records of `verl report`."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms.kl import k3
from verl.algorithms.masked import masked_mean
from verl.config import schema
from verl.data.rlhf_dataset import RLHFDataset
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.rollout.request import SamplingParams
from verl.tracking.formatting import format_line
from verl.tracking.trackers import thumbnails
from verl.trainer.output.metrics import group_rows

#: fields of a sample; a value of the reward function with one of these names gets the prefix `reward_`
_FIELDS = {
    *("images", "input", "output", "gts", "score", "advantage", "length"),
    *("finish_reason", "data_source", "uid", "step"),
}


def generations(batch: DataProto, tokenizer: Any, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Return prompt, response and score of samples, as text.

    Args:
        batch: scored samples. A missing column (such as advantages in validation) gives no field.
        rows: indices of the samples; None: all.

    Returns:
        One mapping per sample: input, output, gts (the ground truth), score, every value that the reward function
        returned in addition to the score, advantage (mean over the response tokens), length (tokens), finish_reason,
        data_source and uid, and images (thumbnails as data URIs) in a batch with images. All have the same keys.
    """
    columns, objects = batch.tensors, batch.non_tensor_batch
    width = columns["prompts"].shape[1]
    samples, rows = [], range(len(batch)) if rows is None else rows
    images = objects.get("multi_modal_data")
    # the samples of a prompt share an object
    distinct = {} if images is None else {id(images[i]): images[i] for i in rows}
    pictures = {key: thumbnails(data) for key, data in distinct.items()}
    for i in rows:
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
        if images is not None:
            sample["images"] = pictures[id(images[i])]
        samples.append(sample)
    return samples


def first_prompt(dataset: Any) -> list[str]:
    """Lines about the first prompt of the training data; none for a custom dataset."""
    if not isinstance(dataset, RLHFDataset):
        return []
    text, media = dataset.describe(0)
    return [f"first prompt: {format_line(text)}", *(f"  {line}" for line in media)]


#: sampling parameters of `PPOTrainer.generate`
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "ignore_eos", "seed", "max_tokens")


def check_sampling(n: int, sampling: Mapping[str, Any], longest: int) -> None:
    """Raise ValueError for sampling parameters that generation does not take. longest: limit of max_tokens."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n: expected the number of responses to each prompt, int >= 1, found {n!r}")
    for name in sampling:
        if name not in _SAMPLING:
            raise ValueError(f"generate: no sampling parameter is called {name!r}: {did_you_mean(name, _SAMPLING)}")
    if sampling.get("max_tokens", 1) > longest:
        raise ValueError(
            f"generate: max_tokens={sampling['max_tokens']} exceeds data.max_response_length ({longest}), the limit of "
            "the rollout engine"
        )
    SamplingParams(**{"max_tokens": longest, "stop_token_ids": (), **sampling})


def prompt_items(
    prompts: Sequence[Any], tokenizer: Any, data: schema.DataConfig, processor: Any = None
) -> list[dict[str, Any]]:
    """Items of prompts (texts or chats, with a processor also with images), tokenized as those of the training data."""
    if isinstance(prompts, str):
        raise ValueError(f"generate: expected a list of prompts, found the string {prompts!r}: use [{prompts!r}]")
    if not isinstance(prompts, Iterable) or not (prompts := list(prompts)):
        raise ValueError(f"generate: expected a list of prompts (texts or chats), found {prompts!r}")
    rows = [{data.prompt_key: prompt, "data_source": "generate"} for prompt in prompts]
    columns = {"ground_truth_key": "answer", "image_key": "images", "video_key": "videos"}
    settings = data.model_copy(update={"filter_overlong_prompts": False, "max_bad_rows": 0, **columns})
    dataset = RLHFDataset(rows, tokenizer, settings.model_copy(update={"reward_fn_key": "data_source"}), processor)
    return [dataset[i] for i in range(len(dataset))]


def response_texts(batch: DataProto, tokenizer: Any) -> list[str]:
    """The responses of a batch as text, without special tokens."""
    masks = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].bool()
    pairs = zip(batch.batch["responses"], masks)
    return [tokenizer.decode(response[mask], skip_special_tokens=True) for response, mask in pairs]


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


def choose_rows(count: int, size: int, seed: int) -> list[int]:
    """Choose `size` of `count` rows at random, in ascending order; the same ones for the same seed."""
    return sorted(random.Random(seed).sample(range(count), min(size, count)))


# ---- records of `verl report` ---------------------------------------------------------------------------------------

#: response tokens of a sample that are recorded
MAX_TOKENS = 512
#: zero-variance groups of a step that are recorded
_EXAMPLES = 3
#: columns (B, T) of the record, where old_log_probs is called log_probs
_PER_TOKEN = ("rollout_log_probs", "old_log_probs", "advantages", "values")


def step_record(batch: DataProto, tokenizer: Any, count: int, seed: int) -> dict[str, Any]:
    """Return what `verl report` shows of a step: distributions of scores and lengths, groups, and a few samples.

    Args:
        batch: a finished training batch.
        count: number of samples with their tokens: the best, the worst, and others drawn at random.
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
    centres, counts = np.unique(finite, return_counts=True)
    if len(centres) > bins:
        counts, edges = np.histogram(finite, bins)
        centres = (edges[1:] + edges[:-1]) / 2
    return [(_short(value), int(number)) for value, number in zip(centres, counts) if number]


def _groups(batch: DataProto, scores: torch.Tensor, tokenizer: Any) -> dict[str, Any]:
    """Number of groups with several samples, and of those with zero variance, with examples."""
    groups = [rows for rows in group_rows(batch) if len(rows) > 1]
    equal = [rows[0] for rows in groups if scores[rows].min() == scores[rows].max()]
    examples = generations(batch, tokenizer, equal[:_EXAMPLES])
    names = ("input", "output", "gts", "score", "images")
    records = [{name: sample[name] for name in names if name in sample} for sample in examples]
    return {"count": len(groups), "zero_variance": len(equal), "examples": records}


def _tokens(batch: DataProto, tokenizer: Any, row: int) -> dict[str, Any]:
    """Texts of the first response tokens of a sample, and the columns of _PER_TOKEN that the batch has."""
    columns = batch.tensors
    width = columns["prompts"].shape[1]
    length = min(int(columns["attention_mask"][row, width:].sum()), MAX_TOKENS)
    ids = columns["responses"][row, :length].tolist()
    record: dict[str, Any] = {"tokens": tokenizer.batch_decode([[token] for token in ids])}
    record["mask"] = columns["response_mask"][row, :length].long().tolist()
    for column in _PER_TOKEN:
        if column in columns:
            record[column.removeprefix("old_")] = [_short(value) for value in columns[column][row, :length].tolist()]
    if {"ref_log_prob", "old_log_probs"} <= columns.keys():
        kl = k3((columns["old_log_probs"] - columns["ref_log_prob"])[row, :length])
        record["ref_kl"] = [_short(value) for value in kl.tolist()]
    return record


def _short(value: float) -> float | None:
    """Four significant digits; None for a value that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
