"""The summary at the end of a run: reward or loss, validation results, and duration."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from verl.tracking.formatting import HEADLINES, format_duration, format_number

Series = Sequence[tuple[int, float]]
"""(step, value) in the order of the steps."""

#: steps at both ends over which the reward is averaged
WINDOW = 10
#: headlines that are summarized
_LEARNED = ("reward", "loss")
_MAX_VALIDATIONS = 3
#: metrics of the weight sync that are summarized, and of the staleness of samples
SYNC = ("weight_sync/bytes", "weight_sync/seconds", "weight_sync/bandwidth_share")
STALENESS = re.compile(r"async/staleness_(\d+)")
#: seconds; a push that would be faster at the bandwidth limit is bound by latency
_LATENCY = 1e-3


def summary_lines(
    history: Mapping[str, Series], steps: int, total_steps: int, seconds: float, resumed: int = 0
) -> list[str]:
    """Summarize a run that has trained `steps` of `total_steps` steps.

        reward 0.61 -> 0.90 in 100 steps (2 min 03 s; means of the first and last 10 steps)
        validation reverse/acc/mean@1: 0.906 (step 0) -> 0.968 (step 100), best 0.978 (step 80)
        weight sync: 1.24GB in 0.11 s, 62% of the bandwidth limit (median push)
        staleness in updates: 0: 3,200 samples (50%), 1: 3,200 samples (50%)

    Args:
        history: metric -> values; metrics other than the reward, the loss, validation results, and the cost and
            staleness of a rollout with separate weights have no line.
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
            trained = f"in {len(values)} steps, up to step {steps}{total}"
        lines.append(f"{label} {first:.2f} -> {last:.2f} {trained} ({time}{means})")
    validations = [name for name in history if name.startswith("val-core/") and "/mean@" in name]
    for name in [*validations[:_MAX_VALIDATIONS], *(["val/loss"] if "val/loss" in history else [])]:
        label = name.removeprefix("val-core/").removeprefix("val/")
        lines.append(f"validation {label}: {first_and_best(name, history[name])}")
    return [*lines, *_push_lines(history), *_staleness(history)] if lines else []


def describe_push(size: float, seconds: float, share: float | None) -> str:
    """Format the cost of a weight push.

    Args:
        size: in bytes.
        seconds: that it took.
        share: of the bandwidth limit, if it was measured. A push that would take less than a millisecond at the limit
            is bound by latency, and its share is omitted.
    """
    limit = ""
    if share is not None and share * seconds >= _LATENCY:
        limit = f", {share:.0%} of the bandwidth limit" if share >= 0.005 else ", less than 1% of the bandwidth limit"
    return f"{format_number(size)}B in {seconds:.3g} s{limit}"


def _push_lines(history: Mapping[str, Series]) -> list[str]:
    sizes, seconds, shares = ([value for _, value in history.get(name, ())] for name in SYNC)
    if not any(sizes):  # the rollout shares the weights of training
        return []
    share = statistics.median(shares) if shares else None
    return [f"weight sync: {describe_push(statistics.median(sizes), statistics.median(seconds), share)} (median push)"]


def _staleness(history: Mapping[str, Series]) -> list[str]:
    """The histogram over all samples of the run."""
    counts: Counter[int] = Counter()
    for name, series in history.items():
        if match := STALENESS.fullmatch(name):
            counts[int(match[1])] += int(sum(value for _, value in series))
    total = counts.total()
    bars = [f"{k}: {counts[k]:,} samples ({counts[k] / total:.0%})" for k in sorted(counts) if total]
    return [f"staleness in updates: {', '.join(bars)}"] if bars else []


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
