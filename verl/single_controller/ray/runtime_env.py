"""What of a working directory travels to the nodes of a Ray cluster: code, never weights, checkpoints or data.

`runtime_env.yaml` has the patterns that are always left out. A directory that is too large all the same is explained
before Ray packs it: how large, what is in it, and which pattern leaves it out.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_DEFAULTS = Path(__file__).with_name("runtime_env.yaml")
_IGNORE_FILES = (".gitignore", ".rayignore")  # that Ray reads too
_RAY_LIMIT = "RAY_max_grpc_message_size"
_SHOWN = 5  # of the largest parts of a package that is too large

Matcher = Callable[[str], bool]


def default_excludes() -> list[str]:
    """The patterns that are always left out."""
    return list(yaml.safe_load(_DEFAULTS.read_text())["excludes"])


def package_limit() -> int:
    """Bytes that Ray sends at most, where its own variable does not say otherwise."""
    return int(os.environ.get(_RAY_LIMIT, 512 * 2**20))


def prepare_runtime_env(given: Mapping[str, Any]) -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: variables as text, and of a working directory only what should travel.

    Raises ValueError for a working directory that is not there or that is too large for Ray.
    """
    env = {name: value for name, value in given.items() if value is not None}
    if "env_vars" in env:
        env["env_vars"] = {name: str(value) for name, value in env["env_vars"].items()}
    folder = env.get("working_dir")
    if folder is None or "://" in folder or folder.endswith(".zip"):  # packed before, and somewhere else
        return env
    env["excludes"] = [*default_excludes(), *env.get("excludes", [])]
    check_package(Path(folder), env["excludes"], package_limit())
    return env


def check_package(folder: Path, excludes: Sequence[str], limit: int) -> None:
    """Raise ValueError when what travels of a folder is not less than `limit` bytes; the message has the culprits."""
    if not folder.is_dir():
        raise ValueError(f"runtime_env.working_dir: there is no folder {str(folder)!r} (looked at {folder.resolve()})")
    sizes: Counter[str] = Counter()
    for path, size in travelling(folder, excludes):
        top, inside, _ = path.partition("/")
        sizes[f"/{top}/" if inside else f"/{top}"] += size
    total = sum(sizes.values())
    if total < limit:
        return
    parts = "; ".join(f"{_words(size)} left out by the pattern {part!r}" for part, size in sizes.most_common(_SHOWN))
    raise ValueError(
        f"runtime_env.working_dir {str(folder)!r} is too large to travel to the nodes: {_words(total)}, and Ray sends "
        f"less than {_words(limit)}. Its largest parts: {parts}. Add such patterns to "
        "ray_kwargs.ray_init.runtime_env.excludes (or to a file .rayignore), or leave working_dir out where all nodes "
        "see the same file system"
    )


def travelling(folder: Path, excludes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(path below the folder, bytes) of every file that Ray would pack."""
    yield from _walk(folder, "", [("", ignore_matcher(excludes))])


def _walk(folder: Path, prefix: str, matchers: list[tuple[str, Matcher]]) -> Iterator[tuple[str, int]]:
    """matchers: each with the path of the folder that its patterns are relative to."""
    for name in _IGNORE_FILES:
        if (folder / name).is_file():
            matchers = [*matchers, (prefix, ignore_matcher((folder / name).read_text().splitlines()))]
    for entry in sorted(folder.iterdir()):
        path = prefix + entry.name
        if entry.is_dir() and not entry.is_symlink():
            if not _left_out(path + "/", matchers):
                yield from _walk(entry, path + "/", matchers)
        elif entry.is_file() and not _left_out(path, matchers):
            yield path, entry.stat().st_size


def _left_out(path: str, matchers: Sequence[tuple[str, Matcher]]) -> bool:
    return any(matches(path.removeprefix(base)) for base, matches in matchers)


def ignore_matcher(lines: Sequence[str]) -> Matcher:
    """Whether a path (a folder's ends in /) is left out by the lines of a .gitignore; the last line that fits says."""
    rules = [
        (not line.startswith("!"), _regex(line.removeprefix("!"))) for line in map(str.strip, lines) if _says(line)
    ]

    def matches(path: str) -> bool:
        return next((out for out, regex in reversed(rules) if regex.fullmatch(path)), False)

    return matches


def _says(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern of .gitignore for paths of files and folders."""
    body = pattern.strip("/")
    anywhere = "/" not in pattern.rstrip("/")
    parts = []
    for token in re.findall(r"\*\*/|/\*\*$|\*|\?|\[[^\]]+\]|.", body):
        known = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
        parts.append(known.get(token) or (token.replace("[!", "[^") if len(token) > 1 else re.escape(token)))
    ending = "/.*" if pattern.endswith("/") else "(?:/.*)?"
    return re.compile(("(?:.*/)?" if anywhere else "") + "".join(parts) + ending)


def _words(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
