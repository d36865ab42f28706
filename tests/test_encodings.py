"""Text files are UTF-8 whatever the locale: every call that opens one, or reads the output of a command, says so."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: functions that open a text file if their mode is not binary; the others do only if it is not
TEXT_BY_DEFAULT = {"open", "fdopen", "read_text", "write_text"}
BINARY_BY_DEFAULT = {"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
#: `open` of these opens something else
OTHERS = {"os", "Image", "av", "shards"}
#: what a file has in which `without_encoding` can find something: only those are parsed
CANDIDATE = re.compile(r"open\(|_text\(|TemporaryFile\(|\btext=|universal_newlines=")


def without_encoding(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls in a module that depend on the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        value = getattr(node.func, "value", None)  # of a name, of the last attribute, or of something else
        owner = getattr(value, "attr", getattr(value, "id", ""))
        if isinstance(node.func, ast.Name) and node.func.id not in ("open", *BINARY_BY_DEFAULT):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*node.args, *([keywords["mode"]] if "mode" in keywords else [])]
        modes = {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
        modes = {mode for mode in modes if mode and set(mode) <= set("rwaxbt+")}
        is_text = name in TEXT_BY_DEFAULT and not any("b" in mode for mode in modes)
        is_text = is_text or (name in BINARY_BY_DEFAULT and any("b" not in mode for mode in modes))
        is_text = is_text and not (name == "open" and owner in OTHERS)
        is_text = is_text or (owner == "subprocess" and bool(keywords.keys() & {"text", "universal_newlines"}))
        if is_text and "encoding" not in keywords:
            yield node


def test_calls_are_found():
    depends = [
        *("open(p)", "open(p, 'a')", "p.open('w')", "p.read_text()", "p.write_text(t)", "os.fdopen(d, mode='w')"),
        *("subprocess.run(c, text=True)", "tempfile.TemporaryFile('w+')", "p.read_text(errors='replace')"),
    ]
    does_not = [
        *("open(p, 'rb')", "p.open(mode='wb')", "os.open(p, os.O_RDONLY)", "Image.open(p)", "p.read_bytes()"),
        *("open(p, encoding='utf-8')", "subprocess.run(c)", "tempfile.TemporaryFile()", "read_text(p)"),
    ]
    assert [line for line in depends + does_not if list(without_encoding(ast.parse(line)))] == depends
    assert all(CANDIDATE.search(line) for line in depends)


def test_every_text_file_has_an_encoding():
    listed = ["git", "ls-files", "verl/*.py", "examples/*.py", "recipe/*.py", "benchmarks/*.py", "scripts/*.py"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.split()
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    found = [
        f"{file}:{call.lineno}: {ast.unparse(call)[:80]}"
        for file, text in texts.items()
        if CANDIDATE.search(text)
        for call in without_encoding(ast.parse(text))
    ]
    assert len(files) > 100 and found == []
