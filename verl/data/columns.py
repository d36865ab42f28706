"""Columns of RL data: which hold the prompt and the ground truth, and which are passed on."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.columns import COLUMNS
from verl.config import schema
from verl.data.files import Rows
from verl.data.forms import PROMPTS, TRUTHS, find_column, note_columns
from verl.data.tokenization import check_encodable

logger = logging.getLogger("verl.data")

NO_TRUTH = {"style": "none", "ground_truth": None}
"""The `reward_model` of a row without ground truth."""
EXTRA_INFO = ("extra_info", "extro_info")
_DEFAULTS = schema.DataConfig()
#: settings that name a column -> what it is for; the rows need those that are not the default, and the prompt
_PURPOSES = {
    "prompt_key": " for the prompt",
    "ground_truth_key": " for the ground truth",
    "image_key": "",
    "video_key": "",
    "reward_fn_key": " to select the reward by",
}


def find_columns(rows: Rows, config: schema.DataConfig) -> schema.DataConfig:
    """The section with the usual names of `verl.data.forms`, which are logged, where rows have these columns and not
    the default ones; a column that the user has set is not replaced. Raises ValueError if the rows lack a column that
    the settings name: prompt, media, ground truth or reward key."""
    columns = {"prompt_key": find_column(rows.columns, PROMPTS, config.prompt_key)}
    if "reward_model" not in rows.columns:
        columns["ground_truth_key"] = find_column(rows.columns, TRUTHS, config.ground_truth_key)
    named = {"prompt_key": "prompt", "ground_truth_key": "ground truth"}
    used = {named[key]: name for key, name in columns.items() if name in rows.columns}
    is_usual = all(config[key] == column for key, column in columns.items())
    note_columns(rows.names, rows.columns, used, config, is_usual)
    config = config if is_usual else config.model_copy(update=columns)
    for name, purpose in _PURPOSES.items():
        key = config[name]
        if name == "prompt_key" or key != _DEFAULTS[name]:
            rows.check_column(key, name, purpose)
    return config


def reward_columns(rows: Rows, prompt_key: str, media: Sequence[str] = ()) -> list[str]:
    """The columns that reward functions receive in `extra_info`: all, except those with a place of their own. media:
    columns with images and videos, which are read."""
    read = {*media, prompt_key, "data_source", "reward_model", *EXTRA_INFO}
    return [name for name in rows.columns if name not in read]


def extra_info_column(rows: Rows) -> str:
    """The column with the `extra_info` of a row, which may be misspelled."""
    name, misspelled = EXTRA_INFO
    if misspelled in rows.columns:
        use = "ignored" if name in rows.columns else f"read as {name!r}"
        logger.warning("%s: the column %r is %s", rows.names, misspelled, use)
    return misspelled if misspelled in rows.columns and name not in rows.columns else name


def reward_info(row: Mapping[str, Any], names: Sequence[str], extra_info: str = "extra_info") -> dict[str, Any]:
    """The columns `names` of a row, and its extra_info."""
    return {name: row[name] for name in names} | dict(row.get(extra_info) or {})


def data_source(row: Mapping[str, Any], rows: Rows, index: int, key: str) -> str:
    """The row's own source; otherwise the column `key` that selects the reward; otherwise the name of its file."""
    for name in ("data_source", key):
        if name in row:
            if not isinstance(row[name], str) or not row[name]:
                raise ValueError(f"{rows.location(index)}: expected a name in column {name!r}, found {row[name]!r}")
            return row[name]
    return rows.source(index)


def other_columns(rows: Rows, names: Sequence[str]) -> list[str]:
    """Those of `names` that items keep unchanged. Names that the batch uses itself are dropped with a warning."""
    others = [name for name in names if name != "ability"]
    reserved = [name for name in others if name in COLUMNS or name == "index"]
    if reserved:
        logger.warning("%s: only rewards get the columns %s, whose names are reserved", rows.names, ", ".join(reserved))
    return [name for name in others if name not in reserved]


def reward_model(row: Mapping[str, Any], location: str, ground_truth_key: str) -> dict[str, Any]:
    """The `reward_model` entry of a row. Raises ValueError if a row of a file with ground truths has none."""
    if "reward_model" not in row and ground_truth_key not in row:
        return dict(NO_TRUTH)
    if "reward_model" in row and ground_truth_key == _DEFAULTS.ground_truth_key:  # the user has chosen no other column
        value, column = row["reward_model"], "reward_model"
        if not isinstance(value, Mapping):
            raise ValueError(f'{location}: expected reward_model {{"ground_truth": ...}}, found {value!r}')
        entry = {"style": "rule", "ground_truth": None} | {k: v for k, v in value.items() if v is not None}
    else:
        value, column = row.get(ground_truth_key), ground_truth_key
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        entry = {"style": "rule", "ground_truth": str(value) if is_number else value}
    truth = entry["ground_truth"]
    if isinstance(truth, str):
        check_encodable(truth, f"{location}: the ground truth (column {column!r})")
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise ValueError(
            f"{location}: the ground truth (column {column!r}) is {value}: expected a finite number or text"
        )
    is_empty = not truth.strip() if isinstance(truth, str) else isinstance(truth, list) and not truth
    missing = truth is None or truth != truth or is_empty
    if entry["style"] == "rule" and missing:
        raise ValueError(f"{location}: the ground truth (column {column!r}) is missing: found {row.get(column)!r}")
    return entry
