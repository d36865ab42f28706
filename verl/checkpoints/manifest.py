"""The manifest of a checkpoint: written last, with the sizes and checksums of all files."""

import json
import re
from pathlib import PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1

#: the fix of a checkpoint that cannot be restored, for messages
DELETE = "delete this checkpoint, so that the one before it is used"


def make_manifest(serial: int, files: dict[str, dict[str, Any]]) -> str:
    """Return the text of a manifest. files: path in the folder -> size and checksum."""
    return json.dumps({"format": FORMAT, "serial": serial, "files": files}, indent=1)


def manifest_fault(manifest: Any) -> str | None:
    """Return the fault of the contents of a manifest, or None."""
    if not isinstance(manifest, dict):
        return f"expected an object, found {type(manifest).__name__}"
    if manifest.get("format") != FORMAT or isinstance(manifest.get("format"), bool):
        return f"expected format {FORMAT}, found {manifest.get('format')!r}: it was written by another version"
    if not is_count(manifest.get("serial")):
        return f"serial: expected int >= 0, found {manifest.get('serial')!r}"
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        return "files: expected an object with an entry per file, found " + ("none" if files == {} else repr(files))
    for name, entry in files.items():
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"files: expected a path inside the checkpoint, found {name!r}"
        digest = entry.get("sha256") if isinstance(entry, dict) and is_count(entry.get("bytes")) else None
        if not isinstance(digest, str) or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
            return f"files: {name!r}: expected bytes and sha256, found {entry!r}"
    return None


def is_count(value: Any) -> bool:
    """Whether a value read from a file is an int of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
