"""The contract of training engines: the built-in engine, and one from a user's file, selected by name."""

from pathlib import Path

import pytest
import torch

import verl.engines
from tests.engines.ranks import OPTIMIZER, make_batch, make_spec, objective_of, train
from verl.engines.base import MicroBatching, TrainEngine, make_engine, register_train_engine
from verl.registry import import_module
from verl.workers.engine_worker import EngineWorker

CUSTOM = Path(__file__).parents[2] / "examples" / "custom_train_engine" / "data_parallel_engine.py"
CONTENTS = ("model", "optimizer", "extra")


@pytest.fixture(autouse=True)
def custom_engine_is_registered(registries_as_they_were):
    import_module(str(CUSTOM))


def engine(strategy: str, path: str) -> TrainEngine:
    optimizer = OPTIMIZER.model_copy(update={"lr_scheduler_type": "constant"})
    made = make_engine(strategy, make_spec(path, optimizer))
    made.spec = make_spec(path, optimizer)  # read by `objective_of`
    return made


@pytest.mark.parametrize("strategy", ["fsdp2", "data_parallel"])
def test_an_engine_selected_by_name_gives_the_numbers_of_the_built_in_one(strategy, path, tmp_path):
    batch, outputs = make_batch(), ("log_probs", "entropys", "sum_pi_squared")
    expected, found = engine("fsdp", path), engine(strategy, path)
    for micro in (MicroBatching(rows=3), MicroBatching(tokens=40), MicroBatching(tokens="auto"), MicroBatching()):
        for name, value in found.infer(batch, outputs, micro, temperature=0.7).items():
            assert value.device.type == "cpu" and value.dtype == torch.float32
            assert torch.allclose(value, expected.infer(batch, outputs, MicroBatching(), 0.7)[name], atol=1e-5), name
    metrics, ours = (train(each, batch, MicroBatching(rows=3)) for each in (expected, found))
    assert ours.keys() == metrics.keys()
    assert ours["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    after = [each.infer(batch, ("log_probs",), MicroBatching())["log_probs"] for each in (expected, found)]
    assert torch.allclose(*after, atol=1e-3)  # not the weights: where a gradient is 0, Adam scales up its noise
    assert dict(expected.weights()).keys() == dict(found.weights()).keys()
    assert {id(p) for p in found.shared_module().parameters()} == {id(p) for p in found.module.parameters()}
    assert dict(TrainEngine.buffers(found)) == {}, "an engine need not have any"
    # a checkpoint resumes
    found.save(tmp_path, CONTENTS)
    found.finish_save()
    resumed = engine(strategy, path)
    resumed.load(tmp_path, CONTENTS)
    for each in (found, resumed):
        train(each, batch, MicroBatching(), steps=1)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found.weights(), resumed.weights()))


def test_a_name_that_is_not_registered_lists_those_that_are(path):
    with pytest.raises(ValueError, match=r"'fdsp': did you mean 'fsdp'\? known: data_parallel, fsdp, fsdp2"):
        make_engine("fdsp", make_spec(path))


def test_a_factory_that_returns_no_engine(path):
    register_train_engine("forgotten")(lambda spec: None)
    with pytest.raises(
        ValueError, match="strategy=forgotten: expected a factory that returns a TrainEngine, found None"
    ):
        make_engine("forgotten", make_spec(path))


def test_names_of_the_package():
    assert {"fsdp", "fsdp2"} <= set(verl.engines.ENGINES)
    assert verl.engines.TrainEngine is TrainEngine and verl.engines.MetricSums.__module__ == "verl.engines.micro_batch"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verl.engines.nothing  # noqa: B018


def update(worker: EngineWorker, batch, rows: list[int], one_step: bool = False) -> dict:
    with worker.update_pass(batch, "x", one_step=one_step) as passed:
        assert [len(mini) for mini in passed.mini_batches] == rows
        for mini in passed.mini_batches:
            passed.add(worker.engine.train_batch(mini, objective_of(worker.engine, mini), MicroBatching(rows=2)))
    return passed.finish()


def test_workers_update_any_engine_with_one_loop(path):
    """One optimizer step per mini-batch, metrics merged and prefixed, the schedule advanced after the last pass."""
    spec = make_spec(path, OPTIMIZER)
    batch = make_batch().replace()
    batch.meta_info |= {"mini_batch_rows": 4, "last_pass": False}
    found = {}
    for strategy in ("fsdp", "data_parallel"):
        worker = EngineWorker()
        worker.engine = worker.build_engine(strategy, spec.model, spec.engine, OPTIMIZER, device="cpu")
        worker.engine.spec = spec  # read by `objective_of`
        assert "x/lr" not in update(worker, batch, rows=[4, 4])
        found[strategy] = update(worker, batch, rows=[8], one_step=True)
        assert found[strategy]["x/lr"] == OPTIMIZER.lr
        assert found[strategy]["x/grad_norm"][1] == 1
        assert "actor/pg_loss" in found[strategy]
    assert found["fsdp"].keys() == found["data_parallel"].keys()
    for name, value in found["fsdp"].items():
        assert found["data_parallel"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
