"""Structure of a written answer: lists, sets, tuples, intervals, matrices."""

import re
from itertools import accumulate

from verl.rewards.rules.answers.quantities import WORD

_OPEN, _CLOSE = "([{", ")]}"


def bracket_depths(text: str) -> list[int]:
    """After each character, the number of brackets that are open."""
    return list(accumulate((c in _OPEN) - (c in _CLOSE) for c in text))


def split_top(text: str, separator: re.Pattern) -> list[str]:
    """Split at a separator outside of brackets. The separator has no brackets in it."""
    depths, begin, parts = bracket_depths(text), 0, []
    for match in separator.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [part.strip() for part in [*parts, text[begin:]]]


_COMMA = re.compile(r',\s*(?:"and"|"or"|\band\b|\bor\b)?|;|"and"|"or"|\band\b|\bor\b')
BRACKETED = re.compile(r"(\(|\[|\\\{|\{)(.*?)(\)|\]|\\\}|\})", re.DOTALL)
_ASSIGNED = re.compile(
    r"\(?[A-Za-z](?:_\{?\w+\}?|\s*\([a-z, ]+\))?'?(?:\s*,\s*[A-Za-z])*\)?\s*(?:=|\\in(?![a-z])|:)\s*(?!.*=)"
)


def split_elements(text: str) -> list[str]:
    r"""The elements of a list at the top level: `1, 2`, `1 or 2`, `1 \pm 2`, `\pm 3`, `x = 1, y = 2`."""
    elements = []
    for part in split_top(text, _COMMA):
        signs = re.findall(r"\\(?:pm|mp)(?![a-z])", part)
        if len(signs) == 1 and not WORD.search(part):
            elements += [part.replace(signs[0], sign) for sign in ("+", "-")]
        else:
            elements.append(part)
    elements = [re.sub(r"^\s*\+\s*", "", element).strip() for element in elements]
    return [element for element in elements if element]


def parse_collection(text: str) -> tuple[str, list[str]]:
    """Return the kind and the elements: "list", "set", "tuple" (or an interval, by its brackets), "single"."""
    parts = split_elements(text)
    if len(parts) > 1:
        values = [_ASSIGNED.sub("", part, count=1) if _ASSIGNED.match(part) else part for part in parts]
        names = [part.partition("=")[0].strip() for part in parts if _ASSIGNED.match(part)]
        if len(set(names)) == len(parts):
            return "assignments", [value for _, value in sorted(zip(names, values))]
        return "list", values
    match = BRACKETED.fullmatch(parts[0] if parts else text)
    closed_before = any(c in _CLOSE and depth == 0 for c, depth in zip(text[:-1], bracket_depths(text)))
    if match and not closed_before:
        inner = split_elements(match[2])
        if match[1].endswith("{"):
            return "set", inner
        if len(inner) > 1:
            return match[1] + match[3], inner
    return "single", parts or [text]


_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[a-z|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def parse_rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text.strip())
    if nested := re.fullmatch(r"\[\s*\[([^()]*)\]\s*\]", text.strip()):
        rows = [row.split(",") for row in re.split(r"\]\s*,\s*\[", nested[1])]
        return rows if len(set(map(len, rows))) == 1 and not re.search(r"[\[\]]", "".join(map("".join, rows))) else None
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    return [[entry.strip() for entry in row.split("&")] for row in rows] or None
