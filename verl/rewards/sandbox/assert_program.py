"""Run tests of a program in a separate process from the program. `code_tests` runs this script twice, isolated from
each other (see `verl.processes.isolation`), with two pipes in between.

    judge      runs the tests. Names that the tests do not define are requested from the solution process.
    solution   runs the program, then serves requests: call a function, read an attribute.

The two exchange plain data as text. A value that the tests compare is therefore a number, a text or a collection of
these, never an object of the program with a custom `==`. The tests, the expected values and the verdict exist only in
the judge, whose memory and streams the program cannot reach. They share a folder for data, from which neither imports.
Whatever the program does to its own process or writes to the channel counts as the return values of its functions. The
verdict is a line of standard output that begins with a random token, which the judge alone has read from standard
input; it is written after all tests have run.

A function of the tests that is given to the program stays in the judge: the program calls it by a message.
Other objects stay in the solution process. The judge holds a `Remote`, which forwards calls, attributes, items, length,
iteration and truth value, and equals no plain value. Helpers that the tests take from the program are the program's.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import io
import itertools
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

#: largest message in bytes
MOST_BYTES = 1 << 24

ENDS_A_LOOP = ("StopIteration", "StopAsyncIteration")
#: modules that graders import before a program, with their public names, in this order
USUAL_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
_COLLECTIONS = {cls.__name__: cls for cls in (tuple, list, set, frozenset, deque)}
_BY_ARGUMENTS = {cls.__name__: cls for cls in (range, timedelta, datetime, date, time)}
_AS_TEXT = {"Decimal": Decimal, "Fraction": Fraction, "complex": complex, "Path": Path}


# ---- plain data as JSON ---------------------------------------------------------------------------------------------


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """Convert a value to JSON data. Subclasses become their base type, numpy values become Python values.

    Args:
        keep: Stores an object that cannot be sent and returns its number.
    """
    if type(value).__module__ == "numpy" and type(value).__name__ != "ufunc":
        value = value.tolist()
    if value is None or type(value) in (bool, int, float, str):
        return value
    for cls in (int, float, str):
        if isinstance(value, cls):
            return cls(value)
    for name, cls in _COLLECTIONS.items():
        if isinstance(value, cls):
            return [name, [pack(item, keep) for item in value]]
    for name, cls in _BY_ARGUMENTS.items():
        if isinstance(value, cls):
            return [name, [pack(item, keep) for item in cls.__reduce__(value)[1]]]
    if isinstance(value, dict):
        return ["dict", [[pack(key, keep), pack(item, keep)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.decode("latin-1")]
    for name, cls in _AS_TEXT.items():
        if isinstance(value, cls):
            return [name, str(value)]
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, type) and issubclass(value, Exception):
        return ["exception", [cls.__name__ for cls in value.__mro__]]
    return ["object", keep(value)]


def unpack(packed: Any, take: Callable[[int], Any]) -> Any:
    """Restore the value that `pack` converted. take: Returns the object with a number.

    Raises ValueError for anything else."""
    if not isinstance(packed, list):
        if isinstance(packed, dict):
            raise ValueError("not a packed value: a JSON object")
        return packed
    name, content = packed
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](unpack(item, take) for item in content)
    if name in _BY_ARGUMENTS:
        return _BY_ARGUMENTS[name](*(unpack(item, take) for item in content))
    if name == "dict":
        return {unpack(key, take): unpack(item, take) for key, item in content}
    if name == "bytes":
        return content.encode("latin-1")
    if name in _AS_TEXT:
        return _AS_TEXT[name](content)
    if name == "exception":
        return exception_class(tuple(content))
    if name == "object":
        return take(content)
    raise ValueError(f"not a packed value: {name!r}")


@functools.cache
def exception_class(names: tuple[str, ...]) -> type[Exception]:
    """The built-in exception of this name, or a new subclass of the next one. names: of a class and its bases."""
    builtin = vars(builtins).get(names[0])
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        if not issubclass(builtin, UnicodeError):
            return builtin
        return type(names[0], (builtin,), {"__init__": lambda *_: None, "__str__": lambda self: self.args[0]})
    return type(names[0], (exception_class(names[1:]),), {})


class Channel:
    """Lines of JSON over two pipes. Raises EOFError if the peer has exited or a message is too large."""

    def __init__(self, reads: int, writes: int):
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")

    def send(self, message: Any) -> None:
        self.writes.write(json.dumps(message).encode() + b"\n")
        self.writes.flush()

    def receive(self) -> Any:
        line = self.reads.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the program has exited, or its message is too large")
        return json.loads(line)


# ---- solution process -----------------------------------------------------------------------------------------------

#: methods that are forwarded to an object
FORWARDED = ("setattr", "getitem", "setitem", "len", "bool", "str", "repr")
#: operators of two objects of the program. With plain data, an object could be `< 3`, or 0 after `- 42`.
OPERATORS = ("lt", "le", "add", "sub", "mul")

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name, None) or getattr(builtins, name) for name in (*FORWARDED, *OPERATORS, "eq")},
    "call": lambda function, arguments, keywords: function(*arguments, **dict(keywords)),
    "next": lambda iterator, count: list(itertools.islice(iterator, count)),
    "instance": isinstance,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    "getattr": getattr,
    "iter": iter,
}


def serve(channel: Channel) -> None:
    """Receive and run the program, send its names, then serve requests until the judge exits."""
    kept: list[Any] = []
    numbers: dict[int, int] = {}
    names: dict[str, Any] = {"__name__": "solution"}
    program = channel.receive()

    def find(name: str) -> Any:
        return names[name] if name in names else getattr(names["Solution"](), name)

    operations = {**OPERATIONS, "global": find}

    def keep(value: Any) -> int:
        if isinstance(value, functools.partial) and value.func is call_back:
            return value.args[0]
        if numbers.setdefault(id(value), len(kept)) == len(kept):
            kept.append(value)
        return numbers[id(value)]

    def take(number: int) -> Any:
        return kept[number] if number >= 0 else functools.partial(call_back, number)

    def call_back(number: int, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the tests, which may send requests before it responds. -1 is the first."""
        channel.send(["", "callback", number, pack(arguments, keep), pack(keywords, keep)])
        while (message := channel.receive())[0] not in ("returned", "raised"):
            respond(operations[message[0]], *message[1:])
        if message[0] == "raised":
            raise exception_class(tuple(message[1]))(message[2])
        return unpack(message[1], take)

    def respond(compute: Callable[..., Any], *packed: Any) -> None:
        """Send the result, and the operands that the call has changed."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                operands = [unpack(operand, take) for operand in packed]
                message = ["value", pack(compute(*operands), keep)]
                after = [pack(operand, keep) for operand in operands]
                message += after if after != list(packed) else []
            except (Exception, SystemExit) as error:
                message = ["raised", [cls.__name__ for cls in type(error).__mro__], str(error)[:2000]]
        channel.send([printed.getvalue(), *message])

    def run_solution() -> list[str]:
        nonlocal program
        program = compile(program, "solution.py", "exec")
        exec(program, names)
        methods = []
        with contextlib.suppress(Exception):  # no class Solution, or one that needs arguments
            methods = [name for name in dir(names["Solution"]()) if not name.startswith("_")]
        return [name for name in (*names, *methods) if not isinstance(names.get(name), types.ModuleType)]

    respond(run_solution)
    while True:
        operation, *operands = channel.receive()
        respond(operations[operation], *operands)


# ---- judge process --------------------------------------------------------------------------------------------------


class Remote:
    """An object that stays in the solution process."""

    __slots__ = ("_number", "_request")

    def __init__(self, request: Callable[..., Any], number: int):
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._request("call", self, arguments, tuple(keywords.items()))

    def __getattr__(self, name: str) -> Any:
        # Library protocols such as numpy's __array_interface__ would let the program read the judge's memory.
        if name.startswith("__"):
            raise AttributeError(f"{name} of an object of the program is not forwarded")
        return self._request("getattr", self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._request("eq", self, other))

    def __hash__(self) -> int:
        return hash(self._number)

    def __iter__(self) -> Any:
        iterator, count = self._request("iter", self), 1
        while items := self._request("next", iterator, count):
            yield from items
            count = min(2 * count, 1024)

    def __next__(self) -> Any:
        for item in self._request("next", self, 1):
            return item
        raise StopIteration

    def __enter__(self) -> Any:
        return self._request("enter", self)

    def __exit__(self, *error: Any) -> None:
        self._request("exit", self)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._request("instance", value, self)


def _forwarded(name: str, needs_remote: bool) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        is_plain = needs_remote and not isinstance(*operands, Remote)
        return NotImplemented if is_plain else self._request(name, self, *operands)

    return method


for _name in (*FORWARDED, *OPERATORS):
    setattr(Remote, f"__{_name}__", _forwarded(_name, _name in OPERATORS))


class ProgramExit(SystemExit):
    """The program has called `sys.exit`; the tests may expect it."""


class BadTests(Exception):
    """The tests cannot be run, or check nothing, whatever the program is. The first message is kept."""

    message = ""

    def __init__(self, message: str):
        super().__init__(message)
        BadTests.message = BadTests.message or message


def raise_again(names: list[str], text: str) -> None:
    """Raise an exception of the program again, as one that ends neither this process nor a loop.

    `all(map(f, cases))` would interpret a StopIteration raised by f as the end of the cases.
    """
    if names[0] == "SystemExit":
        raise ProgramExit(int(text) if text.lstrip("-").isdecimal() else text)
    raise RuntimeError(text) if set(names) & set(ENDS_A_LOOP) else exception_class(tuple(names))(text)


class Checks:
    """Counts the checks of the tests, and records an assert that fails even if it is caught."""

    def __init__(self) -> None:
        self.run, self.failed = 0, False

    def count(self, value: Any) -> Any:
        self.run += 1
        return value

    def check(self, value: Any) -> bool:
        self.failed |= not self.count(value)
        return not self.failed


class Collection:
    """A plugin of pytest: collects from the names of a module."""

    def __init__(self, names: dict[str, Any]):
        self.names, self.outcomes, self.error = names, [], ""

    def pytest_collection(self, session: Any) -> bool:
        module = sys.modules["pytest"].Module.from_parent(session, path=Path("tests.py").absolute())
        module.obj = types.ModuleType("tests")
        vars(module.obj).update(self.names)
        session.items = list(session.genitems(module))
        session.testscollected = len(session.items)
        return True

    def pytest_collectreport(self, report: Any) -> None:
        self.error = self.error or (report.longreprtext if report.failed else "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.outcomes += [report.outcome] if report.failed or report.when == "call" else []
        self.error = report.longreprtext if "FixtureLookupError" in type(report.longrepr).__name__ else self.error


def run_collected(names: dict[str, Any], run: Callable[..., Any]) -> bool:
    """Run tests as `pytest.main` (run) does. Returns whether all have passed."""
    plugin = Collection(names)
    options = f"-q -c {os.devnull} --rootdir=. --noconftest --assert=plain --tb=short --capture=sys -p no:cacheprovider"
    run([*options.split(), "-p", "no:faulthandler"], plugins=[plugin])
    if plugin.error or not {"passed", "failed"} & set(plugin.outcomes):
        raise BadTests(plugin.error[-1000:] or "no test has been run: all are skipped, or none is collected")
    return "failed" not in plugin.outcomes


def take_over_frameworks(tests: str, collects: bool) -> Callable[..., Any] | None:
    """Return `pytest.main`. In the tests, it and `unittest.main` do nothing: what they would run is run afterwards."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run = None
    for framework in map(importlib.import_module, ("unittest", "pytest") if collects or "pytest" in tests else ()):
        run, framework.main = framework.main, lambda *arguments, **keywords: 0
    return run


def update(value: Any, new: Any) -> None:
    """Change the collections of the tests as the program has changed its copies."""
    if isinstance(value, tuple):
        for item, new_item in zip(value, new):
            update(item, new_item)
    elif isinstance(value, list | deque | dict | set) and value != new:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(new)


class Solution:
    """The solution process, as the judge requests it. requests: how many there were."""

    def __init__(self, channel: Channel):
        self.channel, self.requests, self.functions = channel, 0, []

    def take(self, number: int) -> Any:
        return Remote(self.request, number) if number >= 0 else self.functions[-1 - number]

    def number_of(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        if not callable(value):
            raise BadTests(f"they give an object of type {type(value).__name__} to the program, which gets plain data")
        self.functions.append(value)
        return -len(self.functions)

    def call(self, number: int, *packed: Any) -> list[Any]:
        try:
            arguments, keywords = (unpack(each, self.take) for each in packed)
            return ["returned", pack(self.functions[-1 - number](*arguments, **keywords), self.number_of)]
        except Exception as error:
            return ["raised", [cls.__name__ for cls in type(error).__mro__], str(error)[:2000]]

    def receive(self, *operands: Any) -> Any:
        while (message := self.channel.receive())[1] == "callback":
            self.channel.send(self.call(*message[2:]))
        printed, status, *content = message
        sys.stdout.write(printed)
        if status != "value":
            return raise_again(*content)
        result, *after = (unpack(packed, self.take) for packed in content)
        update(operands, after)
        return result

    def request(self, operation: str, *operands: Any) -> Any:
        self.requests += 1
        self.channel.send([operation, *(pack(item, self.number_of) for item in operands)])
        return self.receive(*operands)


def judge(channel: Channel, tests: str, has_checks: bool, lists: dict[str, list[Any]], code: str) -> bool:
    """Run the tests. Returns whether the program has passed, or raises what the tests raise.

    Args:
        tests: Python code, with `__count__` and `__check__` around its checks (has_checks: it has some).
        lists: "collected": functions and classes that pytest collects. "imports": names by which the tests import the
            program. "bound": names that they import and define. "owners": (name, module, attribute) of other modules.
    """
    to_collect, imports = lists["collected"], lists["imports"]
    meant = {}
    for n, m, a in lists["owners"]:
        with contextlib.suppress(ImportError):  # of another system, such as winreg
            meant |= {n: m} if n in USUAL_MODULES or hasattr(importlib.import_module(m), a) else {}
    solution, checks = Solution(channel), Checks()
    run_pytest = take_over_frameworks(tests, bool(to_collect))
    channel.send(code)
    names = solution.receive()
    used = program_names(tests, names, bool(imports), meant)
    program = {n: solution.request("global", n) for n in (names if imports else used) if not n.startswith("__")}
    reserved = {*vars(builtins), *USUAL_MODULES, *lists["bound"]}
    for name in imports:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(program, __all__=[n for n in program if n[0] != "_" and n not in reserved])
    # Modules that the program imports are imported here again. The text of the program says which, not its process.
    modules = dict(zip(USUAL_MODULES, USUAL_MODULES)) | imported_modules(code) | meant
    known = {name: module for name, module in modules.items() if name in names_in(tests)}
    namespace = {"__name__": "__main__", "__file__": "tests.py", "__count__": checks.count, "__check__": checks.check}
    namespace |= {n: importlib.import_module(m) for n, m in known.items()} | {name: program[name] for name in used}
    try:
        exec(compile(tests, "tests.py", "exec"), namespace)
    except SystemExit as end:
        if isinstance(end, ProgramExit) or end.code not in (None, 0):
            raise
    others = {n: v for n, v in namespace.items() if not n.startswith(("test", "Test")) and type(v) is not Remote}
    passed = not to_collect or run_collected({**others, **{n: namespace[n] for n in to_collect}}, run_pytest)
    if passed and not checks.run and solution.requests == len(program):
        raise BadTests("they have called nothing of the program, and run no assert")
    return passed and solution.requests > 0 and not checks.failed and (checks.run > 0 or not has_checks)


def names_in(tests: str) -> set[str]:
    """Return all names used in the tests, except dunder names."""
    names = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    return {name for name in names if not name.startswith("__")}


def imported_modules(code: str) -> dict[str, str]:
    """Name -> the module of the standard library that a program imports by this name."""
    modules = {}
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(code)):
            for alias in node.names if isinstance(node, ast.Import) else ():
                package = alias.name.partition(".")[0]
                if package in sys.stdlib_module_names and "__main__" not in alias.name:
                    modules[alias.asname or package] = alias.name if alias.asname else package
    return modules


def program_names(tests: str, known: Iterable[str], has_imports: bool, modules: Iterable[str]) -> set[str]:
    """Return the program's names that the tests refer to.

    The name of a builtin, or of a module as in `math.isclose`, counts only if the tests neither have another name
    of the program nor import it, so that no program can replace the `abs` in `assert abs(area(2) - 12.57) < 0.01`.
    """
    used = names_in(tests) & set(known)
    others = used - {*vars(builtins), *modules}
    return others if others or has_imports else used


def main() -> None:
    sys.set_int_max_str_digits(0)
    role, *descriptors = sys.argv[1:]
    channel = Channel(*map(int, descriptors))
    if role == "solution":
        with contextlib.suppress(EOFError):  # the judge has exited
            serve(channel)
        return
    token, *arguments = json.loads(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no file with the token: the program can give the tests a link to it
    verdict = "failed"
    try:
        verdict = "passed" if judge(channel, *arguments) else "failed"
    finally:
        verdict = f"bad {json.dumps(BadTests.message)}" if BadTests.message else verdict
        os.write(1, f"\n{token} {verdict}\n".encode())


if __name__ == "__main__":
    main()
