"""benchmarks/calibrate.py on a smaller model."""

from dataclasses import replace

import pytest
import torch

from benchmarks import calibrate
from tests.planner.test_planner import TINY
from verl.engines.torch_engine import TorchEngine
from verl.modeling import attention
from verl.planner import step_time
from verl.planner.devices import host_profile


def test_the_engines_are_measured_with_the_attention_of_training(monkeypatch):
    """torch's own attention would build a mask of all tokens x all tokens of the packed sequences."""
    found = []

    class Recorded(TorchEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self.module.config._attn_implementation)

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    for name, value in {"TorchEngine": Recorded, "CPU_PROBE": sizes, "CPU_ROWS": 4, "REPEATS": 1}.items():
        monkeypatch.setattr(calibrate, name, value)
    profile = calibrate.with_engine_rates(host_profile(torch.device("cpu")), torch.device("cpu"))
    assert found == [attention.NAME]
    assert min(profile.forward, profile.backward, profile.decode, profile.layer_seconds, profile.decode_seconds) > 0


def test_the_corrected_profile_predicts_what_was_measured():
    job, profile = calibrate.probe_job(TINY, 8, 32, 64, 4), host_profile(torch.device("cpu"))
    infer, update, generated = 0.5, 3.0, 2.0
    found = calibrate._corrected(replace(profile, layer_seconds=1e-3), job, infer, update, generated)
    role = job.roles[0]
    assert step_time.infer_seconds(job, role, found) == pytest.approx(infer)
    assert step_time.update_seconds(job, role, found) == pytest.approx(update)
    assert step_time.generation_seconds(job, role, found) == pytest.approx(generated)
