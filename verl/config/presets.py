"""Presets: the settings of each algorithm, by config key, from presets.toml.

`PRESETS[name]` is what `algorithm.name=<name>` sets; keys that the user sets take precedence.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: algorithms that are not presets -> their command
OTHER_COMMANDS = {
    "dpo": "verl dpo --online",
    "sppo": "python -m verl.trainer.main_ppo --config verl/recipe/sppo/sppo.yaml",
    "sft": "python -m verl.trainer.sft_trainer",
}

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SHORT = {"actor": "actor_rollout_ref.actor", "n": "actor_rollout_ref.rollout.n"}


def _settings(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The settings of a preset or part, in their order: a later one of the same key takes precedence."""
    for name, value in entry.items():
        key = prefix + _SHORT.get(name, name)
        if name == "parts":
            for part in value:
                yield from _settings(_TABLES["parts"][part])
        elif isinstance(value, dict):
            yield from _settings(value, f"{key}.")
        else:
            yield key, value


PRESETS: dict[str, dict[str, object]] = {name: dict(_settings(entry)) for name, entry in _TABLES["presets"].items()}
