"""The check of the machine, against faults that are really there: broken packages, low limits."""

import os
import re
import shutil
import socket
import tomllib
from pathlib import Path

import pytest
from verl.utils.env_check import check_env, possible_modes

from verl.env_check import check as machine
from verl.env_check import packages
from verl.env_check.check import Cards, check_gpus, check_interfaces, nvidia_smi
from verl.env_check.packages import (
    CORE,
    FAULT,
    NOTE,
    OK,
    OPTIONAL,
    Check,
    EnvReport,
    Probe,
    check_attention,
    check_core,
    check_fsdp2,
    check_optional,
)
from verl.processes.isolation.mode import Isolation

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # it imports all packages
def test_this_machine_is_fit(capsys):
    report = check_env()
    text = capsys.readouterr().out
    assert report.ok and report["torch"].state == OK and report["other packages"].state == OK
    assert report.modes["local trainer, one process"] is None and report.modes["rollout.name=hf"] is None
    names = ["Python", "torch", "transformers", "GPU", "FSDP2", "packed attention", "Ray"]
    for name in [*names, "disk"]:
        assert re.search(rf"^\[[✓✗!]\] {name}: ", text, re.MULTILINE), name
    assert "local trainer, one process      yes" in text and "Versions tested together: Python" in text


@pytest.fixture
def broken_packages(tmp_path):
    """A folder of packages that are installed and fail: two that some modes need, one that all need."""
    faults = {
        "ray": "raise ImportError('libray.so: undefined symbol')",
        "torchvision": "raise RuntimeError('operator torchvision::nms does not exist')",
        "sglang": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "pyarrow": "raise ImportError('libarrow.so.26: cannot open shared object file')",
    }
    for name, code in faults.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    return tmp_path


def test_broken_packages_are_named_with_cause_and_cure(broken_packages, monkeypatch, capsys):
    monkeypatch.syspath_prepend(broken_packages)
    small = {"pyarrow": "import pyarrow"}  # of what is not broken, nothing is imported
    core = {name: small.get(name, "info = None") for name in packages._CORE_PROBES}
    core["torch"] = "info = {'usable': False, 'cuda': None, 'reason': ''}"
    monkeypatch.setattr(packages, "_CORE_PROBES", core)
    with pytest.raises(SystemExit, match="1"):  # pyarrow is needed by all
        check_env(verbose=False)
    text = capsys.readouterr().out
    lines = text.splitlines()

    def shown(name):
        at = next(i for i, line in enumerate(lines) if line[1:].startswith(("✗", "!")) and line[4:].startswith(name))
        return lines[at], lines[at + 1].strip()

    fault, cure = shown("pyarrow")
    assert fault.startswith("[✗]") and "does not import: ImportError: libarrow.so.26: cannot open" in fault
    assert cure.startswith("-> pip install --force-reinstall --no-deps pyarrow==")
    fault, cure = shown("Ray")
    assert fault.startswith("[✗]") and "ImportError: libray.so: undefined symbol" in fault and "pip install ray" in cure
    fault, cure = shown("torchvision")
    assert "operator torchvision::nms does not exist" in fault and "pip uninstall -y torchvision" in cure
    fault, cure = shown("SGLang")
    assert "killed by SIGSEGV" in fault and "pip install -e '.[sglang]'   # in a clone" in cure  # a supported version
    assert "[✓]" not in text  # verbose=False
    with pytest.raises(SystemExit, match="1"):
        check_env()
    text = capsys.readouterr().out
    for name in ("Python", "torch", "transformers", "FSDP2", "packed attention", "disk"):
        assert re.search(rf"^\[[✓!]\] {name}: ", text, re.MULTILINE), name
    assert re.search(r"local trainer, one process +no: fix pyarrow first", text)


def test_the_table_of_core_packages_is_that_of_the_project():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict(
        re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)(?:,<[\d.]+)?$", line).groups() for line in wanted["dependencies"]
    )
    assert dict(CORE.values()) == found
    extras = {line.split(">")[0].split("[")[0] for lines in wanted["optional-dependencies"].values() for line in lines}
    assert {package.distributions[0] for package in OPTIONAL} <= extras


def probes(**errors):
    found = {module: Probe() for module in [*CORE, "fsdp2", "varlen"]}
    return found | {name: Probe(error) for name, error in errors.items()}


def test_old_and_missing_packages(monkeypatch):
    versions = {"torch": "2.4.0", "transformers": None}
    monkeypatch.setattr("verl.env_check.packages.version_of", lambda name: versions.get(name, "99.0"))
    torch, transformers, others = check_core(probes())
    assert (torch.state, torch.detail) == (FAULT, "2.4.0, requires 2.11 or newer") and "'torch>=2.11'" in torch.fix
    assert (transformers.state, transformers.detail) == (FAULT, "not installed")
    assert transformers.fix == "pip install 'transformers>=5.0'" and others.state == OK
    assert not EnvReport((torch, others), {}).ok


def test_optional_packages_that_are_absent_are_no_fault():
    checks = check_optional(probes())
    assert {check.state for check in checks} == {NOTE} and all(check.fix.startswith("pip install") for check in checks)
    assert check_fsdp2(probes(fsdp2="ImportError: x")).state == FAULT
    assert check_attention(probes(), gpu=True).detail == "torch varlen_attn"
    assert check_attention(probes(varlen="ImportError: x"), gpu=True).state == NOTE
    without = check_attention(probes(torch="ModuleNotFoundError: x", varlen="x"), gpu=False)
    assert (without.state, without.detail) == (FAULT, "needs torch")  # nothing to compute masks with


def fake_nvidia_smi(folder, monkeypatch, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def torch_says(**info):
    return Probe(info={"cuda": "13.0", "usable": True, "reason": "", "capabilities": [[9, 0]], "nccl": "2.28.3"} | info)


def test_gpus_that_the_driver_sees_and_torch_uses(tmp_path, monkeypatch):
    fake_nvidia_smi(
        tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771, 60, 580.1'\necho 'NVIDIA H200, 143771, 90000, 580.1'"
    )
    host = nvidia_smi()
    assert len(host.rows) == 2
    gpu, memory, nccl = check_gpus(torch_says(), host)
    assert (gpu.state, gpu.detail) == (OK, "2 x NVIDIA H200, driver 580.1; CUDA 13.0, 1 visible")
    assert memory.state == NOTE and "GPU 1: 90000 of 143771 MiB" in memory.detail and "GPU 0" not in memory.detail
    assert (nccl.state, nccl.detail) == (OK, "2.28.3")
    old = check_gpus(torch_says(capabilities=[[7, 0]], nccl=None), Cards(host.rows[:1]))
    assert [(c.name, c.state) for c in old] == [("GPU", OK), ("bfloat16", NOTE), ("NCCL", FAULT)]


def test_gpus_that_torch_cannot_use(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771, 60, 470.0'")
    (check,) = check_gpus(torch_says(usable=False, reason="The NVIDIA driver on your system is too old"), nvidia_smi())
    assert check.state == FAULT and check.required and "driver on your system is too old" in check.detail
    assert "update the NVIDIA driver" in check.fix
    (check,) = check_gpus(torch_says(usable=False, cuda=None), nvidia_smi())
    assert check.state == NOTE and "built for the CPU" in check.detail and "--torch-backend=auto" in check.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = check_gpus(torch_says(usable=False), nvidia_smi())
    assert check.state == NOTE and check.fix == "unset CUDA_VISIBLE_DEVICES"


def test_a_driver_that_fails(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'\nexit 9")
    (check,) = check_gpus(torch_says(usable=False), nvidia_smi())
    assert (
        check.state == NOTE and "the driver fails: NVIDIA-SMI has failed" in check.detail and "--gpus all" in check.fix
    )
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia_smi() == Cards()


def test_output_of_the_driver_that_says_little(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA GB10, [N/A], [N/A], 580.1'")
    gpu, nccl = check_gpus(torch_says(), nvidia_smi())
    assert gpu.detail == "1 x NVIDIA GB10, driver 580.1; CUDA 13.0, 1 visible" and nccl.state == OK
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'Unable to determine the device handle'")
    (gpu,) = check_gpus(torch_says(usable=False), nvidia_smi())
    assert gpu.state == NOTE and "printed 'Unable to determine the device handle', expected name, memory" in gpu.detail
    for host in (nvidia_smi(), Cards()):  # what torch can use is used
        gpu, nccl = check_gpus(torch_says(), host)
        assert gpu.state == OK and gpu.detail.startswith("1 visible to torch, CUDA 13.0 (") and nccl.state == OK


def test_little_room(monkeypatch, tmp_path):
    assert machine.check_shared_memory(tmp_path / "none") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(64 << 20, 0, 3 << 30))
    shared, disk = machine.check_shared_memory(tmp_path), machine.check_disk(tmp_path)
    assert shared.state == NOTE and shared.detail.startswith("0.06 GiB") and "--shm-size=16g" in shared.fix
    assert disk.state == NOTE and disk.detail.startswith("3.0 GiB free") and "max_actor_ckpt_to_keep" in disk.fix


def test_modes_follow_the_findings():
    names = ("FSDP2", "vLLM", "megatron-core", "GPU")
    checks = [Check(name, OK, "") for name in names] + [Check(name, FAULT, "") for name in ("Ray", "SGLang")]
    modes = possible_modes(checks)
    assert modes["local trainer, one process"] is None and modes["rollout.name=vllm"] is None
    assert modes["strategy=megatron"] is None and modes["strategy=fsdp"] is None
    assert modes["Ray, one or many hosts"] == "needs Ray" and modes["rollout.name=sglang"] == "needs SGLang"
    broken = possible_modes([*checks, Check("torch", FAULT, "", required=True)])
    assert set(broken.values()) == {"fix torch first"}


LOOPBACK = socket.if_nameindex()[0][1]  # lo, lo0


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("NCCL_SOCKET_IFNAME", LOOPBACK, OK),
        ("NCCL_SOCKET_IFNAME", f"={LOOPBACK}", OK),
        ("NCCL_SOCKET_IFNAME", LOOPBACK[:-1], OK),
        ("NCCL_SOCKET_IFNAME", f"={LOOPBACK[:-1]}", FAULT),
        ("NCCL_SOCKET_IFNAME", f"nosuch,{LOOPBACK}", OK),
        ("NCCL_SOCKET_IFNAME", "^=nosuch", OK),
        ("NCCL_SOCKET_IFNAME", "nosuch0", FAULT),
        ("GLOO_SOCKET_IFNAME", LOOPBACK, OK),
        ("GLOO_SOCKET_IFNAME", LOOPBACK[:-1], FAULT),
    ],
)
def test_network_interfaces_that_variables_name(variable, value, state):
    """NCCL takes prefixes, Gloo one name."""
    (check,) = check_interfaces({variable: value})
    assert check.state == state and (state == OK or f"unset {variable}" in check.fix)
    assert check_interfaces({}) == []


def test_the_isolation_of_programs_is_a_line_of_the_report(monkeypatch):
    monkeypatch.setattr(machine, "isolation", lambda: Isolation(problem="bwrap is missing"))
    line = str(machine.check_isolation())
    assert line.startswith("[!] programs") and "without bubblewrap (bwrap is missing), programs can" in line
    assert "apt install bubblewrap" in line
