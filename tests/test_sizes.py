"""No file over 500 lines, no function over 60, and no trace of the machine that it was written on."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("verl", "recipe", "examples", "benchmarks", "tests", "scripts")
FILE_LINES, FUNCTION_LINES = 500, 60

#: "path" or "path::function" -> why it is longer
EXCEPTIONS: dict[str, str] = {}

# Written in pieces, so that this file does not hold them: folders and hosts that exist on some machines only.
MACHINE_PLACES = re.compile(
    "|".join(
        [
            r"(?<![\w.<$}])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/\w",
            r"/opt/ve" + "nv",
            r"py" + r"pi\.org",
            r"pytorch\.o" + "rg/whl",
        ]
    )
)


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def function_lengths(text: str) -> dict[str, int]:
    lengths, nodes = {}, [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths[node.name] = max(node.end_lineno - node.lineno + 1, lengths.get(node.name, 0))
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return lengths


@functools.cache
def too_long() -> dict[str, int]:
    found = {}
    for path in python_files():
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        lines = {name: len(text.splitlines())}
        found |= {n: size for n, size in lines.items() if size > FILE_LINES}
        found |= {f"{name}::{f}": size for f, size in function_lengths(text).items() if size > FUNCTION_LINES}
    return found


def test_files_and_functions_are_short():
    assert {name: size for name, size in too_long().items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed():
    assert set(EXCEPTIONS) <= set(too_long())


def test_the_measure_itself():
    assert function_lengths("@d\ndef f():\n    a\n    def g():\n        b\n") == {"f": 4, "g": 2}


def test_no_file_names_a_machine():
    suffixes = {".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".txt", ""}
    files = [path for folder in (*FOLDERS, "docs", ".ci") for path in (ROOT / folder).rglob("*")]
    files += list(ROOT.glob("*"))
    found = []
    for path in files:
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts and path.name != ".git":
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if MACHINE_PLACES.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_the_pattern_of_machine_places_itself():
    for text in ("see /wo" + "rk/main", "'/ro" + "ot/x'", "/ho" + "me/me/x", "https://py" + "pi.org"):
        assert MACHINE_PLACES.search(text), text
    for text in ("/path/to/model", "~/data", "$HOME/data", "tmp/work/x", "/workers", "../shared/data"):
        assert not MACHINE_PLACES.search(text), text
