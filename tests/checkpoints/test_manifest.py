"""Files and manifests that are changed, or that are none, are damage of their checkpoint."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoints.test_store import flip_byte, save
from verl.checkpoints.store import CheckpointError, CheckpointStore

ENTRY = {"bytes": 850, "sha256": "0" * 64}
MALFORMED = [
    ({"serial": "x"}, "serial: expected int >= 0, found 'x'"),
    ({"serial": True}, "serial: expected int >= 0, found True"),
    ({"serial": -1}, "serial: expected int >= 0, found -1"),
    ({"format": 99}, "expected format 1, found 99"),
    ({"format": None}, "expected format 1, found None"),
    ({"files": {}}, "files: expected an object with an entry per file, found none"),
    ({"files": []}, "files: expected an object"),
    ({"files": {"trainer.json": {}}}, "'trainer.json': expected bytes and sha256, found {}"),
    ({"files": {"trainer.json": 5}}, "expected bytes and sha256, found 5"),
    ({"files": {"trainer.json": ENTRY | {"bytes": "850"}}}, "expected bytes and sha256"),
    ({"files": {"trainer.json": ENTRY | {"sha256": "short"}}}, "expected bytes and sha256"),
    ({"files": {"../other/model.bin": ENTRY}}, "a path inside the checkpoint, found '../other/model.bin'"),
    ({"files": {"/etc/passwd": ENTRY}}, "a path inside the checkpoint, found '/etc/passwd'"),
    *((text, "is damaged: manifest.json") for text in ("", "[]", "null", "\ud800", "[" * 100_000, '{"format": 1}')),
]


#: what happens to the folder of a checkpoint, and its fault
DAMAGE = [
    (lambda folder: flip_byte(folder / "critic/model.bin"), "critic/model.bin: expected sha256"),
    (lambda folder: os.truncate(folder / "actor/model.bin", 10), "actor/model.bin: expected 800 bytes, found 10"),
    (lambda folder: (folder / "actor/model.bin").unlink(), "actor/model.bin is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    (lambda folder: os.truncate(folder / "manifest.json", 30), "manifest.json cannot be read"),
]


def rewrite_manifest(folder: Path, change: dict | str) -> None:
    """Change entries of the manifest, or its text."""
    manifest = folder / "manifest.json"
    text = json.dumps(json.loads(manifest.read_text()) | change) if isinstance(change, dict) else change
    manifest.write_bytes(text.encode(errors="surrogatepass"))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [*DAMAGE, *((partial(rewrite_manifest, change=change), fault) for change, fault in MALFORMED)],
)
def test_damage_is_refused_by_name_and_the_checkpoint_before_is_used(tmp_path, caplog, damage, fault):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    save(store, 20)
    damage(tmp_path / "global_step_20")
    assert store.latest() == tmp_path / "global_step_10"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("global_step_20" in message and fault in message for message in errors)
    with pytest.raises(CheckpointError, match="global_step_20"):
        store.resume_path(tmp_path / "global_step_20")
    save(store, 20)  # the damaged step is reached and saved again
    assert store.latest() == tmp_path / "global_step_20"
