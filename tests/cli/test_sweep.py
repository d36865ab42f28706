"""`verl sweep`: the trials of a file, runs that continue, the table, and the script for Slurm."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from examples.quickstart.tiny_model import tiny_model
from tests.programs import start_python
from verl.cli import sweep
from verl.cli.app import app
from verl.trainer.guards.interruption import Stopped

LR = "actor_rollout_ref.actor.optim.lr"
COMMON = ["data.train_files=a.jsonl", "data.train_batch_size=8", "actor_rollout_ref.model.path=model"]


def write(folder: Path, text: str) -> Path:
    (folder / "lr.yaml").write_text(text)
    return folder / "lr.yaml"


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"grid:\n  {LR}: [1e-6, 3e-6]\n  trainer.seed: [1, 2]\n", "lr=1e-06_seed=1 lr=1e-06_seed=2 lr=3e-06_seed=1 "),
        ("grid: {trainer: {seed: [1, 2]}, algorithm.name: grpo}", "seed=1_name=grpo seed=2_name=grpo"),
        ("random: {trainer.seed: {integer: [5, 5]}}\ntrials: 3", "seed=5"),
        ("grid: {reward.reward_manager.name: [a/b]}", "name=a%2Fb"),
    ],
)
def test_the_points_of_a_grid_are_folders(folder, text, names):
    trials, metric = sweep.read_sweep(write(folder, text), COMMON)
    found = [str(trial.folder) for trial in trials]
    assert found[: len(names.split())] == [f"sweeps/lr/{name}" for name in names.split()] and metric is None
    assert all(f"trainer.default_local_dir={trial.folder}" in trial.command for trial in trials)


def test_random_samples_are_drawn_from_the_seed_and_more_trials_keep_the_first(folder):
    text = f"grid: {{trainer.seed: [1, 2]}}\nrandom:\n  {LR}: {{log_uniform: [1e-7, 1e-5]}}\n"
    text += "  algorithm.name: {choice: [grpo, rloo]}\n"

    def settings(more: str) -> list:
        file = write(folder, text + more)
        return [trial.settings for trial in sweep.read_sweep(file, COMMON)[0]]

    first, more, other = settings("trials: 2"), settings("trials: 4"), settings("trials: 2\nseed: 1")
    assert len(first) == 4 and more[:4] == first and len(more) == 8 and other != first
    assert all(1e-7 <= point[LR] <= 1e-5 and float(f"{point[LR]:.4g}") == point[LR] for point in more)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {trainer.seed: [1]}", "found gird.trainer.seed"),
        ("config: null", "found nothing to vary"),
        ("random: {trainer.seed: {integer: [0, 9]}}\ntrials: many", "found trials: many"),
        ("command: generate\ngrid: {data.seed: [1]}", "a command of train, sft, dpo, rm; found command: generate"),
        (
            "random: {trainer.seed: {normal: [0, 1]}}",
            "expected values for one of uniform, log_uniform, integer, choice",
        ),
        ("random: {trainer.seed: {integer: [5]}}", "random.trainer.seed.integer: [5]: expected values"),
        ("grid: {trainer.sed: [1]}", "trainer.seed"),
        (f"grid: {{{LR}: [1e-6, fast]}}", LR),
    ],
)
def test_what_is_wrong_is_said_before_a_trial_starts(folder, text, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    status, output = call(write(folder, text), *COMMON)
    assert status == 1 and message in output and not (folder / "sweeps").exists(), output


def test_other_common_settings_need_another_folder(folder):
    file = write(folder, "grid: {trainer.seed: [1]}")
    sweep.read_sweep(file, COMMON)
    sweep.read_sweep(write(folder, "grid: {trainer.seed: [1, 2]}"), COMMON)
    with pytest.raises(ValueError, match="has trials of another command, config or overrides"):
        sweep.read_sweep(file, [*COMMON, "data.seed=3"])


def test_slurm_runs_the_trials_that_have_not_finished(folder):
    file = write(folder, "grid: {trainer.seed: [1, 2, 3]}")
    done = folder / "sweeps/lr/seed=2"
    done.mkdir(parents=True)
    (done / "run.json").write_text('{"state": "finished"}')
    status, output = call(file, *COMMON, "--slurm")
    text = (folder / "sweeps/lr/sweep.slurm").read_text()
    assert status == 0 and "sbatch sweeps/lr/sweep.slurm" in output and "#SBATCH --array=0-1\n" in text
    assert "trainer.seed=1" in text and "trainer.seed=3" in text and "trainer.seed=2" not in text
    subprocess.run(["bash", "-n", "sweeps/lr/sweep.slurm"], check=True)


@pytest.mark.parametrize(("signal", "status"), [(KeyboardInterrupt(), 130), (Stopped(15), 143)])
def test_an_interrupted_sweep_ends_with_the_status_of_the_signal(folder, signal, status, monkeypatch):
    def popen(*_, **__):
        raise signal

    monkeypatch.setattr(subprocess, "Popen", popen)
    code, output = call(write(folder, "grid: {trainer.seed: [1]}"), *COMMON)
    assert code == status and "the same command continues the sweep" in output


def start_trial(command, stdout, stderr, env):
    """As `subprocess.Popen`, for a program that need not import everything anew."""
    assert command[0] == sys.executable and stderr == subprocess.STDOUT
    return start_python(*command[1:], stdout=stdout.fileno(), stderr=stdout.fileno(), cwd=Path.cwd(), env=env)


def test_trials_run_fail_and_continue(folder, monkeypatch):
    """Two trials of which one fails: the other is not repeated, and the table has both."""
    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(Popen=start_trial, STDOUT=subprocess.STDOUT))
    tiny_model("llama", folder / "model", seed=0)
    rows = [json.dumps({"prompt": f"{word}=", "answer": word[::-1]}) for word in ("abc", "bcd", "cde", "def")]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "run.yaml").write_text(
        "model: {path: model}\ndata: {train_files: train.jsonl, train_batch_size: 4, max_length: 16}\n"
        "trainer: {total_training_steps: 2, save_at_end: false, logger: [jsonl], device: cpu}\n"
    )
    file = write(folder, "command: sft\nconfig: run.yaml\ngrid: {optim.lr: [1e-3], trainer.seed: [1, 2]}\n")
    broken = folder / "sweeps/lr/lr=0.001_seed=2"
    broken.parent.mkdir(parents=True)
    broken.write_text("a file where the folder of the run should be")
    status, output = call(file, "--jobs", 2)
    table = [line.split() for line in output.partition("best train/")[2].splitlines()[1:3]]
    assert status == 1 and table[0][-1] == "finished", output
    assert "failed: " in output and "lr=0.001: mean" not in output
    assert (folder / "sweeps/lr/sweep.png").stat().st_size > 1000
    broken.unlink()
    status, output = call(file)
    assert status == 0 and "2 trials, 1 to run" in output and "lr=0.001: mean" in output
