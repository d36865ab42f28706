"""A flow before it runs: operators, edits by name, the errors of compile, and the state in checkpoints."""

import functools
import re

import pytest
import torch

from tests.test_dataflow import keep, numbers, numbers_of_two
from verl import DataFlow, DataProtoValidationError, Operator
from verl.dataflow import Stateful, as_operator, edges

# ---- operators and editing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gen", 3), "operator 'gen': expected a function, found int"),
        (("", keep), "operator name: expected a non-empty string, found ''"),
        ((keep, "gen"), "operator name: expected a non-empty string, found <function keep"),
        (("gen", keep, (1,)), "operator 'gen': reads: expected column names, found 1"),
        (("gen", keep, (), [None]), "operator 'gen': writes: expected column names, found None"),
    ],
)
def test_an_operator_says_what_is_wrong_with_it(args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Operator(*args)


def test_one_name_may_stand_as_a_string():
    operator = Operator("reward", keep, reads="responses", writes=["scores"])
    assert operator.reads == ("responses",) and operator.writes == ("scores",)


def needs_more(batch, tokenizer):
    return batch


def test_a_function_that_needs_more_is_refused_when_the_operator_is_made():
    message = r"operator 'gen': expected a function of the batch alone, found needs_more\(batch, tokenizer\); bind"
    with pytest.raises(
        ValueError, match=message + r".*\n  Source: needs_more\(\) at line \d+ in test_dataflow_compile.py"
    ):
        Operator("gen", needs_more)
    assert Operator("gen", functools.partial(needs_more, tokenizer=None)).accepts_batch


class Counter(Stateful):
    """Numbers the batches that pass."""

    def __init__(self):
        self.count = 0

    def __call__(self, batch):
        self.count += 1
        return {"step": [self.count] * len(batch)}

    def step(self, batch, by=1):
        self.count += by

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_operators_are_named_after_their_functions():
    steps = [keep, functools.partial(needs_more, tokenizer=1), Counter(), Counter().step, numbers_of_two]
    assert [as_operator(s).name for s in steps] == ["keep", "needs_more", "Counter", "step", "numbers_of_two"]
    with pytest.raises(ValueError, match="flow: expected an Operator or a function, found int: 3"):
        DataFlow([3])


def test_editing_by_name():
    flow = DataFlow([Operator(name, keep) for name in ("gen", "reward", "adv")])
    flow.insert_before("reward", Operator("filter", keep)).insert_after("adv", Operator("update", keep))
    flow.insert_after("gen", Operator("balance", keep))
    assert flow.names == ("gen", "balance", "filter", "reward", "adv", "update")
    flow.remove("filter").replace("reward", Operator("score", keep))
    assert flow.names == ("gen", "balance", "score", "adv", "update")
    same_name = Operator("adv", numbers, writes="x")
    assert flow.replace("adv", same_name)["adv"] is same_name
    assert len(flow) == 5 and "adv" in flow and "reward" not in flow and [op.name for op in flow][-1] == "update"


def test_settings_of_operators():
    def scale(batch, *, by: float = 1.0):
        return {"x": [by] * len(batch)}

    flow = DataFlow([Operator("scale", scale, writes="x"), Operator("keep", keep)])
    assert flow.configure({"scale": {"by": 3}}, "flow")["scale"].func(range(2)) == {"x": [3, 3]}
    for settings, message in (
        ({"scal": {}}, "flow.scal: the flow has no such operator: did you mean 'scale'"),
        ({"scale": {"buy": 1}}, "flow.scale.buy: .* no such keyword-only parameter: did you mean 'by'"),
        ({"scale": {"by": "x"}}, "flow.scale.by: expected float, found 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            flow.configure(settings, "flow")


UNKNOWN = r"no operator 'rewrad': did you mean 'reward'\? known: gen, reward"
TAKEN = "already has an operator 'gen'"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: f.insert_before("rewrad", keep), UNKNOWN),
        (lambda f: f.insert_after("rewrad", keep), UNKNOWN),
        (lambda f: f.replace("rewrad", keep), UNKNOWN),
        (lambda f: f.remove("rewrad"), UNKNOWN),
        (lambda f: f["rewrad"], UNKNOWN),
        (lambda f: f.add_operator(Operator("gen", keep)), TAKEN),
        (lambda f: f.insert_before("reward", Operator("gen", keep)), TAKEN),
        (lambda f: f.insert_after("reward", Operator("gen", keep)), TAKEN),
        (lambda f: f.replace("reward", Operator("gen", keep)), TAKEN),
    ],
)
def test_edits_of_unknown_and_taken_names_are_refused(edit, message):
    flow = DataFlow([Operator("gen", keep), Operator("reward", keep)])
    with pytest.raises(ValueError, match=message):
        edit(flow)
    assert flow.names == ("gen", "reward")


def test_a_copy_of_a_flow_is_edited_alone():
    flow = DataFlow([keep])
    DataFlow(flow).remove("keep")
    assert flow.names == ("keep",)


# ---- compile --------------------------------------------------------------------------------------------------------


def flow_of(*operators) -> DataFlow:
    return DataFlow([Operator(name, func, reads, writes) for name, func, reads, writes in operators])


@pytest.mark.parametrize(
    ("flow", "inputs", "message"),
    [
        (DataFlow(), None, "the flow has no operators: add one with add_operator"),
        (
            flow_of(("load", numbers_of_two, (), "x"), ("adv", keep, "valeus", ())),
            None,
            r"operator 'adv' reads 'valeus', but no upstream operator writes it: known: x",
        ),
        (
            flow_of(("gen", keep, "prompts", "responses"), ("adv", keep, "response", ())),
            ("prompts",),
            "operator 'adv' reads 'response', but no upstream operator writes it: did you mean 'responses'",
        ),
        (
            flow_of(("adv", keep, "values", "advantages"), ("critic", keep, (), "values")),
            None,
            r"operator 'adv' reads 'values', which 'critic' writes only after it; .* compile\(inputs=\[...\]\)",
        ),
        (
            flow_of(("adv", keep, "values", "values")),
            (),
            "operator 'adv' reads 'values', but no upstream operator writes it",
        ),
        (DataFlow([keep, numbers_of_two]), None, "operator 'numbers_of_two' takes no batch: only the first operator"),
    ],
)
def test_compile_refuses(flow, inputs, message):
    with pytest.raises(ValueError, match=message):
        flow.compile(inputs)


def test_a_later_writer_is_fine_for_what_comes_with_the_batch():
    flow = flow_of(
        ("adv", lambda b: {"a": b.batch["x"]}, "x", "a"),
        ("scale", lambda b: {"x": b.batch["x"] * 2}, "x", "x"),
    )
    after = flow.compile(inputs=["x"]).run(numbers())
    assert after.batch["a"].tolist() == [0.0, 1.0, 2.0] and after.batch["x"].tolist() == [0.0, 2.0, 4.0]


def test_columns_without_a_writer_are_required_of_the_batch_before_anything_runs():
    ran = []
    flow = flow_of(
        ("gen", ran.append, (), "responses"), ("adv", keep, ("responses", "uid"), ()), ("late", keep, "z", ())
    )
    pipeline = flow.compile()
    assert pipeline.inputs == ("uid", "z")
    with pytest.raises(
        DataProtoValidationError, match="operator 'late' reads 'z', which is not in the batch: known: uid"
    ):
        pipeline.run(numbers())
    assert ran == []


def test_a_missing_column_names_the_operator_that_dropped_it():
    """A replacement without the column, two operators before its reader; a writer in between brings it back."""
    first = ("first", lambda b: b.select(["x"], ["uid"]), (), ())
    drop = ("drop", lambda b: b.drop("x"), (), ())
    after = ("after", lambda b: {"y": torch.ones(len(b))}, (), "y")
    adv = ("adv", keep, "x", ())
    message = (
        r"operator 'adv' reads 'x': 'x' was dropped by operator 'drop', which declares no `writes`, so the batch that "
        r"it returned replaced the previous one\. Keep the column .* or declare the `writes` of 'drop'"
    )
    with pytest.raises(DataProtoValidationError, match=message):
        flow_of(first, drop, after, adv).compile().run(numbers())
    writes_again = ("again", lambda b: {"x": torch.ones(len(b))}, (), "x")
    assert flow_of(drop, writes_again, adv).compile(inputs=["x"]).run(numbers()).batch["x"].tolist() == [1.0] * 3


def test_a_failed_access_to_a_dropped_column_names_the_operator_that_dropped_it():
    use = ("use", lambda b: b.batch["x"], (), ())
    with pytest.raises(TypeError) as failure:  # a batch without tensor columns
        flow_of(("drop", lambda b: b.drop("x"), (), ()), use).compile().run(numbers())
    assert any(note.startswith("'x' was dropped by operator 'drop'") for note in failure.value.__notes__)
    with pytest.raises(KeyError) as failure:  # another key
        flow_of(("drop", lambda b: b.drop("x"), (), ()), ("use", lambda b: {}["y"], (), ())).compile().run(numbers())
    assert failure.value.__notes__ == ["raised in operator 'use'"]


def test_compile_is_of_the_flow_as_it_was():
    flow = DataFlow([keep])
    pipeline = flow.compile()
    flow.add_operator(Operator("more", keep))
    assert [op.name for op in pipeline.operators] == ["keep"]


def test_edges_lead_from_the_last_writer():
    flow = flow_of(
        ("gen", keep, "prompts", ("responses", "mask")),
        ("score", keep, "responses", "rewards"),
        ("values", keep, ("responses", "mask"), "values"),
        ("kl", keep, "rewards", "rewards"),
        ("adv", keep, ("rewards", "values"), "adv"),
    )
    assert edges(flow) == [
        ("gen", "score", "responses"),
        ("gen", "values", "responses"),
        ("gen", "values", "mask"),
        ("score", "kl", "rewards"),
        ("kl", "adv", "rewards"),
        ("values", "adv", "values"),
    ]


# ---- state ----------------------------------------------------------------------------------------------------------


def test_state_round_trip():
    """As objects, as bound methods, and inside partials: an operator with a state never loses it."""

    def build():
        counters = [Counter() for _ in range(3)]
        flow = DataFlow([keep, Operator("object", counters[0], writes="step"), Operator("method", counters[1].step)])
        flow.add_operator(Operator("partial", functools.partial(counters[2].step, by=10)))
        return flow.compile(), counters

    pipeline, _ = build()
    pipeline.run(numbers())
    pipeline.run(numbers())
    state = pipeline.state_dict()
    assert state == {"object": {"count": 2}, "method": {"count": 2}, "partial": {"count": 20}}
    resumed, counters = build()
    resumed.load_state_dict(state)
    assert resumed.run(numbers()).column("step").tolist() == [3, 3, 3]
    assert [c.count for c in counters] == [3, 3, 30]


def test_the_state_of_a_different_flow_is_an_error():
    pipeline = DataFlow([Operator("numbered", Counter(), writes="step")]).compile()
    for state in ({}, {"other": {}}, {"numbered": {"count": 1}, "more": {}}):
        with pytest.raises(ValueError, match=r"saved state belongs to the operators .*, this flow has \['numbered'\]"):
            pipeline.load_state_dict(state)
