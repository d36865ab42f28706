"""Run the cells of the families of models, and write their record and docs/models.md.

python scripts/model_table.py                          # all families: about 10 minutes on one core
python scripts/model_table.py qwen3 mamba2             # these only; the others stay as they are recorded
python scripts/model_table.py --cells sft padded       # these cells only
python scripts/model_table.py --page                   # the page alone, from the record
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TQDM_DISABLE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from tests.models.cells import CELLS, LISTED, TINY, Outcome, read_record, recorded, run_cells, write_record
from tests.models.families import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
MARK = "<!-- tables -->\n"
#: heading of a column -> its cell
COLUMNS = {
    "SFT": "sft",
    "RL `native`": "native",
    "RL `hf`": "hf",
    "packing": "sft",
    "LoRA": "lora",
    "resume, merge": "checkpoint",
    "processes": "ranks",
    "tensor parallel*": "tensor parallel",
    "Megatron*": "megatron",
}
#: columns with cells that were run
_RUN = [column for column, cell in COLUMNS.items() if cell in CELLS]
#: a setting in a message; the last one is the way out
_SETTING = re.compile(r"[\w.]*\w=[\w\[\],.]*\w")


def text_of(outcome: Outcome, column: str) -> str:
    """The text of one cell of the table."""
    if column == "packing" and outcome.result == "padded":
        return "padded"
    if outcome.is_accepted:
        return "yes"
    if outcome.result not in ("refused", "late"):
        return "fault"
    settings = _SETTING.findall(outcome.message) if column in _RUN else []
    return (f"`{settings[-1]}`" if settings else "no") + ("†" if outcome.result == "late" else "")


def table() -> str:
    """One row per family that can be trained, then the others."""
    rows = [f"| `model_type` | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in sorted(usable()):
        cells = (text_of(recorded(family, cell), column) for column, cell in COLUMNS.items())
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def usable() -> list[str]:
    """The families that SFT accepts."""
    return [family for family in TINY if recorded(family, "sft").result != "refused"]


def others() -> str:
    """The families that are refused, or have no tiny model, with the reason."""
    reasons = {name: row for name, row in FAMILIES.items() if isinstance(row, str)}
    reasons |= {name: recorded(name, "sft").message for name in TINY if name not in usable()}
    by_reason: dict[str, list[str]] = {}
    for name in sorted(reasons):
        reason = reasons[name].replace("PATH: ", "").replace("'PATH' ", "").replace("|", "\\|")
        by_reason.setdefault(re.sub(r"\b[A-Z]\w+(Config|LM\w*|Model)\b", "the model", reason), []).append(name)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(["| `model_type` | reason |", "|---|---|", *rows]) + "\n"


def faults() -> str:
    """The cells whose outcome is neither right nor a refusal before loading."""
    rows = [
        f"| `{family}` | {column} | {outcome.message.replace('|', chr(92) + '|')} |"
        for family in TINY
        for column, cell in COLUMNS.items()
        if column != "packing" and not (outcome := recorded(family, cell)).is_settled
    ]
    return "\n".join(["| `model_type` | | |", "|---|---|---|", *rows]) + "\n" if rows else "None.\n"


def text() -> str:
    """The page: what is above the mark, and the tables."""
    above, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    releases = ", ".join(f"{name} {number}" for name, number in read_record()["releases"].items())
    parts = [
        f"{above}{mark}",
        f"Recorded with {releases}.\n",
        table(),
        "\\* From the lists of the engines; not run for this table.\n",
        "## Not supported\n",
        others(),
        "## Known faults\n",
        faults(),
    ]
    return "\n".join(parts)


def run(families: Iterable[str], cells: Iterable[str]) -> None:
    """Run the cells, and write the record after each family."""
    releases = {name: version(name).partition("+")[0] for name in ("transformers", "torch", "peft")}
    for family in families:
        outcomes = run_cells(family, cells)
        write_record({family: outcomes}, releases)
        print(family, *(f"{name}: {outcome.result}" for name, outcome in outcomes.items()), sep="  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rows of tests/models/families.py")
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, *LISTED], default=[*CELLS, *LISTED])
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if not options.page:
        run(options.families or TINY, options.cells)
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
