"""The display of a run: a panel on a terminal, lines in a file, and nothing of a sample read as markup."""

import errno
import io
import logging
import re
import sys
import time

import pytest
from rich.console import Console

from verl.tracking.console import TrainingProgress
from verl.tracking.formatting import StepLine, format_duration, format_fixed, sparkline, summary_lines
from verl.utils import log

METRICS = {"critic/score/mean": 0.625, "response_length/mean": 5.123, "perf/throughput": 15_234.0}
METRICS |= {"timing_s/step": 1.25}
TIMINGS = {"gen": 0.61, "reward": 0.004, "update_actor": 0.38}
SAMPLES = [("s=[bold]abc", "cba\n", 1.0), ("x" * 300, "y" * 300, 0.0)]

#: a lone surrogate, codes of a terminal, a text that is written from right to left, markup, and a formula
HOSTILE = "\ud800 \x1b[2J\x1b]8;;http://x\x07 \r \u202e \x9b31m [/b] :smile: $\\frac{$"
CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.fixture(autouse=True)
def a_usual_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)


def shown(terminal, steps, total, samples=None, width=100, validate=None, **options):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width)
    with TrainingProgress(total, "GRPO on reverse", console=console, **options) as progress:
        for step in steps:
            progress.update(step, {**METRICS, "critic/score/mean": step / total}, TIMINGS, samples)
            if validate is not None:
                progress.validated(step, {"val-core/gsm8k/acc/mean@1": validate[step], "timing_s/testing": 1.0})
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def test_lines_where_there_is_no_terminal():
    text = shown(False, range(1, 24), 23, print_every=10)
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/23", "10/23", "20/23", "23/23"]
    assert text.startswith("GRPO on reverse\n")
    assert steps[0] == "step  1/23  reward 0.043  len 5.12  tok/s 15234  1.25s  ETA 0:22"
    assert "    [gen] 0.61s [update_actor] 0.38s\n" in text
    assert "\x1b" not in text and "╭" not in text


def test_one_line_per_step_and_validation_for_a_trainer():
    text = shown(False, [1, 2], 2, print_every=1, details=False, validate={1: 0.5, 2: 0.25})
    assert text.splitlines() == [
        "step 1/2  reward 0.500  len 5.12  tok/s 15234  1.25s  ETA 0:01",
        "step 1 validation: gsm8k/acc/mean@1 0.5",
        "step 2/2  reward 1.000  len 5.12  tok/s 15234  1.25s  ETA 0:00",
        "step 2 validation: gsm8k/acc/mean@1 0.25 (best 0.5 at step 1)",
    ]


ALL = METRICS | {"reward/acc": 0.5, "actor/ref_kl": 0.06, "actor/entropy": 0.41, "actor/grad_norm": 3.2}


def test_the_line_of_a_step_fits_into_80_columns():
    line = StepLine(100, 80).text(12, ALL, 0.36, 32)
    assert line == "step  12/100  reward 0.625  acc 0.50  len 5.12  kl 0.06  0.36s  ETA 0:32"
    wide = StepLine(100, 120).text(12, ALL, 0.36, 32)
    assert wide == (
        "step  12/100  reward 0.625  acc 0.50  len 5.12  kl 0.06  ent 0.41  grad 3.20  tok/s 15234  0.36s  ETA 0:32"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_all_lines_of_a_run_have_the_same_columns(width):
    lines = StepLine(100, width)
    extreme = {"critic/score/mean": -123456.0, "actor/ref_kl": -2e-10, "response_length/mean": 31_072.0}
    steps = [ALL, ALL | extreme, ALL | {"actor/grad_norm": 2e-10}, {"critic/score/mean": 0.5, "reward/acc": 0.5}, ALL]
    texts = [lines.text(1, metrics, seconds, 1700) for metrics in steps for seconds in (0.001, 9999.0)]
    starts = [[match.start() for match in re.finditer(r"  [a-z/]+ ", text)] for text in texts]
    assert all(text.startswith("step   1/100  reward ") and len(text) <= width for text in texts)
    assert all(found == starts[0] for found in starts)
    if width == 80:
        assert texts[6] == "step   1/100  reward 0.500  acc 0.50  len    -  kl    -  1e-3s  ETA 28:20"


def test_columns_of_equal_values():
    same = METRICS | {"reward/acc": 0.625}
    assert "acc" not in StepLine(9).text(1, same, 1.0, 0)
    lines = StepLine(9)  # a first reward of 0 does not tell whether accuracy is the same
    zero = lines.text(1, METRICS | {"critic/score/mean": 0.0, "reward/acc": 0.0}, 1.0, 0)
    assert "reward 0.000  acc 0.00  len" in zero and "reward 0.625  acc 0.62  len" in lines.text(2, same, 1.0, 0)
    lines = StepLine(9)
    assert "kl" not in lines.text(1, METRICS, 1.0, 0)  # before the end of trainer.critic_warmup
    assert all("len 5.12  kl 0.06" in lines.text(step, ALL, 1.0, 0) for step in (2, 3))


def test_numbers_of_a_fixed_width():
    values = [0.0, 0.625, 12.5, 123.456, 1234.5, 152_345.0, -0.63, 1e-5, -1e-9, float("nan"), float("inf")]
    texts = ["0.000", "0.625", "12.50", "123.5", " 1234", " 152k", "-0.63", " 1e-5", "-1e-9", "  nan", "  inf"]
    assert [format_fixed(value, 5) for value in values] == texts
    assert [format_fixed(value, 4) for value in (1e-9, 2e-10, -2e-10)] == ["1e-9", "0.00", "-0.0"]


def test_samples_are_one_line_each_cut_to_the_width_and_no_markup():
    text = shown(False, [1], 5, SAMPLES)
    first, second = [line.strip() for line in text.splitlines()[-2:]]
    assert first == "+ s=[bold]abc -> cba  (1)"
    assert len(second) <= 100 and second.startswith("- …x") and second.endswith("y…  (0)")


@pytest.mark.parametrize("width", [80, 120])
def test_a_panel_on_a_terminal(width):
    text = shown(True, range(1, 31), 30, SAMPLES, width=width, validate={s: s / 60 for s in range(1, 31)})
    last = text[text.rindex("╭") :]
    for part in (
        "GRPO on reverse",
        "step 30/30",
        "length 5.12",
        "update_actor 0.38s",
        "+ s=[bold]abc -> cba",
        "ETA    0:00",
        "gsm8k/acc/mean@1 0.017 (step 1) -> 0.500 (step 30)",
    ):
        assert part in last
    assert re.search(r" \d:\d\d  ETA    0:00", last), "the time since the start"
    assert "0.03 ▁" in last and "█ 1.00" in last
    assert {len(line) for line in last.strip().splitlines()} == {width}


def test_every_frame_has_the_same_height():
    metrics = [{**ALL, "actor/entropy": value} for value in (0.5, -0.012345, 123.456)]
    output = io.StringIO()
    with TrainingProgress(3, "x", console=Console(file=output, force_terminal=True, width=80)) as progress:
        heights = []
        for step, values in enumerate(metrics, 1):
            progress.update(step, values, TIMINGS, SAMPLES)
            heights.append(len(progress.console.render_lines(progress._panel())))
    assert heights[1] == heights[2] == heights[0] + 1  # the sparkline needs two steps


def test_log_lines_and_prints_appear_above_the_panel_and_warnings_stay_in_it(monkeypatch):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    monkeypatch.setattr(log, "console", lambda: console)
    logger, handler = logging.getLogger("verl"), log._TerminalHandler()
    logger.addHandler(handler)
    try:
        with TrainingProgress(2, "x", console=console) as progress:
            progress.update(1, METRICS, TIMINGS)
            before = len(output.getvalue())
            logger.warning("little memory: 12 MiB of 345 MiB")
            print("from a reward function")
            progress.update(2, METRICS, TIMINGS)
    finally:
        logger.removeHandler(handler)
    after = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue()[before:])
    assert re.search(r"\d\d:\d\d:\d\d WARNING little memory: 12 MiB of 345 MiB *\n╭", after)
    assert re.search(r"from a reward function\n╭", after)
    assert "│ little memory: 12 MiB of 345 MiB" in after[after.rindex("╭") :]
    styled = output.getvalue()[before:]
    assert re.search(r"little memory: 12 MiB of 345 MiB", styled)  # no color inside a number


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("CI", "true"), ("CI", "1")])
def test_no_panel_in_ci_and_on_a_dumb_terminal(variable, monkeypatch):
    monkeypatch.setenv(*variable)
    text = shown(True, [1], 5)
    assert "╭" not in text and "step 1/5" in text


def test_the_log_is_quiet_meanwhile_and_restored_after_an_error():
    logger = logging.getLogger("verl")
    before = logger.level
    with pytest.raises(KeyError), TrainingProgress(5, "x", console=Console(file=io.StringIO())):
        assert logger.level == logging.WARNING
        raise KeyError
    assert logger.level == before


def test_time_left_follows_the_pace_of_steps_and_not_of_the_start(monkeypatch):
    clock = iter([0.0, 100.0, 106.0, 116.0])
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


def test_the_summary_of_a_run():
    rewards = [(step, 0.6 if step <= 10 else 0.9) for step in range(1, 101)]
    validation = [(0, 0.5), (50, 0.8), (100, 0.75)]
    history = {"critic/score/mean": rewards, "val-core/gsm8k/acc/mean@1": validation, "actor/lr": rewards}
    assert summary_lines(history, 100, 100, 123.4) == [
        "reward 0.60 -> 0.90 in 100 steps (2 min 03 s; means of the first and last 10 steps)",
        "validation gsm8k/acc/mean@1: 0.500 (step 0) -> 0.750 (step 100), best 0.800 (step 50)",
    ]
    assert summary_lines({"train/nll": [(1, 2.0)]}, 1, 5, 3.0) == ["loss 2.00 -> 2.00 in 1 of 5 steps (3 s)"]
    resumed = {"train/nll": [(8, 2.0), (9, 1.0)], "val/loss": [(8, 1.0), (9, 1.5)]}
    assert summary_lines(resumed, 9, 10, 3.0) == [
        "loss 2.00 -> 1.00 in 2 steps, up to step 9 of 10 (3 s)",
        "validation loss: 1.000 (step 8) -> 1.500 (step 9)",
    ]
    (line,) = summary_lines({"train/nll": [(1, 4.0), (2, 2.0)]}, 2, 2, 3.0, resumed=1)
    assert line == "loss 4.00 -> 2.00 in 2 steps (3 s since step 1)"
    assert summary_lines({}, 0, 10, 3.0) == []


def test_durations_in_words():
    texts = ["41 s", "2 min 03 s", "1 h 29 min", "2 d 05 h"]
    assert [format_duration(s) for s in (41, 123, 5364, 191000)] == texts


@pytest.mark.parametrize(("width", "height"), [(20, 5), (10, 2), (1, 1)])
def test_a_small_terminal_and_a_score_that_is_nan(width, height):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    before = sys.stdout
    with TrainingProgress(2, "run", console=console) as progress:
        for step in (1, 2):
            progress.update(step, METRICS | {"critic/score/mean": float("nan")}, TIMINGS, SAMPLES)
    assert sys.stdout is before
    assert sparkline([float("nan"), 1.0, 2.0], 2) == "▁█" and sparkline([1.0], 0) == ""


def test_no_panel_where_its_characters_cannot_be_written():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=True, width=80)
    with TrainingProgress(1, "run", console=console, print_every=1) as progress:
        assert not progress.is_live
        progress.update(1, METRICS, TIMINGS)
    console.file.flush()
    assert b"reward" in raw.getvalue()


def test_no_name_or_text_of_a_panel_controls_the_terminal(monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "hunter-88")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=300)
    running = {HOSTILE: time.perf_counter()}
    with TrainingProgress(2, f"run {HOSTILE}", console=console, running=lambda: running) as progress:
        logging.getLogger("verl.x").warning("%s hunter-88", HOSTILE)
        metrics = {f"val-core/{HOSTILE}/acc/mean@1": 0.5, "timing_s/step": 1.0}
        for step in (1, 2):
            progress.update(step, metrics, {HOSTILE: 1.0}, [(HOSTILE, HOSTILE, 1.0)])
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", output.getvalue())
    assert not CODES.findall(text) and "hunter" not in text
    assert text.count(r"\x1b[2J") > 5 and "[/b] :smile:" in text


def test_a_terminal_that_is_closed_does_not_end_the_run(capsys):
    class Terminal(io.StringIO):
        is_closed = False

        def write(self, text: str) -> int:
            if self.is_closed:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal, before = Terminal(), sys.stdout
    with TrainingProgress(2, "run", console=Console(file=terminal, force_terminal=True, width=80)) as progress:
        progress.update(1, METRICS, TIMINGS)
        terminal.is_closed = True
        progress.update(2, METRICS, TIMINGS)
    assert "step 1/2" in terminal.getvalue() and sys.stdout is before
