"""AdamW8bit by hand and against AdamW, and the learning-rate schedules by hand."""

import copy

import pytest
import torch

from tests.engines.ranks import (
    UNEVEN,
    make_batch,
    make_engine,
    qwen2,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from verl.config.schema import OptimConfig
from verl.engines import memory
from verl.engines.base import MicroBatching
from verl.engines.optimizer import AdamW8bit, lr_multiplier

CONTENTS = ("model", "optimizer", "extra")
OPTIMIZER_8BIT = OptimConfig(optimizer="AdamW8bit", lr=1e-2)


COSINE, LINEAR = ({"lr_scheduler_type": name} for name in ("cosine", "linear"))
WSD = {"lr_scheduler_type": "wsd", "lr_decay_steps_ratio": 0.4}


@pytest.mark.parametrize(
    ("keys", "total", "factors"),
    [
        ({"lr_warmup_steps": 3}, 0, [0.25, 0.5, 0.75, 1, 1]),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 12}, 99, [0.25, 0.5, 0.75, 1]),
        (COSINE | {"min_lr_ratio": 0.1}, 4, [1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
        # 1/2, then from 1 to 0.2 in four steps
        # from a half: 0.5 + 0.5 / 2, then 1
        ({"lr_warmup_steps": 1, "lr_warmup_init_ratio": 0.5}, 0, [0.75, 1, 1]),
        (LINEAR | {"lr_warmup_steps": 1, "min_lr_ratio": 0.2}, 5, [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        # 1/3, 2/3, then 1 until step 6, and from 1 to 0 in 0.4 x 10 steps
        (WSD | {"lr_warmup_steps": 2}, 10, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    ],
)
def test_the_schedules_by_hand(keys, total, factors):
    schedule = lr_multiplier(OptimConfig(**keys), total)
    assert [schedule(step) for step in range(len(factors))] == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "total", "message"),
    [
        (COSINE | {"lr_warmup_steps": 5, "total_training_steps": 5}, 0, "cosine schedule needs more total steps"),
        (LINEAR | {"lr_warmup_steps": 3}, 3, r"linear schedule needs more total steps \(3\) than warm-up steps \(3\)"),
        (WSD | {"lr_warmup_steps": 7}, 10, r"wsd schedule .* warm-up steps \(7\) and steps of decay \(4\)"),
    ],
)
def test_a_schedule_that_does_not_fit_into_the_run_is_refused(keys, total, message):
    with pytest.raises(ValueError, match=message):
        lr_multiplier(OptimConfig(**keys), total)


def test_the_first_step_of_a_row_by_hand():
    """The first moments are 0.1 g and 0.001 g^2, so the first step is lr sign(g), whatever the codes."""
    parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0, 3.0]]))
    parameter.grad = torch.tensor([[4.0, -2.0, 0.01]])
    optimizer = AdamW8bit([parameter], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert parameter[0].tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1, 2.85 - 0.1], abs=1e-5)
    state = optimizer.state[parameter]
    # of the row, 0.4 is the largest: 448 of e4m3, whose scale is 0.4 / 448. 0.001 / that = 1.12 is between 1.125 and 1
    assert state["exp_avg_scale"].item() == pytest.approx(0.4 / 448)
    codes = state["exp_avg"].view(torch.float8_e4m3fn).float()[0].tolist()
    assert codes == [448, -224, 1.125]
    # the root of 0.001 x 16 is 448; that of 0.001 x 1e-4 is 448 / 400 = 1.12
    assert state["exp_avg_sq_scale"].item() == pytest.approx((0.001 * 16) ** 0.5 / 448)
    assert state["exp_avg_sq"].view(torch.float8_e4m3fn).float()[0].tolist() == [448, 224, 1.125]


def test_moments_of_large_and_small_gradients_in_a_block_do_not_divide_by_zero():
    """A gradient 1e7 times smaller than the largest one of its block: its update is damped, not lr m / eps."""
    parameter = torch.nn.Parameter(torch.zeros(1, 4))
    optimizer = AdamW8bit([parameter], lr=0.1, weight_decay=0.0)
    for _ in range(20):
        parameter.grad = torch.tensor([[1.0, 1e-7, -1e-3, 0.0]])
        optimizer.step()
    moved = parameter.detach()[0]
    assert moved[0].item() == pytest.approx(-2, abs=0.05) and moved[3] == 0
    assert -2.1 <= moved[1] <= 0 and 0 < moved[2] <= 2.1


def test_it_follows_adamw_with_a_quarter_of_the_memory():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(300, 700, generator=generator)  # the last block of a row has 188 elements
    ours, theirs = (torch.nn.Parameter(torch.zeros(300, 700)) for _ in range(2))
    optimizers = [AdamW8bit([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)]
    for _ in range(60):
        for parameter, optimizer in zip((ours, theirs), optimizers):
            noise = 0.5 * torch.randn(300, 700, generator=torch.Generator().manual_seed(_))
            parameter.grad = parameter.detach() - target + noise
            optimizer.step()
    moved = theirs.detach().norm()
    assert (ours.detach() - theirs.detach()).norm() / moved < 0.1 and moved > 100
    sizes = {
        name: sum(v.numel() * v.itemsize for n, v in state.items() if n != "step")
        for name, state in (("8bit", optimizers[0].state[ours]), ("32bit", optimizers[1].state[theirs]))
    }
    # 2 codes of 1 byte, and 2 scales of 4 bytes for each of 3 blocks of a row
    assert sizes == {"8bit": 2 * 300 * 700 + 2 * 4 * 300 * 3, "32bit": 8 * 300 * 700}


def test_vectors_have_the_moments_of_adamw():
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizers = [AdamW8bit([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)]
    for step in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers):
            parameter.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-7)


def test_a_resumed_run_is_the_same(tmp_path):
    path, batch = save_model(qwen2(), tmp_path / "model"), make_batch()
    engine = make_engine(path, OPTIMIZER_8BIT)
    assert memory.update_bytes(engine.module.parameters(), engine.optimizer) == 6 * sum(
        p.numel() for p in engine.module.parameters()
    )
    train(engine, batch, MicroBatching())
    engine.save(tmp_path / "saved", CONTENTS)
    other = make_engine(path, OPTIMIZER_8BIT)
    other.load(tmp_path / "saved", CONTENTS)
    for each in (engine, other):
        train(each, batch, MicroBatching())
    for (name, value), (_, resumed) in zip(engine.weights(), other.weights(), strict=True):
        assert torch.equal(value, resumed), name


def test_two_ranks_resume_the_checkpoint_of_one(tmp_path):
    """A block is within a row, and FSDP shards rows, so codes and scales are those of one device."""
    path = save_model(qwen2(), tmp_path / "model")
    engine = make_engine(path, OPTIMIZER_8BIT)
    train(engine, make_batch(), MicroBatching())
    engine.save(tmp_path / "saved", CONTENTS)
    ranks = run_on_ranks(2, resumed_on_rank, path, tmp_path / "saved", tmp_path / "again")
    other = make_engine(path, OPTIMIZER_8BIT)
    other.load(tmp_path / "again", CONTENTS)
    train(engine, make_batch(), MicroBatching())
    for name, value in engine.weights():
        assert torch.allclose(ranks[0][name], value, atol=2e-4), name
        assert torch.equal(dict(other.weights())[name], ranks[0][name])
    ours, theirs = (copy.copy(e.optimizer.state) for e in (engine, other))
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        assert {k: (v.shape, v.dtype) for k, v in a.items()} == {k: (v.shape, v.dtype) for k, v in b.items()}


def resumed_on_rank(path: str, folder, out) -> dict[str, torch.Tensor]:
    engine = make_engine(path, OPTIMIZER_8BIT, sharded=True)
    engine.load(folder, CONTENTS)
    train(engine, share_of(engine, make_batch()), UNEVEN)
    engine.save(out, CONTENTS)
    return dict(engine.weights())


def test_tensor_parallel_columns_are_refused(tmp_path):
    path = save_model(qwen2(), tmp_path)
    with pytest.raises(AssertionError, match="AdamW8bit: not supported with tensor_parallel_size > 1: use AdamW"):
        run_on_ranks(2, engine_on_rank_8bit, path)


def engine_on_rank_8bit(path: str) -> None:
    train(make_engine(path, OPTIMIZER_8BIT, sharded=True, tensor_parallel_size=2), make_batch(), MicroBatching())
