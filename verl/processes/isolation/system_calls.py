"""Compiles the table of allowed system calls, system_calls.yaml, with libseccomp, which knows their numbers."""

import ctypes
import errno
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # the second with an error number; 0: the call succeeds without an effect
_EQUAL, _MASKED_EQUAL = 4, 7


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (("argument", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@functools.cache
def compile_filter(signals: bool, attributes: bool) -> bytes:
    """A seccomp program for the kernel; empty if the library libseccomp is missing.

    Args:
        signals: Whether signals can be sent: something else restricts them to the program's processes.
        attributes: Whether mode and times of files can be changed; otherwise these calls have no effect.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return b""
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL | errno.EPERM)))

    def add(names: str, action: int, *condition: int) -> None:
        comparison = _comparison(condition) if condition else _Comparison()
        for name in names.split():
            number = library.seccomp_syscall_resolve_name(name.encode())
            arguments = (rules, ctypes.c_uint32(action), number, len(condition) and 1, ctypes.byref(comparison))
            if number >= 0 and (error := library.seccomp_rule_add_array(*arguments)):  # < 0: not of this architecture
                raise OSError(-error, f"libseccomp refuses the rule for {name}")

    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    add(" ".join([*table["allowed"].values(), table["signals_to_others"] if signals else ""]), _ALLOW)
    add(table["attributes"], _ALLOW if attributes else _FAIL)
    add(table["missing"], _FAIL | errno.ENOSYS)
    for name, conditions in table["conditions"].items():
        for condition in conditions:
            add(name, _ALLOW, *condition)
    with tempfile.TemporaryFile() as file:
        if error := library.seccomp_export_bpf(rules, file.fileno()):
            raise OSError(-error, "libseccomp cannot compile the filter of system calls")
        library.seccomp_release(rules)
        return os.pread(file.fileno(), 1 << 20, 0)


def _comparison(condition: Sequence[int]) -> _Comparison:
    argument, value, *mask = condition
    return _Comparison(argument, _MASKED_EQUAL, *mask, value) if mask else _Comparison(argument, _EQUAL, value, 0)
