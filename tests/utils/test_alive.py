"""Lines of a long phase: after each period without another line, and none after its end."""

import io
import itertools
import threading

from rich.console import Console

from examples.quickstart.alive import Alive
from verl.tracking.console import TrainingProgress


def test_lines_until_the_end():
    lines, heard = [], threading.Semaphore(0)
    doing = itertools.count(1)

    def say(line):
        lines.append(line)
        heard.release()

    with Alive(say, lambda: f"part {next(doing)}", 0.01):
        assert heard.acquire(timeout=60) and heard.acquire(timeout=60)
    assert [line.split(": ")[1] for line in lines[:2]] == ["part 1", "part 2"]
    assert lines[0].startswith("still running after 0 s: ")


def test_no_line_while_others_are_printed():
    lines = []
    with Alive(lines.append, lambda: "x", 3600.0) as alive:
        alive.reset()
    with Alive(lines.append, lambda: "x", None):
        pass
    assert lines == []


def test_a_step_that_takes_long():
    """Without a terminal, a run says which operator runs."""
    heard, lines = threading.Event(), []

    class Lines(io.StringIO):
        def write(self, text):
            lines.extend(text.splitlines())
            if len(lines) > 1:
                heard.set()

    console = Console(file=Lines(), width=80)
    progress = TrainingProgress(12, "GRPO", console=console, running=lambda: {"gen": 0.0})
    with progress, Alive(console.print, progress.activity, 0.01):
        assert heard.wait(60)
    assert lines[0] == "GRPO"
    assert lines[1].startswith("still running after ") and ": step 0/12 done, now gen " in lines[1]
