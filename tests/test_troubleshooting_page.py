"""docs/troubleshooting.md quotes messages that exist."""

import ast
import re
from pathlib import Path

from tests.pages import blocks

PACKAGE = Path(__file__).parents[1] / "verl"
#: a placeholder of logging: %s, %.1f, %r
VALUE = re.compile(r"%[-+.\d]*[sdgrf]")


def texts_of(tree: ast.AST) -> list[str]:
    """The string constants of a module without their placeholders; the parts of an f-string in one line."""
    return [
        VALUE.sub("\0", node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_every_message_is_in_the_code():
    files = sorted(path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts)
    code = "\n".join(text for path in files for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))))
    quoted = [line for block in blocks("troubleshooting.md", "output") for line in block.splitlines()]
    assert len(quoted) >= 25
    for line in quoted:
        for part in re.split(r"\.\.\.", line):
            assert part.strip() in code, f"{line}\nno message has {part.strip()!r}"
