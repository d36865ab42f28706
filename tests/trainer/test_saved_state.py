"""The trainer's state comes back type by type, and no file of a checkpoint can run code when it is read."""

import json
import math
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.conftest import run_settings
from verl.checkpoints.store import _seal
from verl.dataflow import Pipeline
from verl.engines.torch_engine import TorchEngine
from verl.protocol import DataProto
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.state.saved_state import load_state, save_state
from verl.utils.rng import rng_state

STATE = {
    "numbers": [1, -(2**70), 0.1, 1e-300, True, None, math.inf, np.float32(0.1), np.int64(7)],
    "text": ["", "é\n\U0001f600", b"\x00\xff"],
    "nested": ({"a": (1, (2,))}, {}, [], {3: "int key", (1, 2): "tuple key"}, {"$tensor": "no tensor"}),
    "a.b": torch.arange(3),
    "a": {
        "b": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "scalar": torch.tensor(2.0),
        "none": torch.ones(0, 4),
    },
    "shared": torch.arange(6).view(2, 3).T,
    "arrays": [np.arange(4, dtype=np.uint8), np.zeros((2, 2)), np.array([[1, 2], [3, 4]], dtype=np.int32)],
    "objects": np.array([None, "x"], dtype=object),
}


def same(a, b) -> None:
    """Equal, and of the same types all the way down."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(9), b.nan_to_num(9))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        for x, y in zip(a.ravel(), b.ravel(), strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, DataProto):
        same(a.__getstate__(), b.__getstate__())
    else:
        assert a == b


def test_a_state_comes_back_as_it_was(tmp_path):
    save_state(STATE, tmp_path, "state")
    same(load_state(tmp_path, "state"), STATE)
    json.loads((tmp_path / "state.json").read_text())


def test_batches_and_random_states_come_back(tmp_path):
    prompts = {"prompt_ids": [[1, 2], [3, 4]], "extra_info": [{"index": 0, "tags": ["a"]}, {}], "uid": ["a", "b"]}
    batch = DataProto.from_dict({"responses": torch.arange(4).view(2, 2)}, prompts, {"global_step": 3})
    state = {"held": [batch, batch[:0]], "waiting": batch[1:], "rng": rng_state()}
    save_state(state, tmp_path, "state")
    same(load_state(tmp_path, "state"), state)


class Runs:
    """A pickle of it runs code."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (exec, (f"open({str(self.mark)!r}, 'w').close()",))


@pytest.mark.parametrize("value", [Runs("x"), {1, 2}, np.array(["a"]), complex(1, 2)])
def test_what_could_not_be_read_back_is_named(value, tmp_path):
    with pytest.raises(ValueError, match=r"^state\.flow\.mine\.1: .*cannot be saved"):
        save_state({"flow": {"mine": [0, value]}}, tmp_path, "state")
    with pytest.raises(ValueError, match=r"has no state\.json"):
        load_state(tmp_path, "state")


def strangers(folder, edit) -> None:
    """What somebody else may have done to a checkpoint: `edit` it, and describe it anew."""
    edit(folder)
    (folder / "manifest.json").unlink()
    _seal(folder, 1)


def test_an_untrusted_checkpoint_cannot_run_code(settings, tmp_path):
    """In every file of a checkpoint that torch would unpickle without a question."""
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1"]
    run = tmp_path / "run"
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"]).fit()
    folder, mark = run / "global_step_1", tmp_path / "ran"
    written = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"trainer.json", "trainer.safetensors", "extra.pt", ".metadata"} <= written
    shards = folder / "actor" / "shards"
    kept = {path: path.read_bytes() for path in [*shards.iterdir(), folder / "actor" / "extra.pt"]}

    def plain_value(at) -> None:
        """The file of shards has the value of an optimizer's setting replaced by a pickle of ours, at its own place."""
        described = pickle.loads((shards / ".metadata").read_bytes())
        place = next(p for i, p in described.storage_data.items() if i.fqn.endswith(".betas"))
        torch.save(Runs(mark), tmp_path / "value")
        content = (tmp_path / "value").read_bytes()
        file = shards / place.relative_path
        place.offset, place.length = file.stat().st_size, len(content)
        file.write_bytes(file.read_bytes() + content)
        (shards / ".metadata").write_bytes(pickle.dumps(described))

    edits = {
        r"\.metadata cannot be read: builtins\.exec is not allowed": lambda at: (shards / ".metadata").write_bytes(
            pickle.dumps(Runs(mark))
        ),
        r"is damaged, or lacks .*: UnpicklingError: (?!.*weights_only)": plain_value,
        r"extra\.pt is damaged, .*: UnpicklingError: (?!.*weights_only)": lambda at: torch.save(
            Runs(mark), at / "actor" / "extra.pt"
        ),
    }
    for message, edit in edits.items():
        for path, content in kept.items():
            path.write_bytes(content)
        strangers(folder, edit)
        with pytest.raises(ValueError, match=message):
            LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=2"]).fit()
        assert not mark.exists()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    LocalPPOTrainer(overrides=[*run_settings(tiny, run), *ONE_STEP]).fit()
    return run


def state_with(**changes):
    def edit(at) -> None:
        path = at / "trainer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def without_number(at) -> None:
    path = at / "actor/huggingface/model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][1, 2] = math.nan
    save_file(tensors, path, {"format": "pt"})


ONE_STEP = ["algorithm.name=grpo", "trainer.save_freq=1", "trainer.total_training_steps=1"]
OTHER = r"the state of the trainer cannot be restored: .*\(\w+\.py:\d+\)"
DAMAGED = {
    "no state": (lambda at: (at / "trainer.json").write_text("{}"), OTHER),
    "a list as state": (lambda at: (at / "trainer.json").write_text("[1]"), OTHER),
    "the step is text": (state_with(global_step="1"), OTHER),
    "the position is a number": (state_with(flow={"prompts": 5}), OTHER),
    "the random state is a list": (state_with(rng=[1]), OTHER),
    "fingerprints are numbers": (state_with(identity={"model": 5}), OTHER),
    "weights are cut": (
        lambda at: (at / "actor/huggingface/model.safetensors").write_bytes(b"x" * 100),
        "actor is damaged, .*SafetensorError",
    ),
    "shards are cut": (lambda at: os.truncate(at / "actor/shards/__0_0.distcp", 1000), "is damaged, or lacks .*Error"),
    "weights with NaN": (without_number, "the actor contains NaN, infinity or weights beyond 1e6 in lm_head.weight"),
}


@pytest.mark.fast("the random state is a list", "weights with NaN", "shards are cut", "a list as state")
@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_that_the_manifest_does_not_show_is_one_error(kind, saved, tiny, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    edit, message = DAMAGED[kind]
    strangers(run / "global_step_1", edit)
    with pytest.raises(ValueError, match=message) as caught:
        LocalPPOTrainer(overrides=[*run_settings(tiny, run), *ONE_STEP, "trainer.total_training_steps=2"]).fit()
    assert str(run / "global_step_1") in str(caught.value) and "\n" not in str(caught.value)


def test_a_fault_in_the_code_of_a_user_is_not_called_damage_only(saved, tiny, tmp_path, monkeypatch, caplog):
    """Of the sampler's state in the driver, and of an engine in a worker: the log has the line of the fault."""

    def load_faulty(*arguments):
        raise KeyError("of the user")

    run = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    said = r"damaged, of another version, or .*`load_state_dict` failed .*if it is damaged, delete this checkpoint, so"
    for place in (Pipeline, "load_state_dict"), (TorchEngine, "load"):
        caplog.clear()
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=said) as caught:
            patch.setattr(*place, load_faulty)
            LocalPPOTrainer(overrides=[*run_settings(tiny, run), *ONE_STEP, "trainer.total_training_steps=2"]).fit()
        assert isinstance(caught.value.__cause__, KeyError) and "in load_faulty" in caplog.text


def test_a_checkpoint_of_weights_alone_resumes_and_says_what_is_missing(settings, tmp_path, caplog):
    """Not with the weights that the run began with."""
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1"]
    chosen += ["actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=2"]).fit()
    assert "RESUMED" not in caplog.text
    still = [*chosen, "trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=0"]
    LocalPPOTrainer(overrides=still).fit()
    assert "RESUMED WITHOUT OPTIMIZER: the actor of" in caplog.text and "RESUMED WITHOUT EXTRA" in caplog.text
    before, after = (
        load_file(tmp_path / f"run/global_step_{step}/actor/huggingface/model.safetensors") for step in (2, 3)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_no_weights_at_all_are_refused(settings):
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"]).fit()
    nothing = "actor_rollout_ref.actor.checkpoint.load_contents=[optimizer]"
    with pytest.raises(ValueError, match="resume with its initial weights"):
        LocalPPOTrainer(overrides=[*chosen, nothing, "trainer.total_training_steps=2"]).fit()
