"""Answers on disk while they are being made, so that a run killed at any moment goes on where it stopped.

    <output>.parts/<digest>/settings.json      what the answers depend on; the digest is its checksum
    <output>.parts/<digest>/part-00003.jsonl   the answers to one batch of prompts, a line per prompt
    <output>                                   all of them, when the last part is there; the parts are then deleted
    <output>.settings.json                     what the finished file was made with, and how much it holds

Every file is whole or not there. A run with other settings, other prompts or other model files has another digest, so
answers of two runs never meet in one file.
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
class Answers:
    """The answers to one prompt: their texts, their lengths in tokens, and "stop" or "length" for each."""

    responses: list[str]
    tokens: list[int]
    finish_reasons: list[str]


def digest_of(settings: Settings) -> str:
    """16 hexadecimal digits that stand for the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def changed(before: Settings, now: Settings) -> str:
    """`rollout.top_p: 1.0 -> 0.95, ...`: the settings that differ."""
    words = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, list) and isinstance(new, list):  # what files are like: no news to a reader
            words += [f"{key}: others than then"] if old != new else []
        elif old != new:
            words.append(f"{key}: {old} -> {new}")
    return ", ".join(words)


def settings_file(output: Path) -> Path:
    """Where the settings of a finished file stand."""
    return output.with_name(f"{output.name}.settings.json")


class AnswerParts:
    """The parts of one output file. `rows` prompts with `n` answers each, `rows_per_part` prompts to a part."""

    def __init__(self, output: Path, settings: Settings, *, rows: int, rows_per_part: int, n: int):
        self.output = output
        self.settings = dict(settings)
        self.rows, self.rows_per_part, self.n = rows, rows_per_part, n
        self.folder = output.with_name(f"{output.name}.parts") / digest_of(settings)

    def is_finished(self) -> bool:
        """Whether the output is there, made with these settings.

        Raises ValueError when it is there and was made with others: nothing is ever written over.
        """
        if not self.output.exists():
            return False
        what = "its settings are not known"
        if settings_file(self.output).is_file():
            made_with = json.loads(settings_file(self.output).read_text())["settings"]
            if made_with == self.settings:
                return True
            what = f"made with other settings ({changed(made_with, self.settings)})"
        raise ValueError(f"data.output_path: {self.output} is there already, {what}: name another file, or delete it")

    def open(self) -> None:
        """Make the folder; say so where answers of other settings lie beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / "settings.json") as draft:
            draft.write_text(json.dumps(self.settings, indent=1, sort_keys=True) + "\n")
        for other in sorted(self.folder.parent.glob("*/settings.json")):
            if other.parent != self.folder:
                differences = changed(json.loads(other.read_text()), self.settings)
                logger.warning(
                    "%s holds answers made with other settings (%s); they are not used, delete the folder if they are "
                    "not needed",
                    other.parent,
                    differences,
                )

    def rows_of(self, part: int) -> range:
        """The numbers of the prompts of a part."""
        return range(part * self.rows_per_part, min((part + 1) * self.rows_per_part, self.rows))

    def missing(self) -> list[int]:
        """The parts that are still to be made. A damaged one is named in the log and made again."""
        return [part for part in range(self._count) if not self._is_usable(part)]

    def write(self, part: int, answers: Sequence[Answers]) -> None:
        """Keep the answers to the prompts of `rows_of(part)`."""
        with atomic_write(self._path(part)) as draft:
            draft.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))

    def read(self) -> list[Answers]:
        """The answers to all prompts, in their order. All parts must be there."""
        return [answers for part in range(self._count) for answers in self._read(part)]

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write down what the output was made with, before the output itself is put in its place."""
        about = {"settings": self.settings, **facts}
        with atomic_write(settings_file(self.output)) as draft:
            draft.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")

    def delete(self) -> None:
        """Take the parts away, if they are still there; those of other settings stay."""
        if not self.folder.is_dir():
            return
        shutil.rmtree(self.folder)
        if not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    @property
    def _count(self) -> int:
        return -(-self.rows // self.rows_per_part)

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.jsonl"

    def _read(self, part: int) -> list[Answers]:
        return [Answers(**json.loads(line)) for line in self._path(part).read_text().splitlines()]

    def _is_usable(self, part: int) -> bool:
        if not self._path(part).is_file():
            return False
        try:
            found = self._read(part)
        except (ValueError, TypeError) as error:
            logger.warning("%s is damaged and is made again: %s", self._path(part), error)
            return False
        whole = len(found) == len(self.rows_of(part)) and all(len(answers.responses) == self.n for answers in found)
        if not whole:
            logger.warning("%s is not whole and is made again", self._path(part))
        return whole
