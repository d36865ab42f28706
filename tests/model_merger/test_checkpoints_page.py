"""docs/checkpoints.md: its commands run in their order, and do what the page says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pages import DOCS, commands
from verl.checkpoints.store import CheckpointStore

PAGE = (DOCS / "checkpoints.md").read_text()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # programs run here were imported before
@pytest.mark.slow
def test_every_command_runs(shell, caplog):
    listed = [command for command in commands("checkpoints.md") if "benchmarks/" not in command]  # many minutes
    assert len([c for c in listed if c.startswith("verl merge ")]) == 4
    with caplog.at_level("INFO", "verl"):
        for command in listed:
            shell.run(command)
    steps = Path("tiny/run")
    tree = [line.split()[0] for line in PAGE.split("## On-disk layout")[1].split("```")[1].strip().splitlines()]
    written = {path.name for path in [steps, *steps.rglob("*")]}
    assert {Path(name).name for name in tree} - written == {"critic", "global_step_2"}  # no critic; 2 is deleted by now
    assert sorted(path.name for path in steps.glob("global*")) == ["global_step_3", "global_step_4"]
    assert (steps / "latest_checkpointed_iteration.txt").read_text() == "4"
    rounded = load_file("tiny/merged-bf16/model.safetensors")
    for name, tensor in load_file("tiny/merged/model.safetensors").items():
        assert torch.equal(tensor.bfloat16(), rounded[name])
    assert Path("tiny/lora-merged/model.safetensors").is_file()
    assert "is deprecated" not in caplog.text  # the page writes every key as it is called now
    store = CheckpointStore(steps)
    for step in (3, 4):
        assert store.resume_path(store.path(step)).name == f"global_step_{step}"
