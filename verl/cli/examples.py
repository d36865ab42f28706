"""`verl examples`: list the example scripts and configurations, and copy them to edit."""

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

#: a link in a checkout, part of the package otherwise
FOLDER = Path(__file__).resolve().parents[1] / "examples"
_IMPORT = re.compile(r"^from examples\.(\w+)", re.MULTILINE)
_KINDS = (".py", ".sh", ".yaml", ".ipynb")

examples = typer.Typer(help="List and copy example scripts and configurations.")


@examples.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    """List the examples, or copy one."""
    if context.invoked_subcommand is not None:
        return
    for name in names():
        typer.echo(name)
        files = [path for path in files_of(name) if path.suffix in _KINDS]
        width = max(len(str(path.relative_to(FOLDER / name))) for path in files)
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
        line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    else:
        line = next((line[1:].strip() for line in text.splitlines() if line.startswith("# ")), "")
    return line
