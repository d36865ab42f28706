"""docs/checkpoints.md: its commands run in their order, and do what the page says."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.utils.checkpoint_store import CheckpointStore

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def commands() -> list[str]:
    """One string a command: lines of a here-document stay together."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        found += re.findall(r"^\w.*<<'EOF'\n(?:.*\n)*?EOF$|^.+$", block, re.MULTILINE)
    return found


def run(command: str, monkeypatch) -> None:
    """Programs of Python in this process, as `python` would run them: it need not import everything for each."""
    if not command.startswith("python "):
        subprocess.run(["bash", "-ec", command], check=True)
        return
    _, *words = shlex.split(command)
    module = words[0] == "-m"
    program, arguments = (words[1], words[2:]) if module else (words[0], words[1:])
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(sys, "path", [str(Path(program).parent), *sys.path])
    try:
        (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{command}: {end.code}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # programs run here were imported before
def test_every_command_runs(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    listed = commands()
    assert len([c for c in listed if "verl.model_merger" in c]) == 6
    with caplog.at_level("INFO", "verl"):
        for command in listed:
            run(command, monkeypatch)
    steps = Path("tiny/run")
    tree = [line.split()[0] for line in PAGE.split("## On the disk")[1].split("```")[1].strip().splitlines()]
    written = {path.name for path in [steps, *steps.rglob("*")]}
    assert {Path(name).name for name in tree} - written == {"critic", "global_step_2"}  # no critic; 2 is deleted by now
    assert sorted(path.name for path in steps.glob("global*")) == ["global_step_3", "global_step_4"]
    assert (steps / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert "a HuggingFace model already: verified, nothing written" in caplog.text
    merged, in_place = load_file("tiny/merged/model.safetensors"), steps / "global_step_3/actor/huggingface"
    for name, tensor in load_file(in_place / "model.safetensors").items():
        assert torch.equal(tensor, merged[name])
        assert torch.equal(tensor.bfloat16(), load_file("tiny/merged-bf16/model.safetensors")[name])
    assert Path("tiny/lora-merged/model.safetensors").is_file()
    assert "older name" not in caplog.text  # the page writes every key as it is called now
    store = CheckpointStore(steps)
    for step in (3, 4):
        assert store.resume_path(store.path(step)).name == f"global_step_{step}"
