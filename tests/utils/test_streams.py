"""What is printed arrives or is dropped, whatever stdout is: each in a process with such a stdout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOG = r"""
import logging, sys
{setup}
from verl.utils.log import setup_logging
setup_logging()
log = logging.getLogger("verl.x")
for _ in range(3):
    log.info("é \ud800 \x1b[2J")
log.info("%d", "not a number")
{end}
open(sys.argv[1], "w", encoding="utf-8").write("went on")
"""


def slow(*row):
    """A row of a table: one process, which others of the table resemble."""
    return pytest.param(*row, marks=pytest.mark.slow)


def run(tmp_path, setup="", end="", redirect="", **env):
    """The bytes of stdout and stderr of a process that logs. It must reach its end and exit with status 0."""
    program, mark = tmp_path / "program.py", tmp_path / "mark"
    program.write_text(LOG.format(setup=setup, end=end), encoding="utf-8")
    command = f'"{sys.executable}" "{program}" "{mark}" {redirect}'
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, env=env, check=False)
    assert done.returncode == 0 and mark.read_text(encoding="utf-8") == "went on", done
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        slow({"PYTHONIOENCODING": "utf-8"}, "é".encode()),
        slow({"PYTHONIOENCODING": "ascii"}, rb"\xe9"),
        ({"PYTHONIOENCODING": "latin-1"}, "é".encode("latin-1")),
        ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}, rb"\xe9"),
    ],
    ids=["utf-8", "ascii", "latin-1", "POSIX"],
)
def test_lines_in_every_encoding(env, expected, tmp_path):
    out, err = run(tmp_path, **env)
    lines = out.splitlines()
    assert len(lines) == 3 and all(line.endswith(expected + rb" \ud800 \x1b[2J") for line in lines)
    assert err.count(b"Logging error") == 1 and b"%d format" in err  # the one that is a mistake of the code


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"redirect": "> /dev/full"}, b"OSError: [Errno 28]"),
        ({"redirect": "| head -c 1"}, None),  # the first line may be written before head ends
        slow({"redirect": ">&-"}, None),
        ({"setup": "sys.stdout.close()"}, b"ValueError: I/O operation on closed file"),
        slow({"setup": "import io; sys.stdout = io.StringIO()"}, None),
        slow({"setup": "sys.stdout = None"}, None),
        slow(
            {"setup": "import codecs; sys.stdout = codecs.getwriter('ascii')(sys.stdout.buffer)"}, b"UnicodeEncodeError"
        ),
    ],
    ids=["full disk", "head", "no file", "closed", "StringIO", "None", "StreamWriter"],
)
def test_a_stdout_that_cannot_be_written_is_reported_once_at_most(options, reported, tmp_path):
    _, err = run(tmp_path, **options, end="sys.stdout = None")
    count = err.count(b"the log cannot be written to stdout")
    assert count <= 1 and (reported or b"") in err
    if options.get("redirect") != "| head -c 1":
        assert count == (reported is not None)
    assert b"BrokenPipeError\n" not in err and b"Exception ignored" not in err


COMMAND = """
import sys
from verl.utils.log import setup_logging
from verl.processes.streams import command_output
import logging

@command_output()
def main():
    setup_logging()
    {body}
    return {status}

sys.exit(main())
"""


@pytest.mark.parametrize(
    ("body", "redirect", "status", "said"),
    [
        slow(
            "logging.getLogger('verl').info('x' * 10_000)", "> /dev/full", 0, b"the log cannot be written to stdout: "
        ),
        ("print('x')", "> /dev/full", 1, b"error: stdout cannot be written: No space left on device"),
        slow("print('x'); sys.exit(3)", "> /dev/full", 1, b"error: stdout cannot be written: No space left on device"),
        ("print('x'); raise KeyError('y')", "> /dev/full", 1, b"KeyError: 'y'"),
        ("print('x' * 100_000); print('y', file=sys.stderr)", "| true", 4, b"y"),
        slow("print('y', file=sys.stderr)", "2> /dev/full", 4, b""),
        slow("print('x' * 100_000); print('y', file=sys.stderr)", "> /dev/full 2>&1", 1, b""),
    ],
)
def test_the_status_of_a_command_whose_output_is_lost(body, redirect, status, said, tmp_path):
    """The log reports this itself, and does not end a run. An error of the command is not replaced."""
    (tmp_path / "command.py").write_text(COMMAND.format(body=body, status=4 if status == 4 else 0), encoding="utf-8")
    command = f'"{sys.executable}" "{tmp_path / "command.py"}" {redirect}'
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, env=env, check=False)
    assert done.returncode == status and said in done.stderr and b"Exception ignored" not in done.stderr, done
    if b"KeyError" not in said:
        assert done.stderr.count(b"\n") == bool(said) and b"Traceback" not in done.stderr


def test_commands_work_without_standard_files(tmp_path):
    """Otherwise the first files that a command opens would be stdin, stdout and stderr."""
    code = (
        "import os, sys\n"
        "from verl.processes.streams import prepare_streams\n"
        "prepare_streams()\n"
        "print('é \\ud800'), print('x', file=sys.stderr)\n"
        f"file = open({str(tmp_path / 'result')!r}, 'w', encoding='utf-8')\n"
        "file.write(f'{file.fileno() > 2} {sys.stdin.read()!r} {os.get_inheritable(1)}')\n"
    )
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f'"{sys.executable}" "{tmp_path / "program.py"}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command], env=env, check=False).returncode == 0
    assert (tmp_path / "result").read_text(encoding="utf-8") == "True '' True"


def test_output_of_custom_code_is_escaped_and_never_raises(tmp_path):
    code = (
        "import sys\n"
        "from verl.processes.streams import print_printable\n"
        "print_printable('a\\x1b[2J\\ud800\\n')\n"
        "for stream in (None, open('/dev/full', 'w', buffering=1)):\n"
        "    sys.stdout = stream\n"
        "    print_printable('lost\\n')\n"
        "sys.stdout = None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.stdout == b"a\\x1b[2J\\ud800\n" and b"Traceback" not in done.stderr
