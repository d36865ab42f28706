"""One batch on its way through the operators: what can start, what is under way, and the batch as it is now.

Operators of other places run in threads of their own; the batch is put together in the thread of the flow alone.
"""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from verl.dataflow.operator import HOLD, Operator
from verl.dataflow.order import Turn, waits
from verl.dataflow.results import Given, Reports, advance, require_columns, take_reports
from verl.protocol import DataProto

logger = logging.getLogger("verl.dataflow")

Span = tuple[float, float]  # when an operator began and ended, by perf_counter
Observer = Callable[[str, float, DataProto | None], None]


class Pass:
    """One batch on its way.

    turns: of the operators. places: where each of them runs; None is the thread of the flow.
    batch: what the first one is given, None for a source. observer: called after each operator.
    spans: when each began and ended. under_way: when those that have not ended began.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        turns: Sequence[Turn],
        places: Sequence[Hashable],
        batch: DataProto | None,
        observer: Observer | None = None,
    ):
        self.batch = batch
        self.spans: dict[str, Span] = {}
        self.under_way: dict[str, float] = {}
        self._operators, self._turns, self._places, self._observer = operators, turns, places, observer
        self._waits = waits(turns, places)
        self._ended: set[int] = set()
        self._waiting = list(range(len(operators)))
        self._running: dict[concurrent.futures.Future, tuple[int, Given | None]] = {}
        self._first = {} if batch is None else take_reports(batch)
        self._reports: dict[int, Reports] = {}
        self._writer = {} if batch is None else dict.fromkeys(batch.columns, -1)  # of each column, its position

    # ---- going on ---------------------------------------------------------------------------------------------------

    def next(self) -> tuple[int, Given | None] | None:
        """Start what can run elsewhere; the next operator for this thread and what it is given, None at the end.

        Waits while there is none because of what is under way. Raises the error of an operator that failed elsewhere.
        """
        while self._waiting or self._running:
            self._take_in()
            ready = [i for i in self._waiting if self._waits[i] <= self._ended]
            for i in ready:
                if self._places[i] is not None:
                    self._start(i)
            here = [i for i in ready if self._places[i] is None]
            if here:
                self._waiting.remove(here[0])
                self.under_way[self._operators[here[0]].name] = time.perf_counter()
                return here[0], self._given(here[0])
            concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        return None

    def end(self, i: int, given: Given | None, result: Any, span: Span) -> None:
        """Operator i is done, and returned `result`."""
        op = self._operators[i]
        self.spans[op.name] = span
        del self.under_way[op.name]
        logger.info("[%s] %.2fs%s", op.name, span[1] - span[0], self._beside(op.name, span))
        self._ended.add(i)
        if result is not HOLD or op.on is not None:
            self.batch, self._reports[i] = advance(op, self.batch, given, result)
            stay = self._writer if op.writes or result is None else {}
            self._writer = {c: stay.get(c, i) if c not in op.writes else i for c in self.batch.columns}
        if self._observer is not None:
            self._observer(op.name, span[1] - span[0], self.batch)

    def blame(self, i: int, error: BaseException) -> None:
        """Say which operator an error comes from, and what else was under way."""
        error.add_note(f"raised in operator {self._operators[i].name!r}")
        others = [self._operators[j].name for j, _ in self._running.values() if j != i]
        if others:
            error.add_note(f"at the same time ran: {', '.join(others)}")

    def reports(self) -> Reports:
        """What all operators reported, in list order."""
        merged: Reports = {"metrics": {}, "timing": {}}
        for reports in (self._first, *(self._reports[i] for i in sorted(self._reports))):
            for name, facts in reports.items():
                merged[name] |= facts
        return merged

    # ---- one operator -----------------------------------------------------------------------------------------------

    def _given(self, i: int) -> Given | None:
        """The batch as operator i may see it: see `order`."""
        if self.batch is None:
            return None
        op, turn = self._operators[i], self._turns[i]
        others = {c for c, j in self._writer.items() if j >= 0 and j not in turn.ancestors}
        hidden = [c for c in self.batch.columns if c in turn.hidden | others and c not in op.reads]
        batch = self.batch.drop(hidden) if hidden else self.batch.copy()
        require_columns(batch, op.reads, op)
        return Given.of(batch)

    def _start(self, i: int) -> None:
        """Run operator i in a thread of its own."""
        op, given = self._operators[i], self._given(i)
        future: concurrent.futures.Future[tuple[Any, Span]] = concurrent.futures.Future()

        def work() -> None:
            start = time.perf_counter()
            try:
                result = op.func() if given is None else op.func(given.batch)
                future.set_result((result, (start, time.perf_counter())))
            except BaseException as error:
                future.set_exception(error)

        self._waiting.remove(i)
        self._running[future] = i, given
        self.under_way[op.name] = time.perf_counter()
        # a daemon: a run that ends by an error does not wait for what it leaves behind; its processes end with it
        threading.Thread(target=work, name=f"operator {op.name}", daemon=True).start()

    def _take_in(self) -> None:
        """End what has run elsewhere, in list order. Raises the first error."""
        done = sorted((self._running[future][0], future) for future in self._running if future.done())
        for i, future in done:
            error = future.exception()
            if error is not None:
                self.blame(i, error)
                raise error
            given = self._running.pop(future)[1]
            self.end(i, given, *future.result())

    def _beside(self, name: str, span: Span) -> str:
        """The words for a line of timing: which operators ran during a part of this one's time."""
        others = [other for other, (_, end) in self.spans.items() if other != name and end > span[0]]
        others += [self._operators[i].name for i, _ in self._running.values() if self._operators[i].name != name]
        return f" (at the same time: {', '.join(others)})" if others else ""
