"""The sample buffer: which groups are admitted, in which order steps take them, and what a checkpoint has of them."""

import copy
import random
import threading
import time
from collections.abc import Iterable

import pytest
import torch

from verl.dataflow import HOLD
from verl.dataflow.flow import Total
from verl.processes.limits import Durations, Limits
from verl.protocol import DataProto
from verl.trainer.asynchronous.sample_buffer import AsyncPrompts, SampleBuffer
from verl.trainer.guards.operator_watch import OperatorTimeout
from verl.trainer.ppo.canary import StaleWeightsError
from verl.trainer.ppo.operators import Prompts

B = 4


class Source:
    """Batches of B prompts with the uids "0", "1", ..."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self) -> DataProto:
        uids = [str(self.position + i) for i in range(B)]
        self.position += B
        return DataProto.from_dict(non_tensors={"uid": uids, "prompt_ids": [[1]] * B})

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class Run:
    """A trainer without workers: `finish` is the rollout, `train` the rest of a step."""

    def __init__(self, max_staleness: int, total_steps: int = 1000):
        self.step = 0
        self.queue = AsyncPrompts(Prompts(Source(), lambda: self.step, 100), B)
        self.buffer = self.queue.buffer = SampleBuffer(self.queue, B, max_staleness, total_steps, 0)
        self.admitted: dict[str, int] = {}  # uid -> version, of the groups that are being generated

    def admit(self) -> int:
        room = self.buffer.room()
        if room:
            self.queue.size = room
            batch = self.queue().repeat(2)
            self.buffer.admit(batch)
            self.admitted |= dict.fromkeys(batch.non_tensor_batch["uid"], self.buffer.version)
        return room

    def finish(self, uids: Iterable[str], version: int | None = None) -> None:
        """version: of an engine that reports an older one than it was given."""
        for uid in uids:
            given = self.admitted.pop(uid)
            self.buffer.put(samples(uid, given if version is None else version))
            self.buffer.settle([uid])

    def take(self) -> DataProto:
        self.step += 1
        return self.buffer.take()

    def ready(self) -> bool:
        with self.buffer.lock:
            return self.buffer._choose(self.step + 1) is not None

    def push(self) -> None:
        self.buffer.set_version(self.step)


def trained_once(max_staleness: int) -> Run:
    """A run after the push of its first step."""
    run = Run(max_staleness)
    run.admit()
    run.finish(str(i) for i in range(B))
    run.take()
    run.push()
    return run


def samples(uid: str, version: int, length: int = 2, rows: int = 2) -> DataProto:
    ones = torch.ones(rows, length)
    return DataProto.from_dict(
        {
            "prompts": torch.ones(rows, 1, dtype=torch.int64),
            "responses": torch.ones(rows, length, dtype=torch.int64),
            "input_ids": torch.ones(rows, 1 + length, dtype=torch.int64),
            "attention_mask": torch.ones(rows, 1 + length, dtype=torch.int64),
            "response_mask": ones,
            "weight_version": torch.full((rows,), version),
        },
        {"uid": [uid] * rows, "finish_reason": ["stop"] * rows, "weight_versions": [[(0, version)]] * rows},
    )


def uids_of(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"]))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_staleness_is_bounded_whatever_the_order_in_which_groups_finish(k, seed):
    """Some groups take long, at random; no step waits for one that it could do without, and none is dropped."""
    draw, run, seen = random.Random(seed), Run(k), []
    largest = 0
    for _ in range(40):
        run.admit()
        while not run.ready():
            assert run.admitted, "a step waits, and nothing is being generated"
            short = [uid for uid in run.admitted if int(uid) * 2654435761 >> 7 & 3] or list(run.admitted)
            run.finish([draw.choice(short if draw.random() < 0.8 else list(run.admitted))])
            run.admit()
        batch = run.take()
        run.admit()  # while this step is trained
        assert run.buffer.in_flight + len(run.buffer._finished) <= (k + 1) * B
        staleness = run.step - 1 - batch.batch["weight_version"]
        assert staleness.min() >= 0 and staleness.max() <= k
        largest = max(largest, int(staleness.max()))
        metrics = batch.meta_info["metrics"]
        assert metrics["async/dropped"] == 0 and metrics["async/staleness_max"] == int(staleness.max())
        assert [metrics[f"async/staleness_{i}"] for i in range(k + 1)] == [(staleness == i).sum() for i in range(k + 1)]
        assert len(uids_of(batch)) == B
        seen += uids_of(batch)
        run.push()
    assert largest == k and len(set(seen)) == len(seen)
    # each prompt of the source was trained, or is still to be
    assert set(seen) | set(run.buffer.groups) == {str(i) for i in range(len(seen) + len(run.buffer.groups))}


@pytest.mark.parametrize("start", [0, 5])
def test_the_batches_of_the_start_are_not_sorted_by_length(start):
    """The later a prompt was admitted, the earlier its responses end: the order of admission decides, B per step."""
    run = Run(max_staleness=2)
    run.step = start
    run.buffer.reset_to(start, 1000)
    assert run.admit() == 3 * B
    run.finish(str(i) for i in reversed(range(1, 3 * B)))
    assert not run.ready(), "the first step trains on the first prompts, and one of them is not finished"
    run.finish(["0"])
    for step in range(3):
        assert set(uids_of(run.take())) == {str(step * B + i) for i in range(B)}
        run.push()
    assert run.admit() == 3 * B


def test_a_long_response_is_waited_for_and_not_overtaken_for_ever():
    run = Run(max_staleness=2)
    assert run.admit() == 3 * B
    run.finish(str(i) for i in range(B))
    run.take()
    run.push()
    for uid in ("4", "5"):  # an operator filters them
        del run.admitted[uid]
        run.buffer.settle([uid])
    assert run.admit() == B + 2  # 12 to 17, of version 1
    run.finish(str(i) for i in (*range(6, 12), *range(13, 18)))  # all except the first
    assert uids_of(run.take()) == ["6", "7", "8", "9"]
    run.push()
    assert run.admit() == B
    assert uids_of(run.take()) == ["10", "11", "13", "14"], "the group 12 can be trained in step 4"
    run.push()
    assert run.admit() == B
    run.finish(str(i) for i in range(18, 26))
    assert not run.ready(), "the group 12 has version 1: it is due in step 4"
    run.finish(["12"])
    assert uids_of(run.take()) == ["15", "16", "17", "12"]


def test_no_prompt_is_admitted_for_a_step_after_the_last():
    run = Run(max_staleness=3, total_steps=2)
    assert run.admit() == 2 * B and run.admit() == 0
    for _ in range(2):
        run.finish(list(run.admitted)[:B])
        run.take()
        run.push()
    assert run.admit() == 0 and not run.buffer.groups


def test_a_group_of_older_weights_than_given_is_dropped_and_generated_again():
    """An engine that reports its versions itself may be behind."""
    run = trained_once(max_staleness=1)
    run.admit()
    run.finish("4", version=-1)
    assert not run.ready()
    assert run.queue.waiting.non_tensor_batch["uid"][0] == "4" and run.admit() == 1 and "4" in run.admitted
    run.finish(["5", "6", "7", "4"])
    batch = run.take()
    assert uids_of(batch) == ["5", "6", "7", "4"] and batch.meta_info["metrics"]["async/dropped"] == 1


def test_an_engine_that_keeps_its_weights_stops_the_run():
    """Otherwise its groups would be dropped and generated again for ever."""
    run = trained_once(max_staleness=1)
    for _ in range(2):
        run.admit()
        run.finish("4", version=-1)
        assert not run.ready()
    run.admit()
    run.finish("4", version=-1)
    with pytest.raises(StaleWeightsError, match=r"prompt 4 3 times with weights of version -1, .* as version 1, and"):
        run.take()


def test_filtered_groups_make_room_and_are_counted():
    run = Run(max_staleness=1)
    run.admit()
    for uid in "01":
        run.buffer.put(samples(uid, run.admitted.pop(uid)))
    run.admitted.pop("2")
    assert run.buffer.in_flight == 2 * B, "nothing is available to a step before settle()"
    run.buffer.settle(["0", "1", "2"])
    assert run.admit() == 1 and "8" in run.admitted
    run.finish(["3", "4"])
    assert run.take().meta_info["metrics"]["async/filtered"] == 1


def test_a_checkpoint_has_every_prompt_that_is_not_trained_in_its_order():
    run = Run(max_staleness=2)
    run.admit()
    run.finish(["3", "0", "1", "2", "7"])
    trained = uids_of(run.take())
    run.push()
    run.admit()
    state = run.queue.state_dict()
    resumed = Run(max_staleness=2)
    resumed.queue.load_state_dict(state)
    resumed.step = run.step
    resumed.buffer.reset_to(run.step, 4)
    assert resumed.buffer.room() == 3 * B  # of the steps 2 to 4
    for _ in range(3):
        resumed.admit()
        resumed.finish(list(resumed.admitted)[:B])
        trained += uids_of(resumed.take())
        resumed.push()
    assert trained == ["3", "0", "1", "2", *(str(i) for i in range(4, 16))]


def test_a_reset_returns_the_prompts_and_forgets_the_error():
    run = Run(max_staleness=1)
    run.admit()
    run.finish(["2", "0"])
    run.buffer.fail(RuntimeError("stopped"))
    run.buffer.reset()
    run.admitted.clear()
    assert run.admit() == 2 * B and list(run.admitted) == [str(i) for i in range(8)]
    run.finish(["0", "1", "2", "3"])
    assert uids_of(run.take()) == ["0", "1", "2", "3"]


def test_a_checkpoint_of_synchronous_training_is_resumed():
    run = Run(max_staleness=1)
    run.queue.load_state_dict({"position": 8})
    run.admit()
    assert list(run.admitted) == [str(i) for i in range(8, 16)]


def test_reports_of_a_run_are_divided_among_its_groups():
    run = Run(max_staleness=1)
    run.admit()
    for uid in "012345":
        run.buffer.put(samples(uid, run.admitted.pop(uid)))
    reports = {0: ({"metrics": {"reward/failed_rows": Total(6), "rm": (12.0, 12)}, "timing": {}}, 12)}
    run.buffer.settle(list("012345"), [reports])
    metrics = run.take().meta_info["metrics"]
    assert metrics["reward/failed_rows"] == pytest.approx(4) and metrics["rm"] == pytest.approx(1)


def test_an_error_ends_the_wait_unchanged():
    run, error = Run(max_staleness=1), KeyError("cause")
    threading.Timer(0.1, run.buffer.fail, [error]).start()
    with pytest.raises(KeyError) as caught:
        run.take()
    assert caught.value is error


def test_the_operator_keeps_a_batch_and_returns_one():
    run = Run(max_staleness=1)
    run.admit()
    for uid in "0123":
        assert run.buffer(samples(uid, 0, length=2 + int(uid))) is HOLD
        run.buffer.settle([uid])
    run.step += 1
    batch = run.buffer()
    assert batch.batch["responses"].shape == (2 * B, 5) and batch.meta_info["global_step"] == 1


def test_synchronous_training_resumes_unless_prompts_are_waiting():
    run, plain = Run(1), Prompts(Source(), lambda: 0, 100)
    plain.load_state_dict(run.queue.state_dict())
    run.admit()
    with pytest.raises(ValueError, match="8 prompts that were taken from the data and are not trained"):
        plain.load_state_dict(run.queue.state_dict())


def test_a_rollout_that_returns_nothing_ends_the_wait():
    """The limit is ten times the median from admission to arrival; before the first arrival, it is worker_timeout."""
    run = Run(max_staleness=1)
    run.buffer._durations = Durations(Limits(timeout=60, factor=10, minimum=1.0))
    run.admit()
    run.finish([*run.admitted])
    run.take()
    run.admitted.clear()
    start = time.monotonic()
    with pytest.raises(OperatorTimeout, match=r"no group of responses has arrived for 1 s, while \d+ are generated"):
        for _ in range(5):
            run.take()
    assert 1.0 <= time.monotonic() - start < 10


def test_a_loaded_state_replaces_the_groups():
    """A restart returns to the start without a checkpoint: no prompt is lost or repeated."""
    run = Run(max_staleness=1)
    at_the_start = copy.deepcopy(run.queue.state_dict())
    run.admit()
    run.finish([*run.admitted][:3])
    run.queue.load_state_dict(at_the_start)
    run.buffer.reset()
    assert not run.buffer.groups and run.buffer.in_flight == 0
    run.admitted.clear()
    assert run.admit() == 2 * B and sorted(run.admitted, key=int) == [str(i) for i in range(2 * B)]
