"""docs/tracking.md: its commands run in their order, and its tables describe what a run writes."""

import json
import re
from pathlib import Path

import pytest

from tests.pages import DOCS, blocks, commands
from verl.tracking.report.report import find
from verl.tracking.trackers import TRACKER_REGISTRY
from verl.tracking.tracking import Tracking

PAGE = (DOCS / "tracking.md").read_text()


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_command_runs_and_writes_what_the_page_says(shell, capsys):
    for command in commands("tracking.md"):
        shell.run(command)
    metrics = lines("tiny/run/metrics.jsonl")
    scores = [round(line["critic/score/mean"], 3) for line in metrics if "critic/score/mean" in line]
    assert len(scores) == 2 and f"\n{scores}\n" in capsys.readouterr().out
    tables = lines("tiny/run/samples.jsonl")
    assert [(t["step"], t["name"], len(t["rows"])) for t in tables] == [
        (0, "val/generations", 3),
        (1, "train/generations", 2),
        (2, "train/generations", 2),
        (2, "val/generations", 3),
    ]
    fields = set(re.findall(r"`(\w+)`", PAGE.split("A sample has the fields ")[1].split("\n\n")[0])) - {"stop"}
    assert fields <= set(tables[1]["rows"][0])
    assert len(lines("tiny/steps/1.jsonl")) == 32
    assert all(find(name) for line in metrics for name in line if name not in ("step", "time"))
    assert Path("tiny/compare.png").stat().st_size > 10_000
    assert Path("tiny/run/report.html").stat().st_size > 30_000
    record = lines("tiny/run/steps.jsonl")[-1]
    (fields,) = re.findall(r"A sample in `steps.jsonl` has .*?\n\n", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", fields.split("dropped")[0])) & set(record["samples"][0])
    assert {"tokens", "mask", "rollout_log_probs", "advantages"} <= named


def test_the_custom_tracker_of_the_page(tmp_path, monkeypatch):
    (text,) = blocks("tracking.md", "python")
    monkeypatch.setitem(TRACKER_REGISTRY, "csv", None)
    exec(text, {"__name__": "my_tracker"})
    with Tracking(["csv"], "project", "run", {}, tmp_path) as run:
        run.log({"critic/score/mean": 0.25}, 1)
        run.log({"actor/kl": 0.25}, 1)
    assert (tmp_path / "scores.csv").read_text() == "1,0.25\n"


def test_the_page_lists_every_tracker():
    listed = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", PAGE.split("## Samples")[0], re.M))))
    assert listed == set(TRACKER_REGISTRY)
