"""Names of a package that are loaded at first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        homes: module -> the names that it defines, with spaces between them.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return list(home), load, lambda: sorted(home)
