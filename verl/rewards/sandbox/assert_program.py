"""Run asserts about a program in a separate process from the program. `code_tests` runs this file as a script.

    judge      runs tests.py. Names that the tests do not define are requested from the solution process.
    solution   runs solution.py, then serves requests: call a function, read an attribute.

The two exchange plain data as text. A value that the tests compare is therefore a number, a text or a collection of
these, never an object of the program with a custom `==`. The tests, the expected values and the verdict (the judge's
exit status) exist only in the judge, whose memory other processes cannot read (see program_boot). Whatever the program
does to its own process or writes to the channel counts as the return values of its functions.

Other objects stay in the solution process. The judge holds a `Remote`, which forwards calls, attributes, items, length,
iteration and truth value, and equals no plain value. Helpers and classes that the tests take from the program are the
program's own.

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

#: largest message in bytes
MOST_BYTES = 1 << 24

ENDS_A_LOOP = ("StopIteration", "StopAsyncIteration")

_COLLECTIONS = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
_AS_TEXT = {"Decimal": Decimal, "Fraction": Fraction, "complex": complex}


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
    if isinstance(value, dict):
        return ["dict", [[pack(key, keep), pack(item, keep)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.decode("latin-1")]
    for name, cls in _AS_TEXT.items():
        if isinstance(value, cls):
            return [name, str(value)]
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return ["object", keep(value)]


def unpack(packed: Any, take: Callable[[int], Any]) -> Any:
    """Restore the value that `pack` converted. Raises ValueError for anything else.

    Args:
        packed: The JSON data.
        take: Returns the object with a number.
    """
    if not isinstance(packed, list):
        if isinstance(packed, dict):
            raise ValueError("not a packed value: a JSON object")
        return packed
    name, content = packed
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
    raise ValueError(f"not a packed value: {name!r}")


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
    """Run solution.py, send its names, then serve requests until the judge exits."""
    kept: list[Any] = []
    names: dict[str, Any] = {"__name__": "solution"}
    operations = {**OPERATIONS, "global": names.__getitem__}

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def respond(compute: Callable[[], Any]) -> None:
        try:
            channel.send(["value", pack(compute(), keep)])
        except Exception as error:
            bases = [cls.__name__ for cls in type(error).__mro__]
            channel.send(["raised", bases, str(error)[:2000]])

    def run_solution() -> dict[str, Any]:
        with open("solution.py", encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), names)
        modules = {name: value.__name__ for name, value in names.items() if isinstance(value, types.ModuleType)}
        return {"modules": modules, "others": [name for name in names if name not in modules]}

    channel.receive()
    respond(run_solution)
    while True:
        operation, *operands = channel.receive()
        respond(
            lambda name=operation, packed=operands: operations[name](*(unpack(v, kept.__getitem__) for v in packed))
        )


# ---- judge process --------------------------------------------------------------------------------------------------


class Remote:
    """An object that stays in the solution process."""

    __slots__ = ("_number", "_request")

    def __init__(self, request: Callable[..., Any], number: int):
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._request("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        # Library protocols such as numpy's __array_interface__ would let the program read the judge's memory.
        if name.startswith("__"):
            raise AttributeError(f"{name} of an object of the program is not forwarded")
        return self._request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._request("getitem", self, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._request("equal", self, other))

    def __hash__(self) -> int:
        return hash(self._number)

    def __iter__(self) -> Any:
        return iter(self._request("list", self))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._request("instance", value, self)

    def __len__(self) -> int:
        return self._request("len", self)

    def __bool__(self) -> bool:
        return self._request("bool", self)

    def __str__(self) -> str:
        return self._request("text", self)


def _object_number(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} of the tests cannot be sent to the program")
    return value._number


def raise_again(names: list[str], text: str) -> None:
    """Raise the nearest built-in exception that ends neither this process nor a loop.

    `all(map(f, cases))` would interpret a StopIteration raised by f as the end of the cases.
    """
    for name in names:
        cls = vars(builtins).get(name)
        if isinstance(cls, type) and issubclass(cls, Exception) and name not in ENDS_A_LOOP:
            raise cls(text)
    raise RuntimeError(text)


def judge(channel: Channel, tests: str) -> None:
    """Run the tests. An exception ends this process with a failure."""

    def take(number: int) -> Remote:
        return Remote(request, number)

    def receive() -> Any:
        status, *content = channel.receive()
        if status == "value":
            return unpack(*content, take)
        return raise_again(*content)

    def request(operation: str, *operands: Any) -> Any:
        channel.send([operation, *(pack(item, _object_number) for item in operands)])
        return receive()

    channel.send("begin")
    names = receive()
    shared = {name: request("global", name) for name in program_names(tests, names["others"])}
    # Modules that the program has imported are imported again, since it may have changed them. Standard library only.
    modules = {n: m for n, m in names["modules"].items() if m.partition(".")[0] in sys.stdlib_module_names}
    imported = {n: importlib.import_module(m) for n, m in modules.items() if n in names_in(tests)}
    exec(compile(tests, "tests.py", "exec"), {"__name__": "tests", **imported, **shared})


def names_in(tests: str) -> set[str]:
    """Return all names used in the tests, except dunder names."""
    names = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    return {name for name in names if not name.startswith("__")}


def program_names(tests: str, known: Iterable[str]) -> set[str]:
    """Return the program's names that the tests refer to. A builtin's name counts only if no other name does.

    `assert sum(10, 15) == 6` can therefore refer to the program's `sum`, but no program can replace the `abs` in
    `assert abs(area(2) - 12.57) < 0.01`.
    """
    used = names_in(tests) & set(known)
    return used - set(vars(builtins)) or used


def start_program() -> Channel:
    """Start the solution process, which waits for the first message, and return the channel to it."""
    request_read, request_write = os.pipe()
    response_read, response_write = os.pipe()
    command = [sys.executable, "-I", "program.py", str(request_read), str(response_write)]
    subprocess.Popen(command, pass_fds=(request_read, response_write), stdin=subprocess.DEVNULL)
    os.close(request_read)
    os.close(response_write)
    return Channel(response_read, request_write)


def main() -> None:
    sys.set_int_max_str_digits(0)
    if sys.argv[1:]:
        with contextlib.suppress(EOFError):  # the judge has exited
            serve(Channel(*map(int, sys.argv[1:])))
        return
    channel = start_program()
    with open("tests.py", encoding="utf-8") as file:
        tests = file.read()
    os.remove("tests.py")
    sys.path.remove("")  # from here on the program writes to this folder: nothing may be imported from it
    judge(channel, tests)


if __name__ == "__main__":
    main()
