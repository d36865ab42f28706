"""docs/models.md is the record of the cells, and the record is of all families of the installed transformers."""

from scripts import model_table
from tests.models.cells import CELLS, LISTED, TINY, read_record
from tests.models.families import FAMILIES
from tests.pages import commands, table_rows

PAGE = model_table.PAGE.read_text(encoding="utf-8")


def test_the_page_is_the_record():
    assert model_table.text() == PAGE, "run python scripts/model_table.py --page"


def test_every_family_is_recorded():
    families = read_record()["families"]
    missing = [name for name in TINY if set(families.get(name, ())) != {*CELLS, *LISTED}]
    assert not missing, f"run python scripts/model_table.py {' '.join(missing)}"
    assert len(TINY) >= 150
    named = {name for row in table_rows(PAGE) for name in row[0].replace("`", "").split(", ")}
    assert set(FAMILIES) <= named


def test_the_commands_run(shell):
    for command in commands("models.md"):
        shell.run(command)
