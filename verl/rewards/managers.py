"""Reward managers: compute the per-token reward of a batch.

    naive   one call per response, in this process
    batch   one call for the whole batch: the function takes lists
    dapo    naive, with a penalty for responses close to the length limit
    prime   naive, in a pool of subprocesses that can be killed

The reward of a response is placed at the last token sampled by the policy; all other positions are 0. The score of a
sample depends neither on the other samples of the batch nor on their order.
"""

import inspect
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from verl.processes.streams import print_printable
from verl.protocol import DataProto
from verl.registry import Registry, did_you_mean
from verl.rewards.functions import ScoreFunction
from verl.rewards.outcome import BadOutcome, RewardError, Sample, read_outcome, split_outcome
from verl.rewards.responses import add_group_scores, prompt_texts, read_samples, reward_tensor, token_masks
from verl.rewards.sandbox.calls import Isolation, call_samples
from verl.rewards.sandbox.pool import Outcome, ProcessPool, address_of

logger = logging.getLogger(__name__)

_RETRY_SECONDS, _LONGEST_RETRY = 1.0, 30.0  # before the first retry, doubled for each further one

REWARD_MANAGER_REGISTRY: Registry[type] = Registry("reward manager", builtins_replaceable=True)


def register_reward_manager(name: str) -> Callable[[type], type]:
    """Register a class under `name`, the value of `reward.reward_manager.name` (class decorator).

    The class is a subclass of RewardManager, or a manager written for public verl (`is_public_manager`). It may
    take the name of a built-in manager, which it replaces.
    """

    def decorate(manager: type) -> type:
        check_manager(name, manager)
        return REWARD_MANAGER_REGISTRY.register(name, manager)

    return decorate


register = register_reward_manager


def check_manager(name: str, cls: Any) -> None:
    """Raise ValueError if `cls` is not a reward manager."""
    if not (inspect.isclass(cls) and issubclass(cls, RewardManager)) and not is_public_manager(cls):
        raise ValueError(
            f"reward manager {name!r}: expected a subclass of RewardManager, or a class with the method "
            f"__call__(self, data, return_dict=False) or async run_single(self, data), found {cls!r}"
        )


def scores_single_samples(cls: Any) -> bool:
    """Whether a class has the method `run_single` of public verl's managers."""
    return inspect.isfunction(inspect.getattr_static(cls, "run_single", None))


def is_public_manager(cls: Any) -> bool:
    """Whether a class is a manager of public verl: it has `__call__(data, return_dict)` or `run_single(data)`."""
    if not inspect.isclass(cls) or issubclass(cls, RewardManager):
        return False
    if scores_single_samples(cls):
        return True
    call = inspect.getattr_static(cls, "__call__", None)
    return inspect.isfunction(call) and "data" in inspect.signature(call).parameters


def reward_result(
    data: DataProto, rewards: torch.Tensor, extras: Sequence[Mapping[str, Any]], failed: int
) -> dict[str, Any]:
    """The result of a manager with `return_dict`, from the extra values of each sample; a missing value is None."""
    empty = int((~token_masks(data)[1].any(1)).sum())
    names = dict.fromkeys(name for extra in extras for name in extra)
    return {
        "reward_tensor": rewards,
        "reward_extra_info": {name: [extra.get(name) for extra in extras] for name in names},
        "metrics": {"reward/failed_rows": float(failed), "reward/empty_responses": float(empty)},
    }


def check_failure_rate(failures: Collection[RewardError], total: int, limit: float) -> None:
    """Raise RewardError with the most frequent errors if more than one sample and a share above `limit` failed."""
    if len(failures) <= max(1, limit * total):
        return
    counts = Counter(str(error).splitlines()[0] for error in failures)
    lines = "".join(f"\n  {count} x {text}" for text, count in counts.most_common(3))
    raise RewardError(
        f"{len(failures)} of {total} samples of a step failed to score, more than reward.max_failure_rate={limit:g}:"
        f"{lines}\nFix the function, or raise reward.max_failure_rate (1: no limit)"
    )


class RewardManager(ABC):
    """Computes the reward of every sample of a batch. Base class of custom reward managers.

    Args:
        tokenizer: Decodes the responses.
        compute_score: A reward function or a ScoreFunction.
        num_examine: Number of samples per data source that are printed at each call.
        reward_fn_key: The column with the data source of a sample.
        timeout: Seconds per call of the function; None for no timeout, which makes breakpoints in the function safe.
        on_error: What to do if the function raises, hangs, or returns anything but a finite number or a dict with such
            a "score". "raise" raises a RewardError that names function and sample. "count" assigns `failure_score`,
            logs the first error and counts the samples in `reward/failed_rows`.
        failure_score: Score of a failed sample with on_error="count".
        max_concurrency: Maximum number of concurrent calls of an `async def` function.
        isolation: "process": custom functions are called in one worker process, which keeps their state between calls.
            It is killed and restarted if a call exceeds its timeout or the memory limit. "none": they are called in
            this process, where breakpoints work.
        memory_limit_mb: Memory limit of the worker process in MiB; None: half of the memory of the host.
        retries: How often the failed samples of a batch are scored again before they count as failed.
        max_failure_rate: With on_error="count", the largest share of a batch that may fail; a single sample always may.

    Raises:
        ValueError: For an invalid argument, or a function whose form the manager does not support.
    """

    forms: tuple[str, ...] = ("sample", "batch")
    """The supported forms of reward functions (see verl.rewards.functions)."""

    def __init__(
        self,
        tokenizer: Any,
        compute_score: Callable | ScoreFunction,
        *,
        num_examine: int = 0,
        reward_fn_key: str = "data_source",
        timeout: float | None = 300.0,
        on_error: str = "raise",
        failure_score: float = 0.0,
        max_concurrency: int = 64,
        isolation: str = "none",
        memory_limit_mb: int | None = None,
        retries: int = 0,
        max_failure_rate: float = 1.0,
    ):
        if on_error not in ("raise", "count"):
            raise ValueError(f"reward manager: on_error: expected 'raise' or 'count', found {on_error!r}")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"reward manager: timeout: expected seconds above 0, or null for none, found {timeout!r}")
        if not math.isfinite(failure_score):
            raise ValueError(f"reward manager: failure_score: expected a finite number, found {failure_score!r}")
        if max_concurrency < 1:
            raise ValueError(f"reward manager: max_concurrency: expected at least 1, found {max_concurrency!r}")
        function = compute_score if isinstance(compute_score, ScoreFunction) else ScoreFunction(compute_score)
        if function.form not in self.forms:
            argument, manager = ("lists", "batch") if function.form == "batch" else ("one response", "naive")
            raise ValueError(
                f"reward function {function.location} takes {argument}, which {type(self).__name__} does not support: "
                f"use reward_manager={manager}"
            )
        self.tokenizer, self.compute_score = tokenizer, function
        self.num_examine, self.reward_fn_key = num_examine, reward_fn_key
        self.timeout, self.max_concurrency = timeout, max_concurrency
        self.on_error, self.failure_score = on_error, float(failure_score)
        self.isolation = Isolation(isolation, memory_limit_mb)
        self.retries, self.max_failure_rate = retries, max_failure_rate

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Compute the rewards of a batch.

        Args:
            data: The batch.
            return_dict: Also return extra values and metrics.

        Returns:
            The rewards, (B, T) float32. With `return_dict`: {"reward_tensor": the rewards, "reward_extra_info":
            name -> list of B values, "metrics": name -> float}.
        """

    def score_samples(
        self,
        count: int,
        outcomes: Callable[[list[int]], Generator[tuple[int, ScoreFunction | None, Outcome]]],
        message: Callable[[int, ScoreFunction | None, BadOutcome], str],
    ) -> tuple[list[float], list[dict[str, Any]], int]:
        """Score `count` samples; those that fail are scored again, and handled as `on_error` says.

        Args:
            outcomes: Scores the samples with these indices; yields (position in the list, the function that scored the
                sample, outcome).
            message: (index, function, failure) -> the text of an error.

        Returns:
            Scores, extra values and the number of failed samples.
        """
        scores, extras = [self.failure_score] * count, [{"acc": 0.0} for _ in range(count)]
        failures: dict[int, RewardError] = {}
        todo = list(range(count))
        for retry in range(self.retries + 1):
            # Closed explicitly, so that busy workers are stopped if a sample raises.
            with closing(outcomes(todo)) as results:
                for k, function, outcome in results:
                    i = todo[k]
                    try:
                        scores[i], extra = read_outcome(outcome)
                        is_accuracy = function is not None and function.is_accuracy
                        extras[i] = {**({"acc": scores[i]} if is_accuracy else {}), **extra}
                    except BadOutcome as bad:
                        failures[i] = RewardError(message(i, function, bad))
                        failures[i].__cause__ = bad.__cause__
                        if self.on_error == "raise" and retry == self.retries:
                            raise failures[i]  # noqa: B904 (its cause is set)
            if not failures or retry == self.retries:
                break
            todo = sorted(failures)
            logger.warning(
                "%d of %d samples failed to score; retry %d of %d; the first: %s",
                *(len(todo), count, retry + 1, self.retries, failures[todo[0]]),
            )
            time.sleep(min(_RETRY_SECONDS * 2**retry, _LONGEST_RETRY))
            failures.clear()
        if failures:
            first = failures[min(failures)]
            logger.error("%s", first, exc_info=first.__cause__)
            check_failure_rate(failures.values(), count, self.max_failure_rate)
            logger.error("%d of %d samples failed to score; assigned %g", len(failures), count, self.failure_score)
            if (lowest := min(scores)) < self.failure_score:
                logger.warning(
                    "reward.failure_score=%g is above the lowest score of this batch, so a sample that fails is "
                    "preferred to a wrong one: set reward.failure_score=%g",
                    *(self.failure_score, lowest),
                )
        return scores, extras, len(failures)


@register_reward_manager("naive")
class NaiveRewardManager(RewardManager):
    """Calls the reward function once per sample.

    The extra value "acc" is the one the function returns; otherwise the score, unless the function was registered with
    accuracy=False. It is 0 for failed samples. Extra values that a sample lacks are None.
    """

    forms = ("sample",)
    pool: ProcessPool | None = None
    score_group: Callable | None = None  # of the agent loop, see `add_group_scores`

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        if self.score_group is not None:
            add_group_scores(samples, self.score_group)
        scores, extras, failed = self.score_samples(
            len(samples),
            lambda todo: self._outcomes_of_all([samples[i] for i in todo]),
            lambda i, function, bad: f"reward function {function.location} {bad}\n{samples[i].describe()}",
        )
        scores = self.shape(scores, extras, token_masks(data)[0].sum(1).tolist())
        if self.num_examine:
            self._print_examples(data, samples, scores)
        rewards = reward_tensor(data, scores)
        return reward_result(data, rewards, extras, failed) if return_dict else rewards

    def _outcomes_of_all(self, samples: Sequence[Sample]) -> Generator[tuple[int, ScoreFunction, Outcome]]:
        """The results of agent loops, and the outcomes of the other samples."""
        yield from ((i, self.compute_score, Outcome(s.result)) for i, s in enumerate(samples) if s.result is not None)
        if rest := [i for i, sample in enumerate(samples) if sample.result is None]:
            with closing(self.outcomes([samples[i] for i in rest])) as outcomes:
                yield from ((rest[k], function, outcome) for k, function, outcome in outcomes)

    def outcomes(self, samples: Sequence[Sample]) -> Generator[tuple[int, ScoreFunction, Outcome]]:
        """Score the samples; yields (index, the function that scored it, outcome) in any order."""
        by_source: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            by_source.setdefault(sample.data_source, []).append(i)
        functions = {source: self.compute_score.for_data_source(source) for source in by_source}
        for source, indices in by_source.items():
            function, selected = functions[source], [samples[i] for i in indices]
            pool, memory = self.pool or self.isolation.pool_for(function), self.isolation.memory_bytes
            calls = call_samples(function, selected, self.timeout, pool, self.max_concurrency, memory)
            for k, outcome in calls:
                yield indices[k], function, outcome

    def shape(self, scores: list[float], extras: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        """Compute the rewards from the scores. Override this for reward shaping.

        Args:
            scores: B scores of the reward function.
            extras: B dicts of extra values, which may be extended.
            lengths: B response lengths in tokens.
        """
        return scores

    def _print_examples(self, data: DataProto, samples: Sequence[Sample], scores: Sequence[float]) -> None:
        seen: Counter[str] = Counter()
        indices = []
        for i, sample in enumerate(samples):
            seen[sample.data_source] += 1
            if seen[sample.data_source] <= self.num_examine:
                indices.append(i)
        for i, prompt in zip(indices, prompt_texts(data, self.tokenizer, indices)):
            sample = samples[i]
            text = f"[data_source] {sample.data_source}\n[prompt] {prompt}\n[response] {sample.solution_str}\n"
            print_printable(f"{text}[ground_truth] {sample.ground_truth}\n[score] {scores[i]:g}\n")


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls a function that takes and returns lists once per batch. `timeout` applies to that call."""

    forms = ("batch",)

    def outcomes(self, samples: Sequence[Sample]) -> Generator[tuple[int, ScoreFunction, Outcome]]:
        names = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
        lists = {name: [getattr(sample, name) for sample in samples] for name in names}
        batch = Sample(**lists, number=0, total=len(samples))
        pool, memory = self.pool or self.isolation.pool_for(self.compute_score), self.isolation.memory_bytes
        calls = call_samples(self.compute_score, [batch], self.timeout, pool, self.max_concurrency, memory)
        ((_, outcome),) = calls
        for i, sample_outcome in enumerate(split_outcome(outcome, len(samples))):
            yield i, self.compute_score, sample_outcome


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """`naive` with the soft overlong penalty of DAPO (Yu et al. 2025, arXiv:2503.14476).

    A response of `n` tokens receives `min(0, -(n - (max_resp_len - len)) / len * penalty_factor)` in addition to its
    score: 0 up to `max_resp_len - len` tokens, then decreasing linearly to `-penalty_factor` at `max_resp_len`. "acc"
    is not changed.

    Args:
        max_resp_len: Maximum response length in tokens; required if the buffer is enabled.
        overlong_buffer: {"enable": bool, "len": int, "penalty_factor": float, "log": bool}. len None: a fifth of
            max_resp_len. `log` adds the extra values "overlong_reward" and "overlong".
        *args, **kwargs: Arguments of RewardManager.
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        defaults = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}
        for name in overlong_buffer or {}:
            if name not in defaults:
                raise ValueError(f"overlong_buffer has no {name!r}: {did_you_mean(name, defaults)}")
        buffer = defaults | dict(overlong_buffer or {})
        self.enabled, self.log = bool(buffer["enable"]), bool(buffer["log"])
        self.buffer_len, self.penalty_factor = buffer["len"], float(buffer["penalty_factor"])
        self.max_resp_len = max_resp_len
        if self.buffer_len is None and max_resp_len is not None:
            self.buffer_len = max(1, max_resp_len // 5)
        if self.enabled and not (max_resp_len is not None and 0 < self.buffer_len <= max_resp_len):
            fix = "reward.reward_kwargs.max_resp_len=${data.max_response_length}"
            if max_resp_len is not None:
                fix = f"reward.reward_kwargs.overlong_buffer.len={max(1, max_resp_len // 4)}"
            raise ValueError(
                f"overlong_buffer: expected 0 < len <= max_resp_len, found len={self.buffer_len!r}, "
                f"max_resp_len={max_resp_len!r}: set {fix}, or reward.reward_kwargs.overlong_buffer.enable=false"
            )

    def shape(self, scores: list[float], extras: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        if not self.enabled:
            return scores
        unpenalized = self.max_resp_len - self.buffer_len
        penalties = [min(0.0, -(n - unpenalized) / self.buffer_len * self.penalty_factor) for n in lengths]
        if self.log:
            for extra, penalty in zip(extras, penalties):
                extra.update(overlong_reward=penalty, overlong=penalty < 0)
        return [score + penalty for score, penalty in zip(scores, penalties)]


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """`naive` in a pool of worker processes.

    A call that exceeds its timeout is killed with its process, even inside library code. The function must be defined
    at the top level of a file or module, so that workers can import it, and its arguments and results must be
    picklable.

    Args:
        num_processes: Size of the pool; default: the number of cores, at most 16.
        *args, **kwargs: Arguments of RewardManager.
    """

    def __init__(self, *args: Any, num_processes: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        address_of(self.compute_score.func)
        self.pool = ProcessPool(min(16, os.cpu_count() or 1) if num_processes is None else num_processes)
