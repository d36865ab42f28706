"""The search against brute force on random cost tables, with ties and groups that do not fit."""

import itertools
import random
from dataclasses import replace

import pytest

from tests.planner.test_planner import H200, job_of
from verl.planner.placement import STAGES, Group
from verl.planner.search import NEAR, Search


class TableSearch(Search):
    """A search whose groups have random costs: few different ones, so that many placements are equally fast.

    Args:
        seed: of the table.
        roles: of the job.
        values: possible seconds of a stage.
        missing: share of the groups that do not fit.
        overlaps: of an asynchronous run.
    """

    def __init__(
        self,
        seed: int,
        roles: tuple[str, ...],
        values: list[float],
        missing: float,
        overlaps: bool = False,
    ):
        job = replace(job_of(roles=roles, strict=False), overlaps=overlaps)
        super().__init__(job, H200)
        self._random, self._values, self._missing = random.Random(seed), values, missing

    def group(self, names: tuple[str, ...], devices: int) -> Group | None:
        if self._random.random() < self._missing:
            return None
        roles = tuple(self.job.role(name).on(devices) for name in names)
        group = Group(self.job, H200, roles, self.job.role("actor"))
        vars(group)["seconds"] = {stage: (stage, self._random.choice(self._values)) for stage in STAGES}
        return group


def fastest(search: TableSearch, devices: int) -> list[float]:
    """The seconds of the fastest allocation of each partition that has one, by trying all, in ascending order."""
    found = []
    for partition in search.partitions():
        options = []
        for sizes in itertools.product(range(1, devices + 1), repeat=len(partition)):
            groups = [search.group(names, size) for names, size in zip(partition, sizes)]
            if sum(sizes) <= devices and None not in groups:
                stages = [max(group.stages[i] for group in groups) for i in range(4)]
                if search.job.overlaps:
                    generation, preparation, training, push = stages
                    stages = [max(generation, preparation + training), push]
                options.append(sum(stages) + H200.step_seconds)
        found += [min(options)] if options else []
    return sorted(found)


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [0.5, 1.0, 1.02, 3.0, 7.0]], ids=["equal", "ties", "near"])
def test_search_equals_brute_force_on_random_costs(values, missing):
    nothing_fits = 0
    for seed, devices in itertools.product(range(2), range(1, 9)):
        for roles in (("actor",), ("actor", "ref"), ("actor", "ref", "critic")):
            search = TableSearch(seed, roles, values, missing)
            expected = fastest(search, devices)
            plans = search.plans(devices)
            near = sum(seconds <= NEAR * expected[0] for seconds in expected)
            assert [plan.seconds for plan in plans] == pytest.approx(expected[: max(2, near)])
            assert all(plan.devices <= devices and plan.concurrent for plan in plans)
            for plan in plans:
                named = sorted(name for group in plan.groups for name in group.names)
                assert named == sorted(roles)
            nothing_fits += not expected
    assert (nothing_fits > 0) == (missing > 0)


@pytest.mark.parametrize("devices", [4, 8])
def test_search_equals_brute_force_on_random_costs_of_four_roles(devices):
    roles = ("actor", "ref", "critic", "reward")
    for seed in range(3):
        search = TableSearch(seed, roles, [1.0, 2.0, 3.0], 0.4)
        expected = fastest(search, devices)
        assert len(search.partitions()) == 15
        assert [plan.seconds for plan in search.plans(devices, 1)][:1] == pytest.approx(expected[:1])


@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_asynchronous_plans_equal_brute_force_and_have_a_separate_rollout(missing):
    """A set partition of the other roles, and the rollout alone: 1, 2 and 5 ways for one, two and three roles."""
    for seed, devices in itertools.product(range(3), range(1, 7)):
        for roles, ways in ((("actor",), 1), (("actor", "ref"), 2), (("actor", "ref", "critic"), 5)):
            search = TableSearch(seed, roles, [0.5, 1.0, 1.02, 3.0, 7.0], missing, overlaps=True)
            assert len(search.partitions()) == ways
            expected = fastest(search, devices)
            plans = search.plans(devices, ways)
            assert [plan.seconds for plan in plans] == pytest.approx(expected)
            assert all([group.names for group in plan.groups].count(("rollout",)) == 1 for plan in plans)
            assert devices > 1 or not plans
