"""The pools of a run start at the same time, and none is left behind where one fails."""

import threading

import pytest

from verl.single_controller import Worker, WorkerSpec
from verl.single_controller.cluster import ResourcePool, start_pools

POOLS = {name: [(name, ResourcePool(name, (1,)))] for name in ("actor", "critic", "ref")}
SPECS = {name: f"spec of {name}" for name in POOLS}


class Group:
    def __init__(self):
        self.ended = False

    def shutdown(self):
        self.ended = True


def test_they_start_at_the_same_time():
    meet = threading.Barrier(3)

    def start(roles, pool):
        meet.wait(10)
        assert roles == {pool.name: f"spec of {pool.name}"}
        return {pool.name: pool}

    assert list(start_pools(POOLS, SPECS, start)) == ["actor", "critic", "ref"]


def test_one_pool_starts_in_the_callers_thread():
    def start(roles, pool):
        return {"actor": threading.current_thread()}

    assert start_pools({"actor": POOLS["actor"]}, SPECS, start) == {"actor": threading.main_thread()}


def test_where_one_fails_the_others_end():
    made = {}

    def start(roles, pool):
        if pool.name != "actor":
            raise RuntimeError(f"no memory for {pool.name}")
        return made.setdefault("groups", {"actor": Group()})

    with pytest.raises(RuntimeError, match="no memory for critic"):
        start_pools(POOLS, SPECS, start)
    assert made["groups"]["actor"].ended


class Broken(Worker):
    def __init__(self):
        raise RuntimeError("no memory for ref")


def test_where_a_local_role_fails_the_others_end():
    made = {"actor": Group()}
    pools = {"actor": POOLS["actor"], "local": [("ref", ResourcePool("local", (1,), ()))]}
    with pytest.raises(RuntimeError, match="no memory for ref"):
        start_pools(pools, SPECS | {"ref": WorkerSpec(Broken)}, lambda roles, pool: made)
    assert made["actor"].ended
