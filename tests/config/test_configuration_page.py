"""docs/configuration.md and docs/configuration_reference.md: commands, defaults and the generated tables."""

import re
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from scripts import configuration_page
from tests.pages import DOCS, blocks, commands
from verl.cli.app import app
from verl.config.fields import fields_of
from verl.config.schema import Config

PAGE = (DOCS / "configuration.md").read_text()
SHORT = {"actor", "rollout", "model"}


def test_the_reference_is_up_to_date():
    written = configuration_page.PAGE.read_text(encoding="utf-8")
    assert written == configuration_page.text(), "run python scripts/configuration_page.py"
    for schema in configuration_page.SCHEMAS.values():
        assert all(f"| `{key}` |" in written for key in fields_of(schema))


def test_the_defaults_of_the_important_keys():
    table = PAGE.split("## Important keys")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", table, re.MULTILINE)
    assert len(rows) >= 30
    known = fields_of(Config)
    for short, default in rows:
        key = f"actor_rollout_ref.{short}" if short.split(".")[0] in SHORT else short
        plain = known[key].default_from or known[key].default
        assert plain == default or plain == yaml.safe_load(default) or plain == float(default), key


def test_the_commands_run(shell):
    for command in commands("configuration.md"):
        shell.run(command)


@pytest.mark.parametrize("number", [0, 1])
def test_the_output_that_is_shown(number):
    command, shown = blocks("configuration.md", "console")[number], blocks("configuration.md", "text")[number]
    printed = CliRunner().invoke(app, shlex.split(command)[1:]).output
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} <= lines
