"""docs/parallelism.md, lora.md and reward_models.md: their commands, in their order; README links every page."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from verl.trainer.local_trainer import LocalPPOTrainer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def commands(page: str) -> list[str]:
    """One string a command: lines of a here-document stay together."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    one = re.compile(r"^\w.*<<'EOF'\n(?:.*\n)*?EOF$|^.+$", re.MULTILINE)
    return [found for block in blocks for found in one.findall(block)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder of its own; programs of Python in this process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(command: str) -> None:
        if not command.startswith("python "):
            subprocess.run(["bash", "-ec", command], check=True)
            return
        words = shlex.split(command)[1:]
        if words[0] == "-c":
            exec(words[1], {})
            return
        module = words[0] == "-m"
        program, arguments = (words[1], words[2:]) if module else (words[0], words[1:])
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(sys, "path", [str(Path(program).parent), *sys.path])
        try:
            (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{command}: {end.code}"

    return run


def test_parallelism(run):
    """Each run is read, checked and compiled; tests of the executors run what they say."""
    pytest.importorskip("ray")
    from verl.trainer.ray_trainer import RayPPOTrainer

    shapes = set()
    for command in commands("parallelism.md"):
        words = shlex.split(command)
        if words[:3] != ["python", "-m", "verl.trainer.main_ppo"]:
            run(command)
            continue
        assert words[3] == "--config"
        trainer_class = RayPPOTrainer if "trainer.backend=ray" in words else LocalPPOTrainer
        trainer = trainer_class(config_path=words[4], overrides=words[5:])
        shapes.add((trainer.world_size, len(trainer.pools), trainer.config.trainer.backend))
    assert shapes == {(1, 1, "local"), (2, 1, "local"), (2, 1, "ray"), (4, 1, "local"), (4, 3, "local")}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_lora(run, caplog):
    for command in commands("lora.md"):
        run(command)
    assert load_file("tiny/with-adapters/model.safetensors")
    assert "older name" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_reward_models(run, caplog):
    for command in commands("reward_models.md"):
        run(command)
    assert "CHANGES NOTHING" not in caplog.text and "older name" not in caplog.text


def test_the_readme_links_every_page():
    readme = (ROOT / "README.md").read_text()
    pages = {path.name for path in DOCS.glob("*.md")}
    assert set(re.findall(r"\(docs/(\w+\.md)\)", readme)) == pages
    for page in DOCS.glob("*.md"):
        assert set(re.findall(r"\]\((\w+\.md)\)", page.read_text())) <= pages, page.name
