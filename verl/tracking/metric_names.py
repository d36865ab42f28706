"""The metrics that a run logs: `metric_names.yaml`, the one list of their names and meanings."""

import itertools
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf


@dataclass(frozen=True)
class Metric:
    """An entry of the list.

    Attributes:
        section: heading on the page.
        names: pattern of names; `*` is any text, `{a,b}` are alternatives.
        watch: healthy values, and what to do about others; empty if there is nothing to watch.
    """

    section: str
    names: str
    unit: str
    meaning: str
    watch: str = ""

    @property
    def patterns(self) -> list[str]:
        """The names without alternatives."""
        parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"({[^}]*})", self.names)]
        return ["".join(choice) for choice in itertools.product(*parts)]

    def matches(self, name: str) -> bool:
        """Whether a metric is described by this entry."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


@cache
def metrics() -> tuple[Metric, ...]:
    """Every entry of the list, in order. A name is described by the first entry that matches."""
    text = Path(__file__).with_name("metric_names.yaml").read_text(encoding="utf-8")
    sections = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return tuple(
        Metric(section, **{key: str(value) for key, value in entry.items()})
        for section, entries in sections.items()
        for entry in entries
    )


def find(name: str) -> Metric | None:
    """The entry of a metric; None if it is not in the list."""
    return next((metric for metric in metrics() if metric.matches(name)), None)


def describe(name: str) -> str:
    """Meaning of a metric, and what to watch; empty if it is not in the list."""
    metric = find(name)
    text = f"{metric.meaning} {metric.watch}".strip() if metric else ""
    return re.sub(r"`|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "", text)
