"""Generators that go on where they were saved, and seeds that depend on what they are for."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.programs import run_python
from verl.utils.rng import fork_seed, rng_state, seed_everything, set_rng_state


def draws():
    values = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]
    if torch.cuda.is_available():
        values.append(torch.rand(3, device="cuda").tolist())
    return values


def test_the_same_draws_after_a_restore_from_a_file():
    seed_everything(7)
    draws()  # leaves a cached second normal number in Python's and numpy's generator
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draws() for _ in range(3)]
    seed_everything(8)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draws() for _ in range(3)] == expected


def test_seeding_covers_every_generator():
    seed_everything(3)
    first = draws()
    seed_everything(3)
    assert draws() == first
    seed_everything(2**40 + 3)  # wider than numpy takes
    assert draws() != first


def test_saved_gpus_that_are_absent_are_said(caplog):
    draws()
    state = rng_state()
    expected = draws()
    one_more = [torch.Generator("cpu").get_state()] * (1 + torch.cuda.device_count() - len(state["cuda"]))
    set_rng_state(state | {"cuda": state["cuda"] + one_more})
    assert "will differ from the saved run" in caplog.text
    assert draws() == expected  # what is there goes on as saved


def test_fork_seed_depends_on_its_parts_alone():
    seed = fork_seed(1, "rollout", 5)
    program = "from verl.utils.rng import fork_seed; print(fork_seed(1, 'rollout', 5))"
    run = run_python("-c", program, cwd=Path.cwd())  # with another hash seed
    assert int(run.stdout) == seed == fork_seed(np.int64(1), "rollout", 5)
    assert seed == 3035216879451127848  # must never change: saved runs depend on it


def test_fork_seed_separates_neighbours():
    assert fork_seed("ab", "c") != fork_seed("a", "bc") != fork_seed("abc")
    assert fork_seed(1) != fork_seed("1")
    seeds = {fork_seed(0, step, row) for step in range(100) for row in range(100)}
    assert len(seeds) == 10_000 and all(0 <= s < 2**63 for s in seeds)
    # Uniform: every bit is set about half of the time (5 sigma of a fair coin over 10,000).
    counts = np.array([[s >> bit & 1 for bit in range(63)] for s in seeds]).sum(axis=0)
    assert np.abs(counts - 5000).max() < 250
    with pytest.raises(TypeError, match="found float"):
        fork_seed(1.0)
