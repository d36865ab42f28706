"""Scoring the responses of a file: responses -> score."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.config.schema.offline import EvalConfig, EvalDataConfig, EvalRewardConfig
from verl.data.columns import reward_info
from verl.data.files import DEFAULT_SOURCE, read_rows
from verl.data.forms import PROMPTS, TRUTHS, find_column
from verl.dataflow import DataFlow, Operator
from verl.evaluation.prompts import INFO, TURNS
from verl.protocol import DataProto
from verl.rewards.functions import ScoreFunction
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager
from verl.rewards.outcome import BadOutcome, RewardError, Sample, read_outcome
from verl.rewards.resolve import resolve_reward_function
from verl.rewards.sandbox.pool import ProcessPool, address_of

logger = logging.getLogger("verl.trainer")

RESPONSES_PER_PASS = 4096


@dataclass(frozen=True)
class PromptWithResponses:
    """A prompt and its responses.

    Attributes:
        key: Identifies the prompt across files.
        data_source: Selects the reward function.
        location: File and row, for messages.
        trajectory_info: Of each response, further entries of extra_info, from agent loops.
    """

    key: str
    prompt: Any
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    responses: list[str]
    location: str
    trajectory_info: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ScoredPrompt:
    """The scores of the responses to one prompt.

    Attributes:
        scores: (n,) float64.
        correct: (n,) bool.
        failed: Number of responses that could not be scored.
    """

    prompt: PromptWithResponses
    scores: np.ndarray
    correct: np.ndarray
    failed: int


# ---- reading --------------------------------------------------------------------------------------------------------


def read_responses(paths: Sequence[str], data: EvalDataConfig) -> list[PromptWithResponses]:
    """Read prompts with their responses and check every row. Raises ValueError with file and row."""
    rows = read_rows(paths)
    data = data.model_copy(update={"prompt_key": find_column(rows.columns, PROMPTS, data.prompt_key)})
    truth = data.reward_model_key
    if truth not in rows.columns or data.ground_truth_key != TRUTHS[0]:
        truth = find_column(rows.columns, TRUTHS, data.ground_truth_key)
    for key, column in {"prompt_key": data.prompt_key, "response_key": data.response_key}.items():
        rows.check_column(column, key)
    has_truth = truth in rows.columns
    if not has_truth and INFO not in rows.columns:  # an environment may score without one
        raise ValueError(
            f"{rows.names}: no ground truth: expected a column {data.reward_model_key!r} ({{'ground_truth': ...}}; "
            f"data.reward_model_key) or {data.ground_truth_key!r} (data.answer_key); found {', '.join(rows.columns)}"
        )
    seen: Counter[str] = Counter()
    read = {data.prompt_key, data.response_key, data.data_source_key, data.reward_model_key, "extra_info", TURNS, INFO}
    others, prompts = [name for name in rows.columns if name not in read], []
    for index, row in enumerate(rows):
        location, responses = rows.location(index), row[data.response_key]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
            raise ValueError(
                f"{location}: expected a list of texts in column {data.response_key!r}, found {responses!r:.80}"
            )
        source = row.get(data.data_source_key, DEFAULT_SOURCE)
        if not isinstance(source, str) or not source:
            raise ValueError(f"{location}: expected a name in column {data.data_source_key!r}, found {source!r}")
        prompt = json.dumps([source, row[data.prompt_key]], sort_keys=True, default=str)
        seen[prompt] += 1
        key = f"{prompt}#{seen[prompt]}"  # a prompt that occurs twice in a file counts as two prompts
        ground_truth = _ground_truth(row[truth], location, truth, truth == data.reward_model_key) if has_truth else None
        info = reward_info(row, others)
        infos, prompt = [*map(json.loads, row.get(INFO) or ["{}"] * len(responses))], row[data.prompt_key]
        if len(infos) != len(responses):
            raise ValueError(f"{location}: {len(responses)} responses, but {len(infos)} in column {INFO!r}")
        prompts.append(PromptWithResponses(key, prompt, source, ground_truth, info, responses, location, infos))
    return prompts


def _ground_truth(truth: Any, location: str, column: str, is_nested: bool) -> Any:
    if is_nested:
        if not isinstance(truth, Mapping):
            raise ValueError(f"{location}: expected {{'ground_truth': ...}} in column {column!r}, found {truth!r:.80}")
        truth = truth.get("ground_truth")
    if truth is None:
        raise ValueError(f"{location}: the ground truth (column {column!r}) is missing")
    return truth


# ---- the flow -------------------------------------------------------------------------------------------------------


def iterate_batches(prompts: Sequence[PromptWithResponses]) -> Iterator[DataProto]:
    """Yield the responses in batches of RESPONSES_PER_PASS samples."""
    pairs = [(prompt, i) for prompt in prompts for i in range(len(prompt.responses))]
    for start in range(0, len(pairs), RESPONSES_PER_PASS):
        selected = pairs[start : start + RESPONSES_PER_PASS]
        samples = [
            Sample(
                p.data_source,
                p.responses[i],
                p.ground_truth,
                {**p.extra_info, **p.trajectory_info[i]},
                number,
                len(selected),
                f"{p.location}, response {i}",
                p.prompt,
            )
            for number, (p, i) in enumerate(selected)
        ]
        yield DataProto.from_dict(non_tensors={"sample": samples})


class Scorer:
    """The operator that scores. Functions run in processes that are killed at the timeout, `async def` functions in an
    event loop, so a call that hangs or crashes does not affect others. A response that cannot be scored raises
    RewardError (reward.on_error=raise) or counts as incorrect (reward.on_error=count)."""

    def __init__(self, function: ScoreFunction, reward: EvalRewardConfig):
        self.on_error = reward.on_error
        manager = BatchRewardManager if function.form == "batch" else NaiveRewardManager
        self.manager = manager(None, function, timeout=reward.timeout)
        if not function.is_async:
            address_of(function.func)
            self.manager.pool = ProcessPool(reward.num_processes or min(16, os.cpu_count() or 1))
        self.first_error: RewardError | None = None

    def __call__(self, batch: DataProto) -> DataProto:
        samples = list(batch.non_tensor_batch["sample"])
        scores, accs, failed = [0.0] * len(samples), [0.0] * len(samples), [False] * len(samples)
        # closed explicitly, so that busy workers are stopped if a sample raises
        with closing(self.manager.outcomes(samples)) as outcomes:
            for i, function, outcome in outcomes:
                try:
                    scores[i], extra = read_outcome(outcome)
                    accs[i] = _accuracy(scores[i], extra)
                except BadOutcome as bad:
                    error = RewardError(f"reward function {function.location} {bad}\n{samples[i].describe()}")
                    error.__cause__ = bad.__cause__
                    if self.on_error == "raise":
                        raise error from bad.__cause__
                    self.first_error = self.first_error or error
                    failed[i] = True
        return DataProto.from_dict(non_tensors={"score": scores, "acc": accs, "failed": failed})

    def close(self) -> None:
        """Stop the worker processes."""
        if self.manager.pool is not None:
            self.manager.pool.close()


def _accuracy(score: float, extra: Mapping[str, Any]) -> float:
    """Return the "acc" of the function, or its score if it returns none."""
    acc = extra.get("acc", score)
    if not isinstance(acc, bool | int | float | np.number | np.bool_) or acc != acc:
        raise BadOutcome(f'returned a dict whose "acc" is {acc!r:.80}: expected a number')
    return float(acc)


def score_prompts(prompts: Sequence[PromptWithResponses], scorer: Scorer, right_from: float) -> list[ScoredPrompt]:
    """Score all responses.

    Args:
        right_from: A response is correct if its "acc", or its score without one, is at least this.

    Raises:
        RewardError: If a response cannot be scored (see `Scorer`), or if none can be.
    """
    batches = iterate_batches(prompts)
    pipeline = DataFlow(
        [
            Operator("responses", lambda: next(batches), writes="sample"),
            Operator("score", scorer, reads="sample", writes=("score", "acc", "failed")),
        ]
    ).compile()
    total = sum(len(prompt.responses) for prompt in prompts)
    scores, accs, failed = np.zeros(total), np.zeros(total), np.zeros(total, dtype=bool)
    done = 0
    while done < total:
        scored = pipeline.run().non_tensor_batch
        span = slice(done, done + len(scored["score"]))
        scores[span], accs[span], failed[span] = (scored[name].astype(float) for name in ("score", "acc", "failed"))
        done = span.stop
        logger.info("scored %s of %s responses", f"{done:,}", f"{total:,}")
    if failed.any():
        logger.error(
            "%d of %d responses could not be scored and count as incorrect; the first error:", failed.sum(), total
        )
        logger.error("%s", scorer.first_error)
    if failed.all():
        raise scorer.first_error
    correct = (accs >= right_from) & ~failed
    ends = np.cumsum([len(prompt.responses) for prompt in prompts])[:-1]
    by_prompt = zip(prompts, np.split(scores, ends), np.split(correct, ends), np.split(failed, ends))
    return [ScoredPrompt(prompt, s, c, int(f.sum())) for prompt, s, c, f in by_prompt]


def find_function(config: EvalConfig, prompts: Sequence[PromptWithResponses]) -> ScoreFunction:
    """The custom or registered reward function, or the rules by data source. Raises ValueError if one is missing."""
    custom = config.reward.custom_reward_function
    registered = config.reward.reward_function
    function = resolve_reward_function(custom.path, custom.name, registered, custom.reward_kwargs)
    for source, first in {prompt.data_source: prompt for prompt in reversed(prompts)}.items():
        info = [first.extra_info] if function.form == "batch" else first.extra_info
        function.for_data_source(source).arguments(source, "", first.ground_truth, info, first.prompt)
    return function
