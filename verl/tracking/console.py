"""The display of a running training: a live panel on a terminal, one line per step otherwise."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rich import box
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl.tracking.formatting import (
    HEADLINES,
    StepLine,
    best_point,
    core_results,
    first_and_best,
    format_clock,
    format_headline,
    format_line,
    format_sample,
    format_validation,
    sparkline,
)
from verl.utils import log
from verl.utils.redaction import printable, redact_text

Sample = tuple[str, str, float]
"""(prompt, response, score)"""

#: headlines that are drawn as sparklines
_CURVES = ("reward", "loss")
#: seconds between two drawings of the panel: at most, while an operator runs, and at least, for very fast steps
_REDRAW_SECONDS = 1.0
_MIN_REDRAW_SECONDS = 0.1
#: warnings that the panel keeps, and their characters
_WARNINGS = 2
_WARNING_WIDTH = 400
#: number of operators in the panel: those with the largest total time so far
_OPERATORS = 8
#: smallest share of the time of a step, and at least 0.01 s, of the operators in a line
_SHARE = 0.01


class TrainingProgress:
    """Context manager that displays a run. Call `update` after each step.

        with TrainingProgress(total_steps=100, title="GRPO") as progress:
            progress.update(step, metrics, timings)

    On a terminal, a panel is redrawn in place, and log lines appear above it. Otherwise (a file, CI, a notebook,
    TERM=dumb), lines are printed every `print_every` steps and at the first and last step.

    Args:
        total_steps: number of the last step.
        print_every: steps between two lines without a terminal.
        console: where to print; None: the console of the log.
        quiet: suppress log lines below WARNING meanwhile.
        details: print the operators and samples below each line.
        running: returns the operators that are running, name -> start by `time.perf_counter`.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        print_every: int = 10,
        console: Console | None = None,
        *,
        quiet: bool = True,
        details: bool = True,
        running: Callable[[], Mapping[str, float]] = dict,
    ):
        self.total_steps = total_steps
        self.title = format_line(redact_text(title))
        self.print_every = print_every
        self.console = console or log.console()
        self.quiet, self.details, self.running = quiet, details, running
        self._has_custom_console = console is not None
        self._live: Live | None = None
        self._lines = StepLine(total_steps, self.console.width)
        self._labels: set[str] = set()  # labels of all steps, so that the panel keeps its cells
        self._curves: dict[str, list[float]] = {}
        self._seconds: Counter[str] = Counter()  # operator -> of all steps
        self._validations: dict[str, list[tuple[int, float]]] = {}
        self._samples: Sequence[Sample] = ()
        self._durations: deque[float] = deque(maxlen=20)
        self._last: float | None = None
        self._last_draw = 0.0
        self._log_level = logging.NOTSET
        self._step: tuple[int, Mapping[str, float], Mapping[str, float]] | None = None
        self._warnings = _LastWarnings(_WARNINGS)
        self._has_ended = False
        self._start = time.monotonic()

    @property
    def is_live(self) -> bool:
        """Whether a panel is shown."""
        return self._live is not None

    def __enter__(self) -> "TrainingProgress":
        logger = logging.getLogger("verl")
        self._log_level = logger.level
        if self.quiet:
            logger.setLevel(logging.WARNING)
        if log.is_live(self.console) and self.console.encoding.startswith("utf"):  # else it cannot be drawn
            logger.addHandler(self._warnings)
            self._live = _LivePanel(self._panel, self.console)
            self._live.start(refresh=True)
        elif self.details:
            self._print(self.title)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True
        logger = logging.getLogger("verl")
        if self._live is not None:
            live, self._live = self._live, None
            live.transient = self._step is None  # no step to keep on the screen
            with suppress(OSError):
                live.stop()
            logger.removeHandler(self._warnings)
        if self.quiet:
            logger.setLevel(self._log_level)

    def update(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float] | None = None,
        samples: Sequence[Sample] | None = None,
    ) -> None:
        """Display a finished step.

        Args:
            timings: operator -> seconds; None: from the metrics timing_s/*.
            samples: a few (prompt, response, score) to show. The panel keeps them until the next ones.
        """
        if timings is None:
            values = {name.removeprefix("timing_s/"): value for name, value in metrics.items()}
            timings = {name: values[name] for name in values if f"timing_s/{name}" in metrics and name != "step"}
        now = time.monotonic()
        # the time before the first step was spent on loading models
        self._durations.append(sum(timings.values()) if self._last is None else now - self._last)
        self._last = now
        self._step = step, metrics, timings
        self._seconds.update(timings)
        for label in _CURVES:
            name = next((name for name in HEADLINES[label] if name in metrics), None)
            if name is not None:
                self._curves.setdefault(label, []).append(metrics[name])
        self._add_validation(step, metrics)
        if samples:
            self._samples = samples
        if self._live is not None:
            if now - self._last_draw >= _MIN_REDRAW_SECONDS or step == self.total_steps:
                self._last_draw = now
                self._live.refresh()
        elif step == 1 or step % self.print_every == 0 or step == self.total_steps:
            self._print_step()

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show samples with the next step."""
        self._samples = samples

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Display a validation."""
        self._add_validation(step, metrics)
        if self._live is not None:
            self._live.refresh()
        elif results := core_results(metrics):
            name = next(iter(results))
            self._print(format_validation(step, metrics, best_point(name, self._validations[name])))

    def _add_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in core_results(metrics).items():
            self._validations.setdefault(name, []).append((step, value))

    def _remaining(self, step: int) -> float:
        """Remaining seconds at the pace of the last steps."""
        return (self.total_steps - step) * sum(self._durations) / len(self._durations)

    # ---- lines ------------------------------------------------------------------------------------------------------

    def activity(self) -> str:
        """The last step and the running operators, for a line during a long step."""
        step = 0 if self._step is None else self._step[0]
        return f"step {step}/{self.total_steps} done, now {self._describe_running() or 'starting'}"

    def _print(self, text: str) -> None:
        if self._has_custom_console:
            # soft_wrap: do not wrap lines in a file
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            log.steps.info("%s", text)

    def _print_step(self) -> None:
        step, metrics, timings = self._step
        seconds = metrics.get("timing_s/step", self._durations[-1])
        lines = [self._lines.text(step, metrics, seconds, self._remaining(step))]
        if self.details:
            if slowest := {name: value for name, value in timings.items() if value >= max(0.01, _SHARE * seconds)}:
                lines.append("    " + " ".join(f"[{name}] {value:.2f}s" for name, value in slowest.items()))
            lines += ["    " + format_sample(*sample, width=self.console.width - 4) for sample in self._samples]
        self._samples = ()
        self._print("\n".join(lines))

    # ---- the panel --------------------------------------------------------------------------------------------------

    def _frame(self, rows: list) -> Panel:
        return Panel(Group(*rows), title=Text(self.title), title_align="left", box=box.ROUNDED)

    def _panel(self) -> Panel:
        if self._step is None:
            return self._frame([Text("first step ..."), *self._running_lines()])
        step, metrics, timings = self._step
        width = self.console.width - 4
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}", style="bold"),
            ProgressBar(total=self.total_steps, completed=step),
            Text(f"{format_clock(time.monotonic() - self._start):>7}  ETA {format_clock(self._remaining(step)):>7}"),
        )
        steps = {name: value for name, value in metrics.items() if not name.startswith(("val-core/", "val/"))}
        cells = {label: f"{text:<8}" for label, text in format_headline(steps, self._labels).items()}
        self._labels |= cells.keys()
        rows = [bar, _columns(cells)]
        rows += [_curve(label, values, width) for label, values in self._curves.items() if len(values) > 1]
        rows += [self._validation(name, width) for name in list(self._validations)[:2]]
        longest = set(sorted(self._seconds, key=lambda name: -self._seconds[name])[:_OPERATORS])
        # a cell stays where it is, even if the operator takes no time in a step
        longest = {name for name in longest if self._seconds[name] >= _SHARE * self._seconds.total()}
        seconds_by_operator = {name: f"{f'{seconds:.2f}s':<7}" for name, seconds in timings.items() if name in longest}
        rows.append(_columns(seconds_by_operator))
        rows += [Text(format_sample(*sample, width=width), "dim", no_wrap=True) for sample in self._samples]
        rows += [Text(line, "yellow", no_wrap=True, overflow="ellipsis") for line in self._warnings.lines]
        return self._frame(rows if self._has_ended else rows + self._running_lines())

    def _validation(self, name: str, width: int) -> Text:
        label, values = printable(name.removeprefix("val-core/")), first_and_best(name, self._validations[name])
        line = Text.assemble((f"{label} ", "dim"), values, no_wrap=True, overflow="ellipsis")
        line.truncate(width)
        return line

    def _running_lines(self) -> list[Text]:
        """The operators that run now, so that a long step does not look like a hang."""
        return [Text.assemble(("now ", "dim"), self._describe_running(), no_wrap=True)]

    def _describe_running(self) -> str:
        now = time.perf_counter()
        return ", ".join(f"{printable(name)} {now - start:.0f}s" for name, start in dict(self.running()).items())


def _curve(label: str, values: Sequence[float], width: int) -> Text:
    line = sparkline(values, width - len(label) - 18)
    return Text.assemble((f"{label:<6}", "dim"), f"{values[0]:>7.2f} ", (line, "green"), f" {values[-1]:.2f}")


def _columns(cells: Mapping[str, str]) -> Columns:
    """Lay out `label value` pairs in columns, as many per line as fit."""
    pairs = [Text.assemble((f"{printable(label)} ", "dim"), (value, "bold")) for label, value in cells.items()]
    return Columns(pairs, padding=(0, 3), equal=True)


class _LivePanel(Live):
    """Draws a panel in place of the last one."""

    def __init__(self, draw: Callable[[], Panel], console: Console):
        super().__init__(console=console, get_renderable=draw, refresh_per_second=1 / _REDRAW_SECONDS)

    def refresh(self) -> None:
        """Draw the panel. A terminal that has been closed does not end the run."""
        with suppress(OSError):
            super().refresh()


class _LastWarnings(logging.Handler):
    """Keeps the last warnings of the logger "verl" for the panel."""

    def __init__(self, count: int):
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=count)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(format_line(redact_text(record.getMessage()).partition("\n")[0], _WARNING_WIDTH))
