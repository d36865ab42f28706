"""Errors of the configuration: every problem in one message, with the key, the value found and the fix."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        key: the dotted key.
        message: the expected value, the actual one, and the fix.
        location: the file and line, or the override, that set the key.
        spelled: the name under which it was set, if that is an alias.
    """

    key: str
    message: str
    location: str = ""
    spelled: str = ""

    def __str__(self) -> str:
        name = self.spelled or self.key
        origin = ", ".join(filter(None, (self.location, f"alias of {self.key}" if name != self.key else "")))
        return f"{name}{f' ({origin})' if origin else ''}: {self.message}"


class ConfigError(ValueError):
    """The configuration is invalid. `problems` holds everything that was found, not only the first problem."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join([f"{head} in the configuration:", *lines]))


def format_value(value: object) -> str:
    """Format a value for an error message: as YAML, with its type if that is ambiguous."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"{value!r} (str)"
        case dict():
            return f"{value} (dict)"
        case list() | tuple():
            return f"{list(value)} (list)"
        case _:
            return str(value)


def format_plain(value: object) -> str:
    """Format a value as in `key=value`."""
    return value if isinstance(value, str) else format_value(value)


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` is most likely a typo of, or None if no key is close: one with the same ending (the
    first of several, as train_batch_size for batch_size), otherwise the most similar one."""
    known = list(known)
    section, _, last = key.rpartition(".")
    ending = next((name for name in known if name.endswith("." + key)), None)
    if ending:
        return ending
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    longer = [name for name in siblings if name.endswith("_" + last)]
    near = longer or difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)
    if near:
        return siblings[near[0]]
    above = section.rpartition(".")[2]
    inside = [name for name in known if name.rpartition(".")[2] == last and above in name.split(".")]
    if inside:
        return max(inside, key=lambda name: _similarity(key, name))
    # leading sections are often omitted, so the ends of the known keys are compared as well
    depth = key.count(".") + 1
    tails = {name: name for name in known} | {".".join(name.split(".")[-depth:]): name for name in reversed(known)}
    near = [
        tail
        for tail in difflib.get_close_matches(key, tails, n=5, cutoff=0.7)
        if _similarity(last, tail.split(".")[-1]) >= 0.7
        and (not above or (_similarity(above, tail.split(".")[-2]) >= 0.6 if "." in tail else tail == last))
    ]
    return tails[near[0]] if near else None


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
