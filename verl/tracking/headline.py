"""The few metrics that are worth a glance at every step, in one order, as short text."""

import math
from collections.abc import Mapping

#: label -> the metrics that it stands for (the first one present is shown). The order is the order on the screen.
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

#: labels that often stand for one number (a rule that gives 1 or 0, no KL in the reward): it is shown once
_SCORES = ("score", "acc", "reward")


def short(value: float) -> str:
    """Three digits that matter: 0.0123, 1.24, 153k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 9.995 * size or (unit != "k" and abs(value) >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def headline(metrics: Mapping[str, float]) -> dict[str, str]:
    """label -> text for the headline metrics present, in their order, then the core results of a validation.

    Score, accuracy and reward are left out where they are the same number as one of these before.
    Metrics of a flow that has none of these (a flow of one's own) are all shown, timings and memory left out.
    """
    found = {}
    for label, names in HEADLINES.items():
        name = next((name for name in names if name in metrics), None)
        said = [found[other] for other in _SCORES if label in _SCORES and other in found]
        if name is not None and not any(math.isclose(metrics[name], other, rel_tol=1e-6) for other in said):
            found[label] = metrics[name]
    shown = {label: short(value) for label, value in found.items()}
    rest = [name for name in metrics if name.startswith(("val-core/", "val/"))]
    if not shown and not rest:
        rest = [name for name in metrics if not name.startswith(("timing_s/", "perf/", "training/"))]
    return shown | {name: short(metrics[name]) for name in rest}
