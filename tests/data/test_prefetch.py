"""Batches that threads prepare are those that are read without threads, and saved positions are of batches in use."""

import gc
import json
import random
import sys
import threading
import time

import pytest
import torch
from PIL import Image

from tests.waiting import wait_until
from verl.data import prefetch
from verl.data.collate import collate_prompts
from verl.data.order import PromptSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.protocol import DataProto

NAME = "data reader"


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


class Slow:
    """Rows whose reading takes a different time each."""

    def __init__(self, size: int):
        self.size, self.read, self.bad = size, [], {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict:
        time.sleep(0.002 * (row * 7919 % 5))
        self.read.append(row)
        if row in self.bad:
            raise self.bad[row]
        return {"row": row, "text": f"a{row}"}


def collate(rows: list[dict]) -> DataProto:
    return DataProto.from_dict(non_tensors={name: [row[name] for row in rows] for name in rows[0]})


def source_of(dataset, size=4, **more) -> PromptSource:
    return PromptSource(dataset, size, seed=3, collate=more.pop("collate", collate), **more)


def contents(batch: DataProto) -> dict:
    return {name: list(values) for name, values in batch.non_tensor_batch.items()} | dict(batch.meta_info)


@pytest.mark.parametrize("workers, ahead", [(1, 1), (2, 1), (5, 3)])
def test_batches_and_positions_are_those_of_reading_without_threads(workers, ahead):
    plain, threaded = source_of(Slow(11)), source_of(Slow(11), workers=workers, batches_ahead=ahead)
    for _ in range(9):  # several epochs
        assert contents(threaded()) == contents(plain())
        assert threaded.state_dict() == plain.state_dict()
        assert (threaded.epoch, threaded.step_in_epoch) == (plain.epoch, plain.step_in_epoch)
    threaded.close()


def test_a_saved_position_is_exact_at_every_step_and_a_loaded_one_is_used():
    whole = [contents(batch) for batch in map(lambda _: plain(), range(8))] if (plain := source_of(Slow(11))) else []
    first = source_of(Slow(11), workers=2, batches_ahead=2)
    states = [first.state_dict()]
    for expected in whole:
        assert contents(first()) == expected
        states.append(first.state_dict())
    for step in (5, 0, 3):  # backwards, with other batches prepared
        first.load_state_dict(states[step])
        assert [contents(first()) for _ in range(2)] == whole[step : step + 2]
    resumed = source_of(Slow(11))  # without threads
    resumed.load_state_dict(states[6])
    assert contents(resumed()) == whole[6]
    first.close()


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_the_error_is_that_of_the_first_row_which_fails(workers):
    """In the order of the batch, whichever is found first; an earlier or a later call is not affected."""
    rows = PromptSource(Slow(12), 4, shuffle=False, collate=collate, workers=workers)
    rows.dataset.bad = {5: ValueError("row 5 is bad"), 4: KeyError("row 4"), 8: SystemExit(3), 10: ValueError("10")}
    assert contents(rows())["row"] == [0, 1, 2, 3]
    position = rows.state_dict()
    with pytest.raises(KeyError, match="row 4"):
        rows()
    with pytest.raises(SystemExit, match="3"):
        rows()
    assert contents(rows())["row"] == [0, 1, 2, 3]
    rows.dataset.bad = {}  # repaired
    rows.load_state_dict(position)
    assert contents(rows())["row"] == [4, 5, 6, 7]
    rows.close()


def test_an_error_of_collate_is_raised_with_its_batch():
    def strict(rows):
        if rows[0]["row"] == 4:
            raise ValueError("no batch")
        return collate(rows)

    rows = PromptSource(Slow(12), 4, shuffle=False, collate=strict, workers=2)
    assert contents(rows())["row"] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no batch"):
        rows()
    assert contents(rows())["row"] == [8, 9, 10, 11]
    rows.close()


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_bounded_number_of_batches_is_in_memory(ahead):
    settings = {"shuffle": False, "workers": 4, "batches_ahead": ahead}
    rows = PromptSource(Slow(1000), 4, collate=collate, **settings)
    for step in range(1, 6):
        rows()
        wait_until(lambda most=4 * (step + ahead): len(rows.dataset.read) >= most)
        time.sleep(0.05)
        assert len(rows.dataset.read) == len(set(rows.dataset.read)) == 4 * (step + ahead)
    rows.close()
    assert not readers()


def test_threads_work_at_the_same_time():
    both = threading.Barrier(2)

    class Rows(Slow):
        def __getitem__(self, row):
            both.wait(10)
            return {"row": row}

    rows = source_of(Rows(8), 4, workers=2)
    assert len(rows()) == 4
    both.abort()  # one thread may wait for the next batch
    rows.close()


def test_one_thread_reads_in_the_order_of_the_batches():
    rows = PromptSource(Slow(100), 4, shuffle=False, collate=collate, workers=1)
    for _ in range(5):
        rows()
    rows.close()
    assert rows.dataset.read == list(range(len(rows.dataset.read)))


def test_the_time_in_threads_is_reported():
    begun, rows = time.monotonic(), source_of(Slow(8), workers=1)
    rows()
    rows()
    assert 0.0 < rows.seconds_ahead < time.monotonic() - begun
    assert source_of(Slow(8)).seconds_ahead == 0.0
    rows.close()


class Hanging(Slow):
    """Row 6 takes until `end` is set."""

    def __init__(self, size):
        super().__init__(size)
        self.begun, self.end = threading.Event(), threading.Event()

    def __getitem__(self, row):
        if row == 6:
            self.begun.set()
            self.end.wait(30)
        return super().__getitem__(row)


def wait_until_no_thread_is_left() -> None:
    wait_until(lambda: gc.collect() >= 0 and not readers())


def test_close_ends_the_threads_and_the_wait_of_another_thread(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.2)
    rows = PromptSource(Hanging(12), 4, shuffle=False, collate=collate, workers=2)
    rows()
    found = []

    def wait():
        try:
            rows()
        except RuntimeError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert rows.dataset.begun.wait(10)
    rows.close()
    waiting.join(10)
    assert found == ["reading the data was stopped"]
    (still,) = readers()
    assert still.daemon and "a thread is still reading a row" in caplog.text  # the program does not wait for it
    rows.dataset.end.set()
    wait_until_no_thread_is_left()
    assert contents(rows())["row"] == [8, 9, 10, 11]  # it can be used again
    rows.close()


def outcome_of(rows: PromptSource, seen: list) -> None:
    try:
        seen.append(contents(rows())["row"])
    except Exception as error:
        seen.append(error)


@pytest.mark.parametrize("line", range(10))
@pytest.mark.parametrize("expected", [[0, 1, 2, 3], [4, 5, 6, 7]])
def test_close_at_any_line_of_take(expected, line):
    """The wait ends with RuntimeError; before or after it, the batch is the right one."""
    rows = PromptSource(Slow(40), 4, shuffle=False, collate=collate, workers=2)
    if expected[0]:
        rows()  # the batch is planned
    lines, seen = iter(range(20)), []
    closing = threading.Thread(target=rows.close)

    def trace(frame, event, _):
        if frame.f_code is not prefetch.Prefetcher.take.__code__:
            return None
        if event == "line" and next(lines) == line:
            closing.start()
            closing.join(0.05)  # it may wait until the batch is taken
        return trace

    def take():
        sys.settrace(trace)
        outcome_of(rows, seen)

    taking = threading.Thread(target=take, daemon=True)
    taking.start()
    taking.join(20)
    if closing.ident is None:
        return rows.close()  # there is no such line
    closing.join(20)
    (found,) = seen  # it has ended
    assert found == expected or str(found) == "reading the data was stopped", found
    rows.close()


def test_a_source_that_is_forgotten_leaves_no_thread():
    rows = source_of(Slow(100), workers=4)
    rows()
    del rows
    wait_until_no_thread_is_left()


# ---- the datasets of this package -----------------------------------------------------------------------------------


def write_images(folder, count):
    draw = random.Random(0)
    lines = []
    for i in range(count):
        size = draw.choice([(16, 16), (24, 16), (40, 32)])
        Image.effect_noise(size, 50 + i).convert("RGB").save(folder / f"{i}.png")
        prompt, images = ("<image>?" * (1 + i % 2), [f"{i}.png"] * (1 + i % 2)) if i % 5 else (f"text {i}", [])
        lines.append({"prompt": prompt, "response": "abc", "answer": "1", "images": images})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def assert_same(mine, other):
    """Batches with the same tensors, bit for bit."""
    assert mine.non_tensor_batch.keys() == other.non_tensor_batch.keys()
    for name in mine.tensors:
        assert torch.equal(mine.batch[name], other.batch[name])
    for name, values in mine.non_tensor_batch.items():
        for a, b in zip(values, other.non_tensor_batch[name]):
            if name == "multi_modal_inputs" and a is not None:
                assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
            else:
                assert a == b


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_images_are_the_same_bit_for_bit(tmp_path, models, family):
    tokenizer, processor = models(family)
    dataset = RLHFDataset(write_images(tmp_path, 20), tokenizer, {"max_prompt_length": 256}, processor=processor)
    plain = source_of(dataset, 8, collate=collate_prompts)
    threaded = source_of(dataset, 8, collate=collate_prompts, workers=6)
    for _ in range(4):
        assert_same(threaded(), plain())
    threaded.close()
