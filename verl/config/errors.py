"""What is wrong with a configuration: every problem, in one message that a reader can act on."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. key: the dotted key. what: found, allowed, and what to do. where: who said so."""

    key: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.key}{f' ({self.where})' if self.where else ''}: {self.what}"


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` holds all that was found, not only the first."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "one problem" if count == 1 else f"{count} problems"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join([f"{head} in the configuration:", *lines]))


def in_words(value: object) -> str:
    """A value as an error message shows it: quoted where it is text, with its kind where that may surprise."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"{value!r} (text)"
        case dict():
            return f"{value} (a mapping)"
        case list() | tuple():
            return f"{list(value)} (a list)"
        case _:
            return str(value)


def nearest_key(wanted: str, known: Iterable[str]) -> str | None:
    """The known key that was most likely meant: one that ends alike, else the most similar one, else None.

    Of several that end alike (train_batch_size, val_batch_size for batch_size) it is the first in the order of `known`.
    """
    known = list(known)
    ends_alike = [key for key in known if key.endswith("." + wanted)]
    if ends_alike:
        return min(ends_alike, key=len)
    section, _, last = wanted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    longer = [name for name in siblings if name.endswith("_" + last)]
    near = longer or difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    if near:
        return siblings[near[0]]
    same_name = [key for key in known if key.rpartition(".")[2] == last]
    if same_name:
        return difflib.get_close_matches(wanted, same_name, n=1, cutoff=0.0)[0]
    # the sections at the front are often left out, so the ends of the known keys count as much as the whole
    depth = wanted.count(".") + 1
    tails = {key: key for key in known} | {".".join(key.split(".")[-depth:]): key for key in reversed(known)}
    near = difflib.get_close_matches(wanted, tails, n=1, cutoff=0.7)
    return tails[near[0]] if near else None
