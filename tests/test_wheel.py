"""The wheel of `make dist` has every file of the package as a file, and works without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def packaged() -> set[str]:
    """The files below verl/, also those behind the links recipe and examples."""
    found = set()
    for folder, folders, files in os.walk(ROOT / "verl", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {str((Path(folder) / name).relative_to(ROOT)) for name in files if not name.endswith(".pyc")}
    return found


def test_the_package_data_have_every_kind_of_file():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = ["*.py", *data["*"], *data["verl"]]
    missing = [file for file in packaged() if not any(fnmatch(Path(file).name, pattern) for pattern in patterns)]
    assert not missing, "add the suffix to package-data in pyproject.toml"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("verl", "recipe", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, "sdist", str(folder)], cwd=source, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    unpacked = next(folder.glob("verl-*/"))
    subprocess.run([sys.executable, "-c", BUILD, "wheel", str(folder)], cwd=unpacked, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, which finds the dependencies in the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    install = ["pip", "--python", str(folder), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.mark.slow
def test_the_wheel_has_all_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("verl/")}
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0xA]  # links
    assert names == packaged()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["python", "-c", "import verl.recipe.dapo as dapo; print(dapo.__file__)"], "site-packages/verl/recipe/dapo"),
        (["verl", "train", "--help"], "usage: verl train"),
        (["verl", "check", "--quiet"], ""),
        (["verl", "recipes", "list"], "smollm2_sums"),
        (["verl", "config", "explain", "profile_steps"], "torch.profiler"),
        (["verl", "quickstart", "--task", "digit", "--steps", "2"], "mean reward"),
        (["verl", "report", "outputs/quickstart/digit-grpo/rl"], "report.html"),
    ],
    ids=lambda value: "-".join(value[1:3]) if isinstance(value, list) else "",
)
def test_commands_work_from_the_wheel(environment, tmp_path_factory, words, shown):
    folder = tmp_path_factory.getbasetemp() / "elsewhere"  # one for all, so that the report finds the run
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    program = environment / "bin" / words[0]
    result = subprocess.run([program, *words[1:]], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert shown in result.stdout and str(ROOT) not in result.stdout
