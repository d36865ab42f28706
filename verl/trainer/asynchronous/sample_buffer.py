"""The sample buffer of asynchronous training: between the thread that generates and the training loop.

    producer thread                                        training loop
    room() -> admit(prompts) -> put(groups), settle()      take(): the train_batch_size groups of one step

Staleness of a sample: the version of the weights before the update that it is trained in, minus the oldest version that
sampled one of its tokens. Two rules keep it at most k = `max_staleness`:

- Admission. While the rollout has version v, no more than (v + k + 1) * B groups have been admitted in total (B groups
  per step). With k = 0 these are the groups of the next step.
- Order. A step takes the groups that finished first, as far as the others can still be trained in time: at most
  (v + k + 1 - s) * B groups that were admitted at version v or before may be left after step s. So a long response is
  waited for and trained, not overtaken until it is too old, and short responses are not preferred.
- Start. With the first weights of a run, k + 1 batches are admitted at once. In the order in which they finish, they
  would be sorted by length: the first step would train on the shortest responses, the last on the longest. So they are
  trained in the order of admission, B per step.

A sample whose engine reports an older version than it was given is the exception: its group is dropped, counted, and
generated again. If this happens to a group again and again, the engine does not get the weights: the run stops.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.sequences import concat_sequences
from verl.dataflow import HOLD
from verl.dataflow.flow import RunReports, Total, merge_reports
from verl.processes.limits import Durations, Limits
from verl.protocol import DataProto
from verl.trainer.guards.operator_watch import OperatorTimeout, thread_stacks
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.canary import StaleWeightsError
from verl.trainer.ppo.dynamic_sampling import PromptQueue
from verl.trainer.ppo.operators import Prompts, check_failures, length_metrics, value_metrics

_LOOK = 0.5  # seconds between two checks for signals and errors while the training loop waits
_MAX_DROPS = 3  # how often one group may be generated with weights that are too old


@dataclass(eq=False)
class Group:
    """A prompt from its admission to the step that trains on its samples."""

    prompt: DataProto  # one row, as it came from the source
    version: int  # of the rollout's weights when it was admitted
    rows: DataProto | None = None  # its samples; None until all of them are in the buffer
    # of the runs of the operators before the buffer, and its share of the groups of each run
    reports: list[tuple[RunReports, float]] = field(default_factory=list)
    admitted: float = field(default_factory=time.monotonic)

    @property
    def oldest_version(self) -> int:
        return int(self.rows.batch["weight_version"].min())


@dataclass(eq=False, repr=False)
class SampleBuffer:
    """Groups that are admitted, generated and waiting for their step.

    As an operator it has two sides: called with a batch it keeps the groups (`put`), called without it returns the
    batch of a step (`take`).

    Args:
        batch_size: B, groups per step.
        max_staleness: k.
        total_steps: number of the last step: no prompts are admitted for later ones.
        limits: of the wait for a group.

    Attributes:
        filtered: number of groups that an operator has filtered since the last `take`.
        lock: held while prompts change their place, so that a checkpoint has each prompt once.
        on_take: called before the first step waits.
        ends: whether the run ends after this step, as after SIGTERM: no further prompts are admitted.
    """

    queue: "AsyncPrompts"
    batch_size: int
    max_staleness: int
    total_steps: int
    pad_token_id: int
    limits: Limits = Limits()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        self.version = self._first_version = 0
        self.lock = threading.Condition(threading.RLock())
        self.groups: dict[str, Group] = {}  # by uid, in the order of admission
        self._finished: list[str] = []  # uids, in the order of `put`
        self._durations = Durations(self.limits)  # of groups, from their admission to the buffer
        self._arrived = 0.0  # when the last group arrived, by `time.monotonic`
        self._steps_taken = 0
        self._taken: list[DataProto] = []  # prompts of the last step
        self._error: BaseException | None = None
        self._dropped = self._tokens = 0  # since the last `take`
        self._drops: Counter[str] = Counter()  # by uid, of groups that are not trained yet
        self.filtered = 0
        self._last_take = time.perf_counter()
        self.on_take = lambda: None
        self.ends = lambda: False

    def __call__(self, batch: DataProto | None = None) -> Any:
        if batch is None:
            return self.take()
        self.put(batch)
        return HOLD

    def reset(self) -> None:
        """Return all prompts to the queue, for new workers: what the last ones generated is dropped."""
        with self.lock:
            self.queue.take_back([group.prompt for group in self.groups.values()])
            self.groups, self._finished, self._error = {}, [], None
            self._dropped = self._tokens = self.filtered = 0
            self._drops.clear()
            self._last_take = time.perf_counter()

    def reset_to(self, step: int, total_steps: int) -> None:
        """Begin after this many completed steps, with weights of that version."""
        with self.lock:
            self.version = self._first_version = self._steps_taken = step
            self.total_steps = total_steps

    def set_version(self, version: int) -> None:
        """The rollout has new weights: further prompts may be admitted."""
        with self.lock:
            self.version = version
            self.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the wait of the training loop with this error."""
        with self.lock:
            self._error = self._error or error
            self.lock.notify_all()

    # ---- the producer's side ----------------------------------------------------------------------------------------

    def room(self) -> int:
        """Number of prompts that may be admitted now."""
        with self.lock:
            if self.ends():
                return 0
            ahead = self.version + self.max_staleness + 1
            steps = min(ahead, max(self.total_steps, self.queue.step())) - self._steps_taken
            return max(0, steps * self.batch_size - len(self.groups))

    def admit(self, batch: DataProto) -> None:
        """Record prompts, of one or more rows, that are about to be generated. The caller holds `lock`."""
        for rows in group_rows(batch):
            prompt = batch[rows[:1]]
            prompt.meta_info = {}  # it describes the step of the batch, and the prompt may be trained in another one
            uid = prompt.non_tensor_batch["uid"][0]
            if uid in self.groups:
                raise ValueError(f"uid {uid!r} was admitted twice: the uid of a prompt must be unique")
            self.groups[uid] = Group(prompt, self.version)
        self.queue.leaving = None  # a checkpoint takes these prompts from `groups` now

    def put(self, batch: DataProto) -> None:
        """Keep the groups of a batch that is generated and scored, until `settle`."""
        with self.lock:
            for rows in group_rows(batch):
                self.groups[batch.non_tensor_batch["uid"][rows[0]]].rows = batch[rows]
            self._tokens += int(batch.batch["response_mask"].sum())

    def settle(self, uids: Sequence[str], runs: Sequence[RunReports] = ()) -> None:
        """Finish the operators for groups: those passed to `put` become available to steps, with their share of the
        reports of the runs. The others have been filtered by an operator, and make room for new prompts."""
        with self.lock:
            arrived = [uid for uid in uids if self.groups[uid].rows is not None]
            self.add_reports(arrived, runs)
            self._finished += arrived
            self._arrived = time.monotonic()
            for uid in uids:
                self._durations.record("group", self._arrived - self.groups[uid].admitted)
            for uid in set(uids) - set(arrived):
                del self.groups[uid]
                self.filtered += 1
            self.lock.notify_all()

    @property
    def in_flight(self) -> int:
        """Number of groups that are admitted and not in the buffer."""
        return len(self.groups) - len(self._finished)

    def join(self, groups: Sequence[DataProto]) -> DataProto:
        """One batch of groups of different lengths, with the meta_info of a step."""
        batch = concat_sequences(groups, self.pad_token_id)
        batch.meta_info = self.queue.meta_info()
        return batch

    def add_reports(self, uids: Sequence[str], runs: Sequence[RunReports]) -> None:
        """Divide the reports of runs of the operators before the buffer among the groups that they covered."""
        with self.lock:
            for uid in uids:
                self.groups[uid].reports += [(run, 1 / len(uids)) for run in runs]

    # ---- the training loop's side -----------------------------------------------------------------------------------

    def take(self) -> Any:
        """Wait for the groups of the next step and return them as one batch. Raises the error given to `fail`. Returns
        HOLD if the run ends, and the groups that were being generated are not sufficient."""
        self.on_take()
        self._taken = []
        began, meta_info = time.monotonic(), self.queue.meta_info()
        with self.lock:
            while (uids := self._choose(meta_info["global_step"])) is None:
                if self._error is not None:
                    raise self._error
                if self.ends() and not self.in_flight:
                    return HOLD
                self.check_progress(began)
                self.lock.wait(_LOOK)
            groups = [self.groups.pop(uid) for uid in uids]
            for uid in uids:
                del self._drops[uid]
            self._finished = [uid for uid in self._finished if uid not in uids]
            self._steps_taken, self._taken = meta_info["global_step"], [group.prompt for group in groups]
            metrics = self._metrics(groups, time.monotonic() - began)
            self.lock.notify_all()
        batch = concat_sequences([group.rows for group in groups], self.pad_token_id)
        check_failures(batch, raise_if_all=True)
        reports = [_shared(run, share) for group in groups for run, share in group.reports]
        columns = batch.non_tensor_batch
        metrics |= value_metrics({name[7:]: columns[name] for name in columns if name.startswith("reward_")})
        # of these samples: the operators before the buffer reported of other sets
        batch.meta_info = meta_info | {"metrics": merge_reports(reports)[0] | length_metrics(batch) | metrics}
        return batch

    def requeue(self) -> None:
        """Return the prompts of the last `take` to the queue, since their step has failed."""
        with self.lock:
            if self._taken:
                self.queue.put_back(DataProto.concat(self._taken))
            self._steps_taken, self._taken = self.queue.step(), []

    def check_progress(self, began: float) -> None:
        """Raise OperatorTimeout if no group has arrived for too long. began: when the caller began to wait."""
        limit = self._durations.limit("group")
        seconds = time.monotonic() - max(began, self._arrived)
        if seconds > limit.seconds:
            raise OperatorTimeout(
                f"no group of responses has arrived for {seconds:.0f} s, while {self.in_flight} are generated (limit: "
                f"{limit.reason}): the rollout or a reward function hangs; stacks of all threads:\n{thread_stacks()}"
            )

    def _choose(self, step: int) -> list[str] | None:
        """The uids of the groups of a step, in the order in which they finished; None if more must finish first."""
        self._drop_stale(step)
        at_start = [uid for uid, group in self.groups.items() if group.version == self._first_version]
        selected = set(at_start[: self.batch_size])
        if not selected <= set(self._finished):
            return None
        for version in range(step - 1 - self.max_staleness, step):
            admitted = sum(group.version <= version for group in self.groups.values())
            may_be_left = (version + self.max_staleness + 1 - step) * self.batch_size
            missing = admitted - may_be_left - len(selected)  # those chosen so far have this version or an older one
            ready = [uid for uid in self._finished if uid not in selected and self.groups[uid].version <= version]
            if missing > len(ready):
                return None
            selected.update(ready[: max(0, missing)])
        others = [uid for uid in self._finished if uid not in selected]
        selected.update(others[: self.batch_size - len(selected)])
        return [uid for uid in self._finished if uid in selected] if len(selected) == self.batch_size else None

    def _drop_stale(self, step: int) -> None:
        """Drop groups that are older than allowed, and return their prompts to the queue. Raises StaleWeightsError if
        one was dropped _MAX_DROPS times."""
        oldest = step - 1 - self.max_staleness
        stale = [uid for uid in self._finished if self.groups[uid].oldest_version < oldest]
        for uid in stale:
            self._drops[uid] += 1
            if self._drops[uid] == _MAX_DROPS:
                raise StaleWeightsError(
                    f"step {step}: the rollout engine has generated the responses to prompt {uid} {_MAX_DROPS} times "
                    f"with weights of version {self.groups[uid].oldest_version}, but they were pushed as version "
                    f"{self.groups[uid].version}, and the step needs at least version {oldest} "
                    f"(trainer.async.max_staleness={self.max_staleness}): the engine does not get the pushed weights"
                )
            self.queue.put_back(self.groups.pop(uid).prompt)
            self._finished.remove(uid)
        self._dropped += len(stale)
        if stale:
            self.lock.notify_all()

    def _metrics(self, groups: list[Group], waited: float) -> dict[str, float]:
        now = time.perf_counter()
        versions = np.concatenate([group.rows.batch["weight_version"].numpy() for group in groups])
        staleness = self._steps_taken - 1 - versions
        spans = [each for group in groups for each in group.rows.non_tensor_batch.get("weight_versions", ())]
        metrics = {
            "async/staleness_mean": float(staleness.mean()),
            "async/staleness_max": int(staleness.max()),
            **{f"async/staleness_{k}": int((staleness == k).sum()) for k in range(self.max_staleness + 1)},
            "async/partial": sum(len({version for _, version in each}) > 1 for each in spans),
            "async/dropped": self._dropped,
            "async/filtered": self.filtered,
            "async/buffer_groups": len(self._finished),
            "async/in_flight_groups": self.in_flight,
            "async/wait_seconds": waited,
            "rollout/tokens_per_second": self._tokens / (now - self._last_take),
        }
        self._dropped = self.filtered = self._tokens = 0
        self._last_take = now
        return metrics


class AsyncPrompts(PromptQueue):
    """The prompts of asynchronous training. The saved state includes those that are not trained yet. A resumed run
    generates them again first, so no prompt is lost or repeated."""

    buffer: SampleBuffer  # has the prompts that are admitted

    def __init__(self, prompts: Prompts, size: int):
        super().__init__(prompts, size)
        self.leaving: DataProto | None = None  # prompts that have left the queue and are not admitted yet
        self._position: dict[str, Any] | None = None  # of the data, before the batch that is being read

    def __call__(self) -> DataProto:
        self._fill()
        with self.buffer.lock:
            batch = self.leaving = super().__call__()
        return batch

    def _fill(self) -> None:
        """Read prompts until `size` are waiting, without the lock: the training loop needs it while a read hangs."""
        while True:
            with self.buffer.lock:
                if self.waiting is not None and len(self.waiting) >= self.size:
                    return
                position = self._position = self.source.state_dict()
            new = self.source()
            with self.buffer.lock:
                if self._position is not position:
                    raise RuntimeError("a read of the data has ended after its run had stopped")
                self.waiting = DataProto.concat([self.waiting, new]) if self.waiting is not None else new
                self._position = None

    def take_back(self, admitted: list[DataProto]) -> None:
        """Return prompts that are admitted, leaving or being read to the queue."""
        with self.buffer.lock:
            under_way = admitted + ([self.leaving] if self.leaving is not None else [])
            if under_way:
                self.put_back(DataProto.concat(under_way))
            if self._position is not None:
                self.source.load_state_dict(self._position)
            self.leaving = self._position = None

    def state_dict(self) -> dict[str, Any]:
        with self.buffer.lock:
            position = self._position or self.source.state_dict()
            state = {"source": position, "size": self.size, "waiting": self.waiting}
            under_way = [group.prompt for group in self.buffer.groups.values()]
            under_way += [self.leaving] if self.leaving is not None else []
            if under_way:
                state["waiting"] = self.before_waiting(DataProto.concat(under_way))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.buffer.lock:  # a state has all prompts that are not trained yet
            self.buffer.groups, self.buffer._finished = {}, []
            self.leaving = self._position = None
            super().load_state_dict(state)


def _shared(run: RunReports, share: float) -> RunReports:
    """A share of the reports of a run that covered several groups."""

    def part(value: Any) -> Any:
        if isinstance(value, Total):
            return Total(value.value * share)
        return (value[0] * share, value[1] * share) if isinstance(value, tuple) else value

    return {
        position: ({**reports, "metrics": {k: part(v) for k, v in reports["metrics"].items()}}, max(1, rows * share))
        for position, (reports, rows) in run.items()
    }
