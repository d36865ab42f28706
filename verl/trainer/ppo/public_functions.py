"""Functions of batches and samples under the names of public verl, for trainers that are written for it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.algorithms.rollout_correction import compute_rollout_correction_and_rejection_mask
from verl.protocol import DataProto
from verl.utils.balance import calculate_workload, get_reverse_idx, get_seqlen_balanced_partitions

# ---- validation -----------------------------------------------------------------------------------------------------


def _compute_response_info(batch: DataProto) -> dict[str, torch.Tensor]:
    """The mask (B, T) of the attended tokens of responses, and the lengths (B,) of prompts and responses."""
    width = batch.batch["responses"].shape[-1]
    prompt_mask, response_mask = batch.batch["attention_mask"].split(
        [batch.batch["attention_mask"].shape[-1] - width, width], -1
    )
    return {
        "response_mask": response_mask,
        "prompt_length": prompt_mask.sum(-1).float(),
        "response_length": response_mask.sum(-1).float(),
    }


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[np.ndarray], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each function over random subsets of the data, drawn with replacement."""
    items = np.array(data, dtype=object)
    subsets = np.random.RandomState(seed).choice(len(items), size=(n_bootstrap, subset_size))
    results = [[reduce_fn(items[subset]) for subset in subsets] for reduce_fn in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in np.array(results, dtype=float)]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> Any:
    """The value of the first item that has the most frequent vote."""
    vote, _ = Counter(item[vote_key] for item in data).most_common(1)[0]
    return next(item[val_key] for item in data if item[vote_key] == vote)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Data source -> variable -> metric -> mean over the prompts.

    Args:
        sample_uids: the prompt of each sample.
        infos_dict: variable -> its value for each sample; those that begin with a string are skipped.

    Returns:
        mean@N and std@N of the N samples of a prompt; best@n, worst@n and, with the variable `pred`, maj@n, each as
        mean and std of a bootstrap, for n = 2, 4, ... and N.
    """
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows[prompt].append(row)
    results: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (source, _), samples in rows.items():
        predictions = [infos_dict["pred"][row] for row in samples] if "pred" in infos_dict else [None]
        for name, column in infos_dict.items():
            values = [column[row] for row in samples if column[row] is not None]
            if values and not isinstance(values[0], str):
                votes = predictions if len(predictions) == len(values) and None not in predictions else None
                for metric, value in _prompt_metrics(values, votes, seed).items():
                    results[source][name][metric].append(value)
    return {
        source: {
            name: {metric: float(np.mean(each)) for metric, each in metrics.items()}
            for name, metrics in variables.items()
        }
        for source, variables in results.items()
    }


def _prompt_metrics(values: list[Any], votes: list[Any] | None, seed: int) -> dict[str, float]:
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))} | ({f"std@{count}": float(np.std(values))} if count > 1 else {})
    powers = (2**power for power in range(1, count.bit_length()))
    for n in dict.fromkeys([*(power for power in powers if power < count), *([count] if count > 1 else [])]):
        drawn = dict(zip(("best", "worst"), bootstrap_metric(values, n, [np.max, np.min], seed=seed), strict=True))
        if votes is not None:
            pairs = [{"val": value, "pred": vote} for value, vote in zip(values, votes, strict=True)]
            [drawn["maj"]] = bootstrap_metric(
                pairs, n, [partial(calc_maj_val, vote_key="pred", val_key="val")], seed=seed
            )
        for kind, (mean, std) in drawn.items():
            metrics |= {f"{kind}@{n}/mean": mean, f"{kind}@{n}/std": std}
    return metrics


# ---- micro-batches --------------------------------------------------------------------------------------------------


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Split a batch into micro-batches of at most `max_token_len` tokens, counted by `attention_mask`.

    Args:
        dp_group: with `same_micro_num_in_dp`, all its ranks get as many micro-batches.
        num_batches_divided_by: their number is a multiple of this.
        use_dynamic_bsz_balance: those with the most work stand in the middle.

    Raises:
        ValueError: a row is longer than `max_token_len`.
    """
    lengths, width = batch["attention_mask"].sum(-1).long(), batch["attention_mask"].shape[-1]
    if max_token_len < width:
        raise ValueError(f"max_token_len: expected at least the {width} columns of the batch, found {max_token_len}")
    work, step = calculate_workload(lengths).tolist(), num_batches_divided_by or 1
    target, count = max(min(len(lengths), -(-int(lengths.sum()) // max_token_len)), min_num_micro_batch or 1), 0
    while target > count:
        count = -(-target // step) * step
        parts = get_seqlen_balanced_partitions(work, count, equal_size=False)
        target = count + any(lengths[rows].sum() > max_token_len for rows in parts)
        if dp_group is not None and same_micro_num_in_dp and torch.distributed.is_initialized():
            most = torch.tensor(target, device=lengths.device)
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
            target = int(most)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda rows: (sum(work[row] for row in rows), rows[0]), reverse=True)
        parts = parts[::2][::-1] + parts[1::2]
    return [batch[rows] for rows in parts], parts


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, **options: Any
) -> tuple[list[DataProto], list[list[int]]]:
    """`rearrange_micro_batches` of a DataProto."""
    _, parts = rearrange_micro_batches(data.batch, max_token_len, **options)
    return [data[rows] for rows in parts], parts


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """The rows of micro-batches, one after the other, in the order of the batch."""
    return data[get_reverse_idx([*chain.from_iterable(batch_idx_list)])]


# ---- two policies ---------------------------------------------------------------------------------------------------


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How far the probabilities of the rollout are from those of the actor, over the response tokens."""
    batch, name = data.batch, "training/rollout_probs_diff_"
    mask = batch["response_mask" if "response_mask" in batch else "attention_mask"]
    mask = mask[:, -batch["responses"].shape[1] :].bool()
    actor, rollout = (batch[column][mask].exp() for column in ("old_log_probs", "rollout_log_probs"))
    apart, pair = (actor - rollout).abs(), torch.stack([actor, rollout])
    values = (
        (apart.max(), apart.mean(), apart.std(), pair.corrcoef()[0, 1]) if mask.any() else [torch.tensor(np.nan)] * 4
    )
    names = (*(name + kind for kind in ("max", "mean", "std")), "training/rollout_actor_probs_pearson_corr")
    return {name + "valid": int(mask.any())} | {key: value.item() for key, value in zip(names, values, strict=True)}


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Mapping[str, Any]
) -> tuple[DataProto, dict[str, float]]:
    """The batch with `rollout_is_weights` and without rejected responses, and the metrics of both."""
    columns = {
        "old_log_prob": "old_log_probs",
        "rollout_log_prob": "rollout_log_probs",
        "response_mask": "response_mask",
    }
    keys = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    settings = {key: rollout_corr_config.get(key) for key in keys if rollout_corr_config.get(key) is not None}
    tensors = {name: batch.batch[column] for name, column in columns.items()}
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(**tensors, **settings)
    batch.batch.update({"response_mask": mask} | ({} if weights is None else {"rollout_is_weights": weights}))
    return batch, metrics
