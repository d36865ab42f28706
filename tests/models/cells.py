"""The cells of the table of families: which check, with which settings, and how its outcome is recorded.

`record.json` has the outcome of every cell; `scripts/model_table.py` writes it and docs/models.md.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.models import checks
from tests.models.checks import Saved
from tests.models.families import FAMILIES
from verl.config import schema
from verl.engines.loading import ModelSpec, empty_module
from verl.engines.megatron.checks import check_architecture
from verl.engines.parallel import planned_layers
from verl.modeling.huggingface import read_config
from verl.trainer.checks.models import ModelLimits, check_model

#: what a refusal names: a setting with its value, or what to do
_WAY_OUT = re.compile(r"\w=\S|\b(use|set|remove|add|choose|exclude)\b", re.IGNORECASE)
RECORD = Path(__file__).with_name("record.json")
#: families with a tiny model
TINY = tuple(name for name, row in FAMILIES.items() if not isinstance(row, str))


@dataclass(frozen=True)
class Cell:
    """A use of a model.

    Attributes:
        check: a function of `checks`.
        rollout: the rollout engine.
        model: keys of the `model` section.
    """

    check: Callable[[Saved], str]
    rollout: str | None = None
    model: dict[str, Any] = field(default_factory=dict)

    def preflight(self, path: str) -> None:
        """The checks of `--dry-run` of the model and its rollout engine, which read config.json only."""
        section = schema.ModelConfig(path=path, **self.model)
        check_model(section, "causal_lm")
        if self.rollout is not None:
            ModelLimits.from_config(section).check_engine(schema.RolloutConfig(name=self.rollout))


def check_tensor_parallel(path: str) -> None:
    """The plan of transformers for the slices of the layers is one that tensor_parallel_size supports."""
    module = empty_module(ModelSpec(schema.ModelConfig(path=path)))
    planned_layers(module.base_model, type(module).__name__)


def check_megatron(path: str) -> None:
    """strategy=megatron has the architecture."""
    check_architecture(read_config(path, {}), "PATH")


#: columns that are read from what the engines list as supported, without running the model
LISTED: dict[str, Callable[[str], None]] = {"tensor parallel": check_tensor_parallel, "megatron": check_megatron}
PADDED = {"use_remove_padding": False}
CELLS: dict[str, Cell] = {
    "sft": Cell(checks.check_training),
    "padded": Cell(functools.partial(checks.check_training, **PADDED), model=PADDED),
    "hf": Cell(functools.partial(checks.check_rollout, name="hf"), rollout="hf"),
    "native": Cell(functools.partial(checks.check_rollout, name="native"), rollout="native"),
    "lora": Cell(checks.check_lora, model=checks.ADAPTERS),
    "checkpoint": Cell(checks.check_checkpoint),
    "ranks": Cell(checks.check_ranks),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell.

    Attributes:
        result: "yes"; "padded": yes, without packing; "refused": by the checks of `--dry-run`, which read config.json
            only; "late": refused after the weights were loaded; "wrong"; "crash": an error that is not a refusal.
        message: of the refusal or the error.
    """

    result: str
    message: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether the model is right in this use."""
        return self.result in ("yes", "padded")

    @property
    def is_settled(self) -> bool:
        """Whether it is what a user should see: a right result, or an early refusal that names a way out."""
        return self.is_accepted or (self.result == "refused" and _WAY_OUT.search(self.message) is not None)


def listed(name: str, saved: Saved) -> Outcome:
    """The outcome of a column of `LISTED`."""
    try:
        LISTED[name](saved.described)
    except ValueError as error:
        return Outcome("refused", without_paths(error, saved))
    return Outcome("yes")


def outcome_of(cell: Cell, saved: Saved) -> Outcome:
    """Run a cell."""
    try:
        cell.preflight(saved.described)
    except ValueError as error:
        return Outcome("refused", without_paths(error, saved))
    except Exception as error:  # the outcome of a cell, whatever it is
        return Outcome("crash", f"{type(error).__name__}: {without_paths(error, saved)}")
    try:
        return Outcome(cell.check(saved))
    except ValueError as error:
        return Outcome("late", without_paths(error, saved))
    except AssertionError as error:
        return Outcome("wrong", without_paths(error, saved))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {without_paths(error, saved)}")


def without_paths(error: Exception, saved: Saved) -> str:
    """The first line of a message, without the names of temporary folders."""
    text = re.sub(r"/\S*/(tmp|huggingface)[^/\s'\":]*(?=[/\s'\":])", "", " ".join(str(error).split("\n")[:1]))
    return text.replace(saved.path, "PATH").replace(saved.described, "PATH")[:300]


def run_cell(name: str, saved: Saved) -> Outcome:
    """The outcome of a cell, or of a column of `LISTED`."""
    return outcome_of(CELLS[name], saved) if name in CELLS else listed(name, saved)


def run_cells(family: str, names: Iterable[str]) -> dict[str, Outcome]:
    """The outcomes of some cells of a family."""
    with tempfile.TemporaryDirectory() as folder:
        saved = checks.save_family(family, Path(folder))
        return {name: run_cell(name, saved) for name in names}


# ---- the record -----------------------------------------------------------------------------------------------------


@functools.cache
def read_record() -> dict[str, Any]:
    """Family -> cell -> outcome, and the releases that it was made with."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def recorded(family: str, cell: str) -> Outcome:
    """The recorded outcome of a cell."""
    return Outcome(**read_record()["families"][family][cell])


def write_record(outcomes: dict[str, dict[str, Outcome]], releases: dict[str, str]) -> None:
    """Write the outcomes over those of the record."""
    families = read_record()["families"] if RECORD.exists() else {}
    for family, cells in outcomes.items():
        families[family] = families.get(family, {}) | {
            name: {key: value for key, value in asdict(outcome).items() if value} for name, outcome in cells.items()
        }
    families = {name: families[name] for name in sorted(families) if name in TINY}
    read_record.cache_clear()
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in families.items())
    text = f'{{"releases": {json.dumps(releases)},\n"families": {{\n{rows}\n}}}}\n'
    RECORD.write_text(text, encoding="utf-8")
