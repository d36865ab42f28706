"""The display of a running training: a live panel on a terminal, plain lines otherwise."""

import itertools
import logging
import math
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

from verl.utils import log

_BLOCKS = "▁▂▃▄▅▆▇█"

Sample = tuple[str, str, float]
"""(prompt, response, score)"""

#: label -> metrics, of which the first one present is shown; in display order
HEADLINES: dict[str, tuple[str, ...]] = {
    "score": ("critic/score/mean",),
    "acc": ("reward/acc",),
    "reward": ("critic/rewards/mean",),
    "length": ("response_length/mean",),
    "kl": ("actor/ref_kl", "actor/kl", "actor/reward_kl_penalty"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "pg_loss": ("actor/pg_loss",),
    "vf_loss": ("critic/vf_loss",),
    "loss": ("train/loss", "train/nll"),
    "grad_norm": ("actor/grad_norm", "train/grad_norm"),
    "tok/s": ("perf/throughput",),
    "seconds": ("timing_s/step",),
}

#: labels that often have the same value (a reward of 0 or 1, no KL in the reward), which is then shown once
_SCORES = ("score", "acc", "reward")


def short(value: float) -> str:
    """Format with three significant digits: 0.0123, 1.24, 153k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 9.995 * size or (unit != "k" and abs(value) >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def headline(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return label -> text for the headline metrics, in display order, then the core validation results.

    Score, accuracy and reward are shown once if they are equal. If a custom flow has none of these metrics, all of its
    metrics are shown, except timings and memory.
    """
    found = {}
    for label, names in HEADLINES.items():
        name = next((name for name in names if name in metrics), None)
        shown_scores = [found[other] for other in _SCORES if label in _SCORES and other in found]
        if name is not None and not any(math.isclose(metrics[name], other, rel_tol=1e-6) for other in shown_scores):
            found[label] = metrics[name]
    shown = {label: short(value) for label, value in found.items()}
    rest = [name for name in metrics if name.startswith(("val-core/", "val/"))]
    if not shown and not rest:
        rest = [name for name in metrics if not name.startswith(("timing_s/", "perf/", "training/"))]
    return shown | {name: short(metrics[name]) for name in rest}


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` blocks, from ▁ (minimum) to █ (maximum). Equal values give a line in the middle.

    If there are more values than blocks, a block is the mean of adjacent values.
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
    """Context manager that displays a run. Call `update` after each step.

        with TrainingProgress(total_steps=100, title="GRPO") as progress:
            progress.update(step, metrics, timings)

    On a terminal, a panel is redrawn in place. Otherwise, lines are printed every `print_every` steps and at the first
    and last step. Log lines below WARNING are suppressed meanwhile.
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
        """Display a finished step.

        Args:
            metrics: name -> value.
            timings: operator -> seconds.
            samples: a few (prompt, response, score) to show. The panel keeps them until the next ones.
        """
        now = time.monotonic()
        # the time before the first step was spent on loading models
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
        """Remaining time at the pace of the last steps."""
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
        # soft_wrap: do not wrap lines in a file
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
        rows = [bar, _columns(headline(metrics), width)]
        if len(self._rewards) > 1:
            line = sparkline(self._rewards, width - 40)
            first, last = self._rewards[0], self._rewards[-1]
            rows.append(Text.assemble(("score ", "dim"), f"{first:.2f} ", (line, "green"), f" {last:.2f}"))
        rows.append(_columns({name: f"{seconds:.2f}s" for name, seconds in timings.items()}, width))
        rows += [Text(_one_line(*sample, width=width), style="dim") for sample in self._samples]
        return Panel(Group(*rows), title=Text(self.title), title_align="left", box=box.ROUNDED)


def _columns(cells: Mapping[str, str], width: int) -> Table:
    """Lay out `label value` pairs in columns, as many per line as fit."""
    longest = max((len(label) + len(value) for label, value in cells.items()), default=0) + 1
    per_line = max(1, min(6, width // (longest + 3)))
    grid = Table.grid(padding=(0, 3, 0, 0))
    pairs = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in cells.items()]
    for start in range(0, len(pairs), per_line):
        grid.add_row(*pairs[start : start + per_line])
    return grid


def _one_line(prompt: str, response: str, score: float, width: int) -> str:
    """`+ prompt -> response`, truncated to the width; + for a score above 0. Prompts are truncated at the front."""
    prompt, response = (" ".join(text.split()) for text in (prompt, response))
    room = max(width - 12, 20)
    if len(prompt) > room // 2:
        prompt = "…" + prompt[-(room // 2) + 1 :]
    left = room - len(prompt)
    if len(response) > left:
        response = response[: left - 1] + "…"
    return f"{'+' if score > 0 else '-'} {prompt} -> {response}  ({score:.2g})"
