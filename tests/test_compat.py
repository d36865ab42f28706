"""Module paths of earlier releases return the modules that replaced them."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from verl.compat import MOVED

NEEDS_TRITON = ("_triton", "triton_kernels", "cuda", "paged")


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module(old):
    new = MOVED[old]
    if any(word in new for word in NEEDS_TRITON) or ".ray." in new:
        assert (Path(importlib.util.find_spec(new).origin)).is_file()
        return
    assert importlib.import_module(old) is importlib.import_module(new)
    assert importlib.import_module(new).__spec__.name == new


def test_classes_of_old_pickles_are_found():
    text = b"cverl.utils.checkpoint_store\nCheckpointError\n."
    from verl.checkpoints.store import CheckpointError

    assert pickle.loads(text) is CheckpointError


def test_an_unknown_path_is_still_an_import_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.invariant.nothing")


def test_the_hook_imports_nothing_itself():
    code = "import sys, verl; print([m for m in sys.modules if m.startswith('verl.') and m != 'verl.compat'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
