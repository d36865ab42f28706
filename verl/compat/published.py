"""Names that scripts for public verl import: `published.toml`."""

import functools
import tomllib
from pathlib import Path

ANY = "*"
"""Entry of a module for all names that it does not list."""

BELOW = "**"
"""Entry of a module for all names that it does not list, and for the modules below it."""


@functools.cache
def published() -> dict[str, dict[str, str]]:
    """Module of public verl -> name -> the `module:name` (or module) that it is here, or advice what to use instead.

    Read at the first use, which takes milliseconds: most programs import no such name.
    """
    tables = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
    advice = tables.pop("advice")

    def names_of(module: str) -> dict[str, str]:
        names: dict[str, str] = {}
        for key, value in tables[module].items():
            if key == "same-as":
                names |= names_of(value)
            elif isinstance(value, list):
                names |= {name: f"{key}:{name}" for name in value}
            else:
                names[key] = advice[value[1:]] if value.startswith("@") else value
        return names

    return {module: names_of(module) for module in tables}


@functools.cache
def published_packages() -> set[str]:
    """The parents of the modules of `published`."""
    return {path[:dot] for path in published() for dot, letter in enumerate(path) if letter == "."}
