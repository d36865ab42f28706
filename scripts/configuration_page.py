"""Write docs/configuration_reference.md from the schema: python scripts/configuration_page.py"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from verl.cli.config import SCHEMAS
from verl.config import reference_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration_reference.md"
COMMANDS = {"ppo": "train", "sft": "sft", "dpo": "dpo", "rm": "rm", "generation": "generate", "evaluation": "eval"}
ABOVE = """\
# Configuration reference

Every key with its type, default and meaning. `python scripts/configuration_page.py` writes this page from the schema
(`verl/config/schema`); `verl config explain WORD` searches it, and [configuration.md](configuration.md) explains how
keys are set. A default such as `${data.seed}` is the value of that key. The default of a `model.path` or a file is
empty where you must set it.
"""


def section_of(row: str) -> str:
    """The section of a row's key; of `actor_rollout_ref`, the section below it."""
    *parts, _ = row.split("`")[1].split(".")
    return ".".join(parts[: 2 if parts[:1] == ["actor_rollout_ref"] else 1])


def text() -> str:
    """The page: one table per section of each program."""
    parts = [ABOVE]
    known = set(reference_table(SCHEMAS["sft"]).splitlines()[2:])
    for name, schema in SCHEMAS.items():
        head, rule, *rows = reference_table(schema).splitlines()
        parts.append(f"## verl {COMMANDS[name]}\n")
        if name != "sft" and issubclass(schema, SCHEMAS["sft"]):
            rows = [row for row in rows if row not in known]
            parts.append("The keys of `verl sft`, and:\n")
        for section, rows_of_section in itertools.groupby(sorted(rows, key=section_of), section_of):
            title = f"{COMMANDS[name]}: {section}" if section else f"{COMMANDS[name]}: top level"
            parts += [f"### {title}\n", "\n".join([head, rule, *rows_of_section]) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
