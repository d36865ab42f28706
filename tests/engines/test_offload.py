"""What is on the device when; the bytes themselves are measured where there is a GPU (tests/gpu)."""

import pytest
import torch

from tests.engines.ranks import (
    OPTIMIZER,
    assert_same,
    engine_alone,
    make_batch,
    make_engine,
    qwen2,
    results,
    run_on_ranks,
    save_model,
)
from verl.engines.base import MicroBatching
from verl.engines.memory import HOST, OnDevice, move_optimizer

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
GPU = torch.device("cuda", 0)


def test_it_is_on_the_device_from_the_first_entry_to_the_last_exit():
    moves = []
    phase = OnDevice(moves.append, GPU)
    assert moves == [HOST]
    with phase:
        assert moves == [HOST, GPU]
        with phase:
            pass
        assert moves == [HOST, GPU]
    assert moves == [HOST, GPU, HOST]
    with pytest.raises(KeyError), phase:
        raise KeyError
    assert moves == [HOST, GPU, HOST, GPU, HOST]


def test_a_phase_with_the_optimizer_brings_both_and_one_without_it_the_weights(tmp_path):
    engine = make_engine(save_model(qwen2(), tmp_path), OPTIMIZER, **OFFLOAD)
    moves: dict[str, list] = {"weights": [], "optimizer": []}
    engine._weights_used = OnDevice(moves["weights"].append, GPU)
    engine._optimizer_used = OnDevice(moves["optimizer"].append, GPU)
    engine.infer(make_batch(), ("log_probs",), MicroBatching(rows=2))
    dict(engine.weights())
    assert moves == {"weights": [HOST, GPU, HOST, GPU, HOST], "optimizer": [HOST]}
    results(engine, make_batch(), MicroBatching(rows=2), steps=1)
    assert moves["optimizer"] == [HOST, GPU, HOST]


def test_contexts_nest(tmp_path):
    engine = make_engine(save_model(qwen2(), tmp_path), OPTIMIZER, **OFFLOAD)
    moves: dict[str, list] = {"weights": [], "optimizer": []}
    engine._weights_used = OnDevice(moves["weights"].append, GPU)
    engine._optimizer_used = OnDevice(moves["optimizer"].append, GPU)
    with engine.on_device():
        with engine.on_device(optimizer=True):
            dict(engine.weights())
            assert moves == {"weights": [HOST, GPU], "optimizer": [HOST, GPU]}
        assert moves == {"weights": [HOST, GPU], "optimizer": [HOST, GPU, HOST]}
    assert moves["weights"] == [HOST, GPU, HOST]


def test_the_state_that_is_moved_is_all_but_the_step_counts():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    move_optimizer(optimizer, torch.device("meta"))
    state = optimizer.state[weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def offloaded_on_rank(path: str) -> dict:
    engine = make_engine(path, OPTIMIZER, sharded=True, **OFFLOAD)
    return results(engine, make_batch(), MicroBatching(tokens=18))


def test_offloading_changes_no_number(tmp_path):
    path = save_model(qwen2(), tmp_path)
    assert_same(run_on_ranks(2, offloaded_on_rank, path), engine_alone(path))
