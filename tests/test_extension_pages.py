"""Every block of docs/custom_*.md is run, from top to bottom, with a tiny model in place of the one that a reader has.

python, beginning with "# name.py"   written to that file; test_*.py is run
bash                                 run; commands that train get the tiny model and one or two steps at their end
text                                 each line must be in what the bash block before it printed
diff                                 applied to a copy of its file, which must still run
"""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import stores
from tests.pages import as_module
from tests.trainer.conftest import make_tiny, run_settings

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("custom_*.md"))
PAGES += [ROOT / "docs" / "fsdp_extension.md", ROOT / "docs" / "dpo_extension.md"]
#: pages that show or need more than one step
STEPS = {"custom_trainer": 2, "custom_dataset": 2}
BLOCK = re.compile(r"^```(python|bash|text|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


BUILT_IN = [dict(store) for store in stores()]


def forget() -> None:
    """Registries as in a process that has imported nothing of the user's yet."""
    for store, entries in zip(stores(), BUILT_IN):
        store.clear()
        store.update(entries)


class Reader:
    """Does what a page says, in a separate folder."""

    def __init__(self, folder: Path, tiny: Path, steps: int, capsys):
        self.folder, self.tiny, self.steps, self.capsys = folder, tiny, steps, capsys
        self.printed = ""
        self.status = 0
        self.trained = 0

    def python(self, text: str) -> None:
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, "a block of Python begins with the name of its file"
        (self.folder / name[1]).write_text(text)
        if name[1].startswith("test_"):
            forget()
            functions = runpy.run_path(str(self.folder / name[1]))
            tests = [function for key, function in functions.items() if key.startswith("test_")]
            assert tests
            for test in tests:
                test()

    def bash(self, text: str) -> None:
        self.printed, self.status = "", 0
        for line in text.replace("\\\n", " ").strip().splitlines():
            command = as_module(line)
            if command.startswith("python "):
                self._train(shlex.split(command)[1:])
            else:
                subprocess.run(["bash", "-c", command], check=True, cwd=self.folder)

    def _train(self, arguments: list[str]) -> None:
        said = {argument.split("=")[0] for argument in arguments}
        if "imports=[my_rules.py]" in arguments:  # rewards by name, or by data source
            said.add("reward.custom_reward_function.path")
        settings = run_settings(self.tiny, self.folder / f"run{self.trained}")
        own = [setting for setting in settings if setting.split("=")[0] not in said]
        if "imports=[my_rules.py]" in arguments:
            own += [f"data.{split}_files={self._gsm8k(file)}" for split, file in (("train", "train"), ("val", "test"))]
        own += [f"trainer.total_training_steps={self.steps}"]
        own += ["trainer.resume_mode=disable", "data.filter_overlong_prompts=false"]
        if arguments[:2] == ["-m", "verl.trainer.main_ppo"]:
            script, rest = ROOT / "verl" / "trainer" / "main_ppo.py", arguments[2:]
        else:
            script, rest = self.folder / arguments[0], arguments[1:]
        sys.argv = [str(script), *rest, *own]
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        out, err = self.capsys.readouterr()
        self.printed += out + err
        self.status = ended.value.code
        self.trained += 1

    def _gsm8k(self, name: str) -> Path:
        """A copy of the data with the data source of GSM8K."""
        rows = [json.loads(line) for line in (self.tiny / f"{name}.jsonl").read_text().splitlines()]
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**row, "data_source": "openai/gsm8k"}) + "\n" for row in rows))
        return path

    def text(self, text: str) -> None:
        for line in text.strip().splitlines():
            assert line.strip() in self.printed
        self.status = 0  # where it failed, it was shown to

    def diff(self, text: str) -> None:
        (file,) = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
        (self.folder / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / file, self.folder / file)
        subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=text, text=True, check=True, cwd=self.folder)
        registered = runpy.run_path(str(self.folder / file))["ADV_ESTIMATOR_REGISTRY"]
        assert re.search(r'\+@register_adv_est\("(\w+)"', text)[1] in registered


@pytest.mark.fast(
    "custom_reward",
    "custom_estimator",
    "custom_rollout_engine",
    "custom_agent_loop",
    "custom_loss",
    "custom_train_engine",
    "fsdp_extension",
    "dpo_extension",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_as_printed(page, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    reader = Reader(tmp_path, tiny, STEPS.get(page.stem, 1), capsys)
    blocks = BLOCK.findall(page.read_text())
    for i, (kind, text) in enumerate(blocks):
        getattr(reader, kind)(text)
        expects_failure = i + 1 < len(blocks) and blocks[i + 1][0] == "text"
        if kind == "bash" and not expects_failure:
            assert reader.status == 0, reader.printed
    assert reader.trained


def test_all_pages_are_there():
    names = ("loss", "estimator", "reward", "reward_manager", "dataset", "operator", "trainer")
    names += ("rollout_engine", "agent_loop", "train_engine")
    assert {page.stem for page in PAGES} == {f"custom_{name}" for name in names} | {"fsdp_extension", "dpo_extension"}


def test_the_page_on_megatron_names_the_files_that_call_it():
    """And the version that is pinned."""
    page, folder = (ROOT / "docs" / "megatron_extension.md").read_text(), ROOT / "verl" / "engines" / "megatron"
    table = re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)
    call = re.compile(r"^\s*from megatron", re.MULTILINE)
    calls = [path.name for path in folder.glob("*.py") if call.search(path.read_text())]
    assert sorted(table) == sorted(calls) and all((folder / name).is_file() for name in ("convert.py", "layout.py"))
    pin = re.search(r"`(megatron-core[^`]+)`\)", page)[1]
    assert f'megatron = ["{pin}"]' in (ROOT / "pyproject.toml").read_text()
