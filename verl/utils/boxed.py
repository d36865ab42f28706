r"""Reading `\boxed{...}` in worked solutions."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAIL = 10_000  # characters at the end of a text that are searched for a box


def find_boxes(text: str) -> list[tuple[str | None, int, int]]:
    r"""Return the outermost boxes of a text as (content, begin, end). Of nested boxes, the content is the innermost.

    The content is None for a box whose brace does not close. `\boxed 5` counts as a box.
    """
    boxes, position = [], 0
    while mark := _BOX.search(text, position):
        content, position = _braced(text, mark.end())
        while content is not None and (inner := _BOX.match(content.strip())):
            content = _braced(content.strip(), inner.end())[0]
        boxes.append((content, mark.start(), position))
    return boxes


def _braced(text: str, begin: int) -> tuple[str | None, int]:
    """Return the content of a box command that ends at `begin`, and its end."""
    if text[begin : begin + 1] != "{":
        bare = re.compile(r"[^\s$\\{}]+").match(text, begin)
        return (bare[0].rstrip(".,"), bare.end()) if bare else (None, begin)
    depth = 0
    for mark in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[begin + 1 : mark.start()], mark.end()
    return None, len(text)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`. None without a box, or if the last one does not close."""
    boxes = find_boxes(text[-_TAIL:])
    return boxes[-1][0] if boxes else None
