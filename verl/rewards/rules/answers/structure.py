"""Structure of a written answer: lists, sets, tuples, intervals, matrices."""

import re

from verl.rewards.rules.answers.quantities import WORD

_OPEN, _CLOSE = "([{", ")]}"


def split_top(text: str, separator: re.Pattern) -> list[str]:
    """Split at a separator outside of brackets."""
    depth, begin, parts = 0, 0, []
    i = 0
    while i < len(text):
        if text[i] in _OPEN:
            depth += 1
        elif text[i] in _CLOSE:
            depth -= 1
        elif depth == 0 and (match := separator.match(text, i)):
            parts.append(text[begin:i])
            i = begin = match.end()
            continue
        i += 1
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
        if part.count("\\pm") == 1 and not WORD.search(part):
            elements += [part.replace("\\pm", sign) for sign in ("+", "-")]
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
    if match and _closes_at_end(text):
        inner = split_elements(match[2])
        if match[1].endswith("{"):
            return "set", inner
        if len(inner) > 1:
            return match[1] + match[3], inner
    return "single", parts or [text]


def _closes_at_end(text: str) -> bool:
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth == 0 and i < len(text) - 1 and c in _CLOSE:
            return False
    return True


_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[a-z|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def parse_rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    return [[entry.strip() for entry in row.split("&")] for row in rows] or None
