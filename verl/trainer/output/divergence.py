"""Detectors of diverging training. A message states the values and the settings to change.

A detector is a function of the history of metrics and a `scale`, the factor on its thresholds. `DivergenceWatch`
reports an event once: it is reported again only after the detector no longer fires at half of its thresholds.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from verl.tracking.curves import moving_mean
from verl.tracking.formatting import HEADLINES, Series, best_point

History = Mapping[str, Series]
"""Metric -> its values."""

#: steps over which a metric of single batches is averaged
WINDOW = 5
#: after each this many steps, the detectors run one step more rarely
_EVERY = 500

REWARD, ENTROPY, KL = HEADLINES["reward"], HEADLINES["entropy"], HEADLINES["kl"]


def find(history: History, names: Sequence[str]) -> Series:
    """The series of the first of these metrics that the history has; empty if it has none."""
    return next((history[name] for name in names if history.get(name)), ())


def window_means(series: Series) -> list[tuple[int, float]]:
    """(last step, mean) of every window; the first ones are shorter."""
    return list(zip((step for step, _ in series), moving_mean([value for _, value in series], WINDOW)))


def reward_collapse(history: History, scale: float = 1.0) -> str | None:
    """The mean reward fell below half of its best value, by more than five standard errors."""
    series = find(history, REWARD)
    if len(series) <= WINDOW:
        return None
    highest, now = max(value for _, value in series), statistics.fmean([value for _, value in series[-WINDOW:]])
    if not highest - now > scale * abs(highest) / 2:  # nor does the best mean, which is not above it
        return None
    means = window_means(series)
    best_at = max(range(len(means)), key=lambda i: means[i][1])
    best_step, best = means[best_at]
    changes = [abs(b - a) for (_, a), (_, b) in itertools.pairwise(series[: best_at + WINDOW])]
    # the median of |a - b| of two normal variables is 0.95 standard deviations
    deviation = statistics.median_high(changes) / 0.95
    error = deviation * math.sqrt(1 / min(best_at + 1, WINDOW) + 1 / WINDOW)
    if not best - now > scale * max(abs(best) / 2, 5 * error):
        return None
    return (
        f"the reward collapsed: {best:.3g} (step {best_step}) -> {now:.3g} (mean of {WINDOW} steps)"
        f"{_learning_rate(history)}; then rollout.n (more samples per prompt) and actor.clip_ratio"
    )


def never_correct(history: History, scale: float = 1.0) -> str | None:
    """No response of the first steps was correct: the accuracy was 0, or without an accuracy, every score."""
    accuracy = history.get("reward/acc", ())
    series = [accuracy] if accuracy else [history.get(f"critic/score/{name}", ()) for name in ("min", "max")]
    if any([step for step, _ in curve[:WINDOW]] != list(range(1, WINDOW + 1)) for curve in series):  # a resumed run
        return None
    if any(value != 0 for curve in series for _, value in curve[:WINDOW]):
        return None
    return (
        f"no response of the first {WINDOW} steps was correct: warm up with SFT (docs/sft.md), choose easier prompts, "
        "or check the reward function on a correct response"
    )


def kl_blow_up(history: History, scale: float = 1.0) -> str | None:
    """The KL to the reference exceeds 1 nat per token (median of the window: single batches have outliers)."""
    series = find(history, KL)
    if len(series) < WINDOW:
        return None
    now = statistics.median_high(value for _, value in series[-WINDOW:])
    if not now > scale:
        return None
    return (
        f"the policy is far from the reference: KL {_first_to_last(series)}, median of {WINDOW} steps {now:.3g} "
        f"nats per token{_learning_rate(history)}; then a KL penalty (actor.use_kl_loss, actor.kl_loss_coef)"
    )


def entropy_collapse(history: History, scale: float = 1.0) -> str | None:
    """The entropy fell below a tenth of its first values, and the reward did not rise since it was half of them."""
    entropy = find(history, ENTROPY)
    if not entropy or (first := entropy[0][1]) <= 0:
        return None
    now = statistics.fmean([value for _, value in entropy[-WINDOW:]])
    if not now < 0.1 / scale * first:
        return None
    reward = window_means(find(history, REWARD))
    halved = next(step for step, value in window_means(entropy) if value < first / 2)
    at_half = next((value for step, value in reward if step >= halved), None)
    if at_half is not None and reward[-1][1] > at_half:
        return None
    return (
        f"the entropy collapsed: {_first_to_last(entropy)}, mean of {WINDOW} steps {now:.3g}, and the reward did not "
        "rise meanwhile"
        f"{_learning_rate(history)}; then actor.entropy_coeff, a larger actor.clip_ratio_high, or rollout.temperature"
    )


def worse_validation(history: History, scale: float = 1.0, prompts: int | None = None) -> str | None:
    """A validation result is 20 % below its best, or twice in a row 15 %, by more than three standard errors of an
    accuracy, if the number of validation prompts is known."""
    for name, series in history.items():
        if not name.startswith("val-core/") or "/mean@" not in name or len(series) < 2:
            continue
        (best_step, best), (step, now) = best_point(name, series), series[-1]
        noise = 0.0
        if prompts and 0 <= now <= best <= 1:  # an accuracy; of another reward, the spread of a prompt is not known
            noise = 3 * math.sqrt((best * (1 - best) + now * (1 - now)) / prompts)
        second = max(value for _, value in series[-2:])
        worse = best - now > scale * 0.2 * abs(best) or best - second > scale * 0.15 * abs(best)
        if worse and best - now > scale * noise:
            return (
                f"validation got worse: {name.removeprefix('val-core/')} {best:.3f} (step {best_step}) -> {now:.3f} "
                f"(step {step}){_learning_rate(history)}; trainer.save_best keeps the best checkpoint"
            )
    return _overfitting(history, scale)


def _overfitting(history: History, scale: float) -> str | None:
    """The validation loss of SFT rose by 5 %."""
    series = history.get("val/loss", ())
    if len(series) < 2:
        return None
    (best_step, best), (step, now) = best_point("val/loss", series), series[-1]
    if not now - best > scale * 0.05 * abs(best):
        return None
    return (
        f"validation got worse: loss {best:.3f} (step {best_step}) -> {now:.3f} (step {step}); train for fewer steps "
        "(trainer.total_epochs), or lower optim.lr"
    )


def _first_to_last(series: Series) -> str:
    """Both ends, each with its step: the figures of metrics.jsonl."""
    (first_step, first), (step, now) = series[0], series[-1]
    return f"{first:.3g} (step {first_step}) -> {now:.3g} (step {step})"


def _learning_rate(history: History) -> str:
    """The first setting to look at, with its value."""
    series = history.get("actor/lr", ())
    value = f" ({max(value for _, value in series):.3g})" if series else ""
    return f". Lower actor.optim.lr{value} first"


DETECTORS: dict[str, Callable[..., str | None]] = {
    "correct": never_correct,
    "reward": reward_collapse,
    "kl": kl_blow_up,
    "entropy": entropy_collapse,
    "validation": worse_validation,
}


#: metrics of the history, in addition to validation results; the last line is for the summary of the run
_KEPT = {"actor/lr", "reward/acc", "critic/score/min", "critic/score/max", *REWARD, *ENTROPY, *KL}
_KEPT |= {*HEADLINES["loss"]}
#: prefixes of validation results
_VALIDATION = ("val-core/", "val/")


class DivergenceWatch:
    """Reports each event once. prompts: number of validation prompts, if known."""

    def __init__(self, prompts: int | None = None):
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._prompts = prompts
        self._updates = 0
        self._reported: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Add the metrics of a step or of a validation. Returns one line for each new event."""
        for name, value in metrics.items():
            if math.isfinite(value) and (name in _KEPT or name.startswith(_VALIDATION)):
                self.history.setdefault(name, []).append((step, value))
        self._updates += 1
        # the detectors read the whole history: rarer checks in a long run keep the time per step bounded
        is_validation = any(name.startswith(_VALIDATION) for name in metrics)
        if self._updates % (1 + self._updates // _EVERY) and not is_validation:
            return []
        lines = []
        for kind, detector in DETECTORS.items():
            if detector is worse_validation and not is_validation:  # it reads the results of validations only
                continue
            options = {"prompts": self._prompts} if detector is worse_validation else {}
            if kind in self._reported:
                if detector(self.history, scale=0.5, **options) is None:
                    self._reported.discard(kind)
            elif (line := detector(self.history, **options)) is not None:
                self._reported.add(kind)
                lines.append(f"step {step}: {line}")
        return lines
