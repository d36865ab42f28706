"""The commands that a page prints, and a shell for them: for the tests that do what a page says, from top to bottom."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from verl.cli.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of docs/<page> in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def table_rows(text: str, title: str = "") -> list[list[str]]:
    """The cells of the tables of a text, without their heads; title: of the section."""
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0] if title else text
    tables = re.findall(r"^\|.*\n\|[-|: ]+\|\n((?:\|.*\n?)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in line[1:-1].split("|")] for table in tables for line in table.splitlines()]


def commands(page: str) -> list[str]:
    """One string a command of docs/<page>: lines of a here-document, and continued lines, are joined."""
    one = re.compile(r"^\w.*<<'EOF'\n(?:.*\n)*?EOF$|^(?:.*\\\n)*.+$", re.MULTILINE)
    found = [command for block in blocks(page, "bash") for command in one.findall(block)]
    return [command if "<<'EOF'" in command else command.replace("\\\n", " ") for command in found]


def as_module(command: str) -> str:
    """`verl train X` as `python -m verl.trainer.main_ppo X`, the same program; another command as it is."""
    for program in PROGRAMS:
        start = f"verl {program.name} "
        if command.startswith(start) and program.module.startswith("verl.trainer."):
            return " ".join(["python", "-m", program.module, command[len(start) :]])
    return command.replace("verl ", "python -m verl.cli.app ", 1) if command.startswith("verl ") else command


class Shell:
    """Runs commands in a folder that has `examples`, too: programs of Python in this process, the rest in bash.

    A program that runs here need not import everything anew.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, command: str) -> None:
        """Fails the test where the command fails."""
        if command.startswith("verl "):
            command = command.replace("verl ", "python -m verl.cli.app ", 1)
        if not command.startswith("python "):
            subprocess.run(["bash", "-ec", command], check=True)
            return
        words = shlex.split(command)[1:]
        if words[0] == "-c":
            exec(words[1], {})
            return
        module = words[0] == "-m"
        program, arguments = (words[1], words[2:]) if module else (words[0], words[1:])
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [program, *arguments])
            patch.setattr(sys, "path", [str(Path(program).parent), *sys.path])
            try:
                (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
            except SystemExit as end:
                assert not end.code, f"{command}: {end.code}"
