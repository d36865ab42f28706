"""Independent operators of different processes overlap, and no number depends on the overlap."""

import itertools
import logging
import re
import threading
import time
import traceback

import pytest
import torch

from tests.test_dataflow import numbers
from verl import HOLD, DataFlow, DataProto, DataProtoValidationError, Operator
from verl.dataflow import CONTROLLER
from verl.dataflow.operator import depends

WAIT = 10  # seconds after which a meeting that cannot happen is a failure


def processes(on: str) -> str | None:
    return None if on == CONTROLLER else on


def pipeline(*operators: Operator, overlap: bool = True):
    compiled = DataFlow(operators).compile(inputs=("x", "uid"))
    compiled.processes_of = processes if overlap else None
    return compiled


def adds(column: str, *reads: str, meet: threading.Barrier | None = None):
    """A function that writes 1 + the sum of what it reads; with `meet`, only beside another one."""

    def func(batch):
        if meet is not None:
            meet.wait(WAIT)
        return {column: torch.ones(3) + sum(batch.batch[name] for name in reads)}

    return func


def op(name: str, reads: str, on: str | None, meet: threading.Barrier | None = None) -> Operator:
    """An operator that writes the column of its own name."""
    return Operator(name, adds(name, *reads, meet=meet), tuple(reads), name, on=on)


def test_independent_operators_of_different_processes_run_at_the_same_time(caplog):
    meet = threading.Barrier(3)
    flow = pipeline(op("a", "x", "one", meet), op("b", "x", "two", meet), op("c", "x", CONTROLLER, meet))
    with caplog.at_level(logging.INFO, logger="verl.dataflow"):
        after = flow.run(numbers())
    assert all(after.batch[name].tolist() == [1.0, 2.0, 3.0] for name in "abc")
    assert list(flow.timings) == list(after.meta_info["timing"]) == ["a", "b", "c"]
    assert flow.seconds < sum(flow.timings.values()) + 1
    lines = [re.sub(r"\d+\.\d\ds", "-", line) for line in caplog.messages]
    assert sorted(lines)[0] in ("[a] - (at the same time: b, c)", "[a] - (at the same time: c, b)")


def test_an_operator_of_the_controller_does_not_delay_later_operators_of_other_processes():
    """As a slow reward function and the log-probs: the list has the reward first."""
    meet = threading.Barrier(2)
    order = []
    flow = pipeline(op("reward", "x", CONTROLLER, meet), op("log_prob", "x", "actor", meet))
    flow.observer = lambda name, seconds, batch: order.append(name)
    flow.run(numbers())
    assert sorted(order) == ["log_prob", "reward"]


def never(*pairs):
    """Operators whose spans must not overlap, by pairs; each takes a while, so that it would show."""

    def check(flow):
        for before, after in pairs:
            assert flow.spans[before][1] <= flow.spans[after][0], (before, after)

    return check


def slow(column: str, *reads: str):
    def func(batch):
        time.sleep(0.02)
        return {column: torch.ones(3) + sum(batch.batch[name] for name in reads)}

    return func


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Operator("1", slow("a", "x"), "x", "a", on="one"), Operator("2", slow("b", "a"), "a", "b", on="two")),  # reads
        (Operator("1", slow("a", "x"), "x", "a", on="one"), Operator("2", slow("x"), (), "x", on="two")),  # overwrites
        (Operator("1", slow("a"), (), "a", on="one"), Operator("2", slow("a"), (), "a", on="two")),  # both write
        (
            Operator("1", slow("a", "x"), "x", "a", on="one"),
            Operator("2", slow("b", "x"), "x", "b", on="one"),
        ),  # shared
        (Operator("1", slow("a", "x"), "x", "a"), Operator("2", slow("b", "x"), "x", "b", on="one")),  # without `on`
        (Operator("1", slow("a", "x"), "x", "a", on="one"), Operator("2", slow("b", "x"), "x", "b")),
    ],
)
def test_dependent_operators_do_not_overlap(first, second):
    flow = pipeline(first, second)
    flow.run(numbers())
    never(("1", "2"))(flow)


def test_many_flows_give_the_same_batch_with_and_without():
    """All flows of four operators out of these: the batch that each operator sees is the same in both runs."""
    seen: list = []

    def watching(operator: Operator) -> Operator:
        def func(batch):
            seen.append((operator.name, sorted((c, batch.batch[c].tolist()) for c in batch.tensors)))
            batch.meta_info["metrics"] = {operator.name: len(batch.columns), "last": operator.name}
            return operator.func(batch)

        return Operator(operator.name, func, operator.reads, operator.writes, operator.on)

    kinds = [op("a", "x", "one"), Operator("b", adds("b", "x"), "x", "b", on="two")]
    kinds += [Operator("anew", adds("x", "x"), "x", "x", on=CONTROLLER)]
    kinds += [Operator("c", adds("c", "a"), "a", "c", on="two"), Operator("alone", adds("d", "x"), "x", "d")]
    tried = 0
    for chosen in itertools.permutations(kinds, 4):
        names = [o.name for o in chosen]
        if "c" in names and ("a" not in names or names.index("a") > names.index("c")):
            continue
        results = []
        for overlap in (False, True):
            seen.clear()
            flow = pipeline(*map(watching, chosen), overlap=overlap)
            after = flow.run(numbers())
            after.meta_info.pop("timing")
            columns = {name: after.batch[name].tolist() for name in sorted(after.tensors)}
            results.append((columns, after.meta_info, list(after.meta_info["metrics"]), sorted(seen)))
        assert results[0] == results[1], names
        tried += 1
    assert tried == 24 + 36  # without `c`; and half of the 72 with both, where `a` comes before `c`


def test_the_column_of_a_concurrent_operator_is_hidden():
    def looks(batch):
        time.sleep(0.05)
        assert batch.columns == ("x", "uid")
        return {"b": batch.batch["x"]}

    after = pipeline(op("a", "x", "one"), Operator("b", looks, "x", "b", on="two"), overlap=False).run(numbers())
    assert after.columns == ("x", "a", "b", "uid")


def test_extra_columns_are_seen_by_those_that_depend_on_their_writer():
    """A reward function's own values, which nobody declares."""

    def reward(batch):
        return {"score": batch.batch["x"], "acc": [1, 0, 1]}

    def looks(batch):
        return {"adv": torch.tensor(batch.column("acc").astype(float))}

    flow = pipeline(
        Operator("reward", reward, "x", "score", on=CONTROLLER),
        op("b", "x", "one"),
        Operator("adv", looks, "score", "adv", on="two"),
    )
    assert flow.run(numbers()).batch["adv"].tolist() == [1.0, 0.0, 1.0]


def test_facts_of_concurrent_operators_are_merged():
    def sets(name):
        def func(batch):
            batch.meta_info[name] = name
            batch.meta_info["metrics"] = {name: 1}

        return func

    batch = numbers()
    batch.meta_info["start"] = 0
    after = pipeline(Operator("a", sets("a"), "x", on="one"), Operator("b", sets("b"), "x", on="two")).run(batch)
    after.meta_info.pop("timing")
    assert after.meta_info == {"start": 0, "a": "a", "b": "b", "metrics": {"a": 1, "b": 1}}


def test_an_error_names_the_concurrent_operator_and_keeps_its_stack():
    met, release = threading.Barrier(2), threading.Event()

    def breaks(batch):
        met.wait(WAIT)
        raise KeyError("ground_truth")

    def long(batch):
        met.wait(WAIT)
        release.wait(WAIT)

    start = time.monotonic()
    with pytest.raises(KeyError, match="ground_truth") as caught:
        pipeline(Operator("long", long, "x", on="one"), Operator("breaks", breaks, "x", on="two")).run(numbers())
    assert time.monotonic() - start < WAIT / 2  # it does not wait for the other one
    release.set()
    assert caught.value.__notes__ == ["raised in operator 'breaks'", "running at the same time: long"]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "breaks"


@pytest.mark.parametrize("result", [HOLD, {"y": torch.ones(3)}, DataProto.from_dict({"x": torch.ones(1)})])
def test_an_operator_with_on_does_not_replace_the_batch(result):
    with pytest.raises(DataProtoValidationError, match=r"operator 'op': it declares where it runs \(on='one'\)"):
        pipeline(Operator("op", lambda batch: result, "x", on="one")).run(numbers())


def test_dependence_by_hand():
    gen, reward = Operator("gen", len, "x", "y", on="actor"), Operator("reward", len, "y", "r", on=CONTROLLER)
    ref, kl = Operator("ref", len, "y", "p", on="ref"), Operator("kl", len, ("r", "p"), "r", on=CONTROLLER)
    assert depends(reward, gen) and depends(kl, ref) and depends(kl, reward) and depends(gen, Operator("any", len))
    assert not depends(ref, reward)
