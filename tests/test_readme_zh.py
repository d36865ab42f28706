"""README.zh.md keeps step with README.md: headings, code blocks, tables and links."""

import re
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_OTHER_LANGUAGE = {"README.md", "README.zh.md"}


def parts(text: str) -> dict[str, list[str]]:
    """What both pages must have in common, in order: where the first difference is named by its own text."""
    prose = _BLOCK.sub("", text)
    return {
        "heading": [line.split()[0] for line in prose.splitlines() if line.startswith("#")],
        "code block": _BLOCK.findall(text),
        "code block below heading": sections(text),
        "table row": [_names(line) for line in prose.splitlines() if line.startswith("|")],
        "link": sorted(set(re.findall(r"\]\(([^)]+)\)", prose)) - _OTHER_LANGUAGE),
    }


def sections(text: str) -> list[str]:
    """`## 2`: a heading's level, and the number of code blocks up to the next heading."""
    chunks = re.split(r"^(#+) .*$", _BLOCK.sub("@BLOCK@", text), flags=re.MULTILINE)[1:]
    return [f"{level} {body.count('@BLOCK@')}" for level, body in zip(chunks[::2], chunks[1::2])]


def difference(english: str, chinese: str) -> str | None:
    """The first part that differs; None if the pages are in step."""
    theirs = parts(chinese)
    for what, ours in parts(english).items():
        for number, (one, other) in enumerate(zip_longest(ours, theirs[what], fillvalue="(none)"), 1):
            if one != other:
                return f"{what} {number}: README.md has\n{one}\nREADME.zh.md has\n{other}"
    return None


def _names(row: str) -> str:
    """The code and the addresses of a row, whose words are translated."""
    return " ".join(sorted(re.findall(r"`[^`]+`|\]\([^)]+\)", row)))


def test_the_chinese_readme_is_in_step():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    assert "](README.zh.md)" in english and "](README.md)" in chinese
    found = difference(english, chinese)
    assert found is None, found


PAGE = """# a

see

## b

```bash
make x
```

## c

| `verl a` | text |
|---|---|
| [page](docs/a.md) | text |
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("## c", "### c", "heading 3"),
        ("make x", "make y", "code block 1: README.md has\n```bash\nmake x"),
        ("```bash\nmake x\n```\n\n## c", "## c\n\n```bash\nmake x\n```", "code block below heading 2"),
        ("`verl a`", "`verl b`", "table row 1"),
        ("docs/a.md", "docs/b.md", "table row 3"),
        ("see", "see [text](docs/c.md)", "link 2"),
    ],
)
def test_a_difference_is_named(old, new, named):
    assert difference(PAGE, PAGE.replace(old, new)).startswith(named)
    assert difference(PAGE, PAGE.replace("a\n", "甲\n").replace("text", "文字")) is None
