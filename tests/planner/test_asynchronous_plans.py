"""Plans of asynchronous runs: the seconds of a step, a rollout on separate devices, and the table of placements."""

import re
from dataclasses import replace

import pytest

from tests.planner.test_planner import H200, job_of
from verl.planner.devices import GIB
from verl.planner.placement import Group, Plan, is_possible, plan_groups, step_seconds
from verl.planner.report import choice_lines
from verl.planner.search import Search
from verl.planner.shapes import built_in
from verl.trainer.checks.planning import overrides_of

SECOND = replace(H200, step_seconds=0.25)
ASYNC = replace(job_of(roles=("actor", "ref")), overlaps=True)


def test_an_asynchronous_step_takes_the_longer_of_generation_and_training_and_the_push():
    # generation, preparation, training, push; and a quarter of a second outside of the models
    assert step_seconds((5.0, 1.0, 2.0, 0.5), ASYNC, SECOND) == 5.0 + 0.5 + 0.25
    assert step_seconds((2.0, 1.0, 2.0, 0.5), ASYNC, SECOND) == 1.0 + 2.0 + 0.5 + 0.25
    assert step_seconds((5.0, 1.0, 2.5, 0.0), replace(ASYNC, overlaps=False), SECOND) == 5.0 + 1.0 + 2.5 + 0.25


def test_a_push_is_a_stage_of_asynchronous_steps():
    job = replace(job_of(built_in("0.5B")), engine="native")
    roles = (*job.roles, replace(job.role("actor"), name="rollout", trains=False))
    groups = [(("actor",), 1), (("rollout",), 1)]
    synchronous, overlapped = (
        plan_groups(replace(job, roles=roles, overlaps=overlaps), H200, groups) for overlaps in (False, True)
    )
    generation, _, training, push = overlapped.stages
    assert synchronous.stages == pytest.approx((generation, 0, training + push, 0)) and push > 0.1
    assert overlapped.seconds == pytest.approx(max(generation, training) + push + 0.1)
    assert synchronous.seconds == pytest.approx(generation + training + push + 0.1)


def test_a_rollout_needs_no_divisor_of_the_batch_and_two_devices():
    job = replace(job_of(built_in("0.5B"), prompts=4), overlaps=True)
    rollout = replace(job.role("actor"), name="rollout", trains=False)
    assert is_possible(job, rollout.on(3)) and not is_possible(job, job.role("actor").on(3))
    assert not is_possible(replace(job, roles=(*job.roles, rollout), rollout_tensor=2), rollout.on(3))
    search = Search(job, H200)
    assert not search.plans(1)
    for devices in (2, 3, 4):
        (best,) = search.plans(devices)
        assert [group.names for group in best.groups] == [("actor",), ("rollout",)] and best.devices <= devices
        keys = overrides_of(best, devices)
        actor, generating = keys["placement.actor_devices"], keys["placement.rollout_devices"]
        assert actor + generating == list(range(best.devices)) and "trainer.overlap" not in keys


def test_only_groups_that_have_work_for_the_same_stage_set_overlap():
    rollout = replace(ASYNC.role("actor"), name="rollout", trains=False)
    job = replace(ASYNC, roles=(*ASYNC.roles, rollout))
    apart = plan_groups(job, H200, [(("actor",), 1), (("ref",), 1), (("rollout",), 1)])
    together = plan_groups(job, H200, [(("actor", "ref"), 1), (("rollout",), 1)])
    assert overrides_of(apart, 3)["trainer.overlap"] is True and "trainer.overlap" not in overrides_of(together, 2)


# ---- the table ------------------------------------------------------------------------------------------------------


def plan_of(groups: list[tuple[tuple[str, ...], int]], generation: float, training: float, gib: float = 1.0) -> Plan:
    """A plan with these seconds of generation, by the last group, and of training, by the first."""
    rollout = replace(ASYNC.role("actor"), name="rollout", trains=False)
    job = replace(ASYNC, roles=(*ASYNC.roles, rollout))
    found = []
    for names, devices in groups:
        seconds = {"gen": ("generation", generation)} if "rollout" in names else {}
        seconds |= {"update_actor": ("training", training)} if "actor" in names else {}
        roles = tuple(job.role(name).on(devices) for name in names)
        group = Group(job, SECOND, roles, job.role("rollout"))
        vars(group).update(memory={"generation": {"weights": gib * GIB}}, seconds=seconds)
        found.append(group)
    return Plan(job, SECOND, tuple(found))


def row_of(lines: list[str], label: str) -> list[str]:
    """The cells of a row behind its label."""
    (line,) = (
        line for line in lines if line.startswith(label) and re.search(r"\d\.?\d* *$", line) and " on " not in line
    )
    return line.removeprefix(label).split()


BEST = plan_of([(("actor", "ref"), 3), (("rollout",), 5)], 2.0, 2.0)


def test_the_configured_placement_has_a_row_with_its_devices():
    own = replace(plan_of([(("actor", "ref"), 2), (("rollout",), 4)], 2.5, 1.0), placed=[[6, 7], [0, 1, 2, 4]])
    lines = choice_lines(BEST, 8, own)
    # generation is longer: 2 and 2.5 s, and a quarter of a second
    assert row_of(lines, "best")[0] == "2.25"
    assert row_of(lines, "configured *") == ["2.75", "2.5", "0", "1", "0", "1.00"]
    text = [line.rstrip() for line in lines]
    start = next(i for i, line in enumerate(text) if line.startswith("configured *  actor"))
    assert text[start] == "configured *  actor, ref on devices 6, 7"
    assert text[start + 1].strip() == "rollout on devices 0-2, 4"
    assert any(line.startswith("best          actor, ref on devices 0-2") for line in text)
    assert "rollout on devices 3-7" in "\n".join(text) and max(map(len, lines)) <= 80


def test_a_configured_placement_that_is_the_best_one_is_marked_with_its_own_devices():
    own = replace(plan_of([(("rollout",), 5), (("ref", "actor"), 3)], 2.0, 2.0), placed=[[0, 1, 2, 3, 4], [5, 6, 7]])
    lines = choice_lines(BEST, 8, own)
    assert row_of(lines, "best *")[0] == "2.25" and not any("configured *" in line for line in lines)
    assert "best *        rollout on devices 0-4" in lines and "              ref, actor on devices 5-7" in lines
    other = replace(own, job=replace(own.job, rollout_tensor=5))  # of another size
    assert row_of(choice_lines(BEST, 8, other), "configured *")


def test_a_configured_placement_that_does_not_fit_is_named():
    own = replace(plan_of([(("actor", "ref"), 1), (("rollout",), 1)], 1.0, 1.0, gib=1000.0), placed=[[0], [1]])
    lines = choice_lines(BEST, 8, own)
    assert row_of(lines, "configured *")[0] == "1.25" and "* does not fit into memory" in lines
    assert choice_lines(None, 8, own) == ["no placement on 8 devices fits with a rollout on separate devices"]


def test_groups_that_wait_for_one_another_are_named():
    apart = [(("actor",), 2), (("ref",), 1), (("rollout",), 5)]
    own = replace(replace(plan_of(apart, 4.0, 2.0), concurrent=False), placed=[[0, 1], [2], [3, 4, 5, 6, 7]])
    assert "trainer.overlap=true" in " ".join(choice_lines(BEST, 8, own))
    own = replace(replace(BEST, concurrent=False), placed=[[0, 1, 2], [3, 4, 5, 6, 7]])  # nothing to overlap
    assert "trainer.overlap" not in " ".join(choice_lines(BEST, 8, own))


def test_a_rollout_that_shares_devices_is_named_with_the_actor():
    job = job_of(built_in("0.5B"), ("actor", "ref"))
    both = plan_groups(job, H200, [(("actor", "ref"), 4)])
    lines = choice_lines(both, 4, replace(both, placed=[range(4)]))
    assert "best *        actor, rollout, ref on devices 0-3" in lines
    assert "push" not in lines[1]  # a part of training
