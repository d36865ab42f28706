"""Training commands under torchrun: one run, with as many ranks as torchrun started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import DistError, TCPStore

from verl.single_controller.ray import torchrun_nodes
from verl.single_controller.worker import free_port
from verl.trainer import sft_trainer
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.startup.torchrun import Torchrun, launcher_settings, run_under_launcher

MPI = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
RUN_ID = {"TORCHELASTIC_RUN_ID": "none"}
TORCHRUN = MPI | RUN_ID | {"LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def announce(monkeypatch):
    """Set the environment of one rank."""

    def set_variables(**env: str) -> None:
        for name, value in (MPI | RUN_ID | {"RANK": "0", "LOCAL_RANK": "0"} | env).items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def command(tiny, tmp_path) -> list[str]:
    return [
        f"model.path={tiny / 'model'}",
        f"data.train_files={tiny / 'train.jsonl'}",
        "data.train_batch_size=8",
        "trainer.total_training_steps=2",
        "trainer.logger=[jsonl]",
        "trainer.save_freq=2",
        "optim.lr=1e-3",
        "checkpoint.save_contents=[model,hf_model]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]


def test_the_group_is_read_from_the_variables_of_torchrun():
    assert Torchrun.from_env(TORCHRUN) == Torchrun(1, 4, 1, 2)
    assert Torchrun.from_env(MPI | RUN_ID) == Torchrun(1, 4, 1, 4)
    for name in (*MPI, *RUN_ID):  # a scheduler that sets only some of them starts one process
        assert Torchrun.from_env({key: value for key, value in TORCHRUN.items() if key != name}) is None


@pytest.mark.parametrize("outcome", [0, 3, RuntimeError("failed"), KeyboardInterrupt()])
def test_rank_0_runs_the_command_and_the_others_end(outcome, announce):
    announce()
    ran = []

    def command() -> int:
        ran.append((launcher_settings(), "WORLD_SIZE" in os.environ))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    assert [Torchrun(rank, 3, rank, 3).run(command) for rank in (1, 2)] == [0, 0] and not ran
    if isinstance(outcome, BaseException):
        with pytest.raises(type(outcome)):
            Torchrun(0, 3, 0, 3).run(command)
    else:
        assert Torchrun(0, 3, 0, 3).run(command) == outcome
    assert ran == [({"trainer.n_gpus_per_node": 3}, False)]
    assert launcher_settings() == {}


def test_variables_that_another_launcher_has_left_are_ignored(monkeypatch, capsys):
    for name, value in MPI.items():  # as rank 1 of torchrun, the command would end at once
        monkeypatch.setenv(name, value)
    assert run_under_launcher(lambda: 5 if not launcher_settings() and not os.environ.keys() & MPI.keys() else 0) == 5
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set, but not by torchrun" in capsys.readouterr().err


def test_another_number_of_ranks_is_refused_with_both(command, announce, capsys):
    announce(WORLD_SIZE="1")
    assert sft_trainer.main([*command, "trainer.n_gpus_per_node=2"]) == 1
    shown = capsys.readouterr().err
    assert "torchrun started 1 ranks on each of 1 hosts, but trainer.n_gpus_per_node is 2" in shown


def test_hosts_with_different_numbers_of_ranks_are_refused(command, announce, capsys):
    announce(WORLD_SIZE="3", LOCAL_WORLD_SIZE="2")
    assert sft_trainer.main(command) == 1
    assert "torchrun started 3 ranks, 2 of them on this host: start the same number" in capsys.readouterr().err


def test_another_cluster_than_that_of_the_hosts_is_refused(command, announce, capsys, monkeypatch):
    announce(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    monkeypatch.setattr(torchrun_nodes, "run_on_nodes", lambda command, *hosts, **options: command())
    assert sft_trainer.main([*command, "ray_kwargs.ray_init.address=10.0.0.9:6379"]) == 1
    refused = "torchrun started processes on 2 hosts, which become a Ray cluster of this run, but {}: remove it"
    assert refused.format("ray_kwargs.ray_init.address is 10.0.0.9:6379") in capsys.readouterr().err
    announce(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", RAY_ADDRESS="10.0.0.9:6379")
    assert sft_trainer.main(command) == 1
    assert refused.format("RAY_ADDRESS is 10.0.0.9:6379") in capsys.readouterr().err


def test_an_error_of_the_command_is_not_one_of_the_launcher(monkeypatch):
    """A worker that cannot connect raises the same class as a store that is lost."""
    monkeypatch.setattr(torchrun_nodes, "_head_node", contextlib.nullcontext)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def command():
        raise DistError("of a worker")

    with pytest.raises(DistError, match="of a worker"):
        torchrun_nodes.run_on_nodes(command, 0, 1, ("127.0.0.1", store.port), holds_store=False)
    assert store.get("verl/status") == b"1"  # the other hosts end
    monkeypatch.setattr(torchrun_nodes, "_START_LIMIT", 1.0)
    with pytest.raises(SystemExit, match="host 1 of 2 lost the others"):
        torchrun_nodes.run_on_nodes(command, 1, 2, ("127.0.0.1", 1), holds_store=False)


def test_a_script_that_torchrun_starts_several_times_is_refused(settings, announce):
    announce(WORLD_SIZE="2")
    with pytest.raises(ValueError, match=r"torchrun started this script 2 times.*trainer\.n_gpus_per_node=2"):
        LocalPPOTrainer(overrides=settings)


def test_one_announced_rank_trains_in_this_process(command, announce, tmp_path):
    announce(WORLD_SIZE="1", MASTER_PORT=str(free_port()))
    assert sft_trainer.main(command) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "ppo"])
def test_torchrun_gives_the_results_of_the_launcher_of_the_package(program, command, settings, tmp_path):
    module = {"sft": "verl.trainer.sft_trainer", "ppo": "verl.trainer.main_ppo"}[program]
    if program == "ppo":
        command = [*settings, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", "trainer.save_freq=2"]
        command.append("actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]")
    runs = {}
    for name, start in (
        ("torchrun", ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", module]),
        ("own", [module, "trainer.n_gpus_per_node=2"]),
    ):
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-m", *start, *command, f"trainer.default_local_dir={folder}"],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(folder / "global_step_2" / "actor" / "huggingface" / "model.safetensors")
        runs[name] = [{k: v for k, v in step.items() if k != "time" and "second" not in k} for step in metrics], weights
    for ours, theirs in zip(runs["own"][0], runs["torchrun"][0], strict=True):
        untimed = [key for key in ours if "time" not in key and "timing" not in key and "perf" not in key]
        assert {key: ours[key] for key in untimed} == {key: theirs[key] for key in untimed}
    for name, tensor in runs["own"][1].items():
        assert torch.equal(tensor, runs["torchrun"][1][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["torchrun", "worker"])
def test_nothing_is_left_of_a_run_that_is_stopped(stopped, command, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    further = ["trainer.total_training_steps=100000", "trainer.total_epochs=100000", "trainer.save_freq=2"]
    with (tmp_path / "log").open("w") as log:
        run = psutil.Popen([*start, "-m", "verl.trainer.sft_trainer", *command, *further], stdout=log, stderr=log)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 4):
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.3)
    processes = run.children(recursive=True)
    if stopped == "torchrun":
        run.send_signal(signal.SIGINT)
    else:
        found = [p for p in processes if any("worker_main" in word for word in p.cmdline())]
        next(process for process in found if process.environ().get("RANK") == "1").kill()
    assert run.wait(60) != 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    shown = (tmp_path / "log").read_text()
    expected = {"torchrun": "stopped by SIGINT after step", "worker": "was killed by SIGKILL"}
    assert expected[stopped] in shown
    assert "global_step_" in shown
