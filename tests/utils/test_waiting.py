"""Limits of waits from measured durations."""

import pytest

from verl.processes.limits import Durations, Elapsed, Limit, Limits

TEN = Limits(timeout=3600, start=600, factor=10, minimum=120)


def test_the_first_time_has_the_configured_limit():
    assert Durations(TEN).limit("gen") == Limit(3600, "trainer.worker_timeout")
    assert Durations(TEN).start_limit.seconds == 600
    assert Durations(Limits(5)).start_limit.seconds == 5


def test_ten_times_the_median_of_the_same_operator():
    durations = Durations(TEN)
    for seconds in (30, 20, 1000):
        durations.record("gen", seconds)
    assert durations.limit("gen").seconds == 300
    assert durations.limit("gen").reason == "10 x the median of 30 s, at least 120 s"
    assert durations.limit("validation: gen").seconds == 3600
    assert durations.limit(None).seconds == 3600


@pytest.mark.parametrize(("seconds", "limit"), [(0.1, 120), (12, 120), (12.5, 125), (400, 3600)])
def test_between_the_minimum_and_worker_timeout(seconds, limit):
    durations = Durations(TEN)
    durations.record("gen", seconds)
    assert durations.limit("gen").seconds == limit


def test_a_worker_timeout_below_the_minimum_wins():
    durations = Durations(Limits(timeout=8, factor=10, minimum=120))
    durations.record("gen", 0.1)
    assert durations.limit("gen") == Limit(8, "trainer.worker_timeout")


def test_null_turns_it_off():
    durations = Durations(Limits(timeout=3600, factor=None))
    durations.record("gen", 1.0)
    assert durations.limit("gen").seconds == 3600


def test_the_median_follows_durations_that_grow():
    durations = Durations(TEN)
    for _ in range(200):
        durations.record("gen", 20)
    for _ in range(60):
        durations.record("gen", 100)
    assert durations.limit("gen").seconds == 1000


def test_time_in_which_this_process_was_stopped_does_not_count():
    elapsed = Elapsed(max_pause=5)
    for now in (100.0, 100.1, 101.1, 4101.1, 4102.1):
        elapsed.tick(now)
    assert elapsed.seconds == pytest.approx(0.1 + 1 + 5 + 1)
