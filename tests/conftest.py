"""What every test shares: registries are left as they were found; a shell for the commands of a page."""

import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
from fnmatch import fnmatchcase

# before torch is imported: the tests' processes share few cores, and their numbers must not depend on the machine
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.pages import Shell
from verl.tracking.report.report import find


@functools.cache
def stores() -> list[dict]:
    """The entries of every registry. The process that starts the workers of pytest-xdist needs none, and no torch."""
    from verl.agents import AGENT_LOOPS
    from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
    from verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY
    from verl.engines.base import ENGINES
    from verl.rewards import REWARD_FUNCTION_REGISTRY, REWARD_MANAGER_REGISTRY, RULES_BY_DATA_SOURCE
    from verl.rollout.base import ROLLOUT_ENGINES
    from verl.single_controller.dispatch import DISPATCH_MODES

    registries = (ADV_ESTIMATOR_REGISTRY, DISPATCH_MODES, POLICY_LOSS_REGISTRY, REWARD_FUNCTION_REGISTRY)
    registries += (REWARD_MANAGER_REGISTRY, AGENT_LOOPS, ENGINES, ROLLOUT_ENGINES)
    return [*(registry._entries for registry in registries), RULES_BY_DATA_SOURCE]


#: they install an audit hook, which stays in the process and is called for each `id` and `open`
_LAST = ("test_crash_consistency.py", "test_fuzz.py")


@pytest.hookimpl(tryfirst=True)  # before the slow tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.fast("id", "pattern*")` names the cases of a test that are fast; the others are slow."""
    unused: dict[str, set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("fast")) is not None:
            name = item.callspec.id
            found = {pattern for pattern in mark.args if pattern == name or fnmatchcase(name, pattern)}
            test = item.nodeid.partition("[")[0]
            unused[test] = unused.get(test, set(mark.args)) - found
            if not found:
                item.add_marker("slow")
    wrong = {test: patterns for test, patterns in unused.items() if patterns}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"expected ids of cases in the mark `fast`, found {wrong}")
    items.sort(key=lambda item: item.path.name in _LAST)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """A collection of tests makes objects that stay: looking for garbage takes a tenth of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage would go through their 2 million objects each time.

    A run asks for the number of frozen objects, and leaves the heap as it is if there are some. They are counted each
    time, which takes 0.1 s.
    """
    gc.collect()
    gc.freeze()
    # pytest adds its handlers six times in each test to the loggers that do not propagate: to 50 of torch
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logging.getLogger(name).propagate = True
    if (trainers := sys.modules.get("verl.trainer.base")) is not None:
        trainers.frozen_heap = contextlib.nullcontext  # what `frozen_heap` is from now on


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A report of a failure may quote lone surrogates, which the worker processes of pytest-xdist cannot send."""
    report = yield
    if (text := report.longreprtext) != _utf8(text):
        report.longrepr = _utf8(text)
    report.sections = [(_utf8(name), _utf8(content)) for name, content in report.sections]
    return report


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.fixture(autouse=True)
def registries_as_they_were():
    """What a test registers, itself or by a file that it loads, is gone after it."""
    before, last = [dict(store) for store in stores()], next(reversed(sys.modules))
    yield
    # a file that is loaded again must register again
    for name in list(itertools.takewhile(lambda name: name != last, reversed(sys.modules))):
        if name.startswith("verl_user_"):
            del sys.modules[name]
    for store, entries in zip(stores(), before):
        if store != entries:
            store.clear()
            store.update(entries)


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """Runs set variables of this process. The next test has not got them, and can use the fork servers of before."""
    before = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    yield
    for name in [name for name in os.environ if name not in before and not name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(autouse=True)
def log_level_as_it_was():
    """A run sets the level of the logger of the package (trainer.log_level)."""
    package = logging.getLogger("verl")
    before = package.level
    yield
    if package.level != before:  # setting it clears the caches of all loggers
        package.setLevel(before)


#: entries of the list of metrics that take any name, for custom losses and agent loops
_OPEN = {"actor/*", "rollout/*"}


@functools.cache
def _is_listed(name: str) -> bool:
    return (entry := find(name)) is not None and entry.names not in _OPEN


@pytest.fixture(autouse=True)
def logged_metrics_are_listed(request, monkeypatch):
    """Every metric that a run logs in tests/trainer and tests/recipe is in verl/tracking/metric_names.yaml.

    docs/metrics.md is generated from this list. OWN_METRICS in a module of tests names those that its own code logs.
    """
    trainers = sys.modules.get("verl.trainer.base")
    if trainers is None or request.path.parent.name not in ("trainer", "recipe"):
        return
    own = getattr(request.module, "OWN_METRICS", ())

    def checked(method):
        def call(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            logged = getattr(result, "metrics", result)
            missing = [name for name in logged if not _is_listed(name)]
            missing = [name for name in missing if name not in own]
            assert not missing, f"not in verl/tracking/metric_names.yaml: {missing}"
            return result

        return call

    for name in ("step", "_validate"):
        monkeypatch.setattr(trainers.Trainer, name, checked(getattr(trainers.Trainer, name)))


@pytest.fixture
def shell(tmp_path, monkeypatch) -> Shell:
    """Runs the commands of a page in tmp_path, which the test is in from then on."""
    return Shell(tmp_path, monkeypatch)
