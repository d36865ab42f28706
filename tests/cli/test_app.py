"""The command `verl`: its subcommands, their exit codes, what they load, completion, and examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from verl import __version__
from verl.cli.app import app
from verl.cli.programs import FOLDER, PROGRAMS, names, needed
from verl.config import load_config
from verl.trainer.startup import command_line

ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_help_has_every_subcommand():
    status, text = call("--help")
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert status == 0 and [program.name for program in PROGRAMS] == listed[: len(PROGRAMS)]
    assert {"serve", "config", "examples"} <= set(listed) and "--install-completion" in text
    assert call("--version") == (0, f"verl {__version__}\n")


def test_an_unknown_subcommand():
    status, text = call("trian")
    assert status == 2 and "Did you mean 'train'?" in text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_help_of_a_subcommand_is_its_programs(program, capsys):
    path = list(sys.path)
    status, text = call(program.name, "--help")
    assert sys.path == path
    assert status == 0 and text.startswith(f"usage: verl {program.name} ") and "python -m" not in text


def test_arguments_reach_the_program():
    status, text = call("train", "--config", "nothing.yaml", "--dry-run")
    assert status == 1 and "there is no file 'nothing.yaml'" in text
    status, text = call("train", "algorithm.name=grpo", "+data.seed=3", "--print-config", "--trainer.seed=7")
    assert status == 0
    expected = load_config(overrides=["algorithm.name=grpo", "data.seed=3", "trainer.seed=7"])
    assert load_config(base=yaml.safe_load(text)) == expected
    status, text = call("sft", "data.train_batchsize=3", "--dry-run")
    assert status == 1 and "did you mean data.train_batch_size?" in text


def test_plan_is_the_dry_run(monkeypatch):
    given = []
    monkeypatch.setattr("verl.trainer.main_ppo.main", lambda *args, **kwargs: given.append((args, kwargs)) or 3)
    assert call("plan", "a.b=1", "-c", "x.yaml")[0] == 3
    assert given == [((["--dry-run", "a.b=1", "-c", "x.yaml"],), {"program": "verl plan"})]


def test_merge_is_the_default_command_of_merge(monkeypatch):
    given = []
    monkeypatch.setattr("verl.model_merger.__main__.main", lambda words, program: given.append(words) or 0)
    for words in (["--backend", "fsdp"], ["merge", "--backend", "fsdp"], ["test", "--backend", "fsdp"], []):
        assert call("merge", *words)[0] == 0
    assert [words[0] for words in given] == ["merge", "merge", "test", "--help"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell):
    env = {"_VERL_COMPLETE": f"complete_{shell}"}
    words = {"COMP_WORDS": "verl tra", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "verl tra"}
    assert "train" in CliRunner().invoke(app, [], env=env | words, prog_name="verl").output
    words = {"COMP_WORDS": "verl train data.train_f", "COMP_CWORD": "2"}
    words["_TYPER_COMPLETE_ARGS"] = words["COMP_WORDS"]
    assert "data.train_files=" in CliRunner().invoke(app, [], env=env | words, prog_name="verl").output


VERL = ["verl.cli.app"]
QUICK = [[*VERL, "examples"], ["verl.model_merger", "--help"]]


def entry_points() -> list[list[str]]:
    """Every module of the package that `python -m` runs, and every subcommand, with its help."""
    modules = []
    for path in sorted((ROOT / "verl").rglob("*.py")):
        is_of_workers = path.parent.name in ("sandbox", "isolation") or path.name in (
            "worker.py",
            "worker_main.py",
            "fork_server.py",
        )
        is_main = path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text(encoding="utf-8")
        if is_main and not is_of_workers and "examples" not in path.parts:
            modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    groups = [[group.name] for group in app.registered_groups]
    groups += [[g.name, c.name] for g in app.registered_groups for c in g.typer_instance.registered_commands]
    commands = [*groups, *([command.name] for command in app.registered_commands)]
    return [[*words, "--help"] for words in (*([m] for m in modules), *([*VERL, *words] for words in commands))]


MORE = [[*VERL, "--version"], [*VERL, "config", "show"], *entry_points()]
SLOW = [pytest.param(command, marks=pytest.mark.slow) for command in MORE]


@pytest.mark.parametrize("command", [*QUICK, *SLOW], ids=" ".join)
def test_output_that_nobody_reads_or_that_finds_no_space(command):
    """`verl examples | head -1` changes nothing; `> /dev/full` is one line on stderr, and status 1."""
    reader, closed = os.pipe()
    os.close(reader)
    with open(closed, "wb") as pipe, open("/dev/full", "wb") as full:
        found = [
            subprocess.run([sys.executable, "-m", *command], stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
            for out in (pipe, full)
        ]
    error = "error: stdout cannot be written: No space left on device\n"
    assert [(done.returncode, done.stderr) for done in found] == [(0, ""), (1, error)]


def test_nothing_is_collected_at_the_end():
    """Python would search all objects for garbage before it ends: seconds of a command that has loaded torch."""
    program = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    program += "; sys.argv = ['verl', '--version']; import verl.__main__; verl.__main__.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "True"


# ---- config ---------------------------------------------------------------------------------------------------------


def test_show(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train_batch_size: 64}\n")
    status, text = call("config", "show", "--changed", "--config", str(tmp_path / "a.yaml"), "trainer.seed=3")
    assert status == 0
    shown = yaml.safe_load(text)
    assert shown["data"] == {"train_batch_size": 64} and shown["trainer"] == {"seed": 3}
    status, text = call("config", "show", "model.path=m", "--of", "sft")
    assert status == 0 and yaml.safe_load(text)["model"]["path"] == "m"
    status, text = call("config", "show", "trainer.max_steps=3")
    assert status == 1 and "did you mean trainer.total_training_steps?" in text


def test_diff(tmp_path):
    """Files, algorithms, folders of runs and of checkpoints."""
    (tmp_path / "a.yaml").write_text("trainer: {seed: 3}\n")
    run = tmp_path / "run"
    for step in (9, 10):
        (run / f"global_step_{step}").mkdir(parents=True)
        (run / f"global_step_{step}" / "config.yaml").write_text(f"trainer: {{seed: {step}}}\n")
    status, text = call("config", "diff", str(tmp_path / "a.yaml"), str(run))
    key, *values = text.splitlines()[-1].split()
    assert status == 1 and (key, values) == ("trainer.seed", ["3", "10"])  # the newest checkpoint
    assert call("config", "diff", str(run / "global_step_9"), str(run / "global_step_9"))[0] == 0
    (run / "run.json").write_text('{"config": {"trainer": {"seed": 3}}}')
    assert "trainer.seed" not in call("config", "diff", str(tmp_path / "a.yaml"), str(run))[1]
    (run / "run.json").write_text('{"config"')  # a damaged one is skipped, with a warning
    assert call("config", "diff", str(run), str(run / "global_step_10"))[0] == 0
    status, text = call("config", "diff", "defaults", "dapo")
    assert status == 1 and "algorithm.filter_groups.enable" in text
    status, text = call("config", "diff", "dapoo", "grpo")
    assert status == 2 and "did you mean 'dapo'?" in text
    status, text = call("config", "diff", str(tmp_path), "grpo")
    assert status == 2 and "expected the folder of a run" in text


def test_explain_and_convert(tmp_path):
    status, text = call("config", "explain", "clip_ratio_c")
    assert status == 0 and "dual clip" in text
    status, text = call("config", "explain", "num_generations")
    assert status == 1 and "did you mean actor_rollout_ref.rollout.n?" in text
    status, text = call("config", "explain", "beta")  # a part of other keys' lines
    assert status == 0 and "did you mean actor_rollout_ref.actor.kl_loss_coef?" in text
    (tmp_path / "trl.yaml").write_text("num_generations: 4\nper_device_train_batch_size: 8\nfoo: 1\n")
    status, text = call("config", "convert", str(tmp_path / "trl.yaml"), "--overrides")
    assert status == 0 and "actor_rollout_ref.rollout.n=4\n" in text and "# no counterpart: foo: 1" in text
    assert call("config", "convert", str(tmp_path / "nothing.yaml"))[0] == 1


# ---- examples -------------------------------------------------------------------------------------------------------


def test_examples_are_listed_with_a_summary():
    status, text = call("examples")
    assert status == 0 and set(names()) == {line for line in text.splitlines() if line in names()}
    assert "calculator_loop.py  A custom agent loop, complete" in text and call("examples", "list") == (0, text)


def test_copies_have_what_they_import(tmp_path):
    """The files lie as in a checkout, so that the commands of the docs work."""
    assert needed("server_agent") == ["server_agent", "tools", "quickstart"]
    status, text = call("examples", "copy", "server_agent", str(tmp_path))
    assert status == 0 and str(tmp_path / "examples/tools/guess.py") in text
    assert (tmp_path / "examples/server_agent/run.py").read_text() == (FOLDER / "server_agent/run.py").read_text()
    status, text = call("examples", "copy", "tools", str(tmp_path))
    assert status == 1 and "exists" in text
    assert call("examples", "copy", "tools", str(tmp_path), "--overwrite")[0] == 0
    status, text = call("examples", "copy", "quickstrat", str(tmp_path))
    assert status == 1 and "did you mean 'quickstart'?" in text


def test_the_package_has_the_examples():
    """`verl/examples` is a link in a checkout; the wheel has the files, because packages and their data follow it."""
    link = ROOT / "verl" / "examples"
    assert link.is_symlink() and link.resolve() == ROOT / "examples"


def test_the_help_shows_the_command_that_was_typed():
    assert command_line.usage("{program} x", "verl train") == "verl train x"
    assert command_line.usage("{program} x", "a.b") == "python -m a.b x"
