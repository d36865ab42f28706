"""Asynchronous training: the rollout generates the next batches while the policy is trained.

    prompts -> repeat -> gen -> [rm] -> reward -> buffer     in the producer thread
    buffer -> ... -> update_actor -> sync_weights            in the training loop

The flow is that of synchronous training with one more operator, `buffer`, and runs in stages. The producer thread
admits prompts, and scores groups as they finish; `Trainer.step` runs the flow from the buffer on. `sync_weights`
interrupts the requests of the rollout, pushes, and lets them continue with the new weights. Bounded staleness and
interruptible generation are those of AReaL (Fu et al. 2025, arXiv 2505.24298).
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from verl.config import schema
from verl.dataflow import HOLD, DataFlow, Operator, Pipeline
from verl.protocol import DataProto
from verl.single_controller.cluster import wait_limits
from verl.trainer.asynchronous.sample_buffer import AsyncPrompts, SampleBuffer
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.dynamic_sampling import DynamicSampling, Gathered
from verl.trainer.ppo.flow import PPORunner
from verl.trainer.ppo.operators import Prompts, Roles, check_vocabulary, prompt_columns, uses_agent_loop
from verl.trainer.ppo.rollout_correction import copy_log_probs
from verl.trainer.ppo.weights import RolloutWeights
from verl.trainer.view import RunView

logger = logging.getLogger("verl.trainer")

_COLLECT_SECONDS = 0.02  # for which a rollout worker waits for the first finished group; other calls wait behind it
_IDLE_SECONDS = 0.1  # between two polls of an idle producer
_JOIN_SECONDS = 10.0  # for the producer to end, once the workers have ended


@dataclass(eq=False, repr=False)
class Generation:
    """Generation in the background, on the rollout's own devices.

    Args:
        with_columns: also send the other columns, for agent loops that read them.
        partial: interrupt requests for a push of weights; otherwise wait for their trajectories.
    """

    roles: Roles
    with_columns: bool
    partial: bool

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all prompts, for new workers."""
        self.waiting: list[DataProto] = []  # prompts that are not sent yet
        self._prompts: dict[str, DataProto] = {}  # by uid: the rows of groups that are being generated
        self._sent = 0

    def __call__(self, batch: DataProto) -> object:
        """The operator `gen`: keep the prompts, to be sent by `send`."""
        self.waiting.append(batch)
        return HOLD

    def send(self) -> None:
        """Send the prompts that are waiting, group by group to one rank, or tensor-parallel group, after another."""
        ranks = self.roles["rollout"].layout("rollout").dp_size
        batches, self.waiting = self.waiting, []
        for batch in batches:
            shares: list[list[int]] = [[] for _ in range(ranks)]
            for rows in group_rows(batch):
                self._prompts[batch.non_tensor_batch["uid"][rows[0]]] = batch[rows]
                shares[self._sent % ranks].extend(rows)
                self._sent += 1
            inputs = prompt_columns(batch, self.with_columns)
            self.roles["rollout"].submit_prompts([inputs[rows] if rows else None for rows in shares])

    def collect(self) -> list[DataProto]:
        """Return the groups that have finished since the last call, with the columns of their prompts."""
        if not self._prompts:
            return []
        groups = []
        for finished in self.roles["rollout"].collect_finished(_COLLECT_SECONDS):
            for group in finished:
                prompts = self._prompts.pop(group.non_tensor_batch["uid"][0])
                check_vocabulary(group.batch["responses"], prompts.meta_info.get("vocab_size"))
                prompts.meta_info = {}
                groups.append(prompts.union(group))
        return groups

    @contextmanager
    def paused(self, resume_after_error: bool = False) -> Iterator[None]:
        """Keep the rollout's engines idle. resume_after_error: the block does not change the weights."""
        rollout = self.roles["rollout"]
        rollout.pause_generation(self.partial)
        try:
            yield
        except Exception as error:
            if resume_after_error:
                try:
                    rollout.resume_generation()
                except Exception as second:
                    error.add_note(f"generation could not be resumed: {second}")
            raise
        rollout.resume_generation()


@dataclass(eq=False, repr=False)
class FilterGroups:
    """`filter_groups` of asynchronous training: drops zero-variance groups as they arrive; others are generated. The
    limits of `sampling`, the operator of synchronous training, hold for the groups of each training batch."""

    sampling: DynamicSampling

    def __call__(self, batch: DataProto) -> object:
        kept, _ = self.sampling.count(batch)
        if self.sampling.is_complete():
            self.reset()
        return batch[np.concatenate(kept)] if kept else HOLD

    def reset(self) -> None:
        """Begin a new training batch."""
        self.sampling.gathered = Gathered()


class Producer:
    """The thread that fills the buffer.

    Args:
        prompting: prompts -> repeat -> gen.
        scoring: the operators after gen, up to the buffer.
    """

    def __init__(self, prompting: Pipeline, scoring: Pipeline, generation: Generation, buffer: SampleBuffer):
        self.prompting, self.scoring, self.generation, self.buffer = prompting, scoring, generation, buffer
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._turn = threading.Lock()  # held while the thread uses operators and workers
        self._is_held = threading.Event()

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
            self._thread.start()

    def stop(self, seconds: float = _JOIN_SECONDS) -> None:
        """End the thread, and wait for its end. A call in progress ends when the workers end."""
        self._stopped.set()
        self.buffer.fail(RuntimeError("asynchronous generation was stopped"))
        if self._thread is not None:
            self._thread.join(seconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the thread out of operators and workers, and the rollout's engines idle, as for validation. Raises
        OperatorTimeout if the thread does not end what it does."""
        self._is_held.set()
        began = time.monotonic()
        try:
            while not self._turn.acquire(timeout=_IDLE_SECONDS):
                self.buffer.check_progress(began)
            try:
                with self.generation.paused(resume_after_error=True):
                    yield
            finally:
                self._turn.release()
        finally:
            self._is_held.clear()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._turn:
                    did_something = self._admit() | self._score()
                if not did_something or self._is_held.is_set():
                    self._wait()
        except BaseException as error:  # SystemExit of an operator ends the run as well
            if not self._stopped.is_set():
                self.buffer.fail(error)

    def _wait(self) -> None:
        while self._is_held.is_set() and not self._stopped.wait(_COLLECT_SECONDS):
            pass
        with self.buffer.lock:
            if not self.buffer.room() and not self.buffer.in_flight:
                self.buffer.lock.wait(_IDLE_SECONDS)

    def _admit(self) -> bool:
        """Send as many prompts as may be admitted. Returns whether there were any."""
        with self.buffer.lock:
            room = self.buffer.room()
        if not room:
            return False
        self.buffer.queue.size = room
        self.prompting.run()
        with self.buffer.lock:
            for batch in self.generation.waiting:
                self.buffer.admit(batch)
                self.buffer.add_reports(_uids(batch), self.prompting.pop_held_reports())
        self.generation.send()
        return True

    def _score(self) -> bool:
        """Run the operators between gen and the buffer on the groups that have finished. Returns whether any had."""
        groups = self.generation.collect()
        if not groups:
            return False
        uids = [uid for group in groups for uid in _uids(group)]
        for group in groups:
            reports = {-1: ({"metrics": group.meta_info["metrics"], "timing": {}}, len(group))}
            self.buffer.add_reports(_uids(group), [reports])
        self.scoring.run(self.buffer.join(groups))
        self.buffer.settle(uids, self.scoring.pop_held_reports())
        return True


def _uids(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"]))


class AsyncRunner(PPORunner):
    """Turns the flow of synchronous training into that of asynchronous training, and owns its producer."""

    keeps_workers = False
    buffer: SampleBuffer  # set by `finish`
    producer: Producer  # set by `reset`; it ends with its workers

    def __init__(self, view: RunView, weights: RolloutWeights):
        super().__init__(view, weights)
        settings = view.config.trainer["async"]
        self.generation = Generation(view.roles, uses_agent_loop(view.config), settings.partial_rollout)
        self._filter: FilterGroups | None = None

    def describe(self) -> dict[str, str]:
        k = self.view.config.trainer.max_staleness
        interrupted = "are interrupted" if self.generation.partial else "end first"
        age = f"samples are at most {k} update{'s' * (k != 1)} old"
        return {"asynchronous": f"{age}; at a push of weights, running responses {interrupted}"}

    # ---- the flow ---------------------------------------------------------------------------------------------------

    def finish(self, flow: DataFlow) -> DataFlow:
        """Add `buffer` after `reward`; `gen` and `sync_weights` work in the background."""
        view, config = self.view, self.view.config
        flow = super().finish(use_sampled_log_probs(flow, config))
        check_flow(flow)
        size = config.data.train_batch_size
        queue = AsyncPrompts(flow["prompts"].func, size)
        self.buffer = queue.buffer = SampleBuffer(
            queue,
            size,
            config.trainer.max_staleness,
            view.total_steps,
            view.run.inputs.tokenizer.pad_token_id,
            wait_limits(config),
        )
        self.buffer.ends = lambda: view.interrupted is not None
        flow.replace("prompts", replace(flow["prompts"], func=queue))
        flow.replace("gen", replace(flow["gen"], func=self.generation, on=None))
        last = "reward"
        if "filter_groups" in flow:
            last = "filter_groups"
            self._filter = FilterGroups(flow[last].func)
            flow.replace(last, replace(flow[last], func=self._filter))
        flow.insert_after(last, Operator("buffer", self.buffer, reads=("uid", "responses", "weight_version")))
        push = flow["sync_weights"]

        def paused_push(batch: DataProto) -> None:
            with self.generation.paused():
                push.func(batch)
            self.buffer.set_version(batch.meta_info["global_step"])

        return flow.replace("sync_weights", replace(push, func=paused_push))

    def compile(self, flow: DataFlow) -> Pipeline:
        """The pipeline of a step starts at the buffer; the producer runs the stages before it."""
        pipeline = super().compile(flow)
        after_gen = flow.names[flow.names.index("gen") + 1]
        self._stages = pipeline.stage("prompts", "gen"), pipeline.stage(after_gen, "buffer")
        for stage in self._stages:
            stage.log_level = logging.DEBUG  # they run many times per step
        pipeline.start_from("buffer")
        self.reset()
        return pipeline

    # ---- steps ------------------------------------------------------------------------------------------------------

    def position(self) -> None:
        return None

    def undo(self, position: None) -> None:
        self.pipeline.pop_held_reports()
        self.buffer.requeue()

    def reset(self) -> None:
        """Begin with new workers: nothing is in flight, and a new producer starts with the next step."""
        super().reset()
        self.generation.reset()
        self.buffer.reset()
        if self._filter is not None:
            self._filter.reset()
        for stage in self._stages:
            stage.pop_held_reports()
        self.producer = Producer(*self._stages, self.generation, self.buffer)
        self.buffer.on_take = self.producer.start

    def reset_to(self, step: int, total_steps: int) -> None:
        super().reset_to(step, total_steps)
        self.buffer.reset_to(step, total_steps)

    def check_steps(self, steps: int | None) -> None:
        super().check_steps(steps)
        if steps is not None:
            raise ValueError(
                f"fit(steps={steps}) is not supported with trainer.async.max_staleness > 0: set "
                "trainer.total_training_steps"
            )

    def paused(self) -> AbstractContextManager[None]:
        return self.producer.held()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        self.producer.stop(seconds=1.0)  # at the end of a call, so that its worker can end by itself
        try:
            yield
        finally:
            self.producer.stop()


def check_flow(flow: DataFlow) -> None:
    """Raise ValueError for a flow that cannot be run in stages."""
    names = flow.names
    if names[:1] != ("prompts",) or not isinstance(flow["prompts"].func, Prompts) or "gen" not in names:
        raise ValueError(
            "trainer.async.max_staleness > 0: expected a flow that begins with the operator 'prompts' and has 'gen', "
            f"found {' -> '.join(names)}"
        )
    if "gen_baseline" in names:
        raise ValueError(
            "trainer.async.max_staleness > 0 does not support the operator 'gen_baseline', the greedy responses of "
            "remax: use trainer.async.max_staleness=0, or another algorithm.adv_estimator"
        )
    if "sync_weights" not in names:
        raise ValueError("trainer.async.max_staleness > 0: the flow has no operator 'sync_weights'")


def use_sampled_log_probs(flow: DataFlow, config: schema.Config) -> DataFlow:
    """Without a correction, use the rollout's log-probs as old_log_probs: the ratio is to the policy that sampled.

    Unchanged if algorithm.rollout_correction is set, with actor.old_log_prob_pass=always, if another operator reads the
    other columns of `old_log_prob`, and with top_k, top_p or min_p: `old_log_prob` records the tokens that they keep,
    without which a ratio to log-probs of the filtered distribution would not be 1 for equal weights.
    """
    correction = config.algorithm.rollout_correction
    if correction.rollout_is or correction.rollout_rs or correction.bypass_mode or "old_log_prob" not in flow:
        return flow
    why, fix = "actor.old_log_prob_pass is always", ""
    if filters := config.actor_rollout_ref.rollout.active_filters():
        why = f"the log-probs of the rollout are those of the distribution filtered by {filters}"
        fix = ", or turn the filters off"
    elif config.actor_rollout_ref.actor.old_log_prob_pass != "always":
        old = flow["old_log_prob"]
        others = set(old.writes) - {"old_log_probs"}
        if not any(others & set(op.reads) for op in flow):
            k = config.trainer.max_staleness
            logger.info(
                "old_log_probs: copied from the rollout, not computed again, because samples may be %s old. The "
                "importance ratio compares the trained policy with the one that sampled, and clipping limits their "
                "difference (algorithm.rollout_correction.rollout_is=token computes and corrects them: docs/async.md)",
                f"{k} update{'s' * (k > 1)}",
            )
            return copy_log_probs(flow)
        why = f"an operator reads {', '.join(sorted(others))}"
    logger.warning(
        "old_log_probs: computed with the weights before the update, because %s. Samples may be %d update%s older than "
        "these weights, which nothing corrects: set algorithm.rollout_correction.rollout_is=token%s",
        why,
        config.trainer.max_staleness,
        "s" * (config.trainer.max_staleness > 1),
        fix,
    )
    return flow
