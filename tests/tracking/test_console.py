"""The display of a run: a panel on a terminal, lines in a file, and nothing of a sample read as markup."""

import io
import logging
import re

import pytest
from rich.console import Console

from verl.tracking.console import TrainingProgress, sparkline

METRICS = {
    "critic/score/mean": 0.625,
    "response_length/mean": 5.123,
    "perf/throughput": 15_234.0,
    "timing_s/step": 1.25,
}
TIMINGS = {"gen": 0.61, "reward": 0.004, "update_actor": 0.38}
SAMPLES = [("s=[bold]abc", "cba\n", 1.0), ("x" * 300, "y" * 300, 0.0)]


def shown(terminal, steps, total, samples=None, **options):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with TrainingProgress(total, "GRPO on reverse", console=console, **options) as progress:
        for step in steps:
            progress.update(step, {**METRICS, "critic/score/mean": step / total}, TIMINGS, samples)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def test_lines_where_there_is_no_terminal():
    text = shown(False, range(1, 24), 23, print_every=10)
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert [line.split(" ")[1] for line in steps] == ["1/23", "10/23", "20/23", "23/23"]
    assert text.startswith("GRPO on reverse\n")
    assert steps[0] == "step 1/23 | score 0.0435 | length 5.12 | tok/s 15.2k | seconds 1.25 | ETA 0:22"
    assert "[gen] 0.61s [reward] 0.00s [update_actor] 0.38s" in text
    assert "\x1b" not in text and "╭" not in text


def test_samples_are_one_line_each_cut_to_the_width_and_no_markup():
    text = shown(False, [1], 5, SAMPLES)
    first, second = [line.strip() for line in text.splitlines()[-2:]]
    assert first == "+ s=[bold]abc -> cba  (1)"
    assert len(second) <= 100 and second.startswith("- …x") and second.endswith("y…  (0)")


def test_a_panel_on_a_terminal():
    text = shown(True, range(1, 31), 30, SAMPLES)
    last = text[text.rindex("╭") :]
    for part in (
        "GRPO on reverse",
        "step 30/30",
        "length 5.12",
        "update_actor 0.38s",
        "+ s=[bold]abc -> cba",
        "ETA 0:00",
    ):
        assert part in last
    assert "0.03 ▁" in last and "█ 1.00" in last
    assert {len(line) for line in last.strip().splitlines()} == {100}


def test_the_log_is_quiet_meanwhile_and_restored_after_an_error():
    logger = logging.getLogger("verl")
    before = logger.level
    with pytest.raises(KeyError), TrainingProgress(5, "x", console=Console(file=io.StringIO())):
        assert logger.level == logging.WARNING
        raise KeyError
    assert logger.level == before


def test_time_left_follows_the_pace_of_steps_and_not_of_the_start(monkeypatch):
    clock = iter([100.0, 106.0, 116.0])
    monkeypatch.setattr("verl.tracking.console.time.monotonic", lambda: next(clock))
    text = shown(False, [51, 52, 53], 1000, print_every=1)
    # First 0.994 s by the operators: 949 left -> 943 s. Then 3.497 s on average: 948 -> 3315 s; 5.665 s: 947 -> 5364 s.
    assert re.findall(r"ETA (\S+)", text) == ["15:43", "55:15", "1:29:24"]


def test_sparkline():
    assert sparkline([], 10) == ""
    assert sparkline([1, 1], 10) == "▄▄"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 0, 8, 8, 8], 2) == "▁█"
    assert sparkline([0, 2, 4, 6, 8, 10, 12, 14], 4) == "▁▃▆█"  # means 1 5 9 13
