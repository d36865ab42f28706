"""Processes of reward functions that are stopped: their calls do not wait for them."""

import os
import signal
from pathlib import Path

import pytest

from verl.registry import import_module
from verl.rewards.sandbox import pool as pool_module
from verl.rewards.sandbox.pool import Call, Limits, ProcessPool, address_of

SAMPLES = import_module(str(Path(__file__).with_name("sample_rewards.py")))


def call(name: str) -> Call:
    return Call(address_of(vars(SAMPLES)[name]), {"x": 0})


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(pool_module, "STOPPED_SECONDS", 1.0)
    pool = ProcessPool(1)
    yield pool
    pool.close()


def test_a_call_that_had_not_begun_is_sent_again(pool, caplog):
    pid, _ = pool.run(call("which_process"), Limits(wall_seconds=5)).value
    os.kill(pid, signal.SIGSTOP)
    results = dict(pool.map([call("which_process")] * 3, Limits(wall_seconds=5)))
    assert sorted(results) == [0, 1, 2]
    assert all(outcome.failure is None and outcome.value[0] != pid for outcome in results.values())
    assert f"process {pid} of a reward function is stopped (SIGSTOP): it is killed" in caplog.text


def test_a_call_that_had_begun_has_failed(pool):
    """Also without a limit of its time."""
    results = dict(pool.map([call("stop_itself"), call("which_process")], Limits()))
    assert "was stopped by SIGSTOP" in results[0].failure and results[0].over_limit
    assert results[1].failure is None
