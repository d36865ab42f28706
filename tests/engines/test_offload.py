"""What is on the device when; the bytes themselves are measured where there is a GPU (tests/gpu)."""

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, qwen2, results, save_model
from verl.engines.base import MicroBatching
from verl.engines.memory import HOST, HostMemory, OnDevice, move_optimizer

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
    engine = make_engine(save_model(qwen2(), tmp_path), OPTIMIZER, param_offload=True, optimizer_offload=True)
    moves: dict[str, list] = {"weights": [], "optimizer": []}
    engine._weights_used = OnDevice(moves["weights"].append, GPU)
    engine._optimizer_used = OnDevice(moves["optimizer"].append, GPU)
    engine.infer(make_batch(), ("log_probs",), MicroBatching(rows=2))
    dict(engine.weights())
    assert moves == {"weights": [HOST, GPU, HOST, GPU, HOST], "optimizer": [HOST]}
    results(engine, make_batch(), MicroBatching(rows=2), steps=1)
    assert moves["optimizer"] == [HOST, GPU, HOST]
    for each in moves.values():
        each.clear()
    with engine.on_device():  # contexts nest
        with engine.on_device(optimizer=True):
            dict(engine.weights())
            assert moves == {"weights": [GPU], "optimizer": [GPU]}
        assert moves == {"weights": [GPU], "optimizer": [GPU, HOST]}
    assert moves["weights"] == [GPU, HOST]


def test_the_state_that_is_moved_is_all_but_the_step_counts():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    move_optimizer(optimizer, HostMemory(), torch.device("meta"))
    state = optimizer.state[weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
