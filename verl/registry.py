"""Named registries with "did you mean", and loading of a user's object by address."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """One phrase that names the nearest known word and then all of them: what an error message ends with."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known) or '(none)'}"


class Registry(Generic[T]):
    """A name -> object table of one kind of thing ("policy loss", "reward manager").

    >>> LOSSES = Registry("loss")
    >>> @LOSSES.register("mine")
    ... def mine(x): ...
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, obj: T | None = None) -> Any:
        """Register `obj` under `name`, or decorate. Raises ValueError when another object has the name already."""
        if obj is None:
            return lambda decorated: self.register(name, decorated)
        if not isinstance(name, str) or not name:
            raise ValueError(f"a {self.kind} is registered under a non-empty string, found {name!r}")
        present = self._entries.get(name)
        if present is not None and _identity(present) != _identity(obj):
            raise ValueError(
                f"{self.kind} {name!r} is registered already, by {'.'.join(_identity(present))}; choose another name"
            )
        self._entries[name] = obj
        return obj

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(f"no {self.kind} is called {name!r}: {did_you_mean(str(name), self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterable[tuple[str, T]]:
        return self._entries.items()


def _identity(obj: Any) -> tuple[str, str]:
    """Where an object was defined: a file imported twice defines the same thing twice, and that is no clash."""
    definition = obj if isinstance(obj, type | FunctionType) else type(obj)
    return definition.__module__, definition.__qualname__


def import_module(address: str) -> Any:
    """Import `pkg.module`, or the file `path/to/file.py` (once: the same file gives the same module).

    Raises ValueError when there is no such file or module; an error inside the user's code is passed on as it is.
    """
    if not (address.endswith(".py") or "/" in address):
        try:
            found = importlib.util.find_spec(address)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError(
                f"no module {address!r}: expected a dotted module name on PYTHONPATH, or a path to a .py file"
            )
        return importlib.import_module(address)
    path = Path(address).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no file {address!r} (looked at {path}): expected a path to a .py file")
    name = "verl_user_" + "_".join(path.with_suffix("").parts[1:]).replace("-", "_").replace(".", "_")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_object(path: str, name: str) -> Any:
    """The object `name` of the module or file `path`: how a user's reward, dataset, loss or trainer is found.

    Raises ValueError that lists the public names of the file when `name` is not among them.
    """
    module = import_module(path)
    if name not in vars(module):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{path!r} defines no {name!r}: {did_you_mean(name, public)}")
    return vars(module)[name]
