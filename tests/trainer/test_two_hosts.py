"""Two hosts: network namespaces of this machine with an Ethernet link between them, each a node of one Ray cluster.

The first host resolves its own name to 127.0.1.1, as Debian's installer sets it up; the second has a name that nobody
knows. Their interfaces have different names, and each has a second one, which does not reach the other host. Needs root
and iproute2 (`ip`). `make test-hosts` runs these tests.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.slow_link import open_tap, relay
from tests.waiting import wait_until
from verl.single_controller.worker import free_port

ROOT = Path(__file__).parents[2]
HOSTS = {"nodea": ("10.78.0.1", "veth-a"), "nodeb": ("10.78.0.2", "eth-b")}
HEAD = HOSTS["nodea"][0]


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "verl-probe"], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "delete", "verl-probe"]).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2"),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two hosts with Ray nodes.

    Attributes:
        folder: of this test.
        env: of every process.
        port: of Ray.
    """

    folder: Path
    env: dict[str, str]
    port: int
    torchrun_port: int

    def start(self, host: str, *command: str, **options) -> subprocess.Popen:
        """A process on a host, which has the name of the host as its own."""
        own_name = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        shell = ["unshare", "--uts", "--mount", "sh", "-c", own_name, host, str(self.folder / f"{host}.hosts")]
        command = ["ip", "netns", "exec", f"verl-{host}", *shell, *command]
        return subprocess.Popen(command, **{"env": self.env, **options})

    def start_ray(self) -> None:
        for host, (address, _) in HOSTS.items():
            where = ["--head", f"--port={self.port}"] if address == HEAD else [f"--address={HEAD}:{self.port}"]
            options = [f"--node-ip-address={address}", "--num-cpus=2", "--disable-usage-stats"]
            assert self.start(host, "ray", "start", *where, *options, stdout=subprocess.DEVNULL).wait(120) == 0

    def train(self, folder: Path, *settings: str) -> subprocess.Popen:
        log = (self.folder / f"{folder.name}.log").open("a")
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *self.settings, f"trainer.default_local_dir={folder}"]
        return self.start("nodea", *command, *settings, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)

    @property
    def settings(self) -> list[str]:
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={self.folder}/data/train.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=8",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={self.folder}/model",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"reward.custom_reward_function.path={self.folder}/reward.py",
            *("trainer.backend=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=20"),
            *("trainer.total_training_steps=100", "trainer.logger=[console,jsonl]"),
        ]

    def torchrun(self, folder: Path, module: str, *settings: str) -> list[subprocess.Popen]:
        """torchrun on both hosts, with one rank on each."""
        log, runs = (self.folder / f"{folder.name}.log").open("a"), []
        env = {name: value for name, value in self.env.items() if not name.startswith("RAY_")}
        env["RAY_TMPDIR"] = self.env["RAY_TMPDIR"]
        for rank, host in enumerate(HOSTS):
            torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}"]
            where = [f"--master_addr={HEAD}", f"--master_port={self.torchrun_port}", "-m", module]
            command = [sys.executable, "-m", *torchrun, *where, *settings, f"trainer.default_local_dir={folder}"]
            runs.append(self.start(host, *command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, env=env))
        return runs

    def log(self, folder: Path) -> str:
        return (self.folder / f"{folder.name}.log").read_text()

    def processes(self, host: str, name: str) -> list[psutil.Process]:
        """The processes with this name or argument in the network namespace of a host."""
        namespace = os.stat(f"/run/netns/verl-{host}").st_ino
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_there = os.stat(f"/proc/{process.pid}/ns/net").st_ino == namespace
                if is_there and (name in process.name() or name in " ".join(process.cmdline()[:1])):
                    members.append(process)
        return members


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("two-hosts")
    ray_folder = Path("/tmp") / f"verl-hosts-{os.getpid()}"  # paths of sockets are short
    bin_folder = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "NCCL_", "RAY_"))}
    env |= {"PATH": f"{bin_folder}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    env |= {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(ray_folder), "OMP_NUM_THREADS": "1"}
    env["RAY_health_check_failure_threshold"] = "20"  # as docs/multinode.md says
    hosts = Hosts(folder, env, free_port(), free_port())
    env["RAY_ADDRESS"] = f"{HEAD}:{hosts.port}"
    ray_folder.mkdir()
    subprocess.run(["ray", "get-auth-token", "--generate"], env=env, check=True, capture_output=True)
    make = [sys.executable, str(ROOT / "examples/quickstart/make_tiny_model.py"), "--like", "llama"]
    subprocess.run([*make, "--out", str(folder / "model")], env=env, check=True, capture_output=True)
    tasks = [sys.executable, str(ROOT / "examples/quickstart/tasks.py"), "reverse", "--rows", "64"]
    subprocess.run([*tasks, "--out", str(folder / "data")], env=env, check=True, capture_output=True)
    (folder / "nodea.hosts").write_text("127.0.0.1 localhost\n127.0.1.1 nodea\n")
    (folder / "nodeb.hosts").write_text("127.0.0.1 localhost\n")
    (folder / "reward.py").write_text("def compute_score(solution_str): return len(set(solution_str)) / 8.0\n")
    try:
        for host, (address, interface) in HOSTS.items():
            ip("netns", "add", f"verl-{host}")
            ip("-n", f"verl-{host}", "link", "set", "lo", "up")
            if address == HEAD:
                continue
            here = HOSTS["nodea"][1]
            ip("link", "add", here, "netns", "verl-nodea", "type", "veth", "peer", interface, "netns", f"verl-{host}")
        for number, (host, (address, interface)) in enumerate(HOSTS.items()):
            # a bridge of containers, as many hosts have one
            ip("-n", f"verl-{host}", "link", "add", "br0", "type", "veth", "peer", "br1")
            ip("-n", f"verl-{host}", "address", "add", f"172.17.{number}.1/16", "dev", "br0")
            ip("-n", f"verl-{host}", "link", "set", "br0", "up")
            ip("-n", f"verl-{host}", "link", "set", "br1", "up")
            ip("-n", f"verl-{host}", "address", "add", f"{address}/24", "dev", interface)
            ip("-n", f"verl-{host}", "link", "set", interface, "up")
        hosts.start_ray()
        yield hosts
    finally:
        for host in HOSTS:
            with contextlib.suppress(OSError):
                for process in hosts.processes(host, ""):
                    process.kill()
            subprocess.run(["ip", "netns", "delete", f"verl-{host}"], capture_output=True)
        shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(hosts) -> Path:
    """The folder of a run in which nothing happens."""
    folder = hosts.folder / "undisturbed"
    assert hosts.train(folder).wait(300) == 0, hosts.log(folder)[-3000:]
    return folder


def weights(folder: Path, step: int = 100) -> dict[str, torch.Tensor]:
    """The actor of a run's checkpoint, merged."""
    actor, target = folder / f"global_step_{step}" / "actor", folder / f"merged_{step}"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    arguments = ["--local_dir", str(actor), "--target_dir", str(target)]
    if not target.is_dir():
        subprocess.run([*command, *arguments], check=True, capture_output=True, cwd=ROOT)
    return load_file(target / "model.safetensors")


def records(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def assert_equal_runs(folder: Path, undisturbed: Path) -> None:
    """The same weights, bit for bit, and the same rewards in every step."""
    torch.testing.assert_close(weights(folder), weights(undisturbed), rtol=0, atol=0)
    rewards = [{r["step"]: r["critic/rewards/mean"] for r in records(run)} for run in (folder, undisturbed)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 100


def after_steps(hosts: Hosts, name: str, steps: int, *settings: str) -> tuple[Path, subprocess.Popen]:
    """A run that has made some steps."""
    folder = hosts.folder / name
    run = hosts.train(folder, *settings)
    wait_until(lambda: len(records(folder)) >= steps or run.poll() is not None, 240)
    assert run.poll() is None, hosts.log(folder)[-3000:]
    return folder, run


def set_link(state: str) -> None:
    ip("-n", "verl-nodea", "link", "set", HOSTS["nodea"][1], state)


@contextlib.contextmanager
def slow_link(seconds: float, loss: float) -> Iterator[None]:
    """The addresses of the hosts move to a link with this delay in each direction, and this share of lost frames."""
    taps = [open_tap(f"tap-{host}") for host in HOSTS]
    for host in HOSTS:
        ip("link", "set", f"tap-{host}", "netns", f"verl-{host}", "up")
    with relay(*taps, seconds, loss):
        for host, (address, interface) in HOSTS.items():
            ip("-n", f"verl-{host}", "address", "delete", f"{address}/24", "dev", interface)
            ip("-n", f"verl-{host}", "address", "add", f"{address}/24", "dev", f"tap-{host}")
        try:
            yield
        finally:
            for host, (address, interface) in HOSTS.items():
                ip("-n", f"verl-{host}", "address", "delete", f"{address}/24", "dev", f"tap-{host}")
                ip("-n", f"verl-{host}", "address", "add", f"{address}/24", "dev", interface)


def test_two_hosts_train(hosts, undisturbed):
    """Their names cannot be resolved, and no variable names an interface."""
    assert len(records(undisturbed)) == 100
    assert records(undisturbed)[-1]["critic/rewards/mean"] > records(undisturbed)[0]["critic/rewards/mean"]


@pytest.mark.parametrize("seconds", [5, 20, 30])
def test_a_short_cut_of_the_link_changes_nothing(hosts, undisturbed, seconds):
    folder, run = after_steps(hosts, f"cut-{seconds}", 30)
    set_link("down")
    time.sleep(seconds)
    set_link("up")
    assert run.wait(300) == 0, hosts.log(folder)[-3000:]
    assert_equal_runs(folder, undisturbed)


def test_a_slow_and_lossy_link_changes_nothing(hosts, undisturbed):
    """200 ms for a message and its response, and 2 % of all frames are lost."""
    folder = hosts.folder / "slow"
    with slow_link(0.1, 0.02):
        assert hosts.train(folder, "trainer.total_training_steps=20").wait(600) == 0, hosts.log(folder)[-3000:]
    rewards = [[r["critic/rewards/mean"] for r in records(run)[:20]] for run in (folder, undisturbed)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 20
    torch.testing.assert_close(weights(folder, 20), weights(undisturbed, 20), rtol=0, atol=0)


@pytest.fixture(scope="module")
def sft(hosts) -> list[str]:
    """Settings of 80 steps on two ranks."""
    data = hosts.folder / "sft.jsonl"
    rows = ({"prompt": "abc"[i % 3 :], "response": "cbca"[: 1 + i % 4]} for i in range(64))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={hosts.folder}/model", f"data.train_files={data}", "data.train_batch_size=8"]
    return [
        *settings,
        "trainer.total_epochs=10",
        "optim.lr=1e-3",
        "trainer.logger=[console,jsonl]",
        "trainer.save_freq=20",
    ]


@pytest.fixture(scope="module")
def alone(hosts, sft) -> Path:
    """The folder of the same run with two processes on one host."""
    folder = hosts.folder / "sft-alone"
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", *sft, "trainer.n_gpus_per_node=2"]
    command.append(f"trainer.default_local_dir={folder}")
    subprocess.run(command, env=hosts.env, cwd=hosts.folder, check=True, capture_output=True, timeout=300)
    return folder


def assert_equal_training(folder: Path, alone: Path, steps: int = 80) -> None:
    losses = [[record["train/nll"] for record in records(run)][:steps] for run in (folder, alone)]
    assert losses[0] == losses[1] and len(losses[0]) == steps
    torch.testing.assert_close(weights(folder, steps), weights(alone, steps), rtol=0, atol=0)


def torchrun_after_steps(hosts: Hosts, name: str, settings: list[str]) -> tuple[Path, list[subprocess.Popen]]:
    """torchrun on both hosts, after some steps."""
    folder = hosts.folder / name
    runs = hosts.torchrun(folder, "verl.trainer.sft_trainer", *settings)
    wait_until(lambda: len(records(folder)) >= 25 or runs[0].poll() is not None, 240)
    assert runs[0].poll() is None, hosts.log(folder)[-3000:]
    return folder, runs


@pytest.mark.parametrize("seconds", [0, 5, 20, 30])
def test_torchrun_trains_on_both_hosts(hosts, sft, alone, seconds):
    """As two processes of one host do, also if the link is cut for a while."""
    folder, runs = torchrun_after_steps(hosts, f"sft-{seconds}", sft)
    if seconds:
        set_link("down")
        time.sleep(seconds)
        set_link("up")
    assert [run.wait(300) for run in runs] == [0, 0], hosts.log(folder)[-3000:]
    assert_equal_training(folder, alone)


def test_torchrun_over_a_slow_and_lossy_link_changes_nothing(hosts, sft, alone):
    folder = hosts.folder / "sft-slow"
    with slow_link(0.1, 0.02):
        runs = hosts.torchrun(folder, "verl.trainer.sft_trainer", *sft, "trainer.total_training_steps=20")
        assert [run.wait(600) for run in runs] == [0, 0], hosts.log(folder)[-3000:]
    assert_equal_training(folder, alone, 20)


def kill_worker(hosts: Hosts) -> None:
    hosts.processes("nodeb", "ray::RankActor")[0].send_signal(signal.SIGKILL)


def test_a_killed_rank_of_the_other_host_restarts(hosts, undisturbed):
    folder, run = after_steps(hosts, "killed", 30, "trainer.max_restarts=1")
    kill_worker(hosts)
    assert run.wait(300) == 0, hosts.log(folder)[-3000:]
    assert "its process died" in hosts.log(folder)
    assert_equal_runs(folder, undisturbed)


def test_torchrun_restarts_after_a_killed_rank(hosts, sft, alone):
    folder, runs = torchrun_after_steps(hosts, "sft-killed", [*sft, "trainer.max_restarts=1"])
    kill_worker(hosts)
    assert [run.wait(300) for run in runs] == [0, 0], hosts.log(folder)[-3000:]
    assert "its process died" in hosts.log(folder)
    assert_equal_training(folder, alone)


def test_hosts_without_a_shared_folder_are_refused(hosts, monkeypatch):
    folder = hosts.folder / "separate"
    folder.mkdir()
    raylet = str(hosts.processes("nodeb", "raylet")[0].pid)
    subprocess.run(["nsenter", "-m", "-t", raylet, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        run = hosts.train(folder)
        assert run.wait(300) == 1, hosts.log(folder)[-3000:]
    finally:
        subprocess.run(["nsenter", "-m", "-t", raylet, "umount", str(folder)], check=True)
    assert "is not one folder for the whole run" in hosts.log(folder) and "Traceback" not in hosts.log(folder)
    assert not list(folder.glob("global_step_*"))


def restart(hosts: Hosts) -> None:
    """Both hosts, with a link."""
    set_link("up")
    for host in HOSTS:
        for process in hosts.processes(host, ""):
            process.kill()
    hosts.start_ray()


def cut_for_good(hosts: Hosts) -> None:
    set_link("down")


def kill_raylet(hosts: Hosts) -> None:
    hosts.processes("nodeb", "raylet")[0].kill()


def switch_off(hosts: Hosts) -> None:
    """No connection is closed."""
    set_link("down")
    for process in hosts.processes("nodeb", ""):
        process.kill()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (kill_raylet, "its node 10.78.0.2 is lost"),
        (cut_for_good, "network fault"),
        (switch_off, "network fault"),
    ],
)
def test_a_lost_node_is_named_and_the_run_resumes(hosts, undisturbed, fault: Callable[[Hosts], None], message: str):
    """The last tests: the cluster is started again after each."""
    folder, run = after_steps(hosts, fault.__name__, 30)
    fault(hosts)
    try:
        assert run.wait(300) != 0
    finally:  # for the next test, too
        restart(hosts)
    log = hosts.log(folder)
    assert message in log and "its process died" not in log, log[-3000:]
    assert re.search(rf"the same command resumes from {folder}/global_step_\d+", log), log[-3000:]
    assert hosts.train(folder).wait(300) == 0, hosts.log(folder)[-3000:]
    assert_equal_runs(folder, undisturbed)


@pytest.mark.parametrize("fault", [cut_for_good, switch_off])
def test_torchrun_names_a_lost_host_and_resumes(hosts, sft, alone, fault: Callable[[Hosts], None]):
    """Both hosts end, and the same command goes on."""
    folder, runs = torchrun_after_steps(hosts, f"sft-{fault.__name__}", sft)
    fault(hosts)
    try:
        assert all(run.wait(400) != 0 for run in runs), hosts.log(folder)[-3000:]
    finally:
        restart(hosts)
    log = hosts.log(folder)
    assert f"network fault: {HEAD} cannot reach" in log and "its process died" not in log, log[-3000:]
    assert fault is switch_off or f"cannot reach {HEAD}" in log, log[-3000:]
    assert re.search(rf"the same command resumes from {folder}/global_step_\d+", log), log[-3000:]
    runs = hosts.torchrun(folder, "verl.trainer.sft_trainer", *sft)
    assert [run.wait(300) for run in runs] == [0, 0], hosts.log(folder)[-3000:]
    assert_equal_training(folder, alone)
