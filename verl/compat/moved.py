"""Module paths of earlier releases and of public verl whose module has another path here (`moved.txt`)."""

from pathlib import Path


def read_renames(table: str) -> dict[str, str]:
    """Old dotted name -> new one, from lines such as `old -> new: name before:after`."""
    moved = {}
    for line in table.splitlines():
        if line and not line.startswith("#"):
            packages, names = line.split(": ", 1)
            old, new = packages.split(" -> ")
            for name in names.split():
                before, _, after = name.partition(":")
                moved[f"{old}.{before}"] = f"{new}.{after or before}"
    return moved


#: old module path -> new module path
MOVED = read_renames((Path(__file__).parent / "moved.txt").read_text(encoding="utf-8"))


def _resolved(path: str) -> str:
    return _resolved(MOVED[path]) if path in MOVED else path


MOVED |= {old: _resolved(new) for old, new in MOVED.items()}  # a module may have moved more than once
