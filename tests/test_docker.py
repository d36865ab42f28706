"""docker/Dockerfile names files, scripts, extras and stages that exist; docs/docker.md, its stages and arguments."""

import os
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from verl.env_check.packages import TESTED_TOGETHER

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docker/Dockerfile").read_text()
PAGE = (ROOT / "docs/docker.md").read_text()
INSTRUCTIONS = [
    tuple(line.split(None, 1))
    for line in re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    if line.strip()
]
STAGES = [re.fullmatch(r"(\S+) AS (\w+)", rest).groups() for word, rest in INSTRUCTIONS if word == "FROM"]


def of(word: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == word]


def test_stages_are_built_on_known_images():
    known = {"python:${PYTHON}-slim"}
    for image, name in STAGES:
        assert image in known, image
        known.add(name)
    assert f"PYTHON={TESTED_TOGETHER['Python']}" in of("ARG")
    assert set(re.findall(r"--target (\w+)", TEXT + PAGE)) == {"cpu", "cuda"} == {name for _, name in STAGES[1:]}


def test_files_that_are_copied_exist_and_are_in_the_context():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    for copy in of("COPY"):
        *sources, _ = [word for word in copy.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not any(fnmatch(source.split("/")[0], pattern) for pattern in ignored), source
    for needed in ("verl", "examples", "recipe", "scripts", "pyproject.toml", "README.md", "LICENSE"):
        assert not any(fnmatch(needed, pattern) for pattern in ignored), needed


def test_the_steps_are_the_scripts_of_make():
    scripts = [script for run in of("RUN") for script in re.findall(r"scripts/[\w.]+", run)]
    assert set(scripts) == {"scripts/setup_venv.sh"}
    assert "scripts/setup_venv.sh $(VENV)" in (ROOT / "Makefile").read_text()
    assert "pip install" not in " ".join(of("RUN"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in of("ARG"):
        if line.startswith("EXTRAS="):
            assert set(line.removeprefix("EXTRAS=").split(",")) <= set(extras)
    named = {line.partition("=")[0] for line in of("ARG")}
    assert named == set(re.findall(r"^\| `([A-Z]+)` \|", PAGE, re.MULTILINE))


def test_every_image_runs_as_a_user_and_is_checked():
    for name in ("cpu", "cuda"):
        stage = TEXT.split(f"FROM base AS {name}\n")[1].split("\nFROM ")[0]
        users = re.findall(r"^USER (.+)$", stage, re.MULTILINE)
        assert users == ["$UID"] and stage.rstrip().endswith("&& verl check --quiet")
    assert all("root" not in user for user in of("USER"))
    (check,) = of("HEALTHCHECK")
    assert '"verl", "check", "--quiet"' in check


@pytest.mark.parametrize(("extras", "asked"), [("plot,test", True), ("plot", False)])
def test_bubblewrap_is_tried_for_tests_and_its_failure_is_one_line(tmp_path, extras, asked):
    """On a machine without bwrap, as root, with an apt-get that fails."""
    programs = {"id": "echo 0", "apt-get": "exit 100", "python": "exit 0"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "mktemp", "rm", "sh", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(tmp_path / "python")
    command = ["bash", str(ROOT / "scripts/setup_venv.sh"), str(tmp_path / "venv"), extras]
    env = {"PATH": str(tmp_path), "PYTHON": "python"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("bubblewrap could not be installed (apt-get install bubblewrap): ") == asked
    assert done.stderr.count("\n") == asked


@pytest.mark.parametrize(
    ("device", "gpu", "wanted"), [("cpu", True, "+cpu"), ("cuda", False, ""), ("auto", False, "+cpu")]
)
def test_the_device_selects_the_build_of_torch(tmp_path, device, gpu, wanted):
    """With a pip that only notes what it is asked for."""
    venv, programs = tmp_path / "venv/bin", tmp_path / "programs"
    for folder in (venv, programs):
        folder.mkdir(parents=True)
    noted = tmp_path / "noted"
    python = f'#!/bin/sh\necho "$@" >> {noted}\n[ "$1 $2" != "-c import torch" ]\n'
    for path, text in ((venv / "python", python), (programs / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 1}\n")):
        path.write_text(text)
        path.chmod(0o755)
    env = os.environ | {"DEVICE": device, "PATH": f"{programs}:{os.environ['PATH']}"}
    env.pop("TORCH", None)
    subprocess.run(["bash", str(ROOT / "scripts/setup_venv.sh"), str(venv.parent), "plot"], env=env, check=True)
    (torch,) = [line.split()[-1] for line in noted.read_text().splitlines() if "install --quiet torch==" in line]
    assert torch == f"torch=={TESTED_TOGETHER['torch']}{wanted}"
    refused = subprocess.run(
        ["bash", str(ROOT / "scripts/setup_venv.sh")], env=env | {"DEVICE": "tpu"}, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "expected auto, cpu or cuda, found 'tpu'" in refused.stderr
