"""Dynamic sampling: filter zero-variance groups, and generate more until a batch is full.

    prompts -> repeat -> gen -> reward -> filter_groups -> ...
       ^                                       | too few groups: HOLD, another pass
       +----- prompts that were not needed ----+

DAPO, Yu et al. 2025, arXiv 2503.14476: a zero-variance group (all its responses have the same score) has advantage 0,
so the effective batch shrinks as the policy improves. `sample_dynamically` is the edit of the flow.

A prompt has one of three outcomes: its group is trained on; its group has zero variance and is dropped and counted; or
the step is already full, and the prompt returns to the front of the queue, to be sampled again by the policy of the
next step. Responses are never kept for a later step, where they would be off-policy. At the limit of
generations per step the run ends, or the step is filled with zero-variance groups, which have no gradient. Without that
limit, the run ends when many generations in a row have kept no group: every reward may be the same.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.config import schema
from verl.data.sequences import concat_sequences
from verl.dataflow import HOLD, DataFlow, Operator, Stateful
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.trainer.output.metrics import group_rows, response_lengths
from verl.trainer.ppo.operators import Prompts

logger = logging.getLogger("verl.trainer")

#: names of the summed reward; the first is ours, the others are those of public verl
SUMMED_REWARD = ("reward", "score", "seq_reward", "seq_final_reward")


class PromptQueue(Prompts):
    """A source of prompts that takes prompts back and returns them before new ones.

    Args:
        prompts: the source of new prompts.
        size: how many prompts the next call returns.
    """

    def __init__(self, prompts: Prompts, size: int):
        super().__init__(prompts.source, prompts.step, prompts.vocab_size, prompts.media_tokens)
        self.size = size
        self.waiting: DataProto | None = None

    def __call__(self) -> DataProto:
        while self.waiting is None or len(self.waiting) < self.size:
            new_prompts = self.source()
            self.waiting = DataProto.concat([self.waiting, new_prompts]) if self.waiting is not None else new_prompts
        batch, self.waiting = self.waiting[: self.size], self.waiting[self.size :]
        return DataProto(batch.batch, batch.non_tensor_batch, self.meta_info())

    def put_back(self, rows: DataProto) -> None:
        """Return prompts to the front. rows: one row per prompt, possibly with further columns."""
        self.waiting = self.before_waiting(rows)

    def before_waiting(self, rows: DataProto) -> DataProto:
        """The waiting prompts after other prompts, as `put_back` would leave them."""
        waiting = self.waiting
        prompts = rows.select(list(waiting.tensors), list(waiting.non_tensor_batch), [])
        return DataProto.concat([prompts, waiting])

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "size": self.size, "waiting": self.waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "waiting" not in state:  # the checkpoint of a run without a queue
            return super().load_state_dict(state)
        self.source.load_state_dict(state["source"])
        self.size, self.waiting = state["size"], state["waiting"]


@dataclass
class Gathered:
    """Groups gathered in one step.

    Attributes:
        kept: rows of the kept groups.
        zero_variance: rows of zero-variance groups, if they may fill the step.
        groups: number of groups kept.
        passes, prompts, responses: counts over all passes.
        metric_sum: sum of the metric over all responses.
        empty: prompts since the last group that was kept.
    """

    kept: list[DataProto] = field(default_factory=list)
    zero_variance: list[DataProto] = field(default_factory=list)
    groups: int = 0
    passes: int = 0
    prompts: int = 0
    responses: int = 0
    metric_sum: float = 0.0
    empty: int = 0


_WARN_PASSES = 5  # a warning per this many passes without a kept group


@dataclass(eq=False, repr=False)
class DynamicSampling(Stateful):
    """Keeps the groups whose responses differ in `metric`, and holds the pass until there are `num_groups` of them.

    A group is the responses to one prompt: the rows with one `uid`.

    Args:
        queue: the source of prompts.
        metric: "reward" (or "score", "seq_reward", "seq_final_reward"), the summed reward of a response, or a number
            that the reward function returns.
        num_groups: groups of a training batch.
        pass_size: prompts of a full pass, such as the first of a step. Later passes request what is missing, divided
            by the share of groups kept so far.
        max_passes: a step requests at most `max_passes * pass_size` prompts; 0: no limit.
        max_empty_passes: without that limit, raise ValueError after `max_empty_passes * pass_size` prompts in a row
            whose groups have zero variance; 0: never.
        fill: at that limit, fill the step with zero-variance groups; otherwise raise ValueError.
        pad_token_id: for padding batches of different lengths.
    """

    queue: PromptQueue
    metric: str
    num_groups: int
    pass_size: int
    max_passes: int
    max_empty_passes: int
    fill: bool
    pad_token_id: int
    gathered: Gathered = field(default_factory=Gathered)

    def __call__(self, batch: DataProto) -> Any:
        gathered = self.gathered
        differing, equal = self.count(batch)
        if differing:
            gathered.kept.append(batch[np.concatenate(differing)])
        if self.fill and equal:
            gathered.zero_variance.append(batch[np.concatenate(equal)])
        logger.info(
            "dynamic sampling: %d prompts, %d groups with different rewards; %d required",
            gathered.prompts,
            gathered.groups,
            self.num_groups,
        )
        if self.is_complete():
            return self._release()
        size = self.pass_size
        if gathered.groups:  # the missing groups, divided by the share of groups kept so far
            missing = self.num_groups - gathered.groups
            size = min(size, -(-missing * gathered.prompts // gathered.groups))
        left = self.max_passes * self.pass_size - gathered.prompts
        self.queue.size = min(size, left) if self.max_passes else size
        return HOLD

    def count(self, batch: DataProto) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Count the groups of a batch in `gathered`. Returns the rows of the groups that differ, and of the others."""
        values, groups = self.values_of(batch), group_rows(batch)
        differing = [rows for rows in groups if values[rows].min() < values[rows].max()]
        gathered = self.gathered
        gathered.passes += 1
        gathered.prompts += len(groups)
        gathered.groups += len(differing)
        gathered.responses += len(batch)
        gathered.metric_sum += float(values.sum())
        empty_before, gathered.empty = gathered.empty, 0 if differing else gathered.empty + len(groups)
        self._check_empty(empty_before)
        return differing, [rows for rows in groups if values[rows].min() == values[rows].max()]

    def is_complete(self) -> bool:
        """Whether there are enough groups for a step. Raises ValueError at its limit, unless it may be filled."""
        gathered = self.gathered
        if gathered.groups >= self.num_groups:
            return True
        reached = self.max_passes > 0 and gathered.prompts >= self.max_passes * self.pass_size
        if reached and not self.fill:
            raise ValueError(
                f"dynamic sampling: only {gathered.groups} of {self.num_groups} groups have responses that differ in "
                f"{self.metric!r}, after {gathered.prompts} prompts ({self.max_passes} generations of "
                f"{self.pass_size}; mean {self.metric} {gathered.metric_sum / gathered.responses:.3g}). The prompts "
                "may be too easy or too hard: change the data, raise actor_rollout_ref.rollout.n, raise "
                "algorithm.filter_groups.max_num_gen_batches (0: no limit), or continue with fewer groups: "
                "algorithm.filter_groups.at_limit=fill"
            )
        return reached

    def _check_empty(self, empty_before: int) -> None:
        """Warn of generations without a kept group, and raise ValueError at their limit. empty_before: `Gathered.empty`
        before the last pass."""
        gathered = self.gathered
        limit = self.max_empty_passes * self.pass_size
        interval = _WARN_PASSES * self.pass_size
        message = (
            f"dynamic sampling: expected groups with responses that differ in {self.metric!r}, found none among the "
            f"last {gathered.empty} prompts ({gathered.empty // self.pass_size} generations of {self.pass_size} in a "
            f"row; mean {self.metric} of this step {gathered.metric_sum / gathered.responses:.3g}). Check the reward "
            "function, change the data, or raise actor_rollout_ref.rollout.n"
        )
        if not self.max_passes and 0 < limit <= gathered.empty:
            raise ValueError(
                f"{message}. algorithm.filter_groups.max_empty_gen_batches={self.max_empty_passes} sets the limit "
                "(0: no limit)"
            )
        if gathered.empty // interval > empty_before // interval:
            logger.warning("%s", message)

    def values_of(self, batch: DataProto) -> np.ndarray:
        """The metric of every row, (B,) float64. Raises ValueError if it is missing or not numeric."""
        if self.metric in SUMMED_REWARD:
            return batch.batch["token_level_rewards"].sum(1).double().numpy()
        column = f"reward_{self.metric}"
        if column not in batch:
            returned = [name.removeprefix("reward_") for name in batch.non_tensor_batch if name.startswith("reward_")]
            metrics = [*SUMMED_REWARD, *(name for name in returned if name != "model")]
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward function does not return it: "
                f"{did_you_mean(self.metric, metrics)}"
            )
        values = batch.column(column)
        if wrong := [v for v in values if not isinstance(v, bool | int | float | np.number) or v != v]:
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: expected a number per response, found {wrong[0]!r}"
            )
        return values.astype(np.float64)

    def _release(self) -> DataProto:
        """Return the first `num_groups` kept groups. Prompts of further groups return to the queue."""
        gathered, self.gathered = self.gathered, Gathered()
        self.queue.size = self.pass_size
        filled = max(self.num_groups - gathered.groups, 0)
        samples = concat_sequences([*gathered.kept, *(gathered.zero_variance if filled else [])], self.pad_token_id)
        groups = group_rows(samples)
        released, surplus = groups[: self.num_groups], groups[self.num_groups : gathered.groups]
        if surplus:
            self.queue.put_back(samples[[rows[0] for rows in surplus]])
        batch = samples[np.concatenate(released)]
        batch.meta_info["metrics"] = {
            "filter_groups/passes": gathered.passes,
            "filter_groups/prompts": gathered.prompts,
            "filter_groups/kept_share": gathered.groups / gathered.prompts,
            "filter_groups/prompts_put_back": len(surplus),
            f"filter_groups/{self.metric}_mean": gathered.metric_sum / gathered.responses,
            "filter_groups/response_length_mean": response_lengths(batch).mean().item(),
            **({"filter_groups/filled": filled} if self.fill else {}),
        }
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, list) else value for name, value in vars(self.gathered).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gathered = Gathered(**state)


def queue_prompts(flow: DataFlow, size: int) -> PromptQueue:
    """Replace the flow's source of prompts with a queue. Returns the queue."""
    prompts = flow["prompts"]
    queue = PromptQueue(prompts.func, size)
    flow.replace("prompts", Operator("prompts", queue, writes=prompts.writes))
    return queue


def sample_dynamically(flow: DataFlow, config: schema.Config, pad_token_id: int) -> DataFlow:
    """Edit the flow: `prompts` becomes a queue, and `filter_groups` follows `reward`."""
    groups = config.algorithm.filter_groups
    pass_size = config.data.gen_batch_size or config.data.train_batch_size
    sampling = DynamicSampling(
        queue_prompts(flow, pass_size),
        metric=groups.metric,
        num_groups=config.data.train_batch_size,
        pass_size=pass_size,
        max_passes=groups.max_num_gen_batches,
        max_empty_passes=groups.max_empty_gen_batches,
        fill=groups.at_limit == "fill",
        pad_token_id=pad_token_id,
    )
    flow.insert_after("reward", Operator("filter_groups", sampling, reads=("uid", "token_level_rewards")))
    if "gen_baseline" in flow:  # only for the kept groups
        baseline = flow["gen_baseline"]
        flow.remove("gen_baseline").insert_after("filter_groups", baseline)
    return flow
