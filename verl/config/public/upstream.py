"""Keys of public verl that this project does not support: what is accepted, and what to do instead.

Scripts often set a key to its default. That is accepted and has no effect. A key that no result depends on, such as the
buffer size of a weight transfer, is accepted with any value and named in a note. Every other value is an error, because
a setting that is silently ignored invalidates an experiment. The keys are listed in upstream_keys.yaml, which is parsed
when the first unknown key is found.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from verl.config.fields import flatten

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as Loader

_FILE = Path(__file__).with_name("upstream_keys.yaml")
_OFF = (None, False, [], {})


@dataclass(frozen=True)
class UpstreamKey:
    """A key of public verl that is not supported.

    Attributes:
        accepted: the values that are accepted and have no effect: of an ignored key, public verl's default.
        instead: the fix; for an ignored key, why no result depends on it.
        ignored: every value is accepted; one that is not in `accepted` is named in a note.
    """

    accepted: tuple[Any, ...]
    instead: str
    ignored: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether a key with this value is accepted."""
        return self.ignored or self.is_default(value)

    @property
    def tells_reason(self) -> bool:
        """Whether a note on the ignored key tells why: most reasons go without saying."""
        return self.instead not in _content()["plain"]

    def is_default(self, value: Any) -> bool:
        """Whether `value` is one of `accepted`. True does not count as 1, nor False as 0."""
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.accepted)


_TYPE_ANNOTATION = UpstreamKey((), "a type annotation of another implementation", ignored=True)


def upstream_key(key: str, schema: str | None) -> UpstreamKey | None:
    """Return the entry of `key`, a key of public verl that is not supported, or of the nearest listed section above it.

    Args:
        key: dotted key.
        schema: the section of upstream_keys.yaml to look in, such as "ppo"; None: no key is known.

    Returns:
        The entry; None if neither the key nor a section above it is listed.
    """
    if schema is None:
        return None
    listed, names = _unsupported(schema), key.split(".")
    if names[-1] == "_target_":
        return _TYPE_ANNOTATION
    for depth in range(len(names), 0, -1):
        listed_entry = listed.get(".".join(names[:depth]))
        if listed_entry:
            return listed_entry
    for pattern, entry in _content()["patterns"].items():
        if fnmatchcase(key, pattern):
            return UpstreamKey(_OFF, entry) if isinstance(entry, str) else _read({"accept": _OFF} | entry)
    return None


def ignored_key(key: str, schema: str | None, *, has_field: bool) -> UpstreamKey | None:
    """The entry of a key that no result depends on; None if the key has an effect, or is not listed.

    Args:
        key: dotted key.
        schema: as in `upstream_key`.
        has_field: the schema has a field for the key, such as a free mapping above it; then only an entry of exactly
            this key counts, or a pattern that begins with the name of a section.
    """
    if has_field and (schema is None or not (key in _unsupported(schema) or _is_below_pattern(key))):
        return None
    entry = upstream_key(key, schema)
    return entry if entry and entry.ignored else None


@functools.lru_cache(4096)
def _is_below_pattern(key: str) -> bool:
    return any(key.split(".")[0] == each.split(".")[0] and fnmatchcase(key, each) for each in _content()["patterns"])


def upstream_defaults(schema: str = "ppo") -> dict[str, Any]:
    """Dotted key -> public verl's default, of every key of public verl, supported or not."""
    content = _content()[schema]
    return {key: value for name, entry in content.items() for key, value in _defaults(name, entry).items()}


def upstream_engines(key: str) -> list[str]:
    """Engine names that public verl accepts for a key such as `actor_rollout_ref.rollout.name` and this project does
    not."""
    return next((names for end, names in _content()["engines"].items() if key.endswith(end)), [])


def upstream_groups() -> dict[str, list[str]]:
    """Hydra group -> its options whose values are the defaults of this schema."""
    return _content()["groups"]


def upstream_selections() -> dict[str, dict[str, dict[str, Any]]]:
    """Hydra group (empty: whole configurations) -> option -> the keys that it sets."""
    return _content()["selections"]


def upstream_configs() -> list[str]:
    """Names of public verl's configurations whose values are the defaults of this schema."""
    return _content()["configs"]


@functools.cache
def _content() -> dict[str, Any]:
    return yaml.load(_FILE.read_text(encoding="utf-8"), Loader=Loader)


@functools.cache
def _unsupported(schema: str) -> Mapping[str, UpstreamKey]:
    content = _content()
    entries: dict[str, UpstreamKey] = {}
    for name, entry in content[schema].items():
        if _is_unsupported(entry):
            entries[name] = _read(entry)
            below = _defaults(name, entry).items() if isinstance(entry.get("default"), dict) else ()
            entries |= {key: _read(entry | {"default": value}) for key, value in below}
    for section, same in content["same_keys"].get(schema, {}).items():
        ppo = entries if schema == "ppo" else _unsupported("ppo")
        entries |= {section + key.removeprefix(same): known for key, known in ppo.items() if key.startswith(same + ".")}
    return entries


def _is_unsupported(entry: Any) -> bool:
    return isinstance(entry, dict) and ("instead" in entry or "ignored" in entry)


def _defaults(key: str, entry: Any) -> dict[str, Any]:
    """The defaults of an entry: several, if its default is a section."""
    if _is_unsupported(entry) and "default" not in entry:
        return {}
    default = entry["default"] if _is_unsupported(entry) else entry
    return flatten(default, prefix=f"{key}.") if isinstance(default, dict) and default else {key: default}


def _read(entry: Mapping[str, Any]) -> UpstreamKey:
    accepted = entry["accept"] if "accept" in entry else [entry["default"]] if "default" in entry else [None]
    reason = entry.get("ignored") or entry["instead"]
    return UpstreamKey(tuple(accepted), reason, "ignored" in entry)
