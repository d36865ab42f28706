"""The watchdog names what hangs and shows where every thread stands."""

import logging
import threading
import time

from verl.utils.deadline import deadline


def test_a_hang_is_named_with_all_stacks(caplog):
    release = threading.Event()

    def reward_worker_waits():
        release.wait()

    helper = threading.Thread(target=reward_worker_waits, name="reward-3")
    helper.start()
    with caplog.at_level(logging.WARNING), deadline(0.1, "update_actor"):
        time.sleep(0.4)  # stands for a collective that does not return
    release.set()
    helper.join()
    report, ending = [record.getMessage() for record in caplog.records]
    assert report.startswith("update_actor has not finished after 0.1 s (rank 0")
    assert "thread reward-3" in report and "reward_worker_waits" in report
    assert report.index("MainThread") < report.index("reward-3")
    assert "test_a_hang_is_named_with_all_stacks" in report and "deadline of" not in report
    assert ending.startswith("update_actor ended after 0.4") or ending.startswith("update_actor ended after 0.5")


def test_work_in_time_is_silent_and_leaves_no_thread(caplog):
    before = threading.active_count()
    with caplog.at_level(logging.DEBUG):
        for _ in range(20):
            with deadline(5, "gen"):
                pass
    time.sleep(0.05)
    assert not caplog.records and threading.active_count() == before
