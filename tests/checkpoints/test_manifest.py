"""Manifests that are edited, or that are none, are damage of their checkpoint."""

import json

import pytest

from tests.checkpoints.test_store import save
from verl.checkpoints.store import CheckpointStore

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
    ({"dropped": "actor"}, "dropped: expected a list of names"),
    ({"dropped": [1]}, "dropped: expected a list of names"),
]


@pytest.mark.parametrize(("change", "fault"), MALFORMED)
def test_a_malformed_manifest_is_rejected_and_the_previous_checkpoint_is_used(tmp_path, caplog, change, fault):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    manifest = tmp_path / "global_step_2" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert store.latest() == tmp_path / "global_step_1"
    assert fault in caplog.text and "global_step_2 is damaged" in caplog.text
    save(store, 3)  # the run continues beside it
    assert store.latest() == tmp_path / "global_step_3"


@pytest.mark.parametrize("text", ["", "[]", "null", "\ud800", "[" * 100_000, '{"format": 1}'])
def test_a_manifest_that_is_no_manifest(tmp_path, text):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    (tmp_path / "global_step_2" / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    assert store.latest() == tmp_path / "global_step_1"
