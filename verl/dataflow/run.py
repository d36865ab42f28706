"""One run of a batch through the operators: schedules them and tracks the current batch.

Operators of other processes run in threads; the batch itself is only changed in the thread of the flow.
"""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl import columns
from verl.columns import DataProtoValidationError, describe_source
from verl.dataflow.operator import HOLD, Dependencies, Operator, running
from verl.protocol import MERGED_ENTRIES, DataProto
from verl.registry import did_you_mean

logger = logging.getLogger("verl.dataflow")

Span = tuple[float, float]
"""Start and end of an operator, by `time.perf_counter`."""

Observer = Callable[[str, float, DataProto | None], None]
"""Called as (operator name, seconds, shallow copy of the batch) after each operator."""

Reports = dict[str, dict[str, Any]]
"""Reports of one operator: "metrics" and "timing" (parts of its duration) -> name -> value."""


class OperatorInput(NamedTuple):
    """The input of an operator, with the columns and metadata that it had before the operator ran."""

    batch: DataProto
    columns: Mapping[str, Any]
    meta_info: Mapping[str, Any]


@dataclass(eq=False, repr=False)
class PipelineRun:
    """One batch on its way through the operators; see `Pipeline` for `observer`, `log_level`, `label`, `spans` and
    `running_since`.

    deps: the dependencies of each operator. processes: those that run each operator; None is the thread of the flow.
    batch: the input of the first operator; None for a source.
    """

    operators: Sequence[Operator]
    deps: Sequence[Dependencies]
    processes: Sequence[Hashable]
    batch: DataProto | None
    observer: Observer | None
    log_level: int
    label: str

    def __post_init__(self) -> None:
        self.spans: dict[str, Span] = {}
        self.running_since: dict[str, float] = {}
        positions, processes = range(len(self.operators)), self.processes
        # The operators that must have ended before each one starts: its ancestors, and the earlier ones of its
        # processes, whose calls are made in list order, so that they come in the same order in every run.
        self._prerequisites = [
            self.deps[i].ancestors | {j for j in range(i) if processes[j] == processes[i]} for i in positions
        ]
        self._ended: set[int] = set()
        self._waiting = list(positions)
        self._running: dict[concurrent.futures.Future, tuple[int, OperatorInput | None]] = {}
        #: position of an operator (-1: the input) -> its reports, and the rows of the batch after it
        self.reports: dict[int, tuple[Reports, int]] = {}
        self._writer: dict[str, int] = {}  # column -> position of its writer
        self._dropped: dict[str, str] = {}  # column -> the operator whose result replaced the batch without it
        if self.batch is not None:
            self.reports[-1] = take_reports(self.batch), len(self.batch)
            self._writer = dict.fromkeys(self.batch.columns, -1)

    # ---- scheduling -------------------------------------------------------------------------------------------------

    def next(self) -> tuple[int, OperatorInput | None] | None:
        """Start operators that can run in other processes, and return the next one for this thread; None at the end.

        Blocks until an operator is ready. Raises the error of an operator that failed in another thread.
        """
        while self._waiting or self._running:
            # the operators that ended in other threads, in list order
            for i, future in sorted((self._running[future][0], future) for future in self._running if future.done()):
                _, op_input = self._running.pop(future)
                if (error := future.exception()) is not None:
                    self.annotate(i, error)
                    raise error
                self.end(i, op_input, *future.result())
            ready = [i for i in self._waiting if self._prerequisites[i] <= self._ended]
            for i in ready:
                if self.processes[i] is not None:
                    self._start(i)
            local = [i for i in ready if self.processes[i] is None]
            if local:
                self._waiting.remove(local[0])
                self.running_since[self.operators[local[0]].name] = time.perf_counter()
                return local[0], self._input_of(local[0])
            concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        return None

    def end(self, i: int, op_input: OperatorInput | None, result: Any, span: Span) -> None:
        """Record that operator `i` returned `result`, and update the batch."""
        op = self.operators[i]
        others = [name for name, (_, end) in self.spans.items() if end > span[0]]
        others += [self.operators[j].name for j, _ in self._running.values()]
        suffix = f" (at the same time: {', '.join(others)})" if others else ""
        logger.log(self.log_level, "[%s] %.2fs%s", op.name, span[1] - span[0], suffix)
        self.spans[op.name] = span
        del self.running_since[op.name]
        self._ended.add(i)
        if result is not HOLD or op.on is not None:
            columns_before = () if self.batch is None else self.batch.columns
            try:
                self.batch = _batch_after(op, self.batch, op_input, result)
                columns.check_contents(self.batch)
                self.reports[i] = take_reports(self.batch), len(self.batch)
            except DataProtoValidationError as error:
                raise DataProtoValidationError(f"operator {op.name!r}: {error}{describe_source(op.func)}") from None
            # which operator wrote each column, and which one dropped a column
            columns_now, is_replaced = self.batch.columns, isinstance(result, DataProto) and not op.writes
            writers = {} if is_replaced else self._writer
            self._writer = {c: i if c in op.writes else writers.get(c, i) for c in columns_now}
            self._dropped = {c: name for c, name in self._dropped.items() if c not in columns_now}
            self._dropped |= {c: op.name for c in columns_before if c not in columns_now}
        if self.observer is not None:
            self.observer(op.name, span[1] - span[0], None if self.batch is None else self.batch.copy())

    def annotate(self, i: int, error: BaseException) -> None:
        """Add notes to an error: the operator that raised it, and those that ran at the same time."""
        error.add_note(f"raised in operator {self.operators[i].name!r}")
        without_tensors = isinstance(error, TypeError) and "'NoneType'" in str(error)  # batch.batch of no columns
        for column, operator in self._dropped.items() if isinstance(error, KeyError) or without_tensors else ():
            if without_tensors or f"{column!r}" in str(error) or f'"{column}"' in str(error):
                error.add_note(_dropped_by(column, operator))
        if self._running:
            names = (self.operators[j].name for j, _ in self._running.values())
            error.add_note(f"running at the same time: {', '.join(names)}")

    # ---- one operator -----------------------------------------------------------------------------------------------

    def _input_of(self, i: int) -> OperatorInput | None:
        """The batch as operator `i` may see it: without the columns of concurrent operators that it does not read."""
        if self.batch is None:
            return None
        op, deps = self.operators[i], self.deps[i]
        unseen = {c for c, j in self._writer.items() if j >= 0 and j not in deps.ancestors}
        hidden = [c for c in self.batch.columns if c in deps.hidden | unseen and c not in op.reads]
        batch = self.batch.drop(hidden) if hidden else self.batch.copy()
        require_columns(batch, op.reads, op, self._dropped)
        return OperatorInput(batch, batch.tensors | batch.non_tensor_batch, dict(batch.meta_info))

    def _start(self, i: int) -> None:
        op, op_input = self.operators[i], self._input_of(i)
        future: concurrent.futures.Future[tuple[Any, Span]] = concurrent.futures.Future()

        def work() -> None:
            start = time.perf_counter()
            try:
                with running(self.label + op.name):
                    result = op.func() if op_input is None else op.func(op_input.batch)
                future.set_result((result, (start, time.perf_counter())))
            except BaseException as error:
                future.set_exception(error)

        self._waiting.remove(i)
        self._running[future] = i, op_input
        self.running_since[op.name] = time.perf_counter()
        # a daemon, because a run that ends with an error does not wait for its threads; their processes end with it
        threading.Thread(target=work, name=f"operator {op.name}", daemon=True).start()


# ---- the batch after an operator ------------------------------------------------------------------------------------


def as_batch(value: Any) -> DataProto:
    """Return a DataProto unchanged; make one from a mapping of columns."""
    if isinstance(value, DataProto):
        return value
    if isinstance(value, Mapping):
        return DataProto.from_single_dict(value)
    raise DataProtoValidationError(
        f"expected a DataProto, a mapping of columns, None or HOLD, found {type(value).__name__}: return values as "
        "{column: values}"
    )


def require_columns(
    batch: DataProto, names: Iterable[str], op: Operator, dropped: Mapping[str, str] | None = None
) -> None:
    """Raise DataProtoValidationError if `batch` lacks a column that `op` reads.

    Args:
        dropped: column -> the operator that replaced the batch without it.
    """
    for name in names:
        if name in batch:
            continue
        if dropped and name in dropped:
            raise DataProtoValidationError(f"operator {op.name!r} reads {name!r}: {_dropped_by(name, dropped[name])}")
        raise DataProtoValidationError(
            f"operator {op.name!r} reads {name!r}, which is not in the batch: {did_you_mean(name, batch.columns)}"
        )


def _dropped_by(column: str, operator: str) -> str:
    return (
        f"{column!r} was dropped by operator {operator!r}, which declares no `writes`, so the batch that it returned "
        "replaced the previous one. Keep the column in that batch, or return a mapping of the new columns, or declare "
        f"the `writes` of {operator!r}, to add to the batch instead"
    )


def take_reports(batch: DataProto) -> Reports:
    """Remove the metrics and finer timings from the `meta_info` of a batch and return them."""
    reports = {name: batch.meta_info.pop(name, {}) for name in MERGED_ENTRIES}
    for name, value in reports.items():
        if not isinstance(value, Mapping):
            raise DataProtoValidationError(
                f"meta_info[{name!r}]: expected a dict, found {type(value).__name__}: {value!r}"
            )
    return reports


def _batch_after(op: Operator, current: DataProto | None, op_input: OperatorInput | None, result: Any) -> DataProto:
    """The batch unchanged, with the columns of `result`, or replaced by it; with the `meta_info` that `op` set.

    Args:
        current: the batch now. Concurrent operators may have added columns since `op` started.
        op_input: the input of `op`; None for a source.
        result: the return value of `op`.
    """
    if result is None and (op.writes or current is None):
        expected = f"the columns {list(op.writes)}" if op.writes else "a batch"
        raise DataProtoValidationError(f"expected {expected}, found None")
    adds = result is None or bool(op.writes) or (isinstance(result, Mapping) and op.on is None)
    replaces = current is None or not adds or not (len(current) or current.columns)  # no batch yet
    if replaces and op.on is not None and op_input is not None:
        returned = "HOLD" if result is HOLD else "another batch"
        raise DataProtoValidationError(
            f"it declares where it runs (on={op.on!r}), so it may only add the columns that it declares, but it "
            f"returned {returned}: declare `writes`, or remove `on`"
        )
    before, meta_info = (None, {}) if op_input is None else (op_input.batch, op_input.batch.meta_info)
    if op.on is not None and op_input is not None:
        unset = object()
        changed = {name: value for name, value in meta_info.items() if op_input.meta_info.get(name, unset) is not value}
        meta_info = current.meta_info | changed
    if not replaces:
        current = current.copy()
        current.meta_info = dict(meta_info)
    if result is None:
        problem = "returned None: return the batch, or declare the columns as `writes` and return them"
        _require_untouched(op_input, problem)
        return current
    result = as_batch(result)
    if missing := [c for c in op.writes if c not in result]:
        raise DataProtoValidationError(
            f"it declares that it writes {missing[0]!r}, but returned {list(result.columns)}"
        )
    if not result.columns and (not replaces or (before is not None and before.columns)):
        raise DataProtoValidationError(
            "it returned a batch without columns; return None to leave the batch unchanged (metrics go into "
            "batch.meta_info['metrics'])"
        )
    if replaces:
        return _union(DataProto(meta_info=meta_info), result)  # it checks the columns
    return _added(op, current, op_input, result)


def _added(op: Operator, current: DataProto, op_input: OperatorInput | None, result: DataProto) -> DataProto:
    """The batch with the columns of `result`.

    Columns declared in `writes` may be overwritten (rescaled rewards); any other column that is returned must equal the
    one in the batch. Custom columns may be added without a declaration, but not those of the table in
    `verl.columns`, because the edges of the flow are derived from `writes`.
    """
    problem = (
        f"returned only {list(result.columns)}: do not change the batch in place, or declare the columns as `writes` "
        "and return them; to reorder, rename or remove columns, declare no `writes` and return the batch"
    )
    _require_untouched(op_input, problem, result.columns)
    if undeclared := [c for c in result.columns if c in columns.COLUMNS and c not in (*op.writes, *current.columns)]:
        raise DataProtoValidationError(
            f"it returned {undeclared}, which it does not declare: add them to its `writes`, or do not return them"
        )
    if len(result) != len(current):
        names = list(op.writes or result.columns)
        raise DataProtoValidationError(
            f"it adds {names} to {len(current)} rows, found {len(result)} rows; to replace the batch, return a "
            "DataProto and declare no `writes`"
        )
    overwritten = [c for c in op.writes if c in current]
    return _union(current.drop(overwritten) if overwritten else current, result)


def _union(current: DataProto, result: DataProto) -> DataProto:
    """`current.union(result)`, where metadata that an operator returns replaces the earlier values."""
    earlier = {k: v for k, v in current.meta_info.items() if k not in result.meta_info or k in MERGED_ENTRIES}
    current.meta_info = earlier
    return current.union(result)


def _require_untouched(op_input: OperatorInput, problem: str, returned: Iterable[str] = ()) -> None:
    """Raise DataProtoValidationError if the operator changed columns of its input in place and did not return them.

    Args:
        problem: the end of the message.
        returned: the columns that it returned.
    """
    before, now = op_input.columns, op_input.batch.tensors | op_input.batch.non_tensor_batch
    touched = [c for c in {**before, **now} if before.get(c) is not now.get(c) and c not in returned]
    if touched:
        raise DataProtoValidationError(f"it changed the columns {touched} of the batch but {problem}")
