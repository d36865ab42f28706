"""How the log looks, seen from outside: in a process whose output is not a terminal, and in one that is."""

import logging
import os
import pty
import re
import subprocess
import sys

from verl.utils.log import setup_logging

PROGRAM = """
import logging
from verl.utils.log import setup_logging
setup_logging()
setup_logging()
log = logging.getLogger("verl.dataflow")
log.info("[gen] %.2fs", 1.239)
log.debug("not shown")
log.warning("little memory")
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def test_plain_lines_once_with_the_level_where_it_matters():
    done = run(PROGRAM)
    first, second = done.stdout.splitlines()
    assert first[8:] == " [gen] 1.24s" and first[2] == ":"
    assert second[8:] == " WARNING little memory"
    assert done.stderr == ""


def test_the_level_comes_from_the_caller_the_environment_or_is_kept(monkeypatch):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "DEBUG")
    package = logging.getLogger("verl")
    for before, level, expected in (
        (logging.NOTSET, None, logging.DEBUG),
        (logging.NOTSET, "warning", logging.WARNING),
        (logging.ERROR, None, logging.ERROR),
    ):
        package.setLevel(before)
        setup_logging(level)
        assert package.level == expected


def test_a_program_with_its_own_logging_keeps_it():
    done = run("import logging\nlogging.basicConfig(format='mine %(message)s')\n" + PROGRAM)
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["mine [gen] 1.24s", "mine little memory"]


def test_colours_on_a_terminal():
    settings = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    master, slave = pty.openpty()
    settings["TERM"] = "xterm-256color"
    subprocess.run([sys.executable, "-c", PROGRAM], stdout=slave, check=True, env=settings)
    os.close(slave)
    text = os.read(master, 10_000).decode()
    os.close(master)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert plain != text and "[gen] 1.24s" in plain and "little memory" in plain
