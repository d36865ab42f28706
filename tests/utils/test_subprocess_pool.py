"""How the end of a child process is described; the rest is tested with the pools that use it."""

import pytest

from verl.processes.child import describe_exit


@pytest.mark.parametrize(
    "status, description",
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL (if no user or scheduler did it, the machine ran out of memory: see `dmesg`)"),
        (-70, "was killed by signal 70"),
    ],
)
def test_exits_are_described(status, description):
    assert describe_exit(status) == description
