"""The ways in which programs are isolated, for tests that run in each."""

import functools

import pytest

from verl.processes.isolation import program
from verl.processes.isolation.mode import Isolation
from verl.processes.isolation.program import isolation

LANDLOCK = Isolation(problem="the test asks for none")
has_bubblewrap = isolation().bubblewrap is not None
needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap, reason=f"needs bubblewrap: {isolation().problem}")
MODES = {"bubblewrap": isolation(), "landlock": LANDLOCK}
each_mode = pytest.mark.parametrize("mode", [pytest.param("bubblewrap", marks=needs_bubblewrap), "landlock"])


def use(monkeypatch: pytest.MonkeyPatch, mode: Isolation) -> None:
    """Let `run_program` use a mode."""
    monkeypatch.setattr(program, "isolation", functools.cache(lambda: mode))
