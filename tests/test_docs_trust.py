"""docs/internals/trust.md: every row has four cells, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.pages import table_rows

ROOT = Path(__file__).resolve().parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


ROWS = table_rows((ROOT / "docs/internals/trust.md").read_text())


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_tests_that_exist():
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        named = TEST.findall(row[3])
        assert named and not TEST.sub("", row[3]).strip(" ,"), row
        for file, name in named:
            assert (ROOT / file).is_file(), row
            assert name in functions_of(file), row


def test_there_are_at_least_80_faults_each_once():
    faults = [row[0] for row in ROWS]
    assert len(faults) >= 80
    assert len({" ".join(row[:2]) for row in ROWS}) == len(faults)
