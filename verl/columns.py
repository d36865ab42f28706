"""Every column of the batch: its dimensions, dtype and meaning; and the checks of them.

Legend: B rows, P prompt tokens, T response tokens. Position t of every (B, T) column speaks of response token t, the
transition that produced it. Shapes and dtypes are checked after every operator (metadata only, so free). With
`VERL_STRICT_DATA_CHECK=1` contents are checked too: finite values, masks that agree, ids inside the vocabulary.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl.protocol import DataProto


class DataProtoValidationError(ValueError):
    """A batch broke its contract: names the column, what was expected, what was found, and who wrote it."""


@dataclass(frozen=True)
class Column:
    """One row of the table. dims: "B T", "B P", "B P+T", "B" ...; dtype: "int", "float", "mask" or "object"."""

    dims: str
    dtype: str
    meaning: str


COLUMNS: dict[str, Column] = {
    "prompts": Column("B P", "int", "prompt token ids, left-padded"),
    "responses": Column("B T", "int", "response token ids, right-padded"),
    "input_ids": Column("B P+T", "int", "prompt then response"),
    "attention_mask": Column("B P+T", "mask", "1 where a token is there"),
    "position_ids": Column("B P+T", "int", "position of each token in its row, from 0"),
    "response_mask": Column("B T", "mask", "1 where the policy chose the token (tool output, padding: 0)"),
    "rollout_log_probs": Column("B T", "float", "log-probs as reported by the engine that sampled"),
    "old_log_probs": Column("B T", "float", "log-probs of the policy before this update, by the training engine"),
    "ref_log_prob": Column("B T", "float", "log-probs of the reference policy"),
    "entropys": Column("B T", "float", "entropy of the distribution each token was drawn from"),
    "values": Column("B T", "float", "the critic's value before each token"),
    "token_level_scores": Column("B T", "float", "reward before the KL penalty"),
    "token_level_rewards": Column("B T", "float", "reward after the KL penalty"),
    "rm_scores": Column("B T", "float", "reward of the reward model"),
    "advantages": Column("B T", "float", "advantage of each token"),
    "returns": Column("B T", "float", "target of the critic"),
    "rollout_is_weights": Column("B T", "float", "importance weight of the trainer's policy over the sampler's"),
    "sum_pi_squared": Column("B T", "float", "sum over the vocabulary of the squared probabilities"),
    "reward_baselines": Column("B", "float", "summed reward of the greedy answer to the same prompt"),
    "uid": Column("B", "object", "the prompt a row belongs to: rows of one group share it"),
    "data_source": Column("B", "object", "which data set the row came from; chooses its reward rule"),
    "reward_model": Column("B", "object", "what the reward needs, `ground_truth` among it"),
    "extra_info": Column("B", "object", "further facts for the reward function"),
    "raw_prompt": Column("B", "object", "the chat messages or the text before tokenization"),
    "prompt_ids": Column("B", "object", "prompt token ids as a list, without padding"),
}

_KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "int": lambda d: d in (torch.int64, torch.int32),
    "mask": lambda d: d in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool) or d.is_floating_point,
    "float": lambda d: d in (torch.float32, torch.float64),
}


def strict_check_enabled() -> bool:
    """Whether VERL_STRICT_DATA_CHECK asks for contents to be checked. Read at each call, so a test may set it."""
    value = os.environ.get("VERL_STRICT_DATA_CHECK", "0").lower()
    if value not in ("0", "1", "true", "false", ""):
        raise ValueError(f"VERL_STRICT_DATA_CHECK: expected 0 or 1, found {value!r}")
    return value in ("1", "true")


def describe_source(func: Callable | None) -> str:
    """`Source: reward_fn() at line 87 in reward.py` for a function, a method or a callable object; "" for None."""
    if func is None:
        return ""
    while isinstance(func, functools.partial | MethodType):
        func = func.func if isinstance(func, functools.partial) else func.__func__
    func = inspect.unwrap(func)
    name = func.__name__ if inspect.isroutine(func) or inspect.isclass(func) else type(func).__name__
    body = func if inspect.isfunction(func) else type(func).__call__
    if not inspect.isfunction(body):
        return f"\n  Source: {name}()"
    code = body.__code__
    return f"\n  Source: {name}() at line {code.co_firstlineno} in {os.path.basename(code.co_filename)}"


def _widths(dims: str, sizes: dict[str, int | None]) -> tuple[int | None, ...]:
    """The size of each dimension as far as it is known: "B P+T" -> (B, P + T)."""
    known = []
    for dim in dims.split():
        parts = [sizes.get(p) for p in dim.split("+")]
        known.append(None if None in parts else sum(parts))
    return tuple(known)


def _sizes(batch: "DataProto") -> dict[str, int | None]:
    """B, P and T of a batch, read off the columns that define them."""
    tensors = batch.tensors
    width = {k: tensors[k].shape[1] for k in ("prompts", "responses") if k in tensors and tensors[k].dim() == 2}
    response = width.get("responses")
    if response is None:
        two_wide = [k for k, c in COLUMNS.items() if c.dims == "B T" and k in tensors and tensors[k].dim() == 2]
        response = tensors[two_wide[0]].shape[1] if two_wide else None
    return {"B": len(batch), "P": width.get("prompts"), "T": response}


def check(batch: "DataProto", source: Callable | None = None) -> None:
    """Check the known columns of `batch` against the table; raises DataProtoValidationError.

    `source` is the function that wrote the batch: the error says where it stands.
    """
    sizes = _sizes(batch)
    for name, value in batch.tensors.items():
        if name not in COLUMNS:
            continue
        column = COLUMNS[name]
        if column.dtype == "object":
            _fail(name, "a column of objects, one per row", f"a tensor of shape {tuple(value.shape)}", source)
        expected = _widths(column.dims, sizes)
        fits = value.dim() == len(expected) and all(e is None or e == s for e, s in zip(expected, value.shape))
        if not fits:
            shape = ", ".join(d if e is None else f"{d}={e}" for d, e in zip(column.dims.split(), expected))
            _fail(name, f"shape ({shape})", f"shape {tuple(value.shape)}", source)
        if not _KINDS[column.dtype](value.dtype):
            _fail(name, f"{column.dtype} dtype", str(value.dtype), source)
    for name in batch.non_tensor_batch:
        if name in COLUMNS and COLUMNS[name].dtype != "object":
            _fail(name, f"a tensor of dims ({COLUMNS[name].dims})", "a column of objects", source)
    if strict_check_enabled():
        _check_contents(batch, source)


def _fail(name: str, expected: str, found: str, source: Callable | None) -> None:
    raise DataProtoValidationError(f"column {name!r}: expected {expected}, found {found}{describe_source(source)}")


def _check_contents(batch: "DataProto", source: Callable | None) -> None:
    tensors = batch.tensors
    mask = tensors["response_mask"].bool() if "response_mask" in tensors else None
    for name, value in tensors.items():
        column = COLUMNS.get(name)
        if column is None:
            continue
        if column.dtype == "mask" and not bool(((value == 0) | (value == 1)).all()):
            _fail(name, "0 or 1 everywhere", f"values from {value.min().item()} to {value.max().item()}", source)
        if column.dtype == "float":
            counted = value[mask] if mask is not None and column.dims == "B T" else value
            if not bool(counted.isfinite().all()):
                bad = (~value.isfinite() & (mask if mask is not None and column.dims == "B T" else True)).nonzero()
                at = tuple(bad[0].tolist())
                _fail(name, "finite values", f"{value[at].item()} at {at} and {len(bad) - 1} more", source)
    _check_masks(tensors, mask, source)
    _check_ids(batch, tensors, source)


def _check_masks(tensors: dict[str, torch.Tensor], mask: torch.Tensor | None, source: Callable | None) -> None:
    if "attention_mask" not in tensors:
        return
    attention = tensors["attention_mask"].bool()
    empty = (~attention.any(1)).nonzero()
    if len(empty):
        _fail("attention_mask", "at least one token in every row", f"row {empty[0].item()} without any", source)
    if mask is not None:
        outside = (mask & ~attention[:, -mask.shape[1] :]).nonzero()
        if len(outside):
            row, t = outside[0].tolist()
            _fail("response_mask", "0 where attention_mask is 0", f"1 at row {row}, token {t}", source)
    if "position_ids" in tensors:
        length, last = attention.sum(1), (tensors["position_ids"] * attention).amax(1)
        wrong = (last + 1 != length).nonzero()
        if len(wrong):
            row = wrong[0].item()
            found = f"{last[row].item()} in row {row}, which has {length[row].item()} tokens"
            _fail("position_ids", "the last position to be the number of tokens less one", found, source)


def _check_ids(batch: "DataProto", tensors: dict[str, torch.Tensor], source: Callable | None) -> None:
    vocabulary = batch.meta_info.get("vocab_size")
    for name in ("prompts", "responses", "input_ids"):
        if name not in tensors or not tensors[name].numel():
            continue
        low, high = tensors[name].min().item(), tensors[name].max().item()
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            limit = f"below {vocabulary}" if vocabulary is not None else "at least 0"
            _fail(name, f"token ids {limit}", f"ids from {low} to {high}", source)
    if all(k in tensors for k in ("prompts", "responses", "input_ids")):
        joined = torch.cat([tensors["prompts"], tensors["responses"]], 1)
        if not torch.equal(joined, tensors["input_ids"]):
            row = (joined != tensors["input_ids"]).any(1).nonzero()[0].item()
            _fail("input_ids", "prompts followed by responses", f"other ids in row {row}", source)
