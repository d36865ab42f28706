"""Reward managers: from a batch of answers to a reward per token.

    naive   one call per row, in this process
    batch   one call for the whole batch: the function takes lists
    dapo    naive, and answers that come near the length limit lose some of their reward
    prime   naive, in a pool of processes that can be killed

The reward of a row stands at its last token that the policy chose; all other positions are 0. What happens to one row
does not depend on the others, nor on their order.
"""

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from verl.protocol import DataProto
from verl.registry import Registry, did_you_mean
from verl.rewards.functions import ScoreFunction
from verl.rewards.outcome import BadOutcome, RewardError, Row, read_outcome, split_outcome
from verl.rewards.responses import prompt_texts, read_answers
from verl.rewards.sandbox.calls import call_rows
from verl.rewards.sandbox.pool import Outcome, ProcessPool, address_of

logger = logging.getLogger(__name__)

REWARD_MANAGER_REGISTRY: Registry[type["RewardManager"]] = Registry("reward manager")


def register_reward_manager(name: str) -> Callable[[type], type]:
    """Class decorator: register a RewardManager under `name`, the value of `reward_manager` in the configuration."""

    def decorate(manager: type) -> type:
        if not (isinstance(manager, type) and issubclass(manager, RewardManager)):
            raise ValueError(f"reward manager {name!r}: expected a subclass of RewardManager, found {manager!r}")
        return REWARD_MANAGER_REGISTRY.register(name, manager)

    return decorate


register = register_reward_manager


class RewardManager(ABC):
    """Gives a reward to every row of a batch. A manager of one's own subclasses this, or one of those below.

    tokenizer: decodes the answers. compute_score: a reward function or a ScoreFunction. num_examine: how many rows per
    data source are printed at each call. reward_fn_key: the column that names the data source of a row.
    timeout: seconds that one call may take, None for no deadline (then breakpoints in the function are safe).
    on_error: what becomes of a row whose function raises, hangs, or returns anything but a finite number or a dict with
    such a "score": "raise" ends with a RewardError that names function and row, "count" scores it `failure_score`, logs
    the first one and counts them in `reward/failed_rows`. max_concurrency: rows of an `async def` under way at once.
    """

    forms: tuple[str, ...] = ("row", "plugin", "batch")
    """The forms of reward function (see verl.rewards.functions) that the manager can call."""

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
            takes, use = ("lists", "batch") if function.form == "batch" else ("one answer", "naive")
            raise ValueError(
                f"reward function {function.where} takes {takes}, which {type(self).__name__} does not give: use "
                f"reward_manager={use}"
            )
        self.tokenizer, self.compute_score = tokenizer, function
        self.num_examine, self.reward_fn_key = num_examine, reward_fn_key
        self.timeout, self.max_concurrency = timeout, max_concurrency
        self.on_error, self.failure_score = on_error, float(failure_score)

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """The reward of every response token, (B, T) float32.

        With `return_dict`: {"reward_tensor": that, "reward_extra_info": name -> list of B values, "metrics": name ->
        float}.
        """


@register_reward_manager("naive")
class NaiveRewardManager(RewardManager):
    """One call of the reward function per row.

    "acc" among the extra values is the function's own, or else its score, unless that is the opinion of a model; a row
    that failed has 0. A value that the function gave for other rows only is None.
    """

    forms = ("row", "plugin")
    pool: ProcessPool | None = None

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        answers = read_answers(data, self.tokenizer, self.reward_fn_key)
        scores, extras, failed = self._score(answers.rows)
        scores = self.shape(scores, extras, answers.lengths.tolist())
        if self.num_examine:
            self._print_examples(data, answers.rows, scores)
        reward_tensor = answers.reward_tensor(scores)
        if not return_dict:
            return reward_tensor
        names = dict.fromkeys(name for extra in extras for name in extra)
        return {
            "reward_tensor": reward_tensor,
            "reward_extra_info": {name: [extra.get(name) for extra in extras] for name in names},
            "metrics": {"reward/failed_rows": float(failed), "reward/empty_responses": float(answers.empty)},
        }

    def outcomes(self, rows: Sequence[Row]) -> Generator[tuple[int, ScoreFunction, Outcome]]:
        """Score the rows; yields (position, the function that scored it, outcome), in any order."""
        by_source: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            by_source.setdefault(row.data_source, []).append(i)
        functions = {source: self.compute_score.for_data_source(source) for source in by_source}
        for source, positions in by_source.items():
            function, chosen = functions[source], [rows[i] for i in positions]
            for k, outcome in call_rows(function, chosen, self.timeout, self.pool, self.max_concurrency):
                yield positions[k], function, outcome

    def shape(self, scores: list[float], extras: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        """The rewards from the scores; may add to the extra values. `lengths`: tokens of each response."""
        return scores

    def _score(self, rows: Sequence[Row]) -> tuple[list[float], list[dict[str, Any]], int]:
        """Scores, extra values and the number of failed rows."""
        scores, extras, failed = [self.failure_score] * len(rows), [{"acc": 0.0} for _ in rows], 0
        # Closed at once when a row ends the scoring: workers that are still busy must not outlive it.
        with closing(self.outcomes(rows)) as outcomes:
            for i, function, outcome in outcomes:
                try:
                    scores[i], extra = read_outcome(outcome)
                    extras[i] = {**({"acc": scores[i]} if function.is_accuracy else {}), **extra}
                except BadOutcome as bad:
                    error = RewardError(f"reward function {function.where} {bad}\n{rows[i].describe()}")
                    if self.on_error == "raise":
                        raise error from bad.__cause__
                    failed += 1
                    if failed == 1:
                        logger.error("%s", error, exc_info=bad.__cause__)
        if failed:
            logger.error("%d of %d rows have no score of their own; scored %g", failed, len(rows), self.failure_score)
        return scores, extras, failed

    def _print_examples(self, data: DataProto, rows: Sequence[Row], scores: Sequence[float]) -> None:
        seen: Counter[str] = Counter()
        shown = []
        for i, row in enumerate(rows):
            seen[row.data_source] += 1
            if seen[row.data_source] <= self.num_examine:
                shown.append(i)
        for i, prompt in zip(shown, prompt_texts(data, self.tokenizer, shown)):
            print(f"[data_source] {rows[i].data_source}\n[prompt] {prompt}\n[response] {rows[i].solution_str}")
            print(f"[ground_truth] {rows[i].ground_truth}\n[score] {scores[i]:g}")


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """One call for the whole batch, of a function that takes lists and returns a list; `timeout` is for that call."""

    forms = ("batch",)

    def outcomes(self, rows: Sequence[Row]) -> Generator[tuple[int, ScoreFunction, Outcome]]:
        whole = Row(
            data_source=[row.data_source for row in rows],
            solution_str=[row.solution_str for row in rows],
            ground_truth=[row.ground_truth for row in rows],
            extra_info=[row.extra_info for row in rows],
            number=0,
            total=len(rows),
        )
        ((_, outcome),) = call_rows(self.compute_score, [whole], self.timeout, self.pool, self.max_concurrency)
        for i, one in enumerate(split_outcome(outcome, len(rows))):
            yield i, self.compute_score, one


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """`naive` with the soft overlong penalty of DAPO (Yu et al. 2025, arXiv:2503.14476).

    An answer of `n` tokens gets `min(0, -(n - (max_resp_len - len)) / len * penalty_factor)` on top of its score: 0 up
    to `max_resp_len - len`, then a straight line down to `-penalty_factor` at `max_resp_len`. "acc" stays unshaped.
    overlong_buffer: {"enable": bool, "len": int, "penalty_factor": float, "log": bool}; log adds the extra values
    "overlong_reward" and "overlong".
    """

    def __init__(
        self,
        tokenizer: Any,
        compute_score: Callable | ScoreFunction,
        *,
        max_resp_len: int | None = None,
        overlong_buffer: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(tokenizer, compute_score, **kwargs)
        known = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}
        for name in overlong_buffer or {}:
            if name not in known:
                raise ValueError(f"overlong_buffer has no {name!r}: {did_you_mean(name, known)}")
        buffer = known | dict(overlong_buffer or {})
        self.enabled, self.log = bool(buffer["enable"]), bool(buffer["log"])
        self.buffer_len, self.penalty_factor = buffer["len"], float(buffer["penalty_factor"])
        self.max_resp_len = max_resp_len
        if self.enabled and not (max_resp_len is not None and 0 < self.buffer_len <= max_resp_len):
            raise ValueError(
                f"overlong_buffer: expected 0 < len <= max_resp_len, found len={self.buffer_len!r}, "
                f"max_resp_len={max_resp_len!r} (in a run: reward.reward_kwargs.overlong_buffer.len and "
                "reward.reward_kwargs.max_resp_len, which follows data.max_response_length in recipe/dapo)"
            )

    def shape(self, scores: list[float], extras: list[dict[str, Any]], lengths: list[int]) -> list[float]:
        if not self.enabled:
            return scores
        free = self.max_resp_len - self.buffer_len
        penalties = [min(0.0, -(n - free) / self.buffer_len * self.penalty_factor) for n in lengths]
        if self.log:
            for extra, penalty in zip(extras, penalties):
                extra.update(overlong_reward=penalty, overlong=penalty < 0)
        return [score + penalty for score, penalty in zip(scores, penalties)]


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """`naive` in `num_processes` worker processes (as many as cores, at most 16, if not said).

    A row that hangs is killed with its process, whatever it hangs in. The function must be at the top level of a file
    or module, so that the workers can import it; its arguments and results must be picklable.
    """

    def __init__(
        self,
        tokenizer: Any,
        compute_score: Callable | ScoreFunction,
        *,
        num_processes: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(tokenizer, compute_score, **kwargs)
        address_of(self.compute_score.func)
        self.pool = ProcessPool(min(16, os.cpu_count() or 1) if num_processes is None else num_processes)
