"""A flow that runs: what a function may return, how facts are merged, and how errors name the operator."""

import logging
import re
import traceback

import numpy as np
import pytest
import torch

from verl import HOLD, DataFlow, DataProto, DataProtoValidationError, Operator
from verl.dataflow.flow import Total
from verl.dataflow.operator import running, running_operator


def numbers(rows: int = 3) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows, dtype=torch.float32)}, {"uid": [f"u{i}" for i in range(rows)]})


def keep(batch):
    """An operator that does nothing."""


def run_one(func, writes=(), batch=None) -> DataProto:
    """One operator on the batch of numbers."""
    return DataFlow([Operator("op", func, writes=writes)]).compile().run(numbers() if batch is None else batch)


# ---- three functions and a loop -------------------------------------------------------------------------------------


def test_a_loop_in_under_ten_lines(capsys):
    """The example of the README, as a user would type it."""
    snippet = """
from verl import DataFlow

def prompts(): return {"raw_prompt": ["1+1", "2+2"], "truth": ["2", "4"]}
def gen(batch): return {"response": ["2", "5"]}
def reward(batch): print(sum(a == t for a, t in zip(batch.column("response"), batch.column("truth"))))

pipeline = DataFlow([prompts, gen, reward]).compile()
for step in range(3): pipeline.run()
"""
    assert len([line for line in snippet.splitlines() if line]) < 10
    exec(snippet, {})
    assert capsys.readouterr().out == "1\n1\n1\n"


def test_three_operators_added_compiled_and_run():
    flow = DataFlow()
    flow.add_operator(Operator("gen", lambda b: {"y": b.batch["x"] + 1}, reads=("x",), writes=("y",)))
    flow.add_operator(Operator("reward", lambda b: {"z": b.batch["y"] * 2}, reads="y", writes="z"))
    flow.add_operator(lambda b: b[b.batch["z"] > 2])
    result = flow.compile().run(numbers())
    assert result.batch["z"].tolist() == [4.0, 6.0] and result.non_tensor_batch["uid"].tolist() == ["u1", "u2"]
    assert flow.names == ("gen", "reward", "<lambda>")


# ---- what a function returns ----------------------------------------------------------------------------------------


def set_in_place(batch):
    batch.batch["y"] = torch.ones(3)
    return batch


@pytest.mark.parametrize(
    "func",
    [
        lambda b: {"y": torch.ones(3)},
        lambda b: DataProto.from_dict({"y": torch.ones(3)}),
        lambda b: b.replace(y=torch.ones(3)),
        set_in_place,
    ],
)
def test_writes_are_added(func):
    after = run_one(func, writes="y")
    assert after.columns == ("x", "y", "uid") and after.batch["x"].tolist() == [0.0, 1.0, 2.0]


def test_only_declared_columns_may_be_overwritten():
    assert run_one(lambda b: {"x": b.batch["x"] * 10}, writes="x").batch["x"].tolist() == [0.0, 10.0, 20.0]
    with pytest.raises(DataProtoValidationError, match=r"operator 'op': column 'x' is in both .* different contents"):
        run_one(lambda b: {"y": torch.ones(3), "x": b.batch["x"] * 10}, writes="y")

    def in_place(batch):
        batch.batch["x"] = batch.batch["x"] * 10
        batch.batch["y"] = torch.ones(3)
        return batch

    with pytest.raises(DataProtoValidationError, match=r"operator 'op': column 'x' is in both .* different contents"):
        run_one(in_place, writes="y")


def test_without_writes_a_batch_replaces_the_batch_and_a_mapping_is_added():
    assert run_one(lambda b: b.repeat(2)).batch["x"].tolist() == [0, 0, 1, 1, 2, 2]
    assert run_one(lambda b: DataProto.from_dict({"other": torch.ones(7)})).columns == ("other",)
    assert run_one(lambda b: {"other": torch.ones(3)}).columns == ("x", "other", "uid")
    after = run_one(keep)
    assert after.columns == ("x", "uid") and after.batch["x"].tolist() == [0.0, 1.0, 2.0]


def test_hold_ends_the_run_and_the_next_one_starts_from_the_source():
    """A filter that waits until it has four rows of odd numbers: what dynamic sampling does."""
    held, after = [], []
    start = iter(range(0, 100, 3))

    def source():
        first = next(start)
        return {"x": torch.arange(first, first + 3)}

    def gather(batch):
        held.append(batch[batch.batch["x"] % 2 == 1])
        if sum(map(len, held)) < 4:
            return HOLD
        full = DataProto.concat(held)
        held.clear()
        return full

    pipeline = DataFlow([source, gather, Operator("after", lambda b: after.append(len(b)))]).compile()
    assert pipeline.run() is HOLD and repr(HOLD) == "HOLD"
    assert list(pipeline.timings) == ["source", "gather"]
    assert pipeline.run() is HOLD and after == []
    assert pipeline.run().batch["x"].tolist() == [1, 3, 5, 7] and after == [4]
    assert pipeline.run() is HOLD


NO_COLUMNS = "batch without columns; return None to leave the batch unchanged"


@pytest.mark.parametrize(
    ("writes", "result", "message"),
    [
        ("y", None, r"expected the columns \['y'\], found None"),
        ("y", {"z": torch.ones(3)}, r"declares that it writes 'y', but returned \['z'\]"),
        ("y", {"y": torch.ones(2)}, r"adds \['y'\] to 3 rows, found 2 rows"),
        ("y", {"y": 3}, "column 'y': expected a tensor, an array or a list"),
        ("y", {"y": torch.ones(3), "values": torch.ones(3, 2)}, r"returned \['values'\], which it does not declare"),
        ((), {"other": torch.ones(7)}, r"adds \['other'\] to 3 rows, found 7 rows; .* return a DataPro"),
        ((), {"values": torch.ones(3, 2)}, r"returned \['values'\], which it does not declare"),
        ((), {}, NO_COLUMNS),
        ((), DataProto(meta_info={"metrics": {"loss": 1.0}}), NO_COLUMNS),
        *(
            ((), result, f"expected a DataProto, a mapping of columns, None or HOLD, found {type(result).__name__}")
            for result in (3, "text", [1, 2], True, torch.ones(3), (torch.ones(3), {}))
        ),
    ],
)
def test_other_results_are_refused(writes, result, message):
    source = r"\n  Source: <lambda>\(\) at line \d+ in test_data"
    with pytest.raises(DataProtoValidationError, match=rf"operator 'op': .*{message}.*{source}"):
        run_one(lambda b: result, writes=writes)


def test_custom_columns_need_no_declaration():
    """A reward manager adds what it finds (`acc`, `format`): nobody could list it beforehand."""
    after = run_one(lambda b: {"token_level_scores": torch.ones(3, 2), "acc": [1, 0, 1]}, writes="token_level_scores")
    assert after.column("acc").tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "change, columns",
    [
        (lambda batch: batch.reorder(torch.tensor([2, 1, 0])), r"\['x', 'uid'\]"),
        (lambda batch: batch.union(DataProto.from_dict({"v": torch.ones(3)})), r"\['v'\]"),
        (lambda batch: batch.rename("x", "x2"), r"\['x', 'x2'\]"),
        (lambda batch: batch.pop(["x"]), r"\['x'\]"),
    ],
    ids=["reorder", "union", "rename", "pop"],
)
@pytest.mark.parametrize("writes", [("y",), ()], ids=["writes", "mapping"])
def test_columns_that_are_added_do_not_go_with_a_batch_changed_in_place(change, columns, writes):
    """The added rows would not belong to those of the batch, or the change would be lost."""

    def adds(batch):
        change(batch)
        return {"y": torch.arange(3.0)}

    with pytest.raises(DataProtoValidationError, match=rf"'op': it changed the columns {columns} .* only \['y'\]"):
        run_one(adds, writes=writes)


def test_a_column_set_in_place_must_be_returned():
    def sets(batch):
        batch.batch["y"] = torch.ones(3)

    def replaces(batch):
        batch.non_tensor_batch["uid"] = np.array(["a"] * 3, dtype=object)

    def deletes(batch):
        del batch.batch["x"]

    for func, column in ((sets, "y"), (replaces, "uid"), (deletes, "x")):
        with pytest.raises(DataProtoValidationError, match=rf"changed the columns \['{column}'\].* but returned None"):
            run_one(func)


def test_a_batch_broken_by_hand_is_blamed_on_its_writer():
    def breaks(batch):
        batch.non_tensor_batch["uid"] = ["a", "b"]
        return batch

    with pytest.raises(DataProtoValidationError, match=r"(?s)'op': the columns .*'uid': 2.*Source: breaks\(\)"):
        run_one(breaks)


def test_the_batch_of_the_caller_stays_as_it_is():
    batch = numbers().replace(y=torch.zeros(3))
    batch.meta_info["metrics"] = {"a": 1}

    def everything(given):
        given.batch["x"] = torch.ones(3)
        given.meta_info["fact"] = 1
        given.meta_info["metrics"] = {"b": 2}
        return given

    after = run_one(everything, batch=batch)
    assert after.batch["x"].tolist() == [1.0, 1.0, 1.0] and after.meta_info["metrics"] == {"a": 1, "b": 2}
    assert batch.batch["x"].tolist() == [0.0, 1.0, 2.0] and batch.meta_info == {"metrics": {"a": 1}}


# ---- the first operator ---------------------------------------------------------------------------------------------


def test_a_source_makes_the_batch():
    after = DataFlow([Operator("load", lambda: {"x": torch.ones(2), "more": [1, 2]}, writes="x"), keep]).compile().run()
    assert after.columns == ("x", "more")
    for source, writes, message in (
        (lambda: None, (), "expected a batch, found None"),
        (lambda: 3, (), "expected a DataProto, a mapping of columns, None or HOLD, found int"),
        (lambda: {"y": [1]}, "x", r"declares that it writes 'x', but returned \['y'\]"),
    ):
        with pytest.raises(DataProtoValidationError, match=message):
            DataFlow([Operator("load", source, writes=writes)]).compile().run()
    assert DataFlow([lambda: HOLD, keep]).compile().run() is HOLD


def test_a_source_takes_no_batch_and_others_need_one():
    made = DataFlow([Operator("load", lambda batch: {"y": [1, 2]}, writes="y")]).compile().run()  # with one, too
    assert (made.columns, len(made)) == (("y",), 2)
    with pytest.raises(ValueError, match=r"first operator 'numbers_of_two' makes the batch itself: call run\(\)"):
        DataFlow([numbers_of_two]).compile().run(numbers())
    with pytest.raises(ValueError, match=r"first operator 'keep' needs a batch: call run\(batch\)"):
        DataFlow([keep]).compile().run()
    with pytest.raises(DataProtoValidationError, match=r"expected a DataProto, a mapping of columns.* found int"):
        DataFlow([keep]).compile().run(3)


def numbers_of_two():
    return numbers(2)


def test_what_may_be_called_both_ways_is_decided_by_run():
    def either(batch=None):
        return {"y": torch.ones(1)} if batch is None else batch

    pipeline = DataFlow([either, lambda *args: None]).compile()
    assert pipeline.run().columns == ("y",) and pipeline.run(numbers()).columns == ("x", "uid")
    keyword_only = DataFlow([lambda *, rows=4: numbers(rows)]).compile()
    assert len(keyword_only.run()) == 4


def test_the_input_is_checked_and_no_operator_is_named():
    with pytest.raises(DataProtoValidationError) as caught:
        DataFlow([keep]).compile().run({"responses": torch.zeros(2, 3)})
    assert str(caught.value) == "column 'responses': expected dtype int64, found float32"


# ---- facts, metrics, timings ----------------------------------------------------------------------------------------


def test_facts_are_kept_in_every_case():
    def sets_and_adds(batch):
        batch.meta_info["seen"] = 1
        batch.meta_info["metrics"] = {"a": 1}
        return {"y": torch.ones(3)}

    def returns_facts(batch):
        return DataProto.from_dict({"z": torch.ones(3)}, meta_info={"temperature": 0.5, "metrics": {"b": 2}})

    def sets_only(batch):
        assert "metrics" not in batch.meta_info
        batch.meta_info["later"] = 3
        batch.meta_info["metrics"] = {"c": 3}

    def makes_anew(batch):
        batch.meta_info["metrics"] = {"d": 4}
        return DataProto.from_dict({"x": torch.ones(5)}, meta_info={"later": 4, "metrics": {"a": 5}})

    batch = numbers()
    batch.meta_info = {"temperature": 1.0, "start": 0}
    flow = DataFlow(
        [Operator("1", sets_and_adds, (), "y"), Operator("2", returns_facts, (), "z"), sets_only, makes_anew]
    )
    facts = flow.compile().run(batch).meta_info
    assert list(facts.pop("timing")) == ["1", "2", "sets_only", "makes_anew"]
    assert facts == {
        "temperature": 0.5,
        "start": 0,
        "seen": 1,
        "later": 4,
        "metrics": {"a": 5, "b": 2, "c": 3, "d": 4},
    }


def test_metrics_are_a_dict():
    def reports(batch):
        batch.meta_info["metrics"] = [{"a": 1}, {"a": 2}]

    with pytest.raises(DataProtoValidationError, match=r"'op': meta_info\['metrics'\]: expected a dict, found list"):
        run_one(reports)


def test_timings_observer_and_log(caplog):
    seen = []
    pipeline = DataFlow([Operator("gen", keep), Operator("reward", lambda b: b[:1]), Operator("end", lambda b: HOLD)])
    pipeline = pipeline.compile()
    pipeline.observer = lambda name, seconds, batch: seen.append((name, seconds, len(batch)))
    with caplog.at_level(logging.INFO, logger="verl.dataflow"):
        assert pipeline.run(numbers()) is HOLD
    assert [(name, rows) for name, _, rows in seen] == [("gen", 3), ("reward", 1), ("end", 1)]
    assert {name: seconds for name, seconds, _ in seen} == pipeline.timings
    assert all(0 <= seconds < 1 for seconds in pipeline.timings.values())
    assert [re.sub(r"\d+\.\d\ds$", "0.00s", m) for m in caplog.messages] == [
        "[gen] 0.00s",
        "[reward] 0.00s",
        "[end] 0.00s",
    ]
    assert {r.name for r in caplog.records} == {"verl.dataflow"} and {r.levelname for r in caplog.records} == {"INFO"}


def test_an_observer_gets_a_copy():
    pipeline = DataFlow([Operator("one", keep), Operator("two", keep)]).compile()
    pipeline.observer = lambda name, seconds, batch: batch.batch.update(z=torch.ones(3), x=torch.zeros(3))
    assert pipeline.run(numbers()).columns == ("x", "uid") and pipeline.run(numbers()).batch["x"].sum() == 3


@pytest.mark.parametrize("broken", ["function", "result", "observer"])
def test_a_run_after_an_error_reports_its_own_metrics_only(broken):
    runs = iter(["hold", broken, "ends"])

    def op(batch):
        now = next(runs)
        if now == "function":
            raise KeyError("broken")
        batch.meta_info["metrics"] = {"runs": Total(1)}
        return 3 if now == "result" else None

    def gather(batch):
        return HOLD if gathered.append(1) or len(gathered) == 1 else batch

    def observer(name, seconds, batch):
        if broken == "observer" and len(gathered) == 2:
            raise KeyError("broken")

    gathered = []
    pipeline = DataFlow([op, gather]).compile()
    pipeline.observer = observer
    assert pipeline.run(numbers()) is HOLD
    with pytest.raises((KeyError, DataProtoValidationError)):
        pipeline.run(numbers())
    gathered.append(1)
    assert pipeline.run(numbers()).meta_info["metrics"] == {"runs": 1}


def test_operators_may_report_finer_timings():
    after = run_one(
        lambda b: DataProto.from_dict({"y": torch.ones(3)}, meta_info={"timing": {"op/prefill": 0.25}}), "y"
    )
    assert list(after.meta_info["timing"]) == ["op/prefill", "op"]


# ---- failures -------------------------------------------------------------------------------------------------------


def test_the_stack_of_a_failing_function_is_short():
    def reward_fn(batch):
        raise KeyError("ground_truth")

    def fit():
        DataFlow([Operator("reward", reward_fn)]).compile().run(numbers())

    with pytest.raises(KeyError, match="ground_truth") as caught:
        fit()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[1:] == ["fit", "run", "reward_fn"]
    assert caught.value.__notes__ == ["raised in operator 'reward'"]


def test_nothing_is_running_after_an_error():
    seen = []

    def fail(batch):
        seen.append(list(pipeline.running_since))
        raise RuntimeError("once")

    pipeline = DataFlow([Operator("a", keep), Operator("b", fail)]).compile()
    with pytest.raises(RuntimeError, match="once"):
        pipeline.run(numbers())
    assert seen == [["b"]] and not pipeline.running_since


def test_the_operator_that_runs_is_known_while_it_runs():
    with running("first"), running("second"):
        assert running_operator() == "second"
    assert running_operator() is None
