"""The memory of this host: limits of cgroups and of a process."""

import resource
from dataclasses import replace

import pytest
import torch

from verl.planner import devices
from verl.planner.devices import GIB

CPU = torch.device("cpu")


def test_the_files_of_a_process_in_cgroups(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("4:cpu,memory:/a\n1:name=systemd:/c\n0::/a/b\n")
    found = [str(path.relative_to(tmp_path)) for path in devices._limit_files(groups, tmp_path)]
    assert found[:3] == ["a/b/memory.max", "a/memory.max", "memory.max"]
    assert found[3:] == ["memory/a/memory.limit_in_bytes", "memory/memory.limit_in_bytes"]
    # without that file, the cgroup that is mounted
    found = [str(path.relative_to(tmp_path)) for path in devices._limit_files(tmp_path / "none", tmp_path)]
    assert found == ["memory.max", "memory/memory.limit_in_bytes"]


def test_the_smallest_limit_counts(tmp_path, monkeypatch):
    whole = devices.host_memory()
    for name, text in (("outer", "max"), ("inner", str(2**20)), ("absent", None)):
        (tmp_path / name).write_text(f"{text}\n") if text else None
    monkeypatch.setattr(devices, "_limit_files", lambda *_: [tmp_path / name for name in ("outer", "absent")])
    assert devices.host_memory() >= whole
    monkeypatch.setattr(devices, "_limit_files", lambda *_: [tmp_path / name for name in ("outer", "inner", "absent")])
    assert devices.host_memory() == 2**20


def test_a_limit_of_the_process_is_the_memory_of_each_one(monkeypatch):
    assert devices.process_limit() == 0
    device = replace(devices.host_profile(CPU), memory=8 * GIB)
    assert [device.available(count) for count in (1, 4)] == [8 * GIB, 2 * GIB]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, 5 * GIB))  # lowering the real one is for good
    assert devices.process_limit() == 3 * GIB
    limited = replace(device, process_limit=3 * GIB)
    assert [limited.available(count) for count in (1, 2, 4)] == [3 * GIB, 3 * GIB, 2 * GIB]
    assert devices.host_profile(CPU).process_limit == 3 * GIB


@pytest.mark.parametrize("count", [1, 8])
def test_every_gpu_has_its_memory(count):
    gpu = devices.built_in("H200")
    assert gpu.available(count) == gpu.memory
