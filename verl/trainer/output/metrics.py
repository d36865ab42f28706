"""Metrics of a step and of a validation, under the names of verl's plots."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.algorithms.kl import k3
from verl.algorithms.masked import masked_mean, masked_var
from verl.protocol import DataProto

logger = logging.getLogger("verl.trainer")


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return {f"{name}/{kind}": getattr(values, kind)().item() for kind in ("mean", "max", "min")}


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Length of each response in tokens, tool output included: (B,) float32."""
    columns = batch.tensors
    return columns["attention_mask"][:, -columns["responses"].shape[1] :].sum(1).float()


def group_rows(batch: DataProto) -> list[np.ndarray]:
    """The rows of each prompt, in the order of their first rows."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows[uid].append(row)
    return [np.array(members) for members in rows.values()]


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Scores, rewards and lengths of a finished training batch; advantages, returns, values, KL if it has them."""
    columns = batch.tensors
    mask, prompt_mask = columns["response_mask"], columns["attention_mask"][:, : -columns["responses"].shape[1]]
    lengths, scores = response_lengths(batch), columns["token_level_scores"].sum(1)
    metrics = {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", columns["token_level_rewards"].sum(1)),
        **_spread("response_length", lengths),
        **_spread("prompt_length", prompt_mask.sum(1).float()),
        "response/aborted_ratio": (lengths == 0).float().mean().item(),
    }
    groups = [scores.numpy()[rows] for rows in group_rows(batch) if len(rows) > 1] if "uid" in batch else []
    if groups:  # the fraction of zero-variance groups: prompts whose responses all have the same score
        metrics["reward/tied_groups"] = sum(bool(each.min() == each.max()) for each in groups) / len(groups)
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= _spread(f"critic/{name}", columns[name][mask.bool()])
    if "values" in columns:
        unexplained = masked_var(columns["returns"] - columns["values"], mask) / (
            masked_var(columns["returns"], mask) + 1e-5
        )
        metrics["critic/vf_explained_var"] = 1 - unexplained.item()
    if {"ref_log_prob", "old_log_probs"} <= columns.keys():
        kl = k3(columns["old_log_probs"] - columns["ref_log_prob"])
        metrics["actor/ref_kl"] = masked_mean(kl, mask).item()
    return metrics


def timing_metrics(timings: Mapping[str, float], step: float, tokens: int, world_size: int) -> dict[str, float]:
    """Seconds of each operator and of the step, and the tokens per second and process.

    Args:
        timings: operator -> seconds.
        step: wall-clock seconds, less than the sum of `timings` if operators overlap.
        tokens: prompt and response tokens of the batch.
        world_size: number of processes.
    """
    seconds = {f"timing_s/{name}": value for name, value in timings.items()}
    throughput = {"perf/total_num_tokens": tokens, "perf/time_per_step": step}
    return {**seconds, **throughput, "timing_s/step": step, "perf/throughput": tokens / step / world_size}


def _majority(values: np.ndarray, predictions: np.ndarray) -> float:
    """The value of the most frequent prediction (the first one on a tie)."""
    winner = Counter(predictions.tolist()).most_common(1)[0][0]
    return float(values[predictions.tolist().index(winner)])


def validation_metrics(
    data_sources: np.ndarray,
    uids: np.ndarray,
    variables: Mapping[str, np.ndarray],
    predictions: np.ndarray | None = None,
) -> dict[str, float]:
    """val-core/<source>/<variable>/mean@N and, for N > 1 samples per prompt, best@N, worst@N, maj@N and std@N.

    Args:
        data_sources, uids: (B,).
        variables: name -> (B,) numbers. The core one is `acc` if present, otherwise `reward`; the others are reported
            under val-aux.
        predictions: (B,) extracted final values, for the majority vote.
    """
    core = "acc" if "acc" in variables else "reward"
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, uids)):
        groups[str(source)][str(uid)].append(row)
    aggregates = {"mean@": np.mean, "best@": np.max, "worst@": np.min, "std@": np.std}
    metrics: dict[str, float] = {}
    for source, prompts in groups.items():
        n = max(len(rows) for rows in prompts.values())
        kinds = aggregates if n > 1 else {"mean@": np.mean}
        for name, column in variables.items():
            values = {kind: [func(column[rows]) for rows in prompts.values()] for kind, func in kinds.items()}
            if n > 1 and predictions is not None:
                values["maj@"] = [_majority(column[rows], predictions[rows]) for rows in prompts.values()]
            for kind, of_prompts in values.items():
                section = "val-core" if name == core and kind in ("mean@", "best@", "maj@") else "val-aux"
                metrics[f"{section}/{source}/{name}/{kind}{n}"] = float(np.mean(of_prompts))
    return metrics


def numeric_columns(batches: Sequence[DataProto]) -> dict[str, np.ndarray]:
    """`reward` and every numeric reward_* column of scored batches, concatenated, (B,) float64. A column with numbers
    in some rows only is skipped with a warning."""
    scores = [batch.batch["token_level_scores"].sum(1).double().numpy() for batch in batches]
    columns: dict[str, np.ndarray] = {"reward": np.concatenate(scores)}
    names = dict.fromkeys(name for batch in batches for name in batch.non_tensor_batch)
    for name in names:
        if not name.startswith("reward_") or name == "reward_model":
            continue
        values = [v for b in batches for v in b.non_tensor_batch.get(name, [None] * len(b))]
        numbers = sum(isinstance(v, bool | int | float | np.number) for v in values)
        if numbers == len(values):
            columns[name.removeprefix("reward_")] = np.array(values, dtype=np.float64)
        elif numbers:
            short = name.removeprefix("reward_")
            logger.warning("%r is a number in only %d of %d rows: it is not reported", short, numbers, len(values))
    return columns


def joined(batches: Sequence[DataProto], name: str) -> np.ndarray:
    """One object column of several batches, concatenated."""
    return np.concatenate([batch.non_tensor_batch[name] for batch in batches])


def predictions(batches: Sequence[DataProto]) -> np.ndarray | None:
    """The extracted final values, if the reward function returns them as `pred`."""
    if not all("reward_pred" in batch for batch in batches):
        return None
    return joined(batches, "reward_pred")
