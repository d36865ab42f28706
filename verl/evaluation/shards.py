"""Responses on disk during generation, so that a run killed at any moment can resume.

    <output>.parts/<digest>/settings.json      the settings of the responses; the digest is their checksum
    <output>.parts/<digest>/part-00003.jsonl   a shard: the responses to one batch of prompts, one line per prompt
    <output>                                   all responses, written after the last shard; the shards are then deleted
    <output>.settings.json                     the settings of the finished file, and counts

Every file is written atomically. A run with other settings, prompts or model files has another digest, so responses of
different runs are never mixed.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import atomic_write

logger = logging.getLogger("verl.trainer")

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Responses:
    """The responses to one prompt. The attributes are the keys of a line of a shard.

    Attributes:
        tokens: Their lengths in tokens.
        finish_reasons: "stop" or "length".
    """

    responses: list[str]
    tokens: list[int]
    finish_reasons: list[str]


def settings_digest(settings: Settings) -> str:
    """Return a checksum of the settings, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def describe_changes(before: Settings, now: Settings) -> str:
    """Describe the settings that differ: `rollout.top_p: 1.0 -> 0.95, ...`."""
    differences = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, list) and isinstance(new, list):  # checksums and file sizes: not informative
            differences += [f"{key}: changed"] if old != new else []
        elif old != new:
            differences.append(f"{key}: {old} -> {new}")
    return ", ".join(differences)


def settings_file(output: Path) -> Path:
    """Return the path of the settings of a finished file."""
    return output.with_name(f"{output.name}.settings.json")


class ResponseShards:
    """The shards of one output file.

    Args:
        settings: Everything the responses depend on.
        n: Number of responses per prompt.
    """

    def __init__(self, output: Path, settings: Settings, *, prompts: int, prompts_per_shard: int, n: int):
        self.output = output
        self.settings = dict(settings)
        self.prompts, self.prompts_per_shard, self.n = prompts, prompts_per_shard, n
        self.folder = output.with_name(f"{output.name}.parts") / settings_digest(settings)

    def is_finished(self) -> bool:
        """Whether the output exists and was generated with these settings.

        Raises:
            ValueError: If it was generated with other settings. Existing files are never overwritten.
        """
        if not self.output.exists():
            return False
        state = "with unknown settings"
        if settings_file(self.output).is_file():
            recorded = json.loads(settings_file(self.output).read_text(encoding="utf-8"))["settings"]
            if recorded == self.settings:
                return True
            state = f"generated with other settings ({describe_changes(recorded, self.settings)})"
        raise ValueError(
            f"data.output_path: {self.output} already exists, {state}: choose another file, or delete this one"
        )

    def open(self) -> None:
        """Create the folder, and warn of shards of other settings next to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / "settings.json") as draft:
            draft.write_text(json.dumps(self.settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for other in sorted(self.folder.parent.glob("*/settings.json")):
            if other.parent != self.folder:
                logger.warning(
                    "%s contains responses generated with other settings (%s); they are not used. Delete the folder if "
                    "you do not need them",
                    other.parent,
                    describe_changes(json.loads(other.read_text(encoding="utf-8")), self.settings),
                )

    def prompt_indices(self, shard: int) -> range:
        """Return the indices of the prompts of a shard."""
        return range(shard * self.prompts_per_shard, min((shard + 1) * self.prompts_per_shard, self.prompts))

    def missing(self) -> list[int]:
        """Return the shards that must be generated. Damaged shards are logged and included."""
        return [shard for shard in range(self._count) if not self._is_usable(shard)]

    def write(self, shard: int, responses: Sequence[Responses]) -> None:
        """Write the responses to the prompts of a shard."""
        with atomic_write(self._path(shard)) as draft:
            draft.write_text("".join(json.dumps(asdict(item)) + "\n" for item in responses), encoding="utf-8")

    def read(self) -> list[Responses]:
        """Return the responses to all prompts, in order. All shards must exist."""
        return [item for shard in range(self._count) for item in self._read(shard)]

    def finish(self, counts: Mapping[str, Any]) -> None:
        """Write the settings file of the output. Called before the output is written."""
        about = {"settings": self.settings, **counts}
        with atomic_write(settings_file(self.output)) as draft:
            draft.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def delete(self) -> None:
        """Delete the shards, if they exist. Those of other settings are kept."""
        if not self.folder.is_dir():
            return
        shutil.rmtree(self.folder)
        if not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    @property
    def _count(self) -> int:
        return -(-self.prompts // self.prompts_per_shard)

    def _path(self, shard: int) -> Path:
        return self.folder / f"part-{shard:05d}.jsonl"

    def _read(self, shard: int) -> list[Responses]:
        return [Responses(**json.loads(line)) for line in self._path(shard).read_text(encoding="utf-8").splitlines()]

    def _is_usable(self, shard: int) -> bool:
        if not self._path(shard).is_file():
            return False
        try:
            responses = self._read(shard)
        except (ValueError, TypeError) as error:
            logger.warning("%s is damaged and will be generated again: %s", self._path(shard), error)
            return False
        complete = len(responses) == len(self.prompt_indices(shard)) and all(
            len(r.responses) == self.n for r in responses
        )
        if not complete:
            logger.warning("%s is incomplete and will be generated again", self._path(shard))
        return complete
