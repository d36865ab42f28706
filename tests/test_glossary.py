"""One word per thing: no banned word of scripts/glossary.toml in an identifier or in a heading of the docs."""

from pathlib import Path

import pytest

from scripts.glossary import (
    EXCEPTIONS,
    IDENTIFIERS,
    NAMES,
    PROSE,
    banned_headings,
    banned_identifiers,
    banned_prose,
    words_of,
)

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    f"verl/{path.name}"
    for path in (ROOT / "verl").iterdir()
    if path.is_dir() and not path.is_symlink() and any(path.rglob("*.py"))
) + ["recipe"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("recipe/*/README.md"))]


def described(findings: list) -> list[str]:
    better = {**IDENTIFIERS, **NAMES, **PROSE}
    return [f"{file}:{line}: {text}: use {better.get(word, word)} for {word}" for file, line, text, word in findings]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_banned_word_in_an_identifier_or_in_prose(package):
    assert described(banned_identifiers(ROOT, package) + banned_prose(ROOT, package)) == []


def test_no_banned_word_in_an_identifier_of_the_top_modules():
    assert described(banned_identifiers(ROOT, "verl", "*.py")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_banned_word_in_a_heading(page):
    assert described(banned_headings(page)) == []


def test_exceptions_are_needed():
    """A path that exists, or an identifier that is somewhere."""
    text = "\n".join(path.read_text() for path in (ROOT / "verl").rglob("*.py"))
    for where, entry in EXCEPTIONS.items():
        assert entry["why"] and set(entry["words"]) <= {*IDENTIFIERS, *NAMES, *PROSE}, where
        assert (ROOT / where).exists() or where in text, where


def test_a_name_that_is_banned_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "of", "the result")
    (tmp_path / "names.py").write_text("def _of(x, *, of_total):\n    self.of = x.of\n")
    assert [(line, name) for _, line, name, _ in banned_identifiers(tmp_path, "")] == [(1, "_of"), (2, "of")]


def test_the_search_itself(tmp_path):
    assert words_of("KVCache_block2") == ["kv", "cache", "block", "2"]
    (tmp_path / "verl" / "seat.py").parent.mkdir()
    (tmp_path / "verl" / "seat.py").write_text(
        "from itertools import product\n"
        "def in_pieces(x, *, FooProduct=1):  # of one's own\n"
        '    """Nobody reads it."""\n'
        "    self.answer = product(x, x)\n"
    )
    assert banned_identifiers(tmp_path, "", "*.py") == [] and banned_identifiers(tmp_path, "verl", "*.py")
    found = banned_identifiers(tmp_path, "verl")
    assert [(line, name, word) for _, line, name, word in found] == [
        (0, "seat", "seat"),
        (2, "in_pieces", "pieces"),
        (2, "FooProduct", "product"),
        (4, "answer", "answer"),
    ]
    assert [(line, word) for _, line, _, word in banned_prose(tmp_path, "verl")] == [
        (2, "of one's own"),
        (3, "nobody"),
    ]
    (tmp_path / "page.md").write_text("# Custom rewards\n```\n# answers\n```\n## The `answer` column\n### Answers\n")
    assert [(line, word) for _, line, _, word in banned_headings(tmp_path / "page.md")] == [
        (6, "answers"),
        (6, "Answers"),
    ]
