"""Dynamic sampling: learn from prompts whose answers differ, and generate on until there are enough of them.

    prompts -> repeat -> gen -> reward -> filter_groups -> ...
       ^                                       | too few: HOLD, another pass
       +----- prompts that were not needed ----+

DAPO, Yu et al. 2025, arXiv 2503.14476: a group whose answers all score alike has advantage 0, so that the batch that
really teaches something shrinks while the policy gets better. `sample_dynamically` is the edit of the flow.

What becomes of a prompt: its answers are trained on; or they all score alike, and it is dropped and counted; or the
step was full, and it goes back to the front of the queue, to be answered anew by the policy of the next step. Answers
are never kept for a later step, where they would be those of an older policy. At the limit of a step's generations the
run ends, or the step is filled with groups whose answers score alike: they are trained on, to no effect.
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
from verl.trainer.ppo_operators import Prompts

logger = logging.getLogger("verl.trainer")


class PromptQueue(Prompts):
    """A source of prompts that takes some back: these go out again before new ones are drawn.

    size: how many go out at the next call.
    """

    def __init__(self, prompts: Prompts, size: int):
        super().__init__(prompts.source, prompts.step, prompts.vocab_size)
        self.size = size
        self.waiting: DataProto | None = None

    def __call__(self) -> DataProto:
        while self.waiting is None or len(self.waiting) < self.size:
            drawn = self.source()
            self.waiting = DataProto.concat([self.waiting, drawn]) if self.waiting is not None else drawn
        batch, self.waiting = self.waiting[: self.size], self.waiting[self.size :]
        return DataProto(batch.batch, batch.non_tensor_batch, self.facts())

    def put_back(self, rows: DataProto) -> None:
        """rows: one of each prompt, with whatever columns it has got since it went out."""
        waiting = self.waiting
        prompts = rows.select(list(waiting.tensors), list(waiting.non_tensor_batch), [])
        self.waiting = DataProto.concat([prompts, waiting])

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "size": self.size, "waiting": self.waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.size, self.waiting = state["size"], state["waiting"]


@dataclass
class Gathered:
    """What one step has so far. held: the groups that were kept; alike: others; the other fields count all passes."""

    held: list[DataProto] = field(default_factory=list)
    alike: list[DataProto] = field(default_factory=list)
    groups: int = 0
    passes: int = 0
    prompts: int = 0
    answers: int = 0
    metric_sum: float = 0.0


class DynamicSampling(Stateful):
    """Keeps the groups whose answers differ in `metric`, and holds the pass until `num_groups` of them are together.

    A group is the answers to one prompt: the rows of one `uid`.

    metric: "reward", the summed reward of an answer, or a number that the reward function returns beside the score.
    pass_size: prompts of a full pass; the first pass of a step is one. Later ones ask for what is missing, divided by
    the share of groups kept so far.
    max_passes: a step may ask for `max_passes * pass_size` prompts; 0 is no limit.
    fill: with fewer groups kept after that, the step is filled with groups whose answers are alike; else ValueError.
    """

    def __init__(
        self,
        queue: PromptQueue,
        *,
        metric: str,
        num_groups: int,
        pass_size: int,
        max_passes: int,
        fill: bool,
        pad_token_id: int,
    ):
        self.queue = queue
        self.metric = metric
        self.num_groups = num_groups
        self.pass_size = pass_size
        self.max_passes = max_passes
        self.fill = fill
        self.pad_token_id = pad_token_id
        self.so_far = Gathered()

    def __call__(self, batch: DataProto) -> Any:
        values, groups = self._values(batch), group_rows(batch)
        differing = [rows for rows in groups if values[rows].min() < values[rows].max()]
        now = self.so_far
        now.passes += 1
        now.prompts += len(groups)
        now.groups += len(differing)
        now.answers += len(batch)
        now.metric_sum += float(values.sum())
        if differing:
            now.held.append(batch[np.concatenate(differing)])
        if self.fill and len(differing) < len(groups):
            now.alike.append(
                batch[np.concatenate([rows for rows in groups if values[rows].min() == values[rows].max()])]
            )
        logger.info("dynamic sampling: %d of %d groups after %d prompts", now.groups, self.num_groups, now.prompts)
        if now.groups >= self.num_groups or self._at_limit():
            return self._release()
        self.queue.size = self._next_size()
        return HOLD

    def _values(self, batch: DataProto) -> np.ndarray:
        """The metric of every row, (B,) float64. Raises ValueError when it is not there, or not a number."""
        if self.metric == "reward":
            return batch.batch["token_level_rewards"].sum(1).double().numpy()
        column = f"reward_{self.metric}"
        if column not in batch:
            given = [name.removeprefix("reward_") for name in batch.non_tensor_batch if name.startswith("reward_")]
            known = ["reward", *(name for name in given if name != "model")]
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward function does not return that: "
                f"{did_you_mean(self.metric, known)}"
            )
        values = batch.column(column)
        if wrong := [v for v in values if not isinstance(v, bool | int | float | np.number) or v != v]:
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: expected a number for every answer, found {wrong[0]!r}"
            )
        return values.astype(np.float64)

    def _at_limit(self) -> bool:
        """Whether the step may ask for no more prompts. Raises ValueError when it is, and is not to be filled."""
        now = self.so_far
        reached = self.max_passes > 0 and now.prompts >= self.max_passes * self.pass_size
        if reached and not self.fill:
            raise ValueError(
                f"dynamic sampling: only {now.groups} of {self.num_groups} groups have answers that differ in "
                f"{self.metric!r}, after {now.prompts} prompts ({self.max_passes} generations of {self.pass_size}; "
                f"mean {self.metric} {now.metric_sum / now.answers:.3g}): are the prompts much too easy or too hard? "
                "Change the data, raise actor_rollout_ref.rollout.n, raise algorithm.filter_groups.max_num_gen_batches "
                "(0: no limit), or go on with the groups that there are: algorithm.filter_groups.at_limit=fill"
            )
        return reached

    def _next_size(self) -> int:
        """Prompts of the next pass."""
        now, limit = self.so_far, self.max_passes * self.pass_size
        missing = self.num_groups - now.groups
        size = min(self.pass_size, -(-missing * now.prompts // now.groups)) if now.groups else self.pass_size
        return min(size, limit - now.prompts) if limit else size

    def _release(self) -> DataProto:
        """The first `num_groups` groups; the prompts of others that differ go back to the queue."""
        now, self.so_far, self.queue.size = self.so_far, Gathered(), self.pass_size
        filled = max(self.num_groups - now.groups, 0)
        together = concat_sequences([*now.held, *(now.alike if filled else [])], self.pad_token_id)
        groups = group_rows(together)
        chosen, spare = groups[: self.num_groups], groups[self.num_groups : now.groups]
        if spare:
            self.queue.put_back(together[[rows[0] for rows in spare]])
        batch = together[np.concatenate(chosen)]
        batch.meta_info["metrics"] = {
            "filter_groups/passes": now.passes,
            "filter_groups/prompts": now.prompts,
            "filter_groups/kept_share": now.groups / now.prompts,
            "filter_groups/prompts_put_back": len(spare),
            f"filter_groups/{self.metric}_mean": now.metric_sum / now.answers,
            **({"filter_groups/filled": filled} if self.fill else {}),
        }
        return batch

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self.so_far))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.so_far = Gathered(**state)


def queue_prompts(flow: DataFlow, size: int) -> PromptQueue:
    """Let the flow's prompts come from a queue, which is returned."""
    prompts = flow["prompts"]
    queue = PromptQueue(prompts.func, size)
    flow.replace("prompts", Operator("prompts", queue, writes=prompts.writes))
    return queue


def group_rows(batch: DataProto) -> list[np.ndarray]:
    """The rows of each prompt, in the order of their first rows."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows.setdefault(uid, []).append(row)
    return [np.array(members) for members in rows.values()]


def sample_dynamically(flow: DataFlow, config: schema.Config, pad_token_id: int) -> DataFlow:
    """The edit: `prompts` becomes a queue, and `filter_groups` stands behind `reward`."""
    groups = config.algorithm.filter_groups
    pass_size = config.data.gen_batch_size or config.data.train_batch_size
    keep = DynamicSampling(
        queue_prompts(flow, pass_size),
        metric=groups.metric,
        num_groups=config.data.train_batch_size,
        pass_size=pass_size,
        max_passes=groups.max_num_gen_batches,
        fill=groups.at_limit == "fill",
        pad_token_id=pad_token_id,
    )
    flow.insert_after("reward", Operator("filter_groups", keep, reads=("uid", "token_level_rewards")))
    if "gen_baseline" in flow:  # of the groups that are kept
        baseline = flow["gen_baseline"]
        flow.remove("gen_baseline").insert_after("filter_groups", baseline)
    return flow
