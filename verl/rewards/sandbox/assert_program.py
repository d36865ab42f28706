"""Asserts about a program, judged outside of the process that the program runs in. Run by `code_tests` as a script.

    judge      runs tests.py. A name that the tests do not define themselves is asked of the other end.
    solution   runs solution.py, and then does what it is asked: call this, read that attribute.

Between them goes plain data, as text: so a value that the tests compare is a number, a text or a collection of such,
never an object of the program's with an `==` of its own. The tests, the expected values and the verdict (the judge's
exit status) are in the judge alone, whose memory is closed to others (see program_boot). Whatever the program does to
its own process, and whatever it writes to the channel, counts as what its functions return.

Objects of other kinds stay where they are; the judge holds a `Remote`, which hands on calls, attributes, items, length,
iteration and truth, and is equal to no plain value. What the tests take from the program beside the function under
test (a helper, a class) is the program's own, and judged as such.

No module of the package is imported: the script runs in an isolated interpreter.
"""

import ast
import builtins
import contextlib
import importlib
import json
import operator
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

#: the largest message that either end reads
MOST_BYTES = 1 << 24

ENDS_A_LOOP = ("StopIteration", "StopAsyncIteration")

_COLLECTIONS = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
_AS_TEXT = {"Decimal": Decimal, "Fraction": Fraction, "complex": complex}


# ---- plain data as JSON ---------------------------------------------------------------------------------------------


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """What JSON can carry. Subclasses travel as what they are derived from, numpy's values as Python's.

    keep: takes an object that cannot travel, and returns the number that stands for it.
    """
    if type(value).__module__ == "numpy" and type(value).__name__ != "ufunc":
        value = value.tolist()
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, [pack(item, keep) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[pack(key, keep), pack(item, keep)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.decode("latin-1")]
    for name, kind in _AS_TEXT.items():
        if isinstance(value, kind):
            return [name, str(value)]
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return ["object", keep(value)]


def unpack(found: Any, take: Callable[[int], Any]) -> Any:
    """The value that `pack` made this of; take: the object that a number stands for. ValueError for anything else."""
    if not isinstance(found, list):
        if isinstance(found, dict):
            raise ValueError("no packed value")
        return found
    name, content = found
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](unpack(item, take) for item in content)
    if name == "dict":
        return {unpack(key, take): unpack(item, take) for key, item in content}
    if name == "bytes":
        return content.encode("latin-1")
    if name in _AS_TEXT:
        return _AS_TEXT[name](content)
    if name == "object":
        return take(content)
    raise ValueError(f"no packed value: {name!r}")


class Channel:
    """Lines of JSON over two pipes. EOFError where the other end is gone, or says too much at once."""

    def __init__(self, reads: int, writes: int):
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")

    def send(self, message: Any) -> None:
        self.writes.write(json.dumps(message).encode() + b"\n")
        self.writes.flush()

    def receive(self) -> Any:
        line = self.reads.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the program ended, or returned more than can be taken")
        return json.loads(line)


# ---- the program's end ----------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "equal": operator.eq,
    "instance": isinstance,
    "len": len,
    "list": list,
    "bool": bool,
    "text": str,
}


def serve(channel: Channel) -> None:
    """Run solution.py, tell its names, then answer until the judge is gone."""
    kept: list[Any] = []
    names: dict[str, Any] = {"__name__": "solution"}
    operations = {**OPERATIONS, "global": names.__getitem__}

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def answer(compute: Callable[[], Any]) -> None:
        try:
            channel.send(["value", pack(compute(), keep)])
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            channel.send(["raised", kinds, str(error)[:2000]])

    def run_solution() -> dict[str, Any]:
        with open("solution.py") as file:
            exec(compile(file.read(), "solution.py", "exec"), names)
        modules = {name: value.__name__ for name, value in names.items() if isinstance(value, types.ModuleType)}
        return {"modules": modules, "others": [name for name in names if name not in modules]}

    channel.receive()
    answer(run_solution)
    while True:
        operation, *operands = channel.receive()
        answer(lambda asked=operation, given=operands: operations[asked](*(unpack(v, kept.__getitem__) for v in given)))


# ---- the judge's end ------------------------------------------------------------------------------------------------


class Remote:
    """An object that stays in the program's process."""

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int):
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        # Protocols of libraries, such as numpy's __array_interface__, would read the judge's memory where told to.
        if name.startswith("__"):
            raise AttributeError(f"{name} of an object of the program is not handed on")
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", self, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._ask("equal", self, other))

    def __hash__(self) -> int:
        return hash(self._number)

    def __iter__(self) -> Any:
        return iter(self._ask("list", self))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._ask("instance", value, self)

    def __len__(self) -> int:
        return self._ask("len", self)

    def __bool__(self) -> bool:
        return self._ask("bool", self)

    def __str__(self) -> str:
        return self._ask("text", self)


def _number_of(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")
    return value._number


def raise_again(kinds: list[str], text: str) -> None:
    """The nearest of Python's own exceptions that ends neither this process nor a loop.

    `all(map(f, cases))` would take a StopIteration of f for the end of the cases.
    """
    for name in kinds:
        kind = vars(builtins).get(name)
        if isinstance(kind, type) and issubclass(kind, Exception) and name not in ENDS_A_LOOP:
            raise kind(text)
    raise RuntimeError(text)


def judge(channel: Channel, tests: str) -> None:
    """Run the tests; what they raise ends this process with a failure."""

    def take(number: int) -> Remote:
        return Remote(ask, number)

    def receive() -> Any:
        kind, *content = channel.receive()
        if kind == "value":
            return unpack(*content, take)
        return raise_again(*content)

    def ask(operation: str, *operands: Any) -> Any:
        channel.send([operation, *(pack(item, _number_of) for item in operands)])
        return receive()

    channel.send("begin")
    names = receive()
    shared = {name: ask("global", name) for name in names_of_the_program(tests, names["others"])}
    # A module that the program has imported is imported here anew: the program's may be changed. Python's own alone.
    modules = {n: m for n, m in names["modules"].items() if m.partition(".")[0] in sys.stdlib_module_names}
    imported = {n: importlib.import_module(m) for n, m in modules.items() if n in names_in(tests)}
    exec(compile(tests, "tests.py", "exec"), {"__name__": "tests", **imported, **shared})


def names_in(tests: str) -> set[str]:
    """All names that the tests mention, except those that belong to Python."""
    found = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    return {name for name in found if not name.startswith("__")}


def names_of_the_program(tests: str, known: Iterable[str]) -> set[str]:
    """Which names of the program's the tests mean. That of a builtin is meant only where the tests mean no other one.

    So `assert sum(10, 15) == 6` can be about a `sum` of the program's, but no program changes the `abs` of
    `assert abs(area(2) - 12.57) < 0.01`.
    """
    used = names_in(tests) & set(known)
    return used - set(vars(builtins)) or used


def start_program() -> Channel:
    """The other end, in a process of its own, which waits until it is told to begin."""
    asked_at, asks = os.pipe()
    answered_at, answers = os.pipe()
    command = [sys.executable, "-I", "program.py", str(asked_at), str(answers)]
    subprocess.Popen(command, pass_fds=(asked_at, answers), stdin=subprocess.DEVNULL)
    os.close(asked_at)
    os.close(answers)
    return Channel(answered_at, asks)


def main() -> None:
    sys.set_int_max_str_digits(0)
    if sys.argv[1:]:
        with contextlib.suppress(EOFError):  # the judge is done
            serve(Channel(*map(int, sys.argv[1:])))
        return
    channel = start_program()
    with open("tests.py") as file:
        tests = file.read()
    os.remove("tests.py")
    sys.path.remove("")  # from here on the folder is the program's: nothing may be imported from it
    judge(channel, tests)


if __name__ == "__main__":
    main()
