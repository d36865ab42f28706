"""docs/tutorial.md: its commands run in their order, and the model learns what the page says."""

import json
from pathlib import Path

import pytest

from tests.pages import blocks, commands


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_tutorial(shell, capsys):
    pytest.importorskip("matplotlib")
    shell.monkeypatch.syspath_prepend(str(Path.cwd()))
    for command in commands("tutorial.md"):
        shell.run(command)
    printed = capsys.readouterr().out
    assert Path("sort/train.jsonl").read_text().startswith(blocks("tutorial.md", "text")[0])
    assert "{'score': 1.0, 'acc': 1.0, 'same_digits': 1.0} {'score': 0.1, 'acc': 0.0, 'same_digits': 1.0}" in printed
    records = [json.loads(line) for line in Path("sort/runs/grpo/metrics.jsonl").read_text().splitlines()]
    scores = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    assert len(scores) == 60 and sum(scores[-10:]) / 10 > sum(scores[:10]) / 10 + 0.3
    report = json.loads(Path("sort/after.eval.json").read_text())
    assert report["comparison"]["overall"]["prompts"] == 200
    after, before = report["evaluated"]["overall"]["metrics"], report["compared_with"]["overall"]["metrics"]
    assert after["accuracy"]["value"] > before["accuracy"]["value"] + 0.3
    assert Path("sort/compare.png").stat().st_size > 10_000 and Path("sort/runs/grpo/report.html").is_file()
    assert "5466=4566" in printed
