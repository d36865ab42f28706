"""Finds words that the project does not use (scripts/glossary.toml) in identifiers, prose and headings."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

GLOSSARY = tomllib.loads((Path(__file__).parent / "glossary.toml").read_text(encoding="utf-8"))
IDENTIFIERS: dict[str, str] = GLOSSARY["identifiers"]
NAMES: dict[str, str] = GLOSSARY.get("names", {})
PROSE: dict[str, str] = GLOSSARY["prose"]
EXCEPTIONS: dict[str, dict] = GLOSSARY["exceptions"]

Finding = tuple[str, int, str, str]
"""(file, line, identifier or line of text, banned word)"""

_PHRASES = re.compile(rf"\b({'|'.join(map(re.escape, sorted(PROSE, key=len, reverse=True)))})\b", re.IGNORECASE)


def words_of(identifier: str) -> list[str]:
    """Split at underscores and capitals: `KVCache_block2` -> kv, cache, block, 2. Drops `in_place`."""
    identifier = re.sub("(^|_)in_place(?=_|$)", "", identifier, flags=re.IGNORECASE)
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def definitions(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every name that a module defines: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def _allowed(path: str, identifier: str, word: str) -> bool:
    return any(
        word in entry["words"] and (key == identifier or path == key or path.startswith(f"{key}/"))
        for key, entry in EXCEPTIONS.items()
    )


def banned_identifiers(root: Path, folder: str, files: str = "**/*.py") -> list[Finding]:
    """Banned words in the names of modules and in the names that they define: of `files` in `root / folder`."""
    findings = []
    for path in sorted((root / folder).glob(files)):
        name = path.relative_to(root).as_posix()
        for line, identifier in [(0, path.stem), *definitions(path.read_text(encoding="utf-8"))]:
            banned = [word for word in words_of(identifier) if word in IDENTIFIERS]
            banned += [whole for whole in [identifier.strip("_")] if whole in NAMES]
            findings += [(name, line, identifier, word) for word in banned if not _allowed(name, identifier, word)]
    return findings


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and string of a module, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def banned_prose(root: Path, folder: str) -> list[Finding]:
    """Banned phrases in comments, docstrings and strings of the modules under `root / folder`."""
    findings = []
    for path in sorted((root / folder).rglob("*.py")):
        name, module = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        for start, text in prose(module) if _PHRASES.search(module) else ():
            for offset, line in enumerate(text.splitlines()):
                banned = [match.lower() for match in _PHRASES.findall(line)]
                findings += [(name, start + offset, line.strip(), w) for w in banned if not _allowed(name, "", w)]
    return findings


def banned_headings(page: Path) -> list[Finding]:
    """Banned words and phrases in the headings of a Markdown page."""
    findings: list[Finding] = []
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        code ^= line.startswith("```")
        if code or not line.startswith("#"):
            continue
        heading = re.sub(r"`[^`]*`|\bin[ -]place\b", "", line)
        words = [word for word in re.findall(r"[a-z']+", heading.lower()) if word in IDENTIFIERS]
        findings += [(page.name, number, line, word) for word in [*words, *_PHRASES.findall(heading)]]
    return findings
