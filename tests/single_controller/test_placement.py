"""Roles on devices, as pure functions."""

import pytest

from verl.single_controller.cluster import (
    ResourcePool,
    format_devices,
    idle_devices,
    place_roles,
    smaller_sizes,
    visible_devices,
)
from verl.trainer.startup.roles import placement_words

ROLES = ["actor", "ref", "critic", "reward"]


def test_everything_together_by_default():
    found = place_roles(ROLES, {"actor_devices": None, "critic_devices": None}, nnodes=2, devices_per_node=4)
    assert len(set(map(id, found.values()))) == 1
    assert found["critic"] == ResourcePool("actor", (4, 4), tuple(range(8))) and found["critic"].world_size == 8


def test_roles_apart():
    found = place_roles(ROLES, {"actor_devices": [0, 1], "critic_devices": [2, 3]}, nnodes=1, devices_per_node=4)
    assert found["actor"] is found["ref"] is found["reward"] and found["actor"].devices == (0, 1)
    assert found["critic"] == ResourcePool("critic", (2,), (2, 3))


def test_the_same_devices_in_another_order_are_the_same_pool():
    found = place_roles(["actor", "critic"], {"actor_devices": [1, 0], "critic_devices": [0, 1]}, 1, 2)
    assert found["actor"] is found["critic"] and found["actor"].devices == (0, 1)


def test_devices_of_several_nodes():
    found = place_roles(["actor", "critic"], {"actor_devices": [0, 1, 2], "critic_devices": [7, 5]}, 4, 2)
    assert found["actor"].processes_per_node == (2, 1)
    assert found["critic"].processes_per_node == (1, 1) and found["critic"].devices == (5, 7)


def test_local_roles_have_no_devices():
    found = place_roles(ROLES, {"actor_devices": [0, 1]}, nnodes=1, devices_per_node=3, local_roles=["critic", "ref"])
    assert found["critic"] is found["ref"] and found["critic"].is_local and found["critic"].world_size == 1
    assert found["actor"] is found["reward"] and not found["actor"].is_local
    assert idle_devices(found.values(), 1, 3) == [2]
    assert placement_words({"actor": [("actor", found["actor"])], "local": [("ref", found["ref"])]}) == (
        "actor on devices 0, 1; ref in this process"
    )
    with pytest.raises(ValueError, match="local_roles: this run has no role 'teacher'"):
        place_roles(ROLES, {}, 1, 1, ["teacher"])
    with pytest.raises(ValueError, match=r"local_roles has 'ref', and placement\.ref_devices is set: use one of them"):
        place_roles(ROLES, {"actor_devices": [0], "ref_devices": [1]}, 1, 2, ["ref"])


@pytest.mark.parametrize(
    "placement, message",
    [
        ({"actor_devices": [0, 4]},
         r"placement.actor_devices: expected distinct numbers from 0 to 3 .*, found \[0, 4\]: use "
         r"trainer.n_gpus_per_node=5, which counts the processes of all roles$"),
        ({"actor_devices": [1, 1]}, r"found \[1, 1\]"),
        ({"actor_devices": []}, r"found \[\]"),
        ({"actor_devices": [0, 1], "critic_devices": [1, 2]},
         r"placement: critic_devices=\[1, 2\] and actor_devices=\[0, 1\] overlap in \[1\]: give these roles the"),
        ({"critic_devices": [3]},
         r"critic_devices=\[3\] and actor_devices=\[0, 1, 2, 3\] \(not set: all of them\) overlap"),
        ({"critic_devices": [4]},
         r"0 to 3 \(trainer.nnodes=1 x trainer.n_gpus_per_node=4\), found \[4\]: use trainer.n_gpus_per_node=5, "
         r"which counts the processes of all roles, and placement.actor_devices=\[0, 1, 2, 3\]$"),
        ({"critc_devices": [3]}, "no role 'critc': did you mean 'critic'"),
    ],
)  # fmt: skip
def test_impossible_placements_are_refused(placement, message):
    with pytest.raises(ValueError, match=message):
        place_roles(ROLES, placement, nnodes=1, devices_per_node=4)


def test_a_second_device_where_there_is_one():
    with pytest.raises(ValueError) as error:
        place_roles(["actor", "rollout"], {"rollout_devices": [1], "actor_devices": [0]}, 1, 1)
    assert str(error.value) == (
        "placement.rollout_devices: expected only device 0, the only one there is (trainer.nnodes=1 x "
        "trainer.n_gpus_per_node=1), found [1]: use trainer.n_gpus_per_node=2, which counts the processes of all roles"
    )


def test_a_pool_has_processes_on_each_of_its_nodes():
    assert ResourcePool("main", (8, 8)).world_size == 16
    with pytest.raises(ValueError, match="at least one process on each of its nodes"):
        ResourcePool("main", (1, 0))


def test_devices_are_counted_among_the_visible_ones():
    assert visible_devices([0, 2], None) == "0,2"
    assert visible_devices([1], "4, 7") == "7" and visible_devices([0], "GPU-a,GPU-b") == "GPU-a"
    with pytest.raises(ValueError, match="expected to see GPU 2, but CUDA_VISIBLE_DEVICES='4,7' has 2 GPUs"):
        visible_devices([2], "4,7")


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        ([8, 8], [(2, 8), (2, 7), (2, 6)]),  # nothing is lost
        ([8], [(1, 8), (1, 7), (1, 6)]),  # a node is lost
        ([8, 3], [(1, 8), (1, 7), (1, 6), (2, 3), (1, 5)]),  # 5 devices of a node are lost
        ([2, 0], [(1, 2), (1, 1)]),
        ([], []),
    ],
)
def test_sizes_that_are_left(devices, sizes):
    assert smaller_sizes(devices, 2, 8)[: len(sizes)] == sizes
    assert all(nodes <= 2 and count <= 8 for nodes, count in smaller_sizes(devices, 2, 8))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([2], "device 2"),
        ([1, 0], "devices 0, 1"),
        ([0, 1, 2, 3, 6], "devices 0-3, 6"),
        (range(8, 512), "devices 8-511"),
        ([0, 2, 3, 5, 6, 7], "devices 0, 2, 3, 5-7"),
    ],
)
def test_devices_in_words(numbers, words):
    assert format_devices(numbers) == words


def test_devices_that_no_pool_has():
    pools = place_roles(ROLES, {"actor_devices": [0, 5], "critic_devices": [2]}, nnodes=2, devices_per_node=3).values()
    assert idle_devices(pools, 2, 3) == [1, 3, 4]
    assert idle_devices(place_roles(ROLES, {}, nnodes=2, devices_per_node=3).values(), 2, 3) == []
    assert idle_devices([ResourcePool("actor", (2,))], 1, 3) == [2]  # without numbers: the first ones
