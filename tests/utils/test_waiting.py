"""Limits of waits from measured durations."""

import pytest

from verl.processes.limits import Durations, Elapsed, Limit, Limits

TEN = Limits(timeout=3600, start=600, factor=10, minimum=120)


def test_the_first_time_has_the_configured_limit():
    assert Durations(TEN).limit("gen") == Limit(3600, "trainer.worker_timeout")
    assert Durations(TEN).start_limit.seconds == 600
    assert Durations(Limits(5)).start_limit.seconds == 5


def test_the_limit_of_an_operator_names_its_reason():
    durations = Durations(TEN)
    for seconds in (30, 20, 1000):
        durations.record("gen", seconds)
    assert durations.limit("gen").reason == "10 x the median of 30 s, at least 120 s"
    assert durations.limit("validation: gen").seconds == durations.limit(None).seconds == 3600


@pytest.mark.parametrize(
    ("limits", "recorded", "seconds"),
    [
        (TEN, [30, 20, 1000], 300),
        *((TEN, [duration], limit) for duration, limit in ((0.1, 120), (12, 120), (12.5, 125), (400, 3600))),
        (TEN, [20] * 200 + [100] * 60, 1000),  # the median follows durations that grow
        (Limits(timeout=8, factor=10, minimum=120), [0.1], 8),  # below the minimum
        (Limits(timeout=3600, factor=None), [1.0], 3600),  # turned off
    ],
)
def test_ten_times_the_median_between_the_minimum_and_worker_timeout(limits, recorded, seconds):
    durations = Durations(limits)
    for duration in recorded:
        durations.record("gen", duration)
    limit = durations.limit("gen")
    assert limit.seconds == seconds and (limit.reason == "trainer.worker_timeout") == (seconds == limits.timeout)


def test_time_in_which_this_process_was_stopped_does_not_count():
    elapsed = Elapsed(max_pause=5)
    for now in (100.0, 100.1, 101.1, 4101.1, 4102.1):
        elapsed.tick(now)
    assert elapsed.seconds == pytest.approx(0.1 + 1 + 5 + 1)
