"""`verl verify-resume` finds equal runs equal, and names what differs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verl.cli.verify_resume import compare, main

SETTINGS = ["algorithm.adv_estimator=grpo", "--steps", "2"]


def test_a_run_that_resumes_exactly(settings, capsys):
    status, (*others, last) = main([*settings, *SETTINGS]), capsys.readouterr().out.splitlines()
    assert last.endswith("metrics: all equal") and status == 0, (others, last)


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--steps=1", "a=b"])
    assert "--steps: expected a whole number from 2 to 1000000000, found '1'" in capsys.readouterr().err


def make_run(folder, value: float, reward: float, other: str = "x", more: tuple[str, ...] = ()):
    step = folder / "global_step_2"
    step.mkdir(parents=True)
    save_file({"w": torch.tensor([1.0, value]), "same": torch.ones(3)}, step / "model.safetensors")
    # config.yaml names the folder of the run: it differs, and is not compared
    hashes = {"model.safetensors": str(value), "other.bin": other, "config.yaml": str(folder)} | dict.fromkeys(more, "")
    files = {name: {"bytes": 1, "sha256": sha} for name, sha in hashes.items()}
    (step / "manifest.json").write_text(json.dumps({"files": files}))
    measured = dict.fromkeys(("time", "perf/x", "weight_sync/seconds"), value)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": reward, **measured}))
    return folder


def test_differences_are_named(tmp_path):
    found = compare(make_run(tmp_path / "a", 2.0, 0.5), make_run(tmp_path / "b", 2.25, 0.75), 2)
    assert (found.tensors, found.files, found.metrics) == (2, 3, 2)
    assert found.differences == (
        "model.safetensors: w: 1 of 2 values differ, by up to 0.25",
        "step 1: reward is 0.75, expected 0.5",
    )


def test_files_that_differ_are_named(tmp_path):
    straight = make_run(tmp_path / "a", 2.0, 0.5, "x", ("first.bin",))
    resumed = make_run(tmp_path / "b", 2.0, 0.5, "y", ("second.bin", "third.bin"))
    assert compare(straight, resumed, 2).differences == (
        "first.bin: only in the uninterrupted run",
        "other.bin: the contents differ",
        "second.bin: only in the resumed run",
        "third.bin: only in the resumed run",
    )
