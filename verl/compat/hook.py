"""The import hook that resolves the paths of `MOVED` and the names of `published.toml`."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def _moved(table: str) -> dict[str, str]:
    """Old module path -> new one, from lines such as `old package -> new package: name before:after`."""
    moved = {}
    for line in table.splitlines():
        packages, names = line.split(": ", 1)
        old, new = packages.split(" -> ")
        for name in names.split():
            before, _, after = name.partition(":")
            moved[f"{old}.{before}"] = f"{new}.{after or before}"
    return moved


#: module path of public verl or of an earlier version -> module path here. Both are the same module object
MOVED = _moved((Path(__file__).parent / "moved.txt").read_text(encoding="utf-8"))

_TABLES = (Path(__file__).parent / "published.toml").read_text(encoding="utf-8")

#: the modules of `published`, known without parsing its tables
_MODULES = frozenset(re.findall(r'^\["(.+)"\]$', _TABLES, re.MULTILINE))
_NO_RECIPE = (
    "{} does not exist here. The recipes are {}; one that adds only settings, rewards or agent loops runs with "
    "`python -m verl.trainer.main_ppo` (docs/migrate_from_verl.md)"
)

ANY = "*"
"""Entry of a module for all names that it does not list."""

BELOW = "**"
"""Entry of a module for all names that it does not list, and for the modules below it."""


@functools.cache
def published() -> dict[str, dict[str, str]]:
    """Module of public verl -> name -> the `module:name` (or module) that it is here, or advice what to use instead.

    Read at the first use, which takes milliseconds: most programs import no such name.
    """
    tables = tomllib.loads(_TABLES)
    advice = tables.pop("advice")

    def names_of(module: str) -> dict[str, str]:
        names: dict[str, str] = {}
        for key, value in tables[module].items():
            if key == "same-as":
                names |= names_of(value)
            elif isinstance(value, list):
                names |= {name: f"{key}:{name}" for name in value}
            else:
                names[key] = advice[value[1:]] if value.startswith("@") else value
        return names

    return {module: names_of(module) for module in tables}


@functools.cache
def _parents() -> set[str]:
    """The packages of the modules of `MOVED` and `published`."""
    return {path[:dot] for path in (*MOVED, *_MODULES) for dot, letter in enumerate(path) if letter == "."}


def published_names(module: str, first: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module: it resolves names that public verl has in the module of that path.

    A name that exists elsewhere is imported from there. One that is not supported raises an ImportError that says what
    to use instead. `first` is asked before: the `__getattr__` that the module defines itself.
    """

    def find(name: str) -> Any:
        unknown = AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            if first is not None:
                return first(name)
        except AttributeError as error:
            unknown = error
        if name.startswith("__"):  # the import system asks for __path__ and others
            raise unknown
        names = published().get(module, {})
        target = names.get(name) or names.get(ANY) or _advice_below(module)
        if target is None:
            raise unknown
        if " " in target:
            raise ImportError(f"{module}.{name} of public verl does not exist here: {target}", name=module)
        return pkgutil.resolve_name(target if ":" in target else f"{target}:")  # a module: its own errors

    return find


def _advice_below(module: str) -> str | None:
    """The advice of the nearest package of a module that speaks for the modules below it."""
    while module:
        if (advice := published().get(module, {}).get(BELOW)) is not None:
            return advice
        module = module.rpartition(".")[0]
    return None


class _Moved(importlib.abc.Loader):
    """Loads the module object of the new path under the old path."""

    def __init__(self, target: str):
        self.target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the spec of the old path

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module, for `python -m`."""
        spec = importlib.util.find_spec(self.target)
        return spec.loader.get_code(spec.name)


class _WithNames(importlib.machinery.SourceFileLoader):
    """Loads a file of this project whose module has names of public verl, too, or modules below it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__getattr__ = published_names(module.__name__, vars(module).get("__getattr__"))
        if module.__name__ in _parents() and not hasattr(module, "__path__"):
            module.__path__ = []  # a package in public verl


class _Empty(importlib.abc.Loader):
    """Creates a package without files, whose names `find` resolves; None: it has none."""

    def __init__(self, find: Callable[[str], Any] | None):
        self.find = find

    def exec_module(self, module: ModuleType) -> None:
        if self.find is not None:
            module.__getattr__ = self.find


def _former_recipe(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of `recipe` or `recipe.NAME`, which is `verl.recipe.NAME` now. ModuleNotFoundError if there is none."""
    target = MOVED.get(f"verl.{fullname}", f"verl.{fullname}")
    spec = importlib.util.find_spec(target)
    if spec is None:
        recipes = sorted(folder.parent.name for folder in Path(__file__).parents[1].glob("recipe/*/main_*.py"))
        raise ModuleNotFoundError(_NO_RECIPE.format(fullname, ", ".join(recipes)), name=fullname)
    if spec.submodule_search_locations is not None:
        forwarded = _Empty(lambda name: getattr(importlib.import_module(target), name))
        return importlib.util.spec_from_loader(fullname, forwarded, is_package=True)
    return importlib.util.spec_from_loader(fullname, _Moved(target), origin=spec.origin)


class MovedModules(importlib.abc.MetaPathFinder):
    """Finds the modules of `MOVED`, files with names of `published`, and those below `recipe`, which has no files here.

    The first finder: the folder of a package that has moved would give its modules again under the old path, and an
    editable installation of an earlier release still maps `recipe` to its folder.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MOVED:
            new_path = MOVED[fullname]
            origin = importlib.util.find_spec(new_path).origin  # `__file__` of `python -m`
            return importlib.util.spec_from_loader(fullname, _Moved(new_path), origin=origin)
        if fullname in _MODULES or (fullname.startswith("verl.") and fullname in _parents()):
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _WithNames(fullname, spec.origin)
            return spec
        # a package without folders is the one of `_former_recipe`; a user's own `recipe` has a folder
        if fullname.startswith("recipe.") and path is not None and not list(path):
            return _former_recipe(fullname)
        return None


class PublishedModules(importlib.abc.MetaPathFinder):
    """Finds the modules of `published`, and `recipe`. The last finder, so that existing files take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "recipe":
            return _former_recipe(fullname)
        if not fullname.startswith("verl."):
            return None
        if fullname in published() or _advice_below(fullname) is not None:
            return importlib.util.spec_from_loader(fullname, _Empty(published_names(fullname)), is_package=True)
        if fullname in _parents():
            return importlib.util.spec_from_loader(fullname, _Empty(None), is_package=True)
        return None


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())
    sys.meta_path.append(PublishedModules())
