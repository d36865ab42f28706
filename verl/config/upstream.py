"""Keys of upstream verl that this project does not support: what is accepted, and what to do instead.

Scripts often set a key to its default. That is accepted and has no effect. Every other value is an error, because a
silently ignored setting can waste weeks. The keys are data: upstream_keys.yaml, parsed when the first unknown key
is met.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as Loader

_FILE = Path(__file__).with_name("upstream_keys.yaml")
_OFF = (None, False, [], {})


@dataclass(frozen=True)
class UpstreamKey:
    """A key of upstream that is not supported.

    Attributes:
        accepted: the values that are accepted and have no effect; None accepts every value.
        instead: what to do instead.
    """

    accepted: tuple[Any, ...] | None
    instead: str

    def accepts(self, value: Any) -> bool:
        """Whether `value` may be given. True does not count as 1, nor False as 0."""
        if self.accepted is None:
            return True
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.accepted)


def upstream_key(key: str, schema: str | None) -> UpstreamKey | None:
    """The entry of the unsupported upstream key `key`, or of the nearest listed section above it; None if there is
    none.

    Args:
        key: dotted key.
        schema: the section of upstream_keys.yaml to look in, such as "ppo"; None: no key is known.
    """
    if schema is None:
        return None
    listed, names = _unsupported(schema), key.split(".")
    for depth in range(len(names), 0, -1):
        found = listed.get(".".join(names[:depth]))
        if found:
            return found
    for pattern, instead in _content()["patterns"].items():
        if fnmatchcase(key, pattern):
            return UpstreamKey(_OFF, instead)
    return None


def upstream_defaults(schema: str = "ppo") -> dict[str, Any]:
    """Dotted key -> upstream's default, of every key of upstream, supported or not."""
    entries = {
        key: entry if _is_unsupported(entry) else {"default": entry} for key, entry in _content()[schema].items()
    }
    return {key: entry["default"] for key, entry in entries.items() if "default" in entry}


def upstream_engines(key: str) -> list[str]:
    """Engine names that upstream accepts for a key such as `actor_rollout_ref.rollout.name` and this project does
    not."""
    return next((names for end, names in _content()["engines"].items() if key.endswith(end)), [])


@functools.cache
def _content() -> dict[str, Any]:
    return yaml.load(_FILE.read_text(encoding="utf-8"), Loader=Loader)


@functools.cache
def _unsupported(schema: str) -> Mapping[str, UpstreamKey]:
    content = _content()
    found = {key: _read(entry) for key, entry in content[schema].items() if _is_unsupported(entry)}
    for section, same in content["same_keys"].get(schema, {}).items():
        ppo = _unsupported("ppo")
        found |= {section + key.removeprefix(same): known for key, known in ppo.items() if key.startswith(same + ".")}
    return found


def _is_unsupported(entry: Any) -> bool:
    return isinstance(entry, dict) and "instead" in entry


def _read(entry: Mapping[str, Any]) -> UpstreamKey:
    accepted = entry["accept"] if "accept" in entry else [entry["default"]]
    return UpstreamKey(None if accepted == "any" else tuple(accepted), entry["instead"])
