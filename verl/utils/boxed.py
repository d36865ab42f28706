r"""Reading `\boxed{...}` in worked solutions."""

import re

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BOX_TAIL = 10_000  # characters at the end of a text that are searched for a box


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`, or None."""
    text, open_braces, last = text[-_BOX_TAIL:], [], None
    for mark in _BRACES.finditer(text):
        if mark["box"] or mark["open"]:
            open_braces.append(mark)
        elif mark["close"] and open_braces:
            opened = open_braces.pop()
            if opened["box"] and (last is None or opened.end() > last[0]):
                last = (opened.end(), mark.start())
    return None if last is None else text[slice(*last)]
