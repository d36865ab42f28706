"""Optional packages: what an engine of another library needs installed, and how to install it."""

import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        title: its name in messages.
        module: what is imported.
        distributions: names under which it is installed, the first one by `pip install`.
        probe: code that runs without error if the package works.
        tested: versions that were tested.
        minimum: the oldest version that is supported; "": any.
        extra: optional dependencies of this project that install a tested version.
        own_torch: it installs its own torch, so it needs a separate environment.
        on_cpu: command that installs it for a CPU.
    """

    title: str
    module: str
    distributions: tuple[str, ...]
    probe: str
    tested: tuple[str, ...] = ()
    minimum: str = ""
    extra: str | None = None
    own_torch: bool = False
    on_cpu: str = ""

    @property
    def tested_versions(self) -> str:
        return ", ".join(self.tested)

    @property
    def how_to_install(self) -> str:
        """How to install it, for an error message."""
        environment = f" into a separate environment ({self.title} installs its own torch)" if self.own_torch else ""
        cpu = f", or on a CPU: {self.on_cpu}" if self.on_cpu else ""
        return f"in a clone, {self.install_command}{environment}{cpu}"

    @property
    def install_command(self) -> str:
        target = self.distributions[0] if self.extra is None else f"-e '.[{self.extra}]'"
        return f"pip install {target}"

    @property
    def installed_version(self) -> str | None:
        """The installed version; None for a copy without one, such as a build of a commit."""
        return version_of(*self.distributions)

    def missing(self, name: str, instead: str) -> str | None:
        """The error message of an engine whose package is not installed, or too old; None if it is.

        Args:
            name: the name of the engine.
            instead: an engine that needs no package.
        """
        if is_installed(self.module):
            version = self.installed_version
            if not version or ".dev" in version or not self.minimum or at_least(version, self.minimum):
                return None
            return (
                f"{name!r} needs {self.title} {self.minimum} or newer, found {version} (tested: "
                f"{self.tested_versions}): {self.how_to_install}; or use {instead}"
            )
        return (
            f"{name!r} needs {self.title}, which is not installed (tested: {self.tested_versions}): "
            f"{self.how_to_install}; or use {instead}"
        )


@functools.cache  # reading the metadata takes milliseconds
def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def at_least(version: str, minimum: str) -> bool:
    """Compare dotted version numbers, ignoring suffixes (+cpu, rc1, .dev0)."""

    def numbers(text: str) -> list[int]:
        parts = [int(n) for n in re.match(r"\d+(?:\.\d+)*", text).group().split(".")]
        return parts + [0] * (4 - len(parts))

    return numbers(version) >= numbers(minimum)


def is_installed(module: str) -> bool:
    """Whether a module, or a submodule such as `megatron.core`, can be imported. Its parents are imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None  # a folder of that name has no origin
