"""Checkpoints in the background: what is saved is the state at the call, and errors come back."""

import threading
from pathlib import Path

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, UNEVEN, make_batch, qwen2, run_on_ranks, save_model, share_of, train
from verl.engines import checkpoint
from verl.engines.base import MicroBatching
from verl.engines.checkpoint import BackgroundWriter
from verl.engines.fsdp import FSDPEngine
from verl.engines.hf import HFEngine
from verl.engines.lora import LoraConfig
from verl.engines.model import ModelConfig

CONTENTS = ("model", "optimizer", "extra", "hf_model")


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Every file but what torch writes of the time and the order of shards."""
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_what_is_written_is_the_state_at_the_call(lora, tmp_path, monkeypatch):
    path = save_model(qwen2(), tmp_path / "model")
    engine = HFEngine(ModelConfig(path, lora=lora), OPTIMIZER)
    train(engine, make_batch(), MicroBatching())
    engine.save(tmp_path / "now", CONTENTS)
    gate, write = threading.Event(), checkpoint.save_shards
    monkeypatch.setattr(checkpoint, "save_shards", lambda *args: (gate.wait(), write(*args)))
    engine.save(tmp_path / "later", CONTENTS, background=True)
    assert not engine.is_saved()
    train(engine, make_batch(), MicroBatching())  # changes weights, optimizer and schedule
    gate.set()
    engine.finish_save()
    assert engine.is_saved()
    assert tensors_of(tmp_path / "later") == tensors_of(tmp_path / "now")
    resumed, straight = (HFEngine(ModelConfig(path, lora=lora), OPTIMIZER) for _ in range(2))
    for other, folder in ((resumed, "later"), (straight, "now")):
        other.load(tmp_path / folder, CONTENTS)
        train(other, make_batch(), MicroBatching())
    for (name, a), (_, b) in zip(resumed.weights(), straight.weights()):
        assert torch.equal(a, b), name


def test_the_error_of_a_write_surfaces_once_where_it_is_waited_for(tmp_path):
    engine = HFEngine(ModelConfig(save_model(qwen2(), tmp_path / "model")), OPTIMIZER)
    (tmp_path / "file").write_text("where a folder is expected")
    engine.save(tmp_path / "file", CONTENTS, background=True)
    with pytest.raises(OSError, match=r"file/shards could not be written: {0: .*NotADirectoryError"):
        engine.finish_save()
    engine.finish_save()
    engine.save(tmp_path / "file", CONTENTS, background=True)
    with pytest.raises(
        OSError, match=r"file/shards could not be written: {0: .*NotADirectoryError"
    ):  # the next save does not pass over it either
        engine.save(tmp_path / "good", CONTENTS)


def test_one_write_after_another():
    writer, order, gate = BackgroundWriter(), [], threading.Event()
    writer.start(lambda: (gate.wait(), order.append(1)))
    assert not writer.is_done()
    threading.Timer(0.05, gate.set).start()
    writer.start(lambda: order.append(2))
    assert order[:1] == [1]
    writer.wait()
    assert order == [1, 2] and writer.is_done()


def save_while_training(path: str, out: Path) -> None:
    engine = FSDPEngine(ModelConfig(path), OPTIMIZER)
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


def test_ranks_write_in_the_background_while_they_train(tmp_path):
    path = save_model(qwen2(), tmp_path / "model")
    run_on_ranks(2, save_while_training, path, tmp_path)
    found = [tensors_of(tmp_path / folder) for folder in ("now", "first", "second")]
    assert found[0] and found[0] == found[1] == found[2]
