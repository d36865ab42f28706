"""`verl verify-resume` finds equal runs equal, and names what differs."""

import json

import torch
from safetensors.torch import save_file

from verl.cli.verify_resume import main
from verl.trainer.state.verify_resume import compare

SETTINGS = ["algorithm.adv_estimator=grpo", "--steps", "2"]


def test_a_run_that_resumes_exactly(settings, capsys):
    status, (*others, last) = main([*settings, *SETTINGS]), capsys.readouterr().out.splitlines()
    assert last.endswith("metrics: all equal") and status == 0, (others, last)


def test_wrong_arguments(capsys):
    assert main(["--steps=1", "a=b"]) == 1
    assert "--steps: expected int >= 2, found '1'" in capsys.readouterr().err


def make_run(folder, value: float, reward: float):
    step = folder / "global_step_2"
    step.mkdir(parents=True)
    save_file({"w": torch.tensor([1.0, value]), "same": torch.ones(3)}, step / "model.safetensors")
    (step / "other.bin").write_text("x")
    files = {name: {"bytes": 1, "sha256": name} for name in ("model.safetensors", "other.bin", "config.yaml")}
    (step / "manifest.json").write_text(json.dumps({"files": files}))
    measured = dict.fromkeys(("time", "perf/x", "weight_sync/seconds", "weight_sync/bandwidth_share"), value)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": reward, **measured}))
    return folder


def test_differences_are_named(tmp_path):
    found = compare(make_run(tmp_path / "a", 2.0, 0.5), make_run(tmp_path / "b", 2.25, 0.75), 2)
    assert (found.tensors, found.files, found.metrics) == (2, 3, 2)
    assert found.differences == (
        "model.safetensors: w: 1 of 2 values differ, by up to 0.25",
        "step 1: reward is 0.75, expected 0.5",
    )
