"""Registries of names, and loading of custom objects by path."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

logger = logging.getLogger("verl.registry")

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known name, then all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known) or '(none)'}"


def signature(function: Any) -> inspect.Signature:
    """The signature of a function, with annotations that are strings evaluated where that is possible."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, TypeError, AttributeError):
        return inspect.signature(function)


def check_type(parameter: inspect.Parameter, value: Any, key: str) -> None:
    """Check a setting of a custom function against the annotation of its parameter, or the type of the default.

    An int is accepted for a float, a bool is not a number, and null is accepted if it is the default. A parameter
    without an annotation whose default is missing or None accepts anything, as does an annotation that pydantic does
    not know.

    Raises:
        ValueError: another type; the message names the expected one, and what was found.
    """
    annotation, default = parameter.annotation, parameter.default
    if value is None and default is None:
        return
    if annotation is parameter.empty or isinstance(annotation, str):
        if default is None or default is parameter.empty:
            return
        annotation = type(default)
    if not _validates(annotation, value):
        expected = inspect.formatannotation(annotation)
        raise ValueError(f"{key}: expected {expected}, found {value!r} ({type(value).__name__})")


def _validates(annotation: Any, value: Any) -> bool:
    import pydantic  # here: a process that runs one reward function starts without it

    try:
        adapter = pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticSchemaGenerationError:
        return True
    try:  # strict: an int is a float, but a bool is not a number
        adapter.validate_python(value, strict=True)
    except pydantic.ValidationError:
        return isinstance(value, list) and annotation is tuple
    return True


class Registry(MutableMapping[str, T]):
    """A table name -> object for one kind of object ("policy loss", "reward manager").

    >>> LOSSES = Registry("loss")
    >>> @LOSSES.register("mine")
    ... def mine(x): ...
    >>> LOSSES["mine"] = other  # replaces it

    It can be used like a dict, but an unknown name is a ValueError that lists the known ones.
    """

    def __init__(self, kind: str, *, builtins_replaceable: bool = False):
        """builtins_replaceable: a custom object may replace the built-in one of its name; a log line names both."""
        self.kind = kind
        self._builtins_replaceable = builtins_replaceable
        self._entries: dict[str, T] = {}

    def register(self, name: str, obj: T | None = None) -> Any:
        """Register `obj` under `name`; without `obj`, return a decorator.

        The same top-level function or class may be registered again (a reloaded module, a notebook cell): the later
        definition replaces the earlier one.

        Raises:
            ValueError: if another object is registered under the name.
        """
        if obj is None:
            return lambda decorated: self.register(name, decorated)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{self.kind} name: expected a non-empty string, found {name!r}")
        registered = self._entries.get(name)
        if registered is not None and not _same_definition(registered, obj):
            if not (self._builtins_replaceable and _is_builtin(registered) and not _is_builtin(obj)):
                problem = f"{self.kind} {name!r} is already registered as {_described(registered)}"
                raise ValueError(
                    f"{problem}: choose another name, or replace it by item assignment: registry[{name!r}] = ..."
                )
            logger.info("%s %r: %s is replaced by %s", self.kind, name, location_of(registered), location_of(obj))
        self._entries[name] = obj
        return obj

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(f"no {self.kind} is called {name!r}: {did_you_mean(name, self._entries)}")
        return self._entries[name]

    def __setitem__(self, name: str, obj: T) -> None:
        self._entries.pop(name, None)
        self.register(name, obj)

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._entries[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    __hash__, __eq__ = object.__hash__, object.__eq__  # a registry, not its entries


def _same_definition(a: Any, b: Any) -> bool:
    """Whether two objects are identical, or the same top-level `def` or `class` loaded twice: a file may be both a
    module (model.external_lib) and a path (custom_reward_function.path).

    Lambdas and objects made by a factory share their names, so they are compared by identity only.
    """
    if a is b:
        return True
    definitions = all(isinstance(x, type | FunctionType) and "<" not in x.__qualname__ for x in (a, b))
    return definitions and _definition(a) == _definition(b)


def _definition(obj: Any) -> tuple[str, str]:
    """The file of a function or class, or its module if it has no file, and its name there."""
    file = getattr(sys.modules.get(obj.__module__), "__file__", None)
    return os.path.realpath(file) if file else obj.__module__, obj.__qualname__


def _is_builtin(obj: Any) -> bool:
    """Whether this package defines the object."""
    return str(getattr(obj, "__module__", "")).startswith("verl.")


def location_of(obj: Any) -> str:
    """Describe an object for messages; a function with its location: `compute_score() at /path/reward.py:12`."""
    body = inspect.unwrap(obj) if callable(obj) else obj
    if not isinstance(body, FunctionType):
        return _described(obj)
    return f"{body.__qualname__}() at {body.__code__.co_filename}:{body.__code__.co_firstlineno}"


def _described(obj: Any) -> str:
    return f"{obj.__module__}.{obj.__qualname__}" if isinstance(obj, type | FunctionType) else repr(obj)


def import_module(address: str) -> ModuleType:
    """Import `pkg.module` (in public verl also `pkg://pkg.module`), or the file `path/to/file.py`. A file is imported
    once, and again once it changed.

    Raises:
        ValueError: if there is no such file or module, or it calls sys.exit. Other errors raised by the imported code
            are passed on unchanged.
    """
    try:
        return _import_module(address)
    except SystemExit as error:  # it would end a run without a message
        raise ValueError(
            f"{address} calls sys.exit({error.code!r}) while it is imported: move the code that does below "
            "`if __name__ == '__main__':`"
        ) from error


def _import_module(address: str) -> ModuleType:
    if not address.strip():
        raise ValueError(f"expected a module name or the path to a .py file, found {address!r}")
    address = address.removeprefix("pkg://")
    if not (address.endswith(".py") or "/" in address):
        try:
            return importlib.import_module(address)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{address}.".startswith(f"{error.name}."):
                raise
        raise ValueError(f"no module {address!r}: expected a dotted module name on PYTHONPATH, or a path to a .py file")
    path = Path(os.path.realpath(os.path.expanduser(address)))  # links that form a loop are kept
    if path.suffix != ".py" or not os.path.isfile(path):
        raise ValueError(f"no file {address!r} (looked at {path}): expected a path to a .py file")
    # the digest distinguishes files of the same name, and is the same in every process
    name = f"verl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    imported, source = sys.modules.get(name), path.read_bytes()
    if imported is not None and imported.__source__ == source:
        return imported
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    module.__source__ = source
    sys.modules[name] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # a cached .pyc may miss a quick edit
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"raised while importing {path}")
        raise
    return module


def load_object(path: str, name: str, key: str = "") -> Any:
    """Return the object `name` of the module or file `path`: a custom reward function, dataset, loss or trainer.

    Raises:
        ValueError: the module has no such name; the message lists its public names, and the `key` that sets the name.
    """
    module = import_module(path)
    # dir, not vars: a package may import its names at first use
    if name not in dir(module):
        public = [n for n in dir(module) if not n.startswith("_")]
        raise ValueError(f"{path!r} defines no {name!r}: {did_you_mean(name, public)}{key and f'. Set {key}'}")
    return getattr(module, name)
