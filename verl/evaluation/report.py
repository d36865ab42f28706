"""Evaluation report: metrics by data source with confidence intervals, and the comparison of two models.

Printed as tables and written as JSON, whose keys are the fields of the dataclasses.
"""

import json
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from verl.checkpoints.atomic import atomic_write, check_folder
from verl.config.schema.offline import EvalConfig, EvaluationConfig
from verl.evaluation.score import (
    PromptWithResponses,
    ScoredPrompt,
    Scorer,
    find_function,
    read_responses,
    score_prompts,
)
from verl.evaluation.statistics import PairedComparison, compare_paired, mean_intervals, pass_at_k
from verl.rewards.outcome import RewardError
from verl.trainer.checks.preflight import Recipe, Settings, open_run
from verl.trainer.startup.command_line import print_error
from verl.utils.disk import DiskFullError
from verl.utils.log import console
from verl.utils.redaction import console_text

logger = logging.getLogger("verl.trainer")

R = TypeVar("R")


@dataclass(frozen=True)
class Metric:
    """A mean over prompts and its interval; a single prompt has none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Metrics:
    """The metrics of one data source, or of all.

    Attributes:
        fewest_responses, most_responses: Of a prompt.
        failed: Number of responses that could not be scored.
        graded: Whether scores differ from correctness.
        metrics: Name -> mean over prompts.
    """

    prompts: int
    responses: int
    fewest_responses: int
    most_responses: int
    failed: int
    graded: bool
    metrics: dict[str, Metric]


def compute_metrics(scored: Sequence[ScoredPrompt], settings: EvaluationConfig) -> Metrics:
    """Compute means over prompts.

    accuracy    fraction of correct responses
    pass@k      probability that at least one of k responses is correct (verl.evaluation.statistics.pass_at_k)
    avg@k       fraction of correct responses among the first k, for the largest k
    score       the score of the reward function
    """
    n = np.array([len(s.correct) for s in scored])
    correct = np.array([s.correct.sum() for s in scored])
    fewest = int(n.min())
    ks = settings.k or [1 << i for i in range((fewest - 1).bit_length())] + [fewest]  # 1, 2, 4, ... and all
    columns = {"accuracy": correct / n}
    columns |= {f"pass@{k}": pass_at_k(correct, n, k) if k > 1 else correct / n for k in sorted(set(ks))}
    columns[f"avg@{max(ks)}"] = np.array([s.correct[: max(ks)].mean() for s in scored])
    columns["score"] = np.array([s.scores.mean() for s in scored])
    values = np.stack(list(columns.values()), 1)
    intervals: list[tuple[float | None, float | None]] = [(None, None)] * len(columns)
    if len(scored) > 1:
        options = {"samples": settings.bootstrap_samples, "seed": settings.seed}
        intervals = mean_intervals(values, confidence=settings.confidence, **options)
    return Metrics(
        prompts=len(scored),
        responses=int(n.sum()),
        fewest_responses=fewest,
        most_responses=int(n.max()),
        failed=sum(s.failed for s in scored),
        graded=any((s.scores != s.correct).any() for s in scored),
        metrics={
            name: Metric(float(value), low, high)
            for name, value, (low, high) in zip(columns, values.mean(0), intervals)
        },
    )


def check_k(prompts: Sequence[PromptWithResponses], ks: Sequence[int]) -> None:
    """Raise ValueError if a k of pass@k exceeds the number of responses to a prompt."""
    fewest = min(prompts, key=lambda prompt: len(prompt.responses))
    n = len(fewest.responses)
    if max(ks, default=0) > n:
        raise ValueError(
            f"evaluation.k: pass@{max(ks)} requires {max(ks)} responses to every prompt, found {n} "
            f"({fewest.location}): generate more (data.n_samples of verl.trainer.main_generation), or use k up to {n}"
        )


@dataclass(frozen=True)
class BySource(Generic[R]):
    """A result for each data source, in alphabetical order, and for all prompts."""

    sources: dict[str, R]
    overall: R

    def sections(self) -> dict[str, R]:
        """The sections of a table: the sources, and all prompts if there are several sources."""
        return {**self.sources, "all": self.overall} if len(self.sources) > 1 else self.sources


def by_source(scored: Sequence[ScoredPrompt], compute: Callable[[Sequence[ScoredPrompt]], R]) -> BySource[R]:
    """Compute a result for the prompts of each data source, and for all."""
    sources: dict[str, list[ScoredPrompt]] = {}
    for s in scored:
        sources.setdefault(s.prompt.data_source, []).append(s)
    return BySource({name: compute(prompts) for name, prompts in sorted(sources.items())}, compute(scored))


# ---- two models -----------------------------------------------------------------------------------------------------


def check_same_prompts(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise ValueError if two files, given by the keys of their prompts, contain different prompts."""
    only_first, only_second = set(first) - set(second), set(second) - set(first)
    if only_first or only_second:
        example = min(only_first or only_second)
        raise ValueError(
            f"data.compare_path: the files contain different prompts: {len(only_first):,} of {len(first):,} are only "
            f"in data.path, {len(only_second):,} of {len(second):,} only in data.compare_path, for example "
            f"{example:.120}. Compare responses to the same prompts"
        )


def compare(
    first: Sequence[ScoredPrompt], second: Sequence[ScoredPrompt], settings: EvaluationConfig
) -> BySource[PairedComparison]:
    """Compare the accuracy of two models prompt by prompt, first minus second. Their order does not matter."""
    accuracy = {s.prompt.key: s.correct.mean() for s in second}

    def paired(scored: Sequence[ScoredPrompt]) -> PairedComparison:
        return compare_paired(
            np.array([s.correct.mean() for s in scored]),
            np.array([accuracy[s.prompt.key] for s in scored]),
            confidence=settings.confidence,
            samples=settings.bootstrap_samples,
            seed=settings.seed,
        )

    return by_source(first, paired)


# ---- tables ---------------------------------------------------------------------------------------------------------


def metrics_table(evaluated: BySource[Metrics], confidence: float) -> Table:
    """Return a table with a section per data source. With several, each row has the data source."""
    table = _table("data source", "prompts", "responses", "metric", "value", f"{confidence:.0%} interval")
    for name, metrics in evaluated.sections().items():
        table.add_section()
        head = (_cell(name), f"{metrics.prompts:,}", f"{metrics.responses:,}")
        for metric_name, metric in _distinct_metrics(metrics):
            interval = "" if metric.low is None else f"{metric.low:.4f} .. {metric.high:.4f}"
            table.add_row(*head, _cell(metric_name), f"{metric.value:.4f}", interval)
            head = (_cell(name) if len(evaluated.sources) > 1 else "", "", "")
        if metrics.failed:
            table.add_row(*head, "failed to score", f"{metrics.failed:,}", "")
    return table


def comparison_table(comparison: BySource[PairedComparison], confidence: float) -> Table:
    """Return a table as `metrics_table` does."""
    table = _table("data source", "prompts", "accuracy", "data.path - data.compare_path")
    for name, result in comparison.sections().items():
        table.add_section()
        table.add_row(_cell(name), f"{result.prompts:,}", "difference", f"{result.difference:+.4f}")
        head = (_cell(name) if len(comparison.sources) > 1 else "", "")
        if result.low is not None:
            table.add_row(*head, f"{confidence:.0%} interval", f"{result.low:+.4f} .. {result.high:+.4f}")
        table.add_row(*head, "p, sign-flip test", f"{p:.4f}" if (p := result.p_value) >= 1e-4 else "< 0.0001")
        table.add_row(*head, "better, worse, equal", f"{result.wins:,}, {result.losses:,}, {result.ties:,}")
    return table


def _cell(name: str) -> Text:
    """A name of the data, which may look like markup or contain control characters."""
    return Text(console_text(name))


def _table(*headings: str) -> Table:
    """Return an empty table: text left-aligned, numbers right-aligned; only data source names may wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_text = heading in ("data source", "metric", "accuracy")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "data source")
    return table


def _distinct_metrics(metrics: Metrics) -> list[tuple[str, Metric]]:
    """Metrics that do not repeat the accuracy, as avg@k of all responses, scores of 0 or 1 or pass@1 of single ones."""
    repeated = {f"avg@{metrics.most_responses}"}
    repeated |= set() if metrics.graded else {"score"}
    repeated |= {"pass@1"} if metrics.most_responses == 1 else set()
    return [(name, metric) for name, metric in metrics.metrics.items() if name not in repeated]


# ---- the run --------------------------------------------------------------------------------------------------------


class Evaluation:
    """Scores the responses of a file, and optionally compares them with those of another file.

    The constructor runs all checks, before anything is scored.

    Args:
        config: a YAML file, a dictionary with nested or dotted keys, an EvalConfig, or None for overrides alone.
        config_path: the same as config, for a file.
        overrides: `key=value` settings.

    Raises:
        ValueError: For invalid settings or files, or an unsupported reward function.
    """

    def __init__(
        self,
        config: Settings = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
    ):
        run = open_run(config_path if config is None else config, overrides, Recipe(schema=EvalConfig))
        config: EvalConfig = run.config
        self.config, self._passed = config, run.passed
        self.prompts = read_responses(config.data.path, config.data)
        self.compared = read_responses(config.data.compare_path, config.data) if config.data.compare_path else None
        for prompts in self._both():
            check_k(prompts, config.evaluation.k)
        if self.compared is not None:
            check_same_prompts([p.key for p in self.prompts], [p.key for p in self.compared])
        self.function = find_function(config, self.prompts)
        self.scorer = Scorer(self.function, config.reward)
        path = config.evaluation.output_path
        self.output = Path(path) if path else Path(config.data.path[0]).with_suffix(".eval.json")
        check_folder("evaluation.output_path", self.output.parent)

    def passed_checks(self) -> Sequence[str]:
        """Return the names of the checks that have passed."""
        return (*self._passed, "responses", "pass@k", "compared files", "reward function", "output file")

    def plan(self) -> str:
        """Describe what `run` would do."""
        counts = [f"{sum(len(p.responses) for p in prompts):,} responses" for prompts in self._both()]
        compared = f" and compare them with {counts[1]}" if len(counts) > 1 else ""
        function = self.function.location if self.function.route is None else "the rules by data source"
        return (
            f"would score {counts[0]} to {len(self.prompts):,} prompts{compared} with {function}; output: {self.output}"
        )

    def _both(self) -> list[list[PromptWithResponses]]:
        return [self.prompts] if self.compared is None else [self.prompts, self.compared]

    def run(self) -> dict[str, Any]:
        """Score, print the tables and write the JSON file. Returns the contents of that file. Raises RewardError if a
        response cannot be scored (reward.on_error=raise)."""
        settings = self.config.evaluation
        try:
            scored = [score_prompts(prompts, self.scorer, settings.right_from) for prompts in self._both()]
        finally:
            self.scorer.close()
        paths = (self.config.data.path, self.config.data.compare_path)
        report: dict[str, Any] = {"settings": self.config.model_dump(mode="json")}
        for name, files, scored_prompts in zip(("evaluated", "compared_with"), paths, scored):
            evaluated = by_source(scored_prompts, partial(compute_metrics, settings=settings))
            report[name] = {"files": files, **asdict(evaluated)}
            console().print(console_text(", ".join(files)), markup=False, highlight=False, soft_wrap=True)
            console().print(metrics_table(evaluated, settings.confidence))
        if len(scored) > 1:
            comparison = compare(*scored, settings)
            report["comparison"] = asdict(comparison)
            console().print(comparison_table(comparison, settings.confidence))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.output) as draft:
            draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        logger.info("wrote %s", self.output)
        return report


def execute(evaluation: Evaluation) -> int:
    """Evaluate for a command line. Returns the exit status."""
    try:
        evaluation.run()
    except RewardError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # the location in the user's function
        return print_error(error)
    except DiskFullError as error:
        return print_error(error)
    return 0
