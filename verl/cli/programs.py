"""Subcommands of `verl` that run another program: `verl train ARGUMENTS` is `python -m verl.trainer.main_ppo`.

And `verl examples`: list the example scripts and configurations, and copy them to edit.
"""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_FLAGS = ("--config", "--gpus", "--dry-run", "--verbose", "--print-config", "--help")


@dataclass(frozen=True)
class Command:
    """A subcommand that passes its arguments on.

    Attributes:
        module: has `main(arguments, program) -> exit status`, or a function that is named after a colon.
        help: one line for `verl --help`.
        schema: name in `verl.cli.config.SCHEMAS` of the schema whose keys the shell completes; "": none.
    """

    name: str
    module: str
    help: str
    schema: str = ""

    def command(self) -> Callable[..., None]:
        """The function that typer registers: it runs the program and exits with its status."""

        def run(
            arguments: Annotated[list[str] | None, typer.Argument(autocompletion=self.completions)] = None,
        ) -> None:
            raise typer.Exit(self.main(arguments or []))

        return run

    def main(self, arguments: list[str]) -> int:
        """Run the program. Returns its exit status."""
        module, _, function = self.module.partition(":")
        main = getattr(importlib.import_module(module), function or "main")
        return main(arguments, program=f"verl {self.name}")

    def completions(self, incomplete: str) -> list[str]:
        """Keys of the configuration, and flags, that start with `incomplete`."""
        if not self.schema:
            return []
        from verl.cli.config import SCHEMAS
        from verl.config.fields import fields_of

        candidates = [*_FLAGS, *(f"{key}=" for key in fields_of(SCHEMAS[self.schema]))]
        return [word for word in candidates if word.startswith(incomplete)]


def merge(arguments: list[str], program: str) -> int:
    """verl.model_merger, whose command `merge` is the default."""
    from verl.model_merger.__main__ import main as merger

    asks_for_help = arguments[:1] in ([], ["-h"], ["--help"])
    command = [] if asks_for_help or arguments[0] in ("merge", "test") else ["merge"]
    return merger([*command, *(arguments or ["--help"])], program)


def quickstart(arguments: list[str], program: str) -> int:
    """examples/quickstart/run.py, also from an installed package."""
    from verl.registry import import_module

    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        return import_module(str(FOLDER / "quickstart" / "run.py")).main(arguments)
    finally:
        sys.argv = before


PROGRAMS = (
    Command("train", "verl.trainer.main_ppo", "Train with reinforcement learning: PPO, GRPO and others.", "ppo"),
    Command("plan", "verl.cli.plan", "Check a run; print its memory, time and best placement.", "ppo"),
    Command("sft", "verl.trainer.sft_trainer", "Supervised fine-tuning.", "sft"),
    Command("dpo", "verl.recipe.dpo.main_dpo", "Learn from preferences: DPO, IPO, KTO, SimPO, ORPO.", "dpo"),
    Command("rm", "verl.recipe.rm.main_rm", "Train a reward model on preference pairs.", "rm"),
    Command("generate", "verl.trainer.main_generation", "Generate responses to the prompts of a file.", "generation"),
    Command("eval", "verl.trainer.main_eval", "Score responses; pass@k; compare two models.", "evaluation"),
    Command("merge", "verl.cli.programs:merge", "Merge a checkpoint into a Hugging Face model."),
    Command("quickstart", "verl.cli.programs:quickstart", "Train a tiny model with GRPO and watch its reward rise."),
)


# ---- examples -------------------------------------------------------------------------------------------------------

#: a link in a checkout, part of the package otherwise
FOLDER = Path(__file__).resolve().parents[1] / "examples"
_IMPORT = re.compile(r"^from examples\.(\w+)", re.MULTILINE)
_KINDS = (".py", ".sh", ".yaml", ".ipynb")

examples = typer.Typer(help="List and copy example scripts and configurations.")


@examples.command("list", help="List the examples.")
@examples.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    """List the examples, or copy one."""
    if context.invoked_subcommand is not None:
        return
    for name in names():
        typer.echo(name)
        files = [path for path in files_of(name) if path.suffix in _KINDS and name != "recipes"]  # `verl recipes list`
        width = max((len(str(path.relative_to(FOLDER / name))) for path in files), default=0)
        for path in files:
            typer.echo(f"  {path.relative_to(FOLDER / name)!s:<{width}}  {summary(path)}".rstrip())
    typer.echo("\nverl examples copy NAME [DEST] copies a folder to DEST/examples/NAME")


@examples.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="a folder that `verl examples` lists")],
    dest: Annotated[Path, typer.Argument(help="the copy is DEST/examples/NAME")] = Path("."),
    overwrite: Annotated[bool, typer.Option(help="Replace files that exist.")] = False,
) -> None:
    """Copy an example, with the examples that it imports."""
    from verl.registry import did_you_mean
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        if name not in names():
            raise ValueError(f"there is no example {name!r}: {did_you_mean(name, names())}")
        paths = [path for example in needed(name) for path in files_of(example)]
        pairs = [(path, dest / "examples" / path.relative_to(FOLDER)) for path in paths]
        existing = [target for _, target in pairs if target.exists()]
        if existing and not overwrite:
            raise ValueError(f"{existing[0]} exists: choose another DEST, or use --overwrite")
        for path, target in pairs:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
            except OSError as error:
                raise ValueError(f"{target} cannot be written: {error.strerror}; choose another DEST") from None
            typer.echo(target)


def names() -> list[str]:
    """The folders of the examples."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and files_of(path.name))


def files_of(name: str) -> list[Path]:
    """The files of an example."""
    paths = (FOLDER / name).rglob("*")
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def needed(name: str) -> list[str]:
    """The example and those that it imports."""
    needed_names = [name]
    for example in needed_names:
        texts = [path.read_text(encoding="utf-8") for path in files_of(example) if path.suffix == ".py"]
        imported = {other for text in texts for other in _IMPORT.findall(text)} & set(names())
        needed_names += sorted(imported - set(needed_names))
    return needed_names


def summary(path: Path) -> str:
    """The first line of a script's docstring, or of its comment; the title of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return next((line[1:].strip() for line in text.splitlines() if line.startswith("# ")), "")


# ---- recipes --------------------------------------------------------------------------------------------------------

recipes = typer.Typer(help="Recipes: settings for a model, with hardware, time and result.", no_args_is_help=True)

_Recipe = Annotated[str, typer.Argument(help="a recipe that `verl recipes list` names")]


@recipes.command("list")
def list_recipes() -> None:
    """List the recipes with hardware and result."""
    for path in sorted((FOLDER / "recipes").glob("*/recipe.yaml")):
        about = _about(path.parent.name)
        typer.echo(f"{path.parent.name}\n  {about['title']}\n  {about['hardware']}; {about['result']}")


@recipes.command("show")
def show_recipe(name: _Recipe) -> None:
    """Print what a recipe says about itself, and its settings."""
    typer.echo("\n".join(f"{key}: {value}" for key, value in _about(name).items()))
    for path in files_of(f"recipes/{name}"):
        text = path.read_text(encoding="utf-8") if path.name == "config.yaml" else ""
        typer.echo(f"{path}\n{text}".rstrip())


@recipes.command("run", context_settings={"ignore_unknown_options": True})
def run_recipe(
    name: _Recipe,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="for its command")] = None,
) -> None:
    """Run a recipe. Settings after its name override those of the recipe."""
    if (script := FOLDER / "recipes" / name / "run.sh").is_file():  # of several commands
        command = ["bash", str(script), *(arguments or [])]
        raise typer.Exit(subprocess.run(command, env={"PYTHON": sys.executable} | os.environ, check=False).returncode)
    command, *first = _about(name)["command"].split()
    config = FOLDER / "recipes" / name / "config.yaml"
    first += ["--config", str(config)] if config.is_file() else []
    program = next(program for program in PROGRAMS if program.name == command)
    raise typer.Exit(program.main([*first, *(arguments or [])]))


def _about(name: str) -> dict[str, Any]:
    """The content of a recipe.yaml: title, command, hardware, time, result and source."""
    from verl.config.sources import read_yaml
    from verl.registry import did_you_mean
    from verl.trainer.startup.command_line import user_errors

    files = {path.parent.name: path for path in (FOLDER / "recipes").glob("*/recipe.yaml")}
    with user_errors():
        if name not in files:
            raise ValueError(f"there is no recipe {name!r}: {did_you_mean(name, files)}")
        return {key: setting.value for key, setting in read_yaml(files[name]).items()}
