"""Evaluation of answers as a flow: answers -> score. What it reads, and what scoring makes of it."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.config.schema.offline import EvalConfig, EvalDataConfig, EvalRewardConfig
from verl.data.files import Rows, read_rows
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.rewards.functions import ScoreFunction
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager
from verl.rewards.outcome import BadOutcome, RewardError, Row, read_outcome
from verl.rewards.resolve import resolve_reward_function
from verl.rewards.sandbox.pool import ProcessPool, address_of

logger = logging.getLogger("verl.trainer")

ANSWERS_PER_PASS = 4096


@dataclass(frozen=True)
class Question:
    """A prompt with its answers. key: the same for the same prompt in another file. where: file and row."""

    key: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    responses: list[str]
    where: str


@dataclass(frozen=True)
class ScoredQuestion:
    """Scores of the answers to one question, and which of them are right. failed: how many could not be scored."""

    question: Question
    scores: np.ndarray  # (n,) float64
    right: np.ndarray  # (n,) bool
    failed: int


# ---- reading --------------------------------------------------------------------------------------------------------


def read_answered(paths: Sequence[str], data: EvalDataConfig) -> list[Question]:
    """The questions of some files, every row checked. Raises ValueError that names file and row."""
    rows = read_rows(paths)
    names = rows.names
    for key, column in {"prompt_key": data.prompt_key, "response_key": data.response_key}.items():
        if column not in rows.columns:
            raise ValueError(f"{names}: no column {column!r} (data.{key}): {did_you_mean(column, rows.columns)}")
    if data.reward_model_key not in rows.columns and "answer" not in rows.columns:
        raise ValueError(
            f"{names}: no ground truth: expected a column {data.reward_model_key!r} ({{'ground_truth': ...}}; "
            f"data.reward_model_key) or a column 'answer'; found {', '.join(rows.columns)}"
        )
    seen: Counter[str] = Counter()
    return [_question(row, number, rows, data, seen) for number, row in enumerate(rows)]


def _question(row: Mapping[str, Any], number: int, rows: Rows, data: EvalDataConfig, seen: Counter[str]) -> Question:
    where = rows.where(number)
    responses = row[data.response_key]
    responses = [responses] if isinstance(responses, str) else responses
    if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
        raise ValueError(f"{where}: expected a list of texts in column {data.response_key!r}, found {responses!r:.80}")
    source = row.get(data.data_source_key, rows.file_type(number))
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where}: expected a name in column {data.data_source_key!r}, found {source!r}")
    prompt = json.dumps([source, row[data.prompt_key]], sort_keys=True, default=str)
    seen[prompt] += 1
    return Question(
        # a prompt that stands in a file twice is two questions
        key=f"{prompt}#{seen[prompt]}",
        data_source=source,
        ground_truth=_ground_truth(row, where, data),
        extra_info=row.get("extra_info") or {},
        responses=responses,
        where=where,
    )


def _ground_truth(row: Mapping[str, Any], where: str, data: EvalDataConfig) -> Any:
    column = data.reward_model_key if data.reward_model_key in row else "answer"
    found = row[column]
    if column == data.reward_model_key:
        if not isinstance(found, Mapping):
            raise ValueError(f"{where}: expected {{'ground_truth': ...}} in column {column!r}, found {found!r:.80}")
        found = found.get("ground_truth")
    if found is None:
        raise ValueError(f"{where}: the ground truth (column {column!r}) is missing")
    return found


# ---- the flow -------------------------------------------------------------------------------------------------------


def build_evaluation_flow(answers: Callable[[], DataProto], scorer: "Scorer") -> DataFlow:
    """One pass scores one batch of answers."""
    reads = ("response", "data_source", "ground_truth", "extra_info", "where")
    return DataFlow(
        [
            Operator("answers", answers, writes=(*reads, "question")),
            Operator("score", scorer, reads=reads, writes=("score", "acc", "failed")),
        ]
    )


def answers_of(questions: Sequence[Question]) -> Iterator[DataProto]:
    """The answers in batches of ANSWERS_PER_PASS rows; the column `question` says which question a row answers."""
    rows = [(number, i) for number, question in enumerate(questions) for i in range(len(question.responses))]
    for start in range(0, len(rows), ANSWERS_PER_PASS):
        chosen = [(questions[number], number, i) for number, i in rows[start : start + ANSWERS_PER_PASS]]
        yield DataProto.from_dict(
            non_tensors={
                "question": [number for _, number, _ in chosen],
                "response": [question.responses[i] for question, _, i in chosen],
                "data_source": [question.data_source for question, _, _ in chosen],
                "ground_truth": [question.ground_truth for question, _, _ in chosen],
                "extra_info": [question.extra_info for question, _, _ in chosen],
                "where": [f"{question.where}, answer {i}" for question, _, i in chosen],
            }
        )


class Scorer:
    """The operator that scores: an answer that hangs, or takes its process down, cannot stop the others.

    Functions run in processes that are killed at the deadline; `async def` ones in an event loop of their own. An
    answer that cannot be scored ends the evaluation with a RewardError (reward.on_error=raise), or is counted as wrong.
    """

    def __init__(self, function: ScoreFunction, reward: EvalRewardConfig):
        self.on_error = reward.on_error
        manager = BatchRewardManager if function.form == "batch" else NaiveRewardManager
        self.manager = manager(None, function, timeout=reward.timeout)
        if not function.is_async:
            address_of(function.func)
            self.manager.pool = ProcessPool(reward.num_processes or min(16, os.cpu_count() or 1))
        self.first_error: RewardError | None = None

    def __call__(self, batch: DataProto) -> DataProto:
        columns = batch.non_tensor_batch
        names = ("data_source", "response", "ground_truth", "extra_info")
        rows = [
            Row(*values, number=i, total=len(batch), uid=columns["where"][i])
            for i, values in enumerate(zip(*(columns[name] for name in names)))
        ]
        scores, accs, failed = [0.0] * len(rows), [0.0] * len(rows), [False] * len(rows)
        # Closed at once when a row ends the scoring: workers that are still busy must not outlive it.
        with closing(self.manager.outcomes(rows)) as outcomes:
            for i, function, outcome in outcomes:
                try:
                    scores[i], extra = read_outcome(outcome)
                    accs[i] = _accuracy(scores[i], extra)
                except BadOutcome as bad:
                    error = RewardError(f"reward function {function.where} {bad}\n{rows[i].describe()}")
                    error.__cause__ = bad.__cause__
                    if self.on_error == "raise":
                        raise error from bad.__cause__
                    self.first_error = self.first_error or error
                    failed[i] = True
        return DataProto.from_dict(non_tensors={"score": scores, "acc": accs, "failed": failed})

    def close(self) -> None:
        """End the processes."""
        if self.manager.pool is not None:
            self.manager.pool.close()


def _accuracy(score: float, extra: Mapping[str, Any]) -> float:
    """The function's own `acc` where it gives one, else the score."""
    acc = extra.get("acc", score)
    if not isinstance(acc, bool | int | float | np.number | np.bool_) or acc != acc:
        raise BadOutcome(f'returned a dict whose "acc" is {acc!r:.80}: expected a number')
    return float(acc)


def score_questions(questions: Sequence[Question], scorer: Scorer, right_from: float) -> list[ScoredQuestion]:
    """Send all answers through the flow. An answer is right when its `acc`, or else its score, is >= right_from.

    Raises RewardError for an answer that cannot be scored when the scorer does, and when none could be scored.
    """
    batches = answers_of(questions)
    pipeline = build_evaluation_flow(lambda: next(batches), scorer).compile()
    total = sum(len(question.responses) for question in questions)
    scores, accs, failed = np.zeros(total), np.zeros(total), np.zeros(total, dtype=bool)
    done = 0
    while done < total:
        scored = pipeline.run().non_tensor_batch
        at = slice(done, done + len(scored["score"]))
        scores[at], accs[at], failed[at] = (scored[name].astype(float) for name in ("score", "acc", "failed"))
        done = at.stop
        logger.info("scored %s of %s answers", f"{done:,}", f"{total:,}")
    if failed.any():
        logger.error("%d of %d answers could not be scored and count as wrong; the first:", failed.sum(), total)
        logger.error("%s", scorer.first_error)
    if failed.all():
        raise scorer.first_error
    right = (accs >= right_from) & ~failed
    ends = np.cumsum([len(question.responses) for question in questions])[:-1]
    pieces = zip(questions, np.split(scores, ends), np.split(right, ends), np.split(failed, ends))
    return [ScoredQuestion(question, s, r, int(f.sum())) for question, s, r, f in pieces]


def find_function(config: EvalConfig, questions: Sequence[Question]) -> ScoreFunction:
    """The reward function that the configuration names, else the rules by data source, one for each that occurs."""
    custom = config.reward.custom_reward_function
    function = resolve_reward_function(custom.path, custom.name, reward_kwargs=custom.reward_kwargs)
    for source in dict.fromkeys(question.data_source for question in questions):
        function.for_data_source(source)
    return function
