"""Imports tried in another process: errors, crashes, hangs and noise are findings."""

import pytest

from verl.env_check.packages import Probe, at_least, run_probes, version_of
from verl.utils.packages import is_installed


def test_each_piece_of_code_gets_its_own_result():
    found = run_probes(
        {
            "fine": "import json\ninfo = {'a': [1, 2]}",
            "noisy": 'print("hello")\nprint(\'{"name": 3}\', end="")',
            "missing": "import no_such_package_anywhere",
            "raises": "raise RuntimeError('operator torchvision::nms does not exist\\nmore')",
            "leaves": "import sys\nsys.exit(3)",
            "after": "info = 1",
        }
    )
    assert found["fine"] == Probe(info={"a": [1, 2]}) and found["after"] == Probe(info=1)
    assert found["noisy"] == Probe()
    assert found["missing"].error == "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    assert found["raises"].error == "RuntimeError: operator torchvision::nms does not exist"
    assert found["leaves"].error == "SystemExit: 3"


def test_a_crash_names_its_piece_and_what_was_not_reached():
    found = run_probes(
        {"a": "info = 1", "b": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "c": "info = 2"}
    )
    assert found["a"] == Probe(info=1)
    assert found["b"].error == "the process was killed by SIGSEGV"
    assert found["c"].error == "not tried: b failed before it (the process was killed by SIGSEGV)"
    assert run_probes({"a": "import os\nos._exit(7)"})["a"].error == "the process exited with status 7"


def test_a_hang_ends():
    found = run_probes({"a": "info = 1", "b": "import time\ntime.sleep(60)"}, timeout=3.0)
    assert found == {"a": Probe(info=1), "b": Probe(error="timed out after 3 s")}


def test_what_counts_as_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_a_folder").mkdir()
    (tmp_path / "real_code").mkdir()
    (tmp_path / "real_code" / "__init__.py").touch()
    assert is_installed("real_code") and is_installed("json.decoder")
    assert not is_installed("only_a_folder") and not is_installed("no_such.module") and not is_installed("no_such")
    assert version_of("no-such-distribution", "pytest") == pytest.__version__
    assert version_of("no-such-distribution") is None
    assert run_probes({"path": "import real_code"})["path"].error is None  # the child looks where this process looks


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("2.13.0+cpu", "2.11", True),
        ("2.9.1", "2.11", False),
        ("5.0.0rc1", "5.0", True),
        ("26.0.1", "15", True),
        ("0.8", "0.8.0", True),
        ("2.11.0.dev20260101", "2.11", True),
    ],
)
def test_versions(version, minimum, enough):
    assert at_least(version, minimum) == enough
