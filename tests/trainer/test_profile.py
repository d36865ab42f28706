"""trainer.profile_steps: traces of the steps that are named, of every process, in a run that is otherwise the same."""

import gzip
import json

import pytest
import torch

from tests.trainer.runs import fit, metrics_of
from verl.trainer.guards.base import Guard
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer

UPDATE = {"actor.update_actor", "FusedLinearBackward", "Optimizer.step#AdamW.step", "aten::_fused_adamw_"}


def ops(path) -> set[str]:
    """The names of the operations in a trace."""
    return {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if "name" in event}


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("local", 1), pytest.param("local", 2, marks=pytest.mark.slow), pytest.param("ray", 2, marks=pytest.mark.slow)],
)
def test_named_steps_are_traced_in_every_process_and_nothing_else_changes(settings, tmp_path, backend, ranks):
    def run(folder: str, *more: str):
        names = [f"trainer.default_local_dir={tmp_path / folder}", "trainer.total_training_steps=3"]
        names += [f"trainer.n_gpus_per_node={ranks}", f"trainer.backend={backend}", "trainer.device=cpu"]
        fit([*settings, *names, *more], PPOTrainer)
        return tmp_path / folder

    profiled = run("profiled", "trainer.profile_steps=[2]")
    traces = sorted((profiled / "profile").iterdir())
    assert [path.name for path in traces] == [f"step_2_actor_rank_{rank}.pt.trace.json.gz" for rank in range(ranks)]
    assert all(ops(path) >= UPDATE for path in traces)
    plain = run("plain")
    assert metrics_of(profiled) == metrics_of(plain)
    assert not (plain / "profile").exists()


def test_a_step_that_fails_leaves_no_recording(settings):
    class Fail(Guard):
        def before_step(self, view):
            assert torch.autograd._profiler_enabled()
            raise RuntimeError("in the step")

    trainer = LocalPPOTrainer(overrides=[*settings, "trainer.profile_steps=[1]"])
    trainer.guards.append(Fail())
    with pytest.raises(RuntimeError, match="in the step"):
        trainer.fit()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_steps_after_the_end_are_reported(settings, caplog):
    fit([*settings, "trainer.total_training_steps=1", "trainer.profile_steps=[2,1]"])
    assert "trainer.profile_steps: the run ends at step 1, before [2]" in caplog.text
