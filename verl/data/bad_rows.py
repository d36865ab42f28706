"""Bad rows of the training data: parsed with one message each, and dropped up to `data.max_bad_rows`.

By default, the first bad row ends the run before a model is loaded. With `data.max_bad_rows=N`, bad rows are dropped;
more than N end the run.
"""

import array
import itertools
import json
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

logger = logging.getLogger("verl.data")

_LIST = "`verl data inspect` lists all of a file of prompts"
_LISTED = 20  # bad rows whose reasons are in a message
_DEEPEST = 200  # levels of nested lists and objects: libraries that copy or write rows are recursive


class BadRowsError(ValueError):
    """More bad rows than `data.max_bad_rows`. rows: all of them, and the reason of each."""

    def __init__(self, message: str, rows: Mapping[int, str]):
        super().__init__(message)
        self.rows = rows


def parse_json(text: str, location: str, expected: str) -> Any:
    """Parse the JSON of a row or of a file. Raises ValueError for invalid JSON, an object with a key twice, a number
    that is too long, or values nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = error.msg.removesuffix(" at")  # some messages end with it
        raise ValueError(f"{location}: expected {expected}: {reason} at {line}character {error.colno}") from error
    except RecursionError:
        raise ValueError(f"{location}: expected {expected}, found values nested more than {_DEEPEST} deep") from None
    except LookupError as error:  # raised by _unique_keys()
        raise ValueError(f"{location}: expected {expected}: {error}") from error
    except ValueError:  # raised by int()
        limit = f"{sys.get_int_max_str_digits():,}"
        raise ValueError(f"{location}: expected {expected}, found an integer of more than {limit} digits") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise LookupError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return mapping


def check_values(row: Mapping[str, Any], location: str) -> None:
    """Raise ValueError for values nested too deeply."""
    level: list[Any] = [dict(row)]
    for _ in range(_DEEPEST + 1):
        children = (x for each in level for x in (each.values() if isinstance(each, dict) else each))
        level = [x for x in children if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(f"{location}: values are nested more than {_DEEPEST} deep")


def usable_rows(
    rows: Any, indices: Collection[int], check: Callable[[Mapping[str, Any], int], Any], limit: int
) -> tuple[Sequence[int], dict[int, str]]:
    """Check rows, and drop bad ones.

    Args:
        rows: rows with `location(index)`.
        indices: of the rows to check.
        check: (row, index) -> anything; raises ValueError for a bad row.
        limit: number of bad rows that are allowed.

    Returns:
        The indices of the rows to use, and the reason for each bad row.

    Raises:
        BadRowsError: there are more bad rows than allowed.
    """
    kept, bad = array.array("q"), {}
    for index in indices:
        try:
            check(rows[index], index)
        except ValueError as error:
            bad[int(index)] = str(error)
            continue
        kept.append(index)
    examples = "".join(f"\n  {reason}" for reason in itertools.islice(bad.values(), _LISTED))
    if len(bad) > limit:
        count = f"{len(bad)} of {len(indices)} rows"
        message = f"{count} cannot be used, more than data.max_bad_rows={limit}; {_LIST}; the first:{examples}"
        raise BadRowsError(message, bad)
    if bad:
        text = "dropped %d of %d rows, which cannot be used; %s; the first:%s"
        logger.warning(text, len(bad), len(indices), _LIST, examples)
    return kept, bad
