"""Every column of the batch: dimensions, dtype and meaning; and checks.

B samples, P prompt tokens, T response tokens. Position t of every (B, T) column describes response token t. Shapes and
dtypes are checked when columns are joined (`check_layout`), which reads metadata only. With VERL_STRICT_DATA_CHECK=1
contents are checked after every operator (`check_contents`): finite values, consistent masks, ids inside the
vocabulary, positions that count the tokens. A column that is not in the table is custom: it has B rows, and nothing
else is checked.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from verl.protocol import DataProto


class DataProtoValidationError(ValueError, AssertionError, KeyError):
    """A batch violates its contract. The message names the column, what was expected and found, and the source.

    It is also what public verl raises in these cases: a KeyError or an AssertionError.
    """

    __str__ = Exception.__str__  # that of KeyError quotes the message


@dataclass(frozen=True)
class Column:
    """One row of the table.

    Args:
        dims: "B T", "B T k", "B P", "B P+T", "B P+T layers k" or "B".
        dtype: a key of `DTYPES`, or "object" for a column of Python objects.
        meaning: for the documentation.
    """

    dims: str
    dtype: str
    meaning: str


COLUMNS: dict[str, Column] = {
    "prompts": Column("B P", "int64", "prompt token ids, left-padded"),
    "responses": Column("B T", "int64", "response token ids, right-padded"),
    "input_ids": Column("B P+T", "int64", "prompt then response"),
    "attention_mask": Column("B P+T", "mask", "1 where a token is there"),
    "position_ids": Column("B P+T", "int64", "position of each token in its row, from 0; with mRoPE (B, axes, P+T)"),
    "routed_experts": Column("B P+T layers k", "int16", "experts that routers chose; -1: not recorded, padding"),
    "response_mask": Column("B T", "mask", "1 where the policy sampled the token (tool output, padding: 0)"),
    "loss_mask": Column("B T", "mask", "the response_mask of the updates, where it is another one"),
    "rollout_log_probs": Column("B T", "float", "log-probs as reported by the engine that sampled"),
    "weight_version": Column("B", "int64", "version of the weights that sampled it: completed training steps"),
    "weight_versions": Column("B", "object", "spans (first token, version); in asynchronous training"),
    "finish_reason": Column("B", "object", "why the response ended: stop, length or abort"),
    "trajectory_info": Column("B", "object", "what the agent loop adds to extra_info: turns and rewards of tools"),
    "old_log_probs": Column("B T", "float", "log-probs of the policy before this update, by the training engine"),
    "ref_log_prob": Column("B T", "float", "log-probs of the reference policy"),
    "teacher_log_probs": Column("B T", "float", "log-probs of the teacher of the row (distillation)"),
    "candidate_ids": Column("B T k", "int64", "the k tokens that the teacher finds most probable"),
    "teacher_candidate_log_probs": Column("B T k", "float", "the teacher's log-probs of candidate_ids"),
    "entropys": Column("B T", "float", "entropy of the distribution that each token was sampled from"),
    "values": Column("B T", "float", "the critic's value before each token"),
    "token_level_scores": Column("B T", "float", "reward before the KL penalty"),
    "token_level_rewards": Column("B T", "float", "reward after the KL penalty"),
    "rm_scores": Column("B T", "float", "reward of the reward model"),
    "advantages": Column("B T", "float", "advantage of each token"),
    "returns": Column("B T", "float", "target of the critic"),
    "rollout_is_weights": Column("B T", "float", "importance weight of the trainer's policy over the sampler's"),
    "sum_pi_squared": Column("B T", "float", "sum over the vocabulary of the squared probabilities"),
    "reward_baselines": Column("B", "float", "summed reward of the greedy response to the same prompt"),
    "uid": Column("B", "object", "the prompt a row belongs to: rows of one group share it"),
    "data_source": Column("B", "object", "the dataset of the row; selects its reward rule"),
    "reward_model": Column("B", "object", "what the reward needs, `ground_truth` among it"),
    "extra_info": Column("B", "object", "further information for the reward function"),
    "raw_prompt": Column("B", "object", "the chat messages or the text before tokenization"),
    "prompt_ids": Column("B", "object", "prompt token ids as a list, without padding"),
    "raw_prompt_ids": Column("B", "object", "the same with one placeholder for each image or video"),
    "multi_modal_data": Column("B", "object", "decoded images and videos; None in a text-only row"),
    "multi_modal_inputs": Column("B", "object", "tensors of the processor; None in a text-only row"),
}

_DIMS = {column.dims for column in COLUMNS.values()}
#: columns that define P and T, in the order of the table
_DEFINING = {dim: [name for name, column in COLUMNS.items() if column.dims == f"B {dim}"] for dim in ("P", "T")}

# float64 is for tests of the maths; half precision is rejected: it is too coarse for log-probs
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "int64": (torch.int64,),
    "int16": (torch.int16,),
    "float": (torch.float32, torch.float64),
    "mask": (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64),
}


# ---- the function that wrote a batch, for messages ----------------------------------------------------------------


def innermost(func: Callable) -> Any:
    """The function behind partials, bound methods and decorators (those that use `functools.wraps`)."""
    while True:
        if isinstance(func, functools.partial):
            func = func.func
        elif isinstance(func, MethodType):
            func = func.__func__
        elif inspect.isfunction(func) and inspect.unwrap(func) is not func:
            func = inspect.unwrap(func)
        else:
            return func


def callable_name(func: Callable) -> str:
    """The name of a function, method or class; for other callable objects, the name of the class."""
    func = innermost(func)
    return func.__name__ if inspect.isroutine(func) or inspect.isclass(func) else type(func).__name__


def describe_source(func: Callable) -> str:
    """The last line of an error about a batch: `Source: reward_fn() at line 87 in reward.py`.

    The line number is that of the function's definition, including its decorators; of a callable object, that of
    `__call__`; of a class, that of `__init__`. A function without Python code has only a name.
    """
    name, body = callable_name(func), innermost(func)
    if not inspect.isfunction(body):
        body = innermost(body.__init__ if inspect.isclass(body) else type(body).__call__)
    if not inspect.isfunction(body):
        return f"\n  Source: {name}()"
    code = body.__code__
    return f"\n  Source: {name}() at line {code.co_firstlineno} in {os.path.basename(code.co_filename)}"


def _fail(name: str, expected: str, actual: str) -> NoReturn:
    raise DataProtoValidationError(f"column {name!r}: expected {expected}, found {actual}")


# ---- shapes and dtypes --------------------------------------------------------------------------------------------


def check(batch: "DataProto") -> None:
    """Check shapes and dtypes of known columns, and their contents if VERL_STRICT_DATA_CHECK=1."""
    check_layout(batch)
    check_contents(batch)


def check_layout(batch: "DataProto") -> None:
    """Check shapes and dtypes of the known columns against the table. Raises DataProtoValidationError."""
    tensors = batch.tensors
    sizes = {"B": len(batch)}
    for dim in ("P", "T"):
        if defining := _defining_column(dim, tensors):
            sizes[dim] = tensors[defining].shape[1]
    if "P" in sizes and "T" in sizes:
        sizes["P+T"] = sizes["P"] + sizes["T"]
    shapes = {dims: tuple(map(sizes.get, dims.split())) for dims in _DIMS}
    for name, value in tensors.items():
        column = COLUMNS.get(name)
        if column is None:
            continue
        if column.dtype == "object":
            _fail(name, "a column of objects, one per row", f"a tensor of shape {tuple(value.shape)}")
        shape = shapes[column.dims]
        if name == "position_ids" and value.dim() == 3:  # mRoPE: any number of axes
            shape = (shape[0], None, shape[1])
        if value.dim() != len(shape) or any(s is not None and s != v for s, v in zip(shape, value.shape)):
            hint = one_token_short(tuple(value.shape), shape) if column.dims == "B T" else ""
            _fail(name, f"shape {_spell(column.dims, shape, tensors)}", f"shape {tuple(value.shape)}{hint}")
        if value.dtype not in DTYPES[column.dtype]:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in DTYPES[column.dtype])
            _fail(name, f"dtype {allowed}", str(value.dtype).removeprefix("torch."))
    for name in batch.non_tensor_batch:
        if name in COLUMNS and COLUMNS[name].dtype != "object":
            _fail(name, f"a tensor of dims ({', '.join(COLUMNS[name].dims.split())})", "a column of objects")


def _defining_column(dim: str, tensors: dict[str, torch.Tensor]) -> str | None:
    """The column that defines P or T: the first one of the table with that width that is in the batch."""
    for name in _DEFINING[dim]:
        if name in tensors and tensors[name].dim() == 2:
            return name
    return None


def one_token_short(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> str:
    """Hint for a (B, T) column of width T - 1, as shifted log-probs have it; empty for other shapes."""
    if len(shape) != 2 or expected[1] is None or shape[1] != expected[1] - 1:
        return ""
    return ": position t is that of response token t, the last one included: do not drop a column ([:, :-1], [:, 1:])"


def _spell(dims: str, shape: tuple[int | None, ...], tensors: dict[str, torch.Tensor]) -> str:
    """`(B=4, P+T=8) with P as in 'prompts' and T as in 'responses'`."""
    sizes = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in zip(dims.split(), shape))
    origins = [(dim, _defining_column(dim, tensors)) for dim in ("P", "T") if dim in dims]
    sources = " and ".join(f"{dim} as in {name!r}" for dim, name in origins if name)
    return f"({sizes}) with {sources}" if sources else f"({sizes})"


# ---- contents -----------------------------------------------------------------------------------------------------


def strict_check_enabled() -> bool:
    """Whether VERL_STRICT_DATA_CHECK=1. Read at each call, so that tests can set it."""
    value = os.environ.get("VERL_STRICT_DATA_CHECK", "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"VERL_STRICT_DATA_CHECK: expected 0 or 1, found {value!r}")
    return value == "1"


def check_contents(batch: "DataProto") -> None:
    """With VERL_STRICT_DATA_CHECK=1, check the contents of the known columns, which must have passed `check_layout`.

    Token ids are compared with meta_info["vocab_size"] if the batch has it. Raises DataProtoValidationError.
    """
    if not strict_check_enabled():
        return
    tensors = batch.tensors
    for name, value in tensors.items():
        if name in COLUMNS and COLUMNS[name].dtype == "mask" and (index := _first((value != 0) & (value != 1))):
            _fail(name, "0 or 1 everywhere", f"{value[index].item()} at row {index[0]}, position {index[1]}")
    _check_attention(tensors)
    for bad in find_bad_values(tensors, bounded=False):
        _fail(bad.column, "finite values", str(bad))
    _check_positions(tensors, batch.non_tensor_batch.get("multi_modal_inputs"))
    _check_ids(tensors, batch.meta_info.get("vocab_size"))
    _check_routed_experts(tensors)
    _check_media(batch)


def _first(condition: torch.Tensor) -> tuple[int, int] | None:
    """(row, position) of the first true entry of a (B, W) tensor, or None."""
    indices = condition.nonzero()
    return tuple(indices[0].tolist()) if len(indices) else None


def _check_attention(tensors: dict[str, torch.Tensor]) -> None:
    """Prompts are padded on the left, responses on the right, and the policy's tokens are among the tokens."""
    if "attention_mask" not in tensors:
        return
    attention = tensors["attention_mask"].bool()
    empty = (~attention.any(1)).nonzero()
    if len(empty):
        _fail("attention_mask", "at least one token in every row", f"row {empty[0].item()} without any")
    if "prompts" in tensors:
        prompt = attention[:, : tensors["prompts"].shape[1]]
        if index := _first(prompt[:, :-1] & ~prompt[:, 1:]):
            _fail(
                "attention_mask", "prompts padded on the left only", f"a hole in row {index[0]} after token {index[1]}"
            )
    response = _response_part(tensors)
    if response is None:
        return
    if index := _first(~response[:, :-1] & response[:, 1:]):
        _fail(
            "attention_mask",
            "responses padded on the right only",
            f"a hole in row {index[0]} at response token {index[1]}",
        )
    if "response_mask" in tensors and (index := _first(tensors["response_mask"].bool() & ~response)):
        _fail("response_mask", "0 where attention_mask is 0", f"1 at row {index[0]}, token {index[1]}")


def _response_part(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """(B, T) bool, True where attention_mask has a response token; None if T is unknown."""
    name = _defining_column("T", tensors)
    if "attention_mask" not in tensors or name is None:
        return None
    attention = tensors["attention_mask"].bool()
    return attention[:, attention.shape[1] - tensors[name].shape[1] :]


#: magnitudes beyond which a value cannot be a correct result: the log-prob of a token, and any other column
LARGEST_LOG_PROB, LARGEST_VALUE = 1e4, 1e10


@dataclass(frozen=True)
class BadValues:
    """The values of a column that are NaN, infinite or too large. positions: (n, 1) rows, or (n, 2) rows and tokens."""

    column: str
    positions: torch.Tensor
    first: float

    def __str__(self) -> str:
        index = self.positions[0].tolist()
        location = f"row {index[0]}" + (f", token {index[1]}" if len(index) > 1 else "")
        others = f" and {len(self.positions) - 1} more" if len(self.positions) > 1 else ""
        return f"{self.first} at {location}{others}"


def find_bad_values(tensors: Mapping[str, torch.Tensor], bounded: bool = True) -> list[BadValues]:
    """The values of known float columns that are NaN or infinite at valid positions; padding may have any value.

    Args:
        tensors: the tensor columns of a batch.
        bounded: also those beyond LARGEST_LOG_PROB and LARGEST_VALUE.
    """
    counts = tensors["response_mask"].bool() if "response_mask" in tensors else _response_part(tensors)
    bad_columns = []
    for name, value in tensors.items():
        column = COLUMNS.get(name)
        if column is None or column.dtype != "float":
            continue
        limit = LARGEST_LOG_PROB if "log_prob" in name else LARGEST_VALUE
        good = value.abs() <= limit if bounded else value.isfinite()  # NaN is not below any limit
        bad = ~good & counts if column.dims == "B T" and counts is not None else ~good
        if bad.any():
            positions = bad.nonzero()
            bad_columns.append(BadValues(name, positions, value[tuple(positions[0].tolist())].item()))
    return bad_columns


def _check_positions(tensors: dict[str, torch.Tensor], media: Any) -> None:
    if "attention_mask" not in tensors or "position_ids" not in tensors:
        return
    attention, positions = tensors["attention_mask"].bool(), tensors["position_ids"]
    expected = attention.cumsum(1) - 1
    if positions.dim() == 3:
        _check_axes(attention, positions, expected, media)
    elif index := _first(attention & (positions != expected)):
        _fail(
            "position_ids",
            f"{expected[index].item()} at row {index[0]}, position {index[1]} (the tokens before it)",
            f"{positions[index].item()}",
        )


def _check_routed_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Every token has k different experts in every layer, or none; padding has none."""
    if "routed_experts" not in tensors:
        return
    experts = tensors["routed_experts"]
    ordered = experts.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & (ordered[..., -1] >= 0)
    partial = (experts < 0).any(-1) & (experts >= 0).any(-1)
    wrong = (repeated | partial | (experts < -1).any(-1)).any(-1)
    if index := _first(wrong):
        actual = f"{experts[index].tolist()} at row {index[0]}, position {index[1]}"
        _fail("routed_experts", "different experts, or -1 only, in every layer", actual)
    if "attention_mask" in tensors:
        padded = (experts >= 0).flatten(2).any(-1) & ~tensors["attention_mask"].bool()
        if index := _first(padded):
            _fail("routed_experts", "-1 where attention_mask is 0", f"experts at row {index[0]}, position {index[1]}")


def _check_axes(attention: torch.Tensor, positions: torch.Tensor, expected_positions: torch.Tensor, media: Any) -> None:
    """Positions of several axes: not negative; in text-only rows (media: None), those of text on every axis."""
    is_text = torch.tensor([inputs is None for inputs in media] if media is not None else [False] * len(positions))
    is_text = is_text.to(positions.device)[:, None, None]
    wrong = attention[:, None] & ((positions < 0) | (is_text & (positions != expected_positions[:, None])))
    indices = wrong.nonzero()
    if len(indices):
        row, axis, token = indices[0].tolist()
        expected = str(expected_positions[row, token].item()) if is_text[row] else "at least 0"
        _fail(
            "position_ids",
            f"{expected} at row {row}, axis {axis}, position {token}",
            f"{positions[row, axis, token].item()}",
        )


def _check_media(batch: "DataProto") -> None:
    """The tensors of images are finite, and the placeholder tokens are as many as their grids have.

    The tokens are counted if meta_info["media_tokens"] has their ids and the patches of a token:
    {"image": id, "video": id, "patches": n}.
    """
    tokens = batch.meta_info.get("media_tokens")
    prompts = batch.tensors.get("prompts")
    finite: set[int] = set()  # the samples of a prompt share its tensors
    for row, inputs in enumerate(batch.non_tensor_batch.get("multi_modal_inputs", ())):
        if not isinstance(inputs, Mapping | None):
            _fail("multi_modal_inputs", "a dict of tensors or None in every row", f"{inputs!r:.80} in row {row}")
        for name, value in (inputs or {}).items() if id(inputs) not in finite else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
                _fail("multi_modal_inputs", "finite values", f"NaN or infinity in {name!r} of row {row}")
        finite.add(id(inputs))
        for media in ("image", "video") if tokens and prompts is not None else ():
            grid = (inputs or {}).get(f"{media}_grid_thw")
            expected = 0 if grid is None else int(grid.prod(1).sum()) // tokens["patches"]
            count = int((prompts[row] == tokens[media]).sum())
            if count != expected:
                _fail("prompts", f"{expected} {media} tokens in row {row}, as its {media}_grid_thw has", str(count))


def outside_vocabulary(ids: torch.Tensor, vocab_size: int | None) -> tuple[int, int] | None:
    """(row, position) of the first of the token ids (B, W) that is negative or not below `vocab_size`, or None."""
    return _first(ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size))


def _check_ids(tensors: dict[str, torch.Tensor], vocab_size: int | None) -> None:
    for name in ("prompts", "responses", "input_ids"):
        if name not in tensors:
            continue
        ids = tensors[name]
        if index := outside_vocabulary(ids, vocab_size):
            limit = "of at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            _fail(name, f"token ids {limit}", f"{ids[index].item()} at row {index[0]}, position {index[1]}")
    if all(k in tensors for k in ("prompts", "responses", "input_ids")):
        joined = torch.cat([tensors["prompts"], tensors["responses"]], 1)
        if index := _first(joined != tensors["input_ids"]):
            _fail(
                "input_ids",
                f"prompts followed by responses: {joined[index].item()}",
                f"{tensors['input_ids'][index].item()} at row {index[0]}, position {index[1]}",
            )
