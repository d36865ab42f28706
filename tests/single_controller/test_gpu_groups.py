"""Worker groups on two GPUs: which one each rank gets, NCCL between them, and results that lie on a GPU."""

import os
from pathlib import Path

import pytest
import torch

import verl
from tests.single_controller.conftest import TWO, spec
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup, WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SPEC = spec("OnGpu")


def uuid_of(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def check(group: WorkerGroup) -> None:
    (seen, first), (also_seen, second) = group.gpu()
    assert seen == also_seen and len(seen.split(",")) == 2 and first != second
    assert group.all_reduce() == [3.0, 3.0]
    for width in (4, 40_000):  # the wide columns stay with their rank on Ray
        x = torch.arange(6.0)[:, None].expand(6, width)
        out = group.double(DataProto.from_dict({"x": x}))
        assert out.batch["y"].device.type == "cpu" and torch.equal(out.batch["y"] + 0, 2 * x)
        assert out.batch["head"].flatten().tolist() == [0, 2, 4, 6, 8, 10]


def test_processes_on_two_gpus():
    with LocalWorkerGroup(SPEC, 2, timeout=120, devices=[1, 0]) as group:
        assert [uuid for _, uuid in group.gpu()] == [uuid_of(1), uuid_of(0)]
        check(group)
    with LocalWorkerGroup(SPEC, 1, timeout=120, devices=[1]) as group:
        assert [uuid for _, uuid in group.gpu()] == [uuid_of(1)]


def test_ray_actors_on_two_gpus(monkeypatch):
    ray = pytest.importorskip("ray")
    from verl.single_controller.ray.cluster import RayWorkerGroup

    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayWorkerGroup(SPEC, TWO, use_gpu=True, timeout=120) as group:
            check(group)
    finally:
        ray.shutdown()
