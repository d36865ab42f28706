"""Checkpoints in the background: what is saved is the state at the call, and errors come back."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engines.ranks import (
    OPTIMIZER,
    UNEVEN,
    make_batch,
    make_engine,
    qwen2,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from verl.engines import checkpoint
from verl.engines.base import MicroBatching
from verl.engines.checkpoint import ShardWriter

CONTENTS = ("model", "optimizer", "extra", "hf_model")


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Every file but what torch writes of the time and the order of shards."""
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.fast("lora1")
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}])
def test_what_is_written_is_the_state_at_the_call(lora, tmp_path, monkeypatch):
    path = save_model(qwen2(), tmp_path / "model")
    engine = make_engine(path, OPTIMIZER, **lora)
    train(engine, make_batch(), MicroBatching())
    engine.save(tmp_path / "now", CONTENTS)
    gate, write = threading.Event(), ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", lambda shards: gate.wait() and write(shards))
    engine.save(tmp_path / "later", CONTENTS, background=True)
    assert not engine.is_saved()
    train(engine, make_batch(), MicroBatching())  # changes weights, optimizer and schedule
    gate.set()
    engine.finish_save()
    assert engine.is_saved()
    assert tensors_of(tmp_path / "later") == tensors_of(tmp_path / "now")
    resumed, straight = (make_engine(path, OPTIMIZER, **lora) for _ in range(2))
    for other, folder in ((resumed, "later"), (straight, "now")):
        other.load(tmp_path / folder, CONTENTS)
        train(other, make_batch(), MicroBatching())
    for (name, a), (_, b) in zip(resumed.weights(), straight.weights()):
        assert torch.equal(a, b), name


def test_the_error_of_a_write_surfaces_once_where_it_is_waited_for(tmp_path):
    engine = make_engine(save_model(qwen2(), tmp_path / "model"), OPTIMIZER)
    bad, told = (
        tmp_path / "bad",
        pytest.raises(OSError, match=r"bad/shards could not be written: {0: .*IsADirectoryError"),
    )
    (bad / "shards" / "__0_0.distcp").mkdir(parents=True)  # where a file is expected
    engine.save(bad, CONTENTS, background=True)
    with told:
        engine.finish_save()
    engine.finish_save()
    engine.save(bad, CONTENTS, background=True)
    with told:  # the next save does not pass over it either
        engine.save(tmp_path / "good", CONTENTS)
    with told:
        engine.save(bad, CONTENTS)
    (tmp_path / "file").write_text("where a folder is expected")
    with pytest.raises(OSError, match=r"file/shards could not be written: {0: .*NotADirectoryError"):
        engine.save(tmp_path / "file", CONTENTS, background=True)
    assert engine.is_saved()


def one_rank_is_slow(path: str, out: Path) -> None:
    engine, gate, write = make_engine(path, OPTIMIZER, sharded=True), threading.Event(), ShardWriter.write
    if not engine.sharding.is_first_rank:
        ShardWriter.write = lambda shards: gate.wait() and write(shards)
    engine.save(out, CONTENTS, background=True)
    if engine.sharding.is_first_rank:  # is done without the other
        while not engine.is_saved():
            time.sleep(0.01)
        assert not (out / "shards" / ".metadata").exists()
    train(engine, share_of(engine, make_batch()), UNEVEN)
    assert engine.is_saved() == engine.sharding.is_first_rank
    gate.set()
    engine.finish_save()
    assert (out / "shards" / ".metadata").exists() or not engine.sharding.is_first_rank


@pytest.mark.slow
def test_no_rank_waits_for_another_while_it_writes(tmp_path):
    run_on_ranks(2, one_rank_is_slow, save_model(qwen2(), tmp_path / "model"), tmp_path / "out")


def one_rank_cannot_write(path: str, out: Path) -> list[str]:
    engine, found = make_engine(path, OPTIMIZER, sharded=True), []
    for background in (True, False):
        try:
            engine.save(out, CONTENTS, background)
            engine.finish_save()
        except OSError as error:
            found.append(str(error))
    return found


def save_while_training(path: str, out: Path) -> None:
    engine = make_engine(path, OPTIMIZER, sharded=True)
    batch = share_of(engine, make_batch())
    train(engine, batch, UNEVEN)
    engine.save(out / "now", CONTENTS)
    for attempt in ("first", "second"):
        engine.save(out / attempt, CONTENTS, background=True)
    train(engine, batch, UNEVEN)
    engine.finish_save()
    weights = {}
    for folder in ("now", "first", "second"):
        engine.load(out / folder, CONTENTS)
        train(engine, batch, UNEVEN)
        weights[folder] = dict(engine.weights())
    for folder in ("first", "second"):
        assert all(torch.equal(value, weights["now"][name]) for name, value in weights[folder].items())


def saves_on_rank(path: str, out: Path) -> list[str]:
    checkpoint.FILE_ELEMENTS = 2000
    save_while_training(path, out)
    assert len(list((out / "now" / "shards").glob(f"__{dist.get_rank()}_*.distcp"))) == checkpoint.WRITERS
    return one_rank_cannot_write(path, out / "bad")


def test_ranks_write_while_they_train_and_all_hear_of_the_one_that_cannot_write(tmp_path):
    (tmp_path / "bad" / "shards" / "__1_0.distcp").mkdir(parents=True)
    ranks = run_on_ranks(2, saves_on_rank, save_model(qwen2(), tmp_path / "model"), tmp_path)
    found = [tensors_of(tmp_path / folder) for folder in ("now", "first", "second")]
    assert found[0] and found[0] == found[1] == found[2]
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2
    assert all('bad/shards could not be written: {1: "IsADirectoryError' in text for text in ranks[0])
