"""The worker process of `ProcessPool`: runs calls under limits until its parent ends.

It sends ("ready", 0) and reads messages: (number, limits, calls), where a call is (addresses, pickled arguments). The
calls are numbered from `number` on and run in order: the functions at all addresses are loaded and the last one is
called. The worker replies with ("called", number) when the first call starts, and with ("value", number, pickled value,
output) or ("error", number, description, traceback, output) at the end of each.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from verl.processes.child import Parent
from verl.processes.streams import BoundedText
from verl.registry import import_module
from verl.rewards.sandbox.pool import Limits, describe_error


@cache
def find_function(module: str, file: str, name: str) -> Callable:
    """Load the function at an address: from the module if that is the same file here, otherwise from the file."""
    spec = importlib.util.find_spec(module) if _parent_exists(module) else None
    same = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()
    return vars(importlib.import_module(module) if same else import_module(file))[name]


def _parent_exists(module: str) -> bool:
    """Whether the parent packages of `module` exist, as `find_spec` requires."""
    parent = module.rpartition(".")[0]
    return not parent or (_parent_exists(parent) and importlib.util.find_spec(parent) is not None)


@cache
def load_function(spec: bytes) -> Callable:
    """Load a function, or construct the object of a class, and register the rules that it may call.

    Args:
        spec: Pickled (address, arguments of the constructor or None, (name, address, kwargs) of each rule).
    """
    address, constructor_kwargs, rules = pickle.loads(spec)
    if rules:
        from verl.rewards import ScoreFunction, register_data_source  # loads all built-in rules

        for name, rule_address, kwargs in rules:
            register_data_source(name, ScoreFunction(find_function(*rule_address), kwargs))
    func = find_function(*address)
    return func if constructor_kwargs is None else func(**constructor_kwargs)


def call_function(spec: bytes, keywords: dict[str, object]) -> object:
    """Call the function, or the object, of `load_function`."""
    return load_function(spec)(**keywords)


class _Output(BoundedText):
    """The output of a call: the first characters, and the number of the others."""

    def __init__(self) -> None:
        super().__init__(0)
        self.begin(0)

    def begin(self, limit: int) -> None:
        """Discard the text and keep up to `limit` characters from here on."""
        self._chunks: list[str] = []
        self.remaining, self.dropped = limit, 0

    def keep(self, text: str) -> None:
        self._chunks.append(text)

    def text(self) -> str:
        note = f"\n[{self.dropped} more characters of output were dropped]\n" if self.dropped else ""
        return "".join(self._chunks) + note


_OUTPUT = _Output()


@contextlib.contextmanager
def limited(limits: Limits):
    """Limit elapsed time, CPU time and memory of this process from here on. Memory is limited on Linux only."""
    bounds = {}
    if limits.cpu_seconds is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        bounds[resource.RLIMIT_CPU] = int(usage.ru_utime + usage.ru_stime + limits.cpu_seconds) + 1
    if limits.memory_bytes is not None and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        bounds[resource.RLIMIT_AS] = pages * resource.getpagesize() + limits.memory_bytes
    before = {kind: resource.getrlimit(kind) for kind in bounds}
    for kind, soft in bounds.items():
        resource.setrlimit(kind, (soft, before[kind][1]))
    if limits.wall_seconds is not None:
        # The parent enforces this deadline. The alarm has no handler and ends the process if the parent has ended.
        signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + 30.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, limit in before.items():
            resource.setrlimit(kind, limit)


def run_calls(reply: Callable[..., None], number: int, limits: Limits, jobs: Sequence[tuple]) -> None:
    """Run the calls of a message one after the other and reply with the result of each as soon as it is known.

    Args:
        reply: Sends a message.
        number: Number of the first call; the others follow.
        limits: Limits of each call.
        jobs: (addresses, pickled arguments) of each call.
    """
    is_called = False
    for this, (addresses, arguments) in enumerate(jobs, start=number):
        _OUTPUT.begin(limits.output_bytes)
        try:
            with contextlib.redirect_stdout(_OUTPUT), contextlib.redirect_stderr(_OUTPUT):
                *_, function = [find_function(*address) for address in addresses]
                keywords = pickle.loads(arguments)
                if not is_called:
                    is_called = True
                    reply("called", this)
                with limited(limits):
                    value = function(**keywords)
                    if inspect.iscoroutine(value):
                        value = asyncio.run(value)
            kind, *content = "value", pickled(value)
        except BaseException as error:  # including SystemExit: sys.exit() in user code does not end the worker
            trace = "".join(traceback.format_exception(error))
            kind, *content = "error", describe_error(error), trace[-20000:]
        reply(kind, this, *content, _OUTPUT.text())


def pickled(value: object) -> bytes:
    """The pickled return value of a function. Raises TypeError that names its type if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickling runs code of the value's class, which can raise anything
        raise TypeError(
            f"returned a {type(value).__name__} that cannot be sent to another process: {describe_error(error)}"
        ) from error


def no_breakpoint(*args: object, **kwargs: object) -> None:
    """`breakpoint()` in a worker, which has no terminal."""
    raise RuntimeError(
        "breakpoint() needs a terminal, which this worker process does not have: set reward.isolation=none and "
        "reward.timeout=null, so that the reward function is called in the trainer's process"
    )


def main() -> None:
    sys.breakpointhook = no_breakpoint
    parent = Parent()
    parent.send("ready", 0)
    while True:
        run_calls(parent.send, *parent.receive())


if __name__ == "__main__":
    main()
