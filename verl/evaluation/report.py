"""Figures of an evaluation by data source, with intervals; the comparison of two models; as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table

from verl.config.schema.offline import EvaluationConfig
from verl.evaluation.score import Question, ScoredQuestion
from verl.evaluation.statistics import PairedComparison, bootstrap_intervals, compare_paired, pass_at_k


@dataclass(frozen=True)
class Figure:
    """A mean over questions and its bootstrap interval; of a single question there is none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Figures:
    """What is reported of one data source, or of all. graded: scores say more than right and wrong."""

    questions: int
    answers: int
    fewest_answers: int
    most_answers: int
    failed: int
    graded: bool
    metrics: dict[str, Figure]


def figures_of(scored: Sequence[ScoredQuestion], settings: EvaluationConfig) -> Figures:
    """Means over the questions:

    accuracy    the share of right answers
    pass@k      the probability that one of k answers is right (verl.evaluation.statistics.pass_at_k)
    avg@k       the share of right ones among the first k answers, for the largest k
    score       the score as the reward function gave it
    """
    n = np.array([len(s.right) for s in scored])
    right = np.array([s.right.sum() for s in scored])
    ks = settings.k or _powers_of_two(int(n.min()))
    columns = {"accuracy": right / n}
    columns |= {f"pass@{k}": pass_at_k(right, n, k) for k in sorted(set(ks))}
    columns[f"avg@{max(ks)}"] = np.array([s.right[: max(ks)].mean() for s in scored])
    columns["score"] = np.array([s.scores.mean() for s in scored])
    values = np.stack(list(columns.values()), 1)
    intervals = [(None, None)] * len(columns)
    if len(scored) > 1:
        intervals = bootstrap_intervals(
            values, confidence=settings.confidence, samples=settings.bootstrap_samples, seed=settings.seed
        ).tolist()
    return Figures(
        questions=len(scored),
        answers=int(n.sum()),
        fewest_answers=int(n.min()),
        most_answers=int(n.max()),
        failed=sum(s.failed for s in scored),
        graded=any((s.scores != s.right).any() for s in scored),
        metrics={
            name: Figure(float(value), low, high)
            for name, value, (low, high) in zip(columns, values.mean(0), intervals)
        },
    )


def check_k(questions: Sequence[Question], ks: Sequence[int]) -> None:
    """ValueError for a k of pass@k that is more than the answers which every question has."""
    fewest = min(questions, key=lambda question: len(question.responses))
    n = len(fewest.responses)
    if max(ks, default=0) > n:
        raise ValueError(
            f"evaluation.k: pass@{max(ks)} needs {max(ks)} answers to every question, found {n} ({fewest.where}): draw "
            f"more (data.n_samples of verl.trainer.main_generation), or use k up to {n}"
        )


def _powers_of_two(n: int) -> list[int]:
    """1, 2, 4 ... below n, and n."""
    return [1 << i for i in range((n - 1).bit_length())] + [n]


@dataclass(frozen=True)
class Evaluated:
    """The figures of one set of answers. sources: by data source, in alphabetical order."""

    sources: dict[str, Figures]
    overall: Figures


def evaluate(scored: Sequence[ScoredQuestion], settings: EvaluationConfig) -> Evaluated:
    """The figures of every data source and of all questions together."""
    sources = {name: figures_of(part, settings) for name, part in by_source(scored).items()}
    return Evaluated(sources, figures_of(scored, settings))


def by_source(scored: Sequence[ScoredQuestion]) -> dict[str, list[ScoredQuestion]]:
    """The questions of each data source, in alphabetical order."""
    sources: dict[str, list[ScoredQuestion]] = {}
    for s in scored:
        sources.setdefault(s.question.data_source, []).append(s)
    return dict(sorted(sources.items()))


# ---- two models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The accuracy of two models on the same questions; the difference is first minus second."""

    sources: dict[str, PairedComparison]
    overall: PairedComparison


def check_same_questions(first: Sequence[str], second: Sequence[str]) -> None:
    """ValueError when two files do not hold the same questions. first, second: the keys of their questions."""
    only_first, only_second = set(first) - set(second), set(second) - set(first)
    if only_first or only_second:
        example = min(only_first or only_second)
        raise ValueError(
            f"data.compare_path: the files do not hold the same questions: {len(only_first):,} of {len(first):,} are "
            f"only in data.path, {len(only_second):,} of {len(second):,} only in data.compare_path, for example "
            f"{example:.120}. Compare answers to one set of prompts"
        )


def compare(
    first: Sequence[ScoredQuestion], second: Sequence[ScoredQuestion], settings: EvaluationConfig
) -> Comparison:
    """Compare question by question, in whatever order the two files have them."""
    accuracy = {s.question.key: s.right.mean() for s in second}

    def paired(part: Sequence[ScoredQuestion]) -> PairedComparison:
        return compare_paired(
            np.array([s.right.mean() for s in part]),
            np.array([accuracy[s.question.key] for s in part]),
            confidence=settings.confidence,
            samples=settings.bootstrap_samples,
            seed=settings.seed,
        )

    return Comparison({name: paired(part) for name, part in by_source(first).items()}, paired(first))


# ---- tables ---------------------------------------------------------------------------------------------------------


def figures_table(evaluated: Evaluated, confidence: float) -> Table:
    """A block of lines for every data source; the last one is of all questions where there are several sources."""
    table = _table("data source", "questions", "answers", "metric", "value", f"{confidence:.0%} interval")
    for name, figures in _with_overall(evaluated.sources, evaluated.overall).items():
        table.add_section()
        head = (name, f"{figures.questions:,}", f"{figures.answers:,}")
        for metric, figure in _shown(figures):
            interval = "" if figure.low is None else f"{figure.low:.4f} .. {figure.high:.4f}"
            table.add_row(*head, metric, f"{figure.value:.4f}", interval)
            head = ("", "", "")
        if figures.failed:
            table.add_row("", "", "not scored", f"{figures.failed:,}", "")
    return table


def comparison_table(comparison: Comparison, confidence: float) -> Table:
    """A block for every data source, and one of all questions where there are several."""
    table = _table("data source", "questions", "accuracy", "data.path - data.compare_path")
    for name, found in _with_overall(comparison.sources, comparison.overall).items():
        table.add_section()
        table.add_row(name, f"{found.questions:,}", "difference", f"{found.difference:+.4f}")
        if found.low is not None:
            table.add_row("", "", f"{confidence:.0%} interval", f"{found.low:+.4f} .. {found.high:+.4f}")
        table.add_row("", "", "p, random signs", _p(found.p_value))
        table.add_row("", "", "better, worse, equal", f"{found.wins:,}, {found.losses:,}, {found.ties:,}")
        table.add_row("", "", "p, sign test", _p(found.sign_test_p))
    return table


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 else "< 0.0001"


def _table(*headings: str) -> Table:
    """Words to the left, numbers to the right; only the name of a data source may be broken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        words = heading in ("data source", "metric", "accuracy")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "data source")
    return table


def _with_overall(sources: dict, overall: object) -> dict:
    return {**sources, "all": overall} if len(sources) > 1 else sources


def _shown(figures: Figures) -> list[tuple[str, Figure]]:
    """Without what says the same twice: pass@1 and avg@1 of single answers, scores that are 0 or 1."""
    single = figures.most_answers == 1
    return [
        (name, figure)
        for name, figure in figures.metrics.items()
        if not (single and "@" in name) and (name != "score" or figures.graded)
    ]
