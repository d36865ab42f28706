"""The quickstart as a stranger runs it; and, slowly, that each of its algorithms learns and shuffled rewards do not."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.programs import run_python
from verl.trainer.guards.interruption import Stopped

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "quickstart" / "run.py"


def quickstart(out: Path, *more: str) -> subprocess.CompletedProcess:
    return run_python(str(SCRIPT), "--out", str(out), *more, cwd=out.parent, timeout=280)


def moving_means(out: Path) -> tuple[float, float]:
    """Mean reward of the first and of the last ten steps."""
    records = [json.loads(line) for line in (out / "rl" / "metrics.jsonl").read_text().splitlines()]
    scores = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    return sum(scores[:10]) / 10, sum(scores[-10:]) / 10


SHORT = """
import runpy, sys
script = runpy.run_path(sys.argv[1])
script["WARM_UP_STEPS"]["reverse"] = 3
sys.exit(script["main"](sys.argv[2:]))
"""


def test_a_short_run_shows_and_leaves_what_it_promises(tmp_path):
    arguments = ["--out", str(tmp_path / "run"), "--steps", "2"]
    done = run_python("-c", SHORT, str(SCRIPT), *arguments, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "in 2 steps of grpo" in done.stdout
    for shown in ("reward", "len", "kl", "grad", "ETA", "[gen]", "[update_actor]"):
        assert shown in done.stdout, shown
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    folder = tmp_path / "run" / "rl" / "global_step_2" / "actor" / "huggingface"
    assert str(folder) in done.stdout.replace("\n", "")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == 103_232
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "ab"


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path):
    from examples.quickstart.run import arguments

    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "model").mkdir()
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(SystemExit):
            arguments(["--out", str(out)])
    (tmp_path / "thesis.tex").unlink()
    assert arguments(["--out", str(tmp_path)]).out == tmp_path
    assert arguments([]).out != arguments(["--shuffle-rewards"]).out


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo", "remax", "reinforce_plus_plus", "drgrpo"])
def test_every_algorithm_learns(algorithm, tmp_path):
    done = quickstart(tmp_path / "run", "--algorithm", algorithm)
    assert done.returncode == 0, done.stderr
    first, last = moving_means(tmp_path / "run")
    assert first <= 0.70
    assert last >= 0.85


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(tmp_path):
    done = quickstart(tmp_path / "run", "--shuffle-rewards")
    assert done.returncode == 0, done.stderr
    first, last = moving_means(tmp_path / "run")
    assert last <= first


@pytest.mark.parametrize("given", [[], ["--model", "none"]])
def test_a_signal_ends_it_with_one_line(given, monkeypatch, capsys):
    from examples.quickstart import run, showcase

    def stopped(*args):
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(run, "quickstart", stopped)
    monkeypatch.setattr(showcase, "main", stopped)
    assert run.main(given) == 143
    assert capsys.readouterr().err == "\nstopped by SIGTERM; the same command starts again from the beginning\n"
