"""What a run looks like while it learns: a live display on a terminal, plain lines elsewhere."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl.tracking.headline import headline
from verl.utils import log

_BLOCKS = "▁▂▃▄▅▆▇█"

Sample = tuple[str, str, float]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks from the smallest value (▁) to the largest (█); equal values give a line in the middle.

    When there are more values than blocks, a block is the mean of neighbours.
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[min(int((m - low) / (high - low) * 8), 7)] for m in means)


class TrainingProgress:
    """Context manager that shows a run: call `update` after each step.

    On a terminal one panel is redrawn in place. Elsewhere lines are printed every `print_every` steps, and at the first
    and the last step. The log is silent below WARNING meanwhile: the display says the same.
    """

    def __init__(self, total_steps: int, title: str, print_every: int = 10, console: Console | None = None):
        self.total_steps = total_steps
        self.title = title
        self.print_every = print_every
        self.console = console or log.console()
        self._live: Live | None = None
        self._rewards: list[float] = []
        self._samples: Sequence[Sample] = ()
        self._durations: deque[float] = deque(maxlen=20)
        self._last: float | None = None
        self._log_level = logging.NOTSET

    def __enter__(self) -> "TrainingProgress":
        logger = logging.getLogger("verl")
        self._log_level = logger.level
        logger.setLevel(logging.WARNING)
        if self.console.is_terminal:
            waiting = Panel(Text("first step ..."), title=self.title, title_align="left", box=box.ROUNDED)
            self._live = Live(waiting, console=self.console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self.console.print(self.title, markup=False, highlight=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live is not None:
            self._live.stop()
            self._live = None
        logging.getLogger("verl").setLevel(self._log_level)

    def update(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        samples: Sequence[Sample] | None = None,
    ) -> None:
        """Show a finished step.

        timings: operator -> seconds. samples: (prompt, response, score) of a few answers, when it is time to show some;
        the panel keeps them until the next ones come.
        """
        now = time.monotonic()
        # Before the first step, time went into loading models.
        self._durations.append(sum(timings.values()) if self._last is None else now - self._last)
        self._last = now
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        if samples:
            self._samples = samples
        if self._live is not None:
            self._live.update(self._panel(step, metrics, timings), refresh=True)
        elif step == 1 or step % self.print_every == 0 or step == self.total_steps:
            self._print(step, metrics, timings)

    def _remaining(self, step: int) -> str:
        """Time to the end at the pace of the last steps."""
        seconds = round((self.total_steps - step) * sum(self._durations) / len(self._durations))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _print(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        values = [f"{label} {text}" for label, text in headline(metrics).items()]
        seconds = [f"[{name}] {value:.2f}s" for name, value in timings.items()]
        lines = [" | ".join([f"step {step}/{self.total_steps}", *values, f"ETA {self._remaining(step)}"])]
        lines.append("    " + " ".join(seconds))
        lines += ["    " + _one_line(prompt, response, score, width=100) for prompt, response, score in self._samples]
        self._samples = ()
        # soft_wrap: a file has no width, a line stays a line.
        self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def _panel(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> Panel:
        width = self.console.width - 4
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {step}/{self.total_steps}", style="bold"),
            ProgressBar(total=self.total_steps, completed=step),
            Text(f"ETA {self._remaining(step)}"),
        )
        parts = [bar, _columns(headline(metrics), width)]
        if len(self._rewards) > 1:
            line = sparkline(self._rewards, width - 40)
            first, last = self._rewards[0], self._rewards[-1]
            parts.append(Text.assemble(("score ", "dim"), f"{first:.2f} ", (line, "green"), f" {last:.2f}"))
        parts.append(_columns({name: f"{seconds:.2f}s" for name, seconds in timings.items()}, width))
        parts += [Text(_one_line(*sample, width=width), style="dim") for sample in self._samples]
        return Panel(Group(*parts), title=Text(self.title), title_align="left", box=box.ROUNDED)


def _columns(cells: Mapping[str, str], width: int) -> Table:
    """`label value` pairs, as many to a line as fit, in columns."""
    longest = max((len(label) + len(value) for label, value in cells.items()), default=0) + 1
    per_line = max(1, min(6, width // (longest + 3)))
    grid = Table.grid(padding=(0, 3, 0, 0))
    pairs = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in cells.items()]
    for start in range(0, len(pairs), per_line):
        grid.add_row(*pairs[start : start + per_line])
    return grid


def _one_line(prompt: str, response: str, score: float, width: int) -> str:
    """`+ prompt -> response`, cut to the width; + for a score above 0. A long prompt is cut in front: its end asks."""
    prompt, response = (" ".join(text.split()) for text in (prompt, response))
    room = max(width - 12, 20)
    if len(prompt) > room // 2:
        prompt = "…" + prompt[-(room // 2) + 1 :]
    left = room - len(prompt)
    if len(response) > left:
        response = response[: left - 1] + "…"
    return f"{'+' if score > 0 else '-'} {prompt} -> {response}  ({score:.2g})"
