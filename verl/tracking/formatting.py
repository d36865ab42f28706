"""Metrics as text: short numbers, lines of a fixed layout, sparklines, and the summary of a run."""

import itertools
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence

from verl.utils.redaction import printable

_BLOCKS = "▁▂▃▄▅▆▇█"

#: label -> metrics, of which the first one present is shown; in display order
HEADLINES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean",),
    "acc": ("reward/acc",),
    "net_reward": ("critic/rewards/mean",),  # after the KL penalty
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
_REWARDS = ("reward", "acc", "net_reward")

#: fields of the line of a step: label, headline of the value, characters of the value; in display order
_FIELDS = (
    ("reward", "reward", 5),
    ("acc", "acc", 4),
    ("loss", "loss", 5),
    ("len", "length", 4),
    ("kl", "kl", 4),
    ("ent", "entropy", 4),
    ("grad", "grad_norm", 4),
    ("tok/s", "tok/s", 5),
)
#: the fields that a narrow line drops, first one first
_DROPPED_FIRST = ("tok/s", "ent", "grad", "kl", "len", "acc")


def format_number(value: float) -> str:
    """Format with three significant digits: 0.0123, 1.24, 153k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 9.995 * size or (unit != "k" and abs(value) >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def counted(number: int, noun: str) -> str:
    """Text such as "1 step" and "1,000 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_fixed(value: float, width: int) -> str:
    """Format with as many digits as fit into `width` characters (at least 4), right-aligned, so that lines below each
    other align: `0.625`, `12.50`, `1e-05`. A value too small for that, such as 2e-10 in 4 characters, is 0."""
    for digits in range(width - 2, -1, -1):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            break
    else:
        text = format_number(value)
        if len(text) > width:  # 31k instead of 31.1k
            text = re.sub(r"\.\d+", "", text)
    if value and math.isfinite(value) and float(text.rstrip("kMG")) == 0:
        small = f"{value:.0e}".replace("e-0", "e-")
        text = small if len(small) <= width else text
    return text.rjust(width)


def format_clock(seconds: float) -> str:
    """Format seconds as a clock does: 0:07, 2:03, 1:29:24."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_duration(seconds: float) -> str:
    """Format seconds for a sentence or a table: 41 s, 2 min 03 s, 1 h 29 min, 2 d 05 h."""
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if round(seconds) >= size:
            return f"{round(seconds) // size} {large} {round(seconds) % size // part:02d} {small}"
    return f"{round(seconds)} s"


def headline_values(metrics: Mapping[str, float], keep: Collection[str] = ()) -> dict[str, float]:
    """Label -> value of the headline metrics. Equal reward, accuracy and net reward are there once, except the labels
    in `keep`."""
    values: dict[str, float] = {}
    for label, names in HEADLINES.items():
        name = next((name for name in names if name in metrics), None)
        earlier = [values[other] for other in _REWARDS if label in _REWARDS and other in values]
        same = label not in keep and any(math.isclose(metrics[name], other, rel_tol=1e-6) for other in earlier if name)
        if name is not None and not same:
            values[label] = metrics[name]
    return values


def format_headline(metrics: Mapping[str, float], keep: Collection[str] = ()) -> dict[str, str]:
    """Label -> text for the headline metrics, in display order, then the core validation results. keep: as in
    `headline_values`. If a custom flow has none of these metrics, all of its metrics are shown, except timings and
    memory."""
    texts = {label: format_number(value) for label, value in headline_values(metrics, keep).items()}
    names = [name for name in metrics if name.startswith(("val-core/", "val/"))]
    if not texts and not names:
        names = [name for name in metrics if not name.startswith(("timing_s/", "perf/", "training/"))]
    return texts | {name: format_number(metrics[name]) for name in names}


class StepLine:
    """The lines of the steps of a run, one below the other in the same columns.

        step  12/100  reward 0.625  len 5.12  kl 0.06  grad 0.41  0.36s  ETA 0:32

    The first line decides which columns there are. A later one adds a column only for a metric that the earlier ones
    did not have, and shows `-` for one that is missing. A value of 0 or 1 does not tell whether reward and accuracy are
    the same, so the first line then has both.

    Args:
        width: characters of a line; less important columns are dropped from a narrow one.
    """

    def __init__(self, total_steps: int, width: int = 80):
        self._total, self._width = total_steps, width
        self._known: set[str] = set()
        self._columns: list[tuple[str, str, int]] = []
        self._longest_eta = 0

    def text(self, step: int, metrics: Mapping[str, float], seconds: float, remaining: float) -> str:
        """The line of a step that took `seconds`, with `remaining` seconds to the end of the run."""
        values = headline_values(metrics, self._known)
        if not self._known and values.get("reward") in (0.0, 1.0):
            values = headline_values(metrics, _REWARDS)
        number = f"step {step:>{len(str(self._total))}}/{self._total}"
        if not self._longest_eta:  # it may grow to twice the first estimate
            self._longest_eta = len("  ETA 59:59" if remaining < 1800 else "  ETA 99:59:59")
        if values.keys() - self._known:
            self._known |= values.keys()
            self._columns = self._fitting(self._width - len(number) - len("  0.36s") - self._longest_eta)
        cells = []
        for label, name, width in self._columns:
            value = values.get(name)
            cells.append(f"  {label} {'-'.rjust(width) if value is None else format_fixed(value, width)}")
        if not any(name in self._known for _, name, _ in _FIELDS):
            cells = [f"  {name} {text}" for name, text in format_headline(metrics).items()]
        return "".join([number, *cells, f"  {format_fixed(seconds, 4)}s", f"  ETA {format_clock(remaining)}"])

    def _fitting(self, width: int) -> list[tuple[str, str, int]]:
        """The columns of the known metrics that fit into `width` characters."""
        columns = [field for field in _FIELDS if field[1] in self._known]
        for dropped in _DROPPED_FIRST:
            if sum(len(f"  {label} ") + characters for label, _, characters in columns) <= width:
                break
            columns = [field for field in columns if field[0] != dropped]
        return columns


def format_validation(step: int, metrics: Mapping[str, float], best: tuple[int, float] | None) -> str:
    """The line of a validation: its core results, and the best value of the first one so far."""
    results = [
        f"{name.removeprefix('val-core/')} {format_number(value)}" for name, value in core_results(metrics).items()
    ]
    earlier = f" (best {format_number(best[1])} at step {best[0]})" if best is not None and best[0] != step else ""
    return f"step {step} validation: {', '.join(results)}{earlier}"


def core_results(metrics: Mapping[str, float]) -> dict[str, float]:
    """The core validation results, means first: `val-core/<source>/acc/mean@1`, or `val/loss` of SFT."""
    names = [name for name in metrics if name.startswith(("val-core/", "val/"))]
    return {name: metrics[name] for name in sorted(names, key=lambda name: "/mean@" not in name)}


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` blocks, from ▁ (minimum) to █ (maximum), each the mean of adjacent values. Equal
    values give a line in the middle. NaN and infinity are skipped."""
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[min(int((m - low) / (high - low) * 8), 7)] for m in means)


def format_sample(prompt: str, response: str, score: float, width: int) -> str:
    """`+ prompt -> response  (1)`, truncated to the width; + for a score above 0. Prompts are cut at the front."""
    prompt, response = (" ".join(text.split()) for text in (prompt, response))
    prompt, response = (printable(text) for text in (prompt, response))
    room = max(width - 12, 20)
    if len(prompt) > room // 2:
        prompt = "…" + prompt[-(room // 2) + 1 :]
    remaining = room - len(prompt)
    if len(response) > remaining:
        response = response[: remaining - 1] + "…"
    return f"{'+' if score > 0 else '-'} {prompt} -> {response}  ({score:.2g})"


def format_line(text: str, limit: int = 200) -> str:
    """Escape control characters and line breaks, and shorten to `limit` characters."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return line if len(line) <= limit and len(text) <= limit else line[: limit - 3] + "..."


# ---- the summary at the end of a run --------------------------------------------------------------------------------

Series = Sequence[tuple[int, float]]
"""(step, value) in the order of the steps."""

#: steps at both ends over which the reward is averaged
WINDOW = 10
#: headlines that are summarized
_LEARNED = ("reward", "loss")
_MAX_VALIDATIONS = 3


def summary_lines(
    history: Mapping[str, Series], steps: int, total_steps: int, seconds: float, resumed: int = 0
) -> list[str]:
    """Summarize a run that has trained `steps` of `total_steps` steps.

        reward 0.61 -> 0.90 in 100 steps (2 min 03 s; means of the first and last 10 steps)
        validation reverse/acc/mean@1: 0.906 (step 0) -> 0.968 (step 100), best 0.978 (step 80)

    Args:
        history: metric -> values; metrics other than the reward, the loss and validation results have no line.
        steps: completed steps, those before a resume included. The line names the steps that the history has.
        seconds: of this process.
        resumed: the step from which this process resumed; 0: it did not.
    """
    lines = []
    time = format_duration(seconds) + (f" since step {resumed}" if resumed else "")
    is_complete = steps >= total_steps
    for label in _LEARNED:
        series = next((history[name] for name in HEADLINES[label] if history.get(name)), ())
        values = [value for _, value in series]
        if not values:
            continue
        first, last, window = ends(values)
        means = f"; means of the first and last {window} steps" if window > 1 else ""
        total = "" if is_complete else f" of {total_steps}"
        trained = f"in {len(values)}{total} step{'s' * (len(values) > 1 or not is_complete)}"
        if len(values) < steps:
            trained = f"in {counted(len(values), 'step')}, up to step {steps}{total}"
        lines.append(f"{label} {first:.2f} -> {last:.2f} {trained} ({time}{means})")
    validations = [name for name in history if name.startswith("val-core/") and "/mean@" in name]
    for name in [*validations[:_MAX_VALIDATIONS], *(["val/loss"] if "val/loss" in history else [])]:
        label = name.removeprefix("val-core/").removeprefix("val/")
        lines.append(f"validation {label}: {first_and_best(name, history[name])}")
    return lines


def ends(values: Sequence[float]) -> tuple[float, float, int]:
    """Means of the first and the last values, and how many each of them is of."""
    window = min(WINDOW, max(1, len(values) // 2))
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:]), window


def best_point(name: str, series: Series) -> tuple[int, float]:
    """The best (step, value) of a metric: the smallest value of a loss, the largest of another metric."""
    return (min if name.endswith(("loss", "nll")) else max)(series, key=lambda point: point[1])


def first_and_best(name: str, series: Series) -> str:
    """Such as "0.906 (step 0) -> 0.968 (step 100), best 0.978 (step 80)"."""
    (first_step, first), (last_step, last) = series[0], series[-1]
    if len(series) == 1:
        return f"{first:.3f} (step {first_step})"
    best_step, best = best_point(name, series)
    best_text = f", best {best:.3f} (step {best_step})" if best_step not in (first_step, last_step) else ""
    return f"{first:.3f} (step {first_step}) -> {last:.3f} (step {last_step}){best_text}"
