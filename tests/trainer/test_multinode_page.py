"""docs/multinode.md: its commands start two nodes on this machine and train over them, by hand and as a Slurm job."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl.config import load_config
from verl.single_controller.ray.cluster import default_excludes, prepare_runtime_env
from verl.single_controller.worker import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "multinode.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_settings_of_the_page_are_settings(tmp_path):
    pytest.importorskip("ray")
    for number, block in enumerate(blocks("yaml")):
        (tmp_path / f"{number}.yaml").write_text(block)
    travels, network = (load_config(tmp_path / f"{number}.yaml") for number in range(2))
    given = travels.ray_kwargs.ray_init["runtime_env"]
    assert prepare_runtime_env(given | {"working_dir": str(tmp_path)})["excludes"][len(default_excludes()) :] == [
        "/notebooks/"
    ]
    assert network.trainer.worker_env["NCCL_NET_GDR_LEVEL"] == "PHB"


@pytest.fixture
def env(tmp_path) -> Iterator[dict[str, str]]:
    """Of a shell in which `python` and `ray` are those of this environment, and Ray leaves no traces elsewhere."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # paths of sockets are short
        yield environment(tmp_path) | {"RAY_TMPDIR": folder}


def environment(folder: Path) -> dict[str, str]:
    programs = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    further = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(folder)}
    return {**os.environ, "PATH": programs, **further}


@contextlib.contextmanager
def running(command: str, env: dict[str, str], folder: Path) -> Iterator[None]:
    """A command that goes on until the end of the block; everything that it has started ends with it."""
    process = subprocess.Popen(["bash", "-c", command], env=env, cwd=folder, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def check(run: Path) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["actor/grad_norm"] >= 0 for step in steps)


def command_blocks() -> tuple[str, list[str]]:
    """An address of this machine, and the commands of the page with it in them."""
    port = free_port()
    found = [
        block.replace("HEAD_ADDRESS:6379", f"127.0.0.1:{port}").replace("--port=6379", f"--port={port}")
        for block in blocks("bash")
    ]
    return f"127.0.0.1:{port}", found


@pytest.mark.slow
def test_two_nodes_by_hand(tmp_path, env):
    pytest.importorskip("ray")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    address, (token, first, other, look, run, _) = command_blocks()
    subprocess.run(["bash", "-ec", token], env=env, check=True)
    here = " --node-ip-address=127.0.0.1 --block"
    with running(token + first.strip() + here, env, tmp_path), running(token + other.strip() + here, env, tmp_path):
        look_again = f"{token}{look}ray status --address={address} | grep -c ' node_'"
        assert wait_for(look_again, env, at_least=2) == 2
        training = token + run.strip() + " trainer.logger=[jsonl]"
        subprocess.run(["bash", "-ec", training], env=env, cwd=tmp_path, check=True, timeout=200)
    check(tmp_path / "tiny" / "run")


def wait_for(command: str, env: dict[str, str], at_least: int = 0) -> int:
    """The number that a command prints last, once it succeeds and that is large enough."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(["bash", "-ec", command], env=env, capture_output=True, text=True)
        number = int(done.stdout.split()[-1]) if at_least and done.returncode == 0 else 0
        if done.returncode == 0 and number >= at_least:
            return number
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


SHIMS = {
    "scontrol": "echo here-1; echo here-2",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1",
}


@pytest.mark.slow
def test_a_slurm_job(settings, tmp_path, env):
    """The script of the page, with stand-ins for the programs of Slurm that run everything on this machine."""
    pytest.importorskip("ray")
    for name, body in SHIMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    port = free_port()
    slurm = {"SLURM_JOB_NODELIST": "here-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "2"}
    env |= slurm | {"GPUS_PER_NODE": "1", "RAY_PORT": str(port), "RAY_AUTH_MODE": "token"}
    subprocess.run(
        ["bash", "-ec", blocks("bash")[-1] + "ray get-auth-token --generate"], env=env, cwd=tmp_path, check=True
    )
    further = ["algorithm.name=grpo", "actor_rollout_ref.actor.use_kl_loss=false", "trainer.total_training_steps=2"]
    job = subprocess.Popen(["bash", "run.slurm", *settings, *further], env=env, cwd=tmp_path, start_new_session=True)
    try:
        assert job.wait(250) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    check(tmp_path / "run")
    deadline = time.monotonic() + 40
    while left := [
        p for p in psutil.process_iter(["cmdline"]) if f"127.0.0.1:{port}" in " ".join(p.info["cmdline"] or [])
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
