"""From what a function returned to the batch after it: added, in its place, or unchanged, and nothing half done."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl import columns
from verl.columns import DataProtoValidationError, describe_source
from verl.dataflow.operator import HOLD, Operator
from verl.protocol import MERGED_FACTS, DataProto
from verl.registry import did_you_mean

Reports = dict[str, dict[str, Any]]
"""What an operator reported: its metrics, and timings finer than its own."""


@dataclass(frozen=True)
class Given:
    """What an operator is given: a batch of its own; and what stood in it then, to tell what the operator changed."""

    batch: DataProto
    columns: Mapping[str, Any]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, batch: DataProto) -> "Given":
        return cls(batch, batch.tensors | batch.non_tensor_batch, dict(batch.meta_info))

    def changed_columns(self) -> list[str]:
        now = self.batch.tensors | self.batch.non_tensor_batch
        return [c for c in {**self.columns, **now} if self.columns.get(c) is not now.get(c)]

    def changed_facts(self) -> dict[str, Any]:
        """The facts that the operator set."""
        missing = object()
        return {k: v for k, v in self.batch.meta_info.items() if self.facts.get(k, missing) is not v}


def as_batch(value: Any) -> DataProto:
    """A batch from a batch, or from a mapping of columns."""
    if isinstance(value, DataProto):
        return value
    if isinstance(value, Mapping):
        return DataProto.from_single_dict(value)
    raise DataProtoValidationError(
        f"expected a DataProto, a mapping of columns, None or HOLD, found {type(value).__name__}"
    )


def require_columns(batch: DataProto, names: Iterable[str], op: Operator) -> None:
    for name in names:
        if name not in batch:
            raise DataProtoValidationError(
                f"operator {op.name!r} reads {name!r}, which is not in the batch: {did_you_mean(name, batch.columns)}"
            )


def take_reports(batch: DataProto) -> Reports:
    """Take the metrics (and the finer timings) that stand on a batch off it."""
    reports = {name: batch.meta_info.pop(name, {}) for name in MERGED_FACTS}
    for name, facts in reports.items():
        if not isinstance(facts, Mapping):
            raise DataProtoValidationError(
                f"meta_info[{name!r}]: expected a dict, found {type(facts).__name__}: {facts!r}"
            )
    return reports


def advance(op: Operator, current: DataProto | None, given: Given | None, result: Any) -> tuple[DataProto, Reports]:
    """The batch after `op`, which returned `result`, and what it reported.

    current: the batch as it is now; operators beside `op` may have added to it since `op` was given its own.
    """
    try:
        if result is None:
            after = _unchanged(op, current, given)
        elif op.writes and current is not None:
            after = _added(op, _with_facts(op, current, given), as_batch(result))
        else:
            after = _instead(op, given, result)
        columns.check_contents(after)
        return after, take_reports(after)
    except DataProtoValidationError as error:
        raise DataProtoValidationError(f"operator {op.name!r}: {error}{describe_source(op.func)}") from None


def _with_facts(op: Operator, current: DataProto, given: Given) -> DataProto:
    """The batch with the facts that the operator left on its own."""
    facts = given.batch.meta_info if op.on is None else current.meta_info | given.changed_facts()
    return DataProto(current.batch, current.non_tensor_batch, facts)


def _unchanged(op: Operator, current: DataProto | None, given: Given | None) -> DataProto:
    """The operator returned None: the batch goes on with the columns it had."""
    if op.writes or current is None:
        expected = f"the columns {list(op.writes)}" if op.writes else "a batch"
        raise DataProtoValidationError(f"expected {expected}, found None")
    if touched := given.changed_columns():
        raise DataProtoValidationError(
            f"it changed the columns {touched} of the batch but returned None: return the batch, or the columns "
            "under declared `writes`"
        )
    return _with_facts(op, current, given)


def _instead(op: Operator, given: Given | None, result: Any) -> DataProto:
    """The batch from here on: what a source made, or what an operator without `writes` returned."""
    if op.on is not None and given is not None:
        found = "HOLD" if result is HOLD else "another batch"
        raise DataProtoValidationError(
            f"it says where it runs (on={op.on!r}), so it adds the columns that it declares and nothing else, but it "
            f"returned {found}: declare `writes`, or leave `on` out"
        )
    result = as_batch(result)
    _require_written(op, result)
    if given is not None and given.batch.columns and not result.columns:
        raise DataProtoValidationError(
            "it returned a batch without columns, which would be the batch from here on; return None to keep the one "
            "there is (metrics go into batch.meta_info['metrics'])"
        )
    facts = given.batch.meta_info if given is not None else {}
    return DataProto(meta_info=facts).union(result)  # which checks the columns too


def _added(op: Operator, current: DataProto, result: DataProto) -> DataProto:
    """The batch with the declared columns of `result`.

    What an operator declares it may write anew (rescaled rewards); a column that it hands back must be the one that was
    there. Columns of its own it may add freely, but not those of the table: the edges of the flow come from `writes`.
    """
    _require_written(op, result)
    if undeclared := [c for c in result.columns if c in columns.COLUMNS and c not in (*op.writes, *current.columns)]:
        raise DataProtoValidationError(
            f"it returned {undeclared}, which it does not declare: add them to its `writes` or leave them out"
        )
    if len(result) != len(current):
        raise DataProtoValidationError(f"it adds {list(op.writes)} to {len(current)} rows, found {len(result)} rows")
    rewritten = [c for c in op.writes if c in current]
    return (current.drop(rewritten) if rewritten else current).union(result)


def _require_written(op: Operator, result: DataProto) -> None:
    if missing := [c for c in op.writes if c not in result]:
        raise DataProtoValidationError(
            f"it declares that it writes {missing[0]!r}, but returned {list(result.columns)}"
        )
