"""The part of a working directory that Ray ships to the nodes: code, never weights, checkpoints or data.

`runtime_env.yaml` has the patterns that are always excluded. A directory that is still too large is rejected before Ray
packs it, with its size, its largest entries and the patterns that exclude them.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl.utils.paths import resolved

_DEFAULTS = Path(__file__).with_name("runtime_env.yaml")
_IGNORE_FILES = (".gitignore", ".rayignore")  # Ray reads them too
_RAY_LIMIT = "RAY_max_grpc_message_size"
_LISTED = 5  # largest entries that the error about a too large package lists

Matcher = Callable[[str], bool]


def default_excludes() -> list[str]:
    return list(yaml.safe_load(_DEFAULTS.read_text(encoding="utf-8"))["excludes"])


def package_limit() -> int:
    """Max bytes that Ray ships: 512 MiB, or the value of Ray's environment variable."""
    return int(os.environ.get(_RAY_LIMIT, 512 * 2**20))


def prepare_runtime_env(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: variables as strings, and exclude patterns for the working directory.

    Raises ValueError for a working directory that does not exist or is too large for Ray.
    """
    env = {name: value for name, value in settings.items() if value is not None}
    if "env_vars" in env:
        env["env_vars"] = {name: str(value) for name, value in env["env_vars"].items()}
    folder = env.get("working_dir")
    if folder is None or "://" in folder or folder.endswith(".zip"):  # already packed
        return env
    env["excludes"] = [*default_excludes(), *env.get("excludes", [])]
    check_package(Path(folder), env["excludes"], package_limit())
    return env


def check_package(folder: Path, excludes: Sequence[str], limit: int) -> None:
    """Raise ValueError if Ray would send `limit` bytes or more of a folder; the message names the largest entries."""
    if not folder.is_dir():
        raise ValueError(f"runtime_env.working_dir: there is no folder {str(folder)!r} (looked at {resolved(folder)})")
    sizes: Counter[str] = Counter()
    for path, size in packed_files(folder, excludes):
        top, inside, _ = path.partition("/")
        sizes[f"/{top}/" if inside else f"/{top}"] += size
    total = sum(sizes.values())
    if total < limit:
        return
    largest = "; ".join(
        f"{_format_size(size)} excluded by the pattern {path!r}" for path, size in sizes.most_common(_LISTED)
    )
    raise ValueError(
        f"runtime_env.working_dir {str(folder)!r} is too large to send to the nodes: {_format_size(total)}, and Ray "
        f"sends less than {_format_size(limit)}. Its largest entries: {largest}. Add such patterns to "
        "ray_kwargs.ray_init.runtime_env.excludes (or to a file .rayignore), or remove working_dir if all nodes share "
        "a file system"
    )


def packed_files(folder: Path, excludes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(path below the folder, bytes) of every file that Ray would pack."""
    yield from _walk(folder, "", [("", ignore_matcher(excludes))])


def _walk(folder: Path, prefix: str, matchers: list[tuple[str, Matcher]]) -> Iterator[tuple[str, int]]:
    """Walk a folder. matchers: each with the path of the folder that its patterns are relative to."""
    for name in _IGNORE_FILES:
        if (folder / name).is_file():
            matchers = [*matchers, (prefix, ignore_matcher((folder / name).read_text(encoding="utf-8").splitlines()))]
    for entry in sorted(folder.iterdir()):
        path = prefix + entry.name
        if entry.is_dir() and not entry.is_symlink():
            if not _is_excluded(path + "/", matchers):
                yield from _walk(entry, path + "/", matchers)
        elif entry.is_file() and not _is_excluded(path, matchers):
            yield path, entry.stat().st_size


def _is_excluded(path: str, matchers: Sequence[tuple[str, Matcher]]) -> bool:
    return any(matches(path.removeprefix(base)) for base, matches in matchers)


def ignore_matcher(lines: Iterable[str]) -> Matcher:
    """Whether a path (a folder's ends in /) is excluded by the lines of a .gitignore, as Ray reads them."""
    from ray._private.thirdparty.pathspec import PathSpec

    return PathSpec.from_lines("gitwildmatch", lines).match_file


def _format_size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
