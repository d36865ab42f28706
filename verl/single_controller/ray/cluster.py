"""Workers as Ray actors on the nodes of a Ray cluster, in one placement group per pool.

    ray.init()
    groups = colocate({"actor": actor_spec, "ref": ref_spec}, ResourcePool("main", (8, 8)), use_gpu=True)
    log_probs = groups["ref"].compute_log_prob(batch)   # 16 ranks on two nodes, shared by both roles

`actor_pool` has the controller's side of the actors, `rank_actor` the actor itself.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import ray_constants, services

from verl.config import schema
from verl.processes.limits import Limits
from verl.single_controller.cluster import Pools, ResourcePool, RunConfig, smaller_sizes, start_pools, wait_limits
from verl.single_controller.ray.actor_pool import CONNECTION_LIMIT, START_TIMEOUT, RayPool, reserve
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import CALL_TIMEOUT, WorkerGroup
from verl.utils.paths import resolved
from verl.utils.rendezvous import is_loopback

logger = logging.getLogger("verl.single_controller")

# ---- the working directory ------------------------------------------------------------------------------------------

# Ray ships a part of it to the nodes: code, never weights, checkpoints or data. `verl/trainer/runtime_env.yaml` has the
# patterns that are always excluded. Ray refuses a directory that is too large.

_DEFAULTS = Path(__file__).parents[2] / "trainer" / "runtime_env.yaml"


def default_excludes() -> list[str]:
    return list(yaml.safe_load(_DEFAULTS.read_text(encoding="utf-8"))["excludes"])


def prepare_runtime_env(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: variables as strings, and exclude patterns for the working directory.

    Raises ValueError for a working directory that does not exist.
    """
    env = {name: value for name, value in settings.items() if value is not None}
    if "env_vars" in env:
        env["env_vars"] = {name: str(value) for name, value in env["env_vars"].items()}
    folder = env.get("working_dir")
    if folder is None or "://" in folder or folder.endswith(".zip"):  # already packed
        return env
    env["excludes"] = [*default_excludes(), *env.get("excludes", [])]
    if not Path(folder).is_dir():
        raise ValueError(f"runtime_env.working_dir: there is no folder {folder!r} (looked at {resolved(Path(folder))})")
    return env


# ---- the cluster ----------------------------------------------------------------------------------------------------


REPLACEMENT_SECONDS = 60.0  # for another node to replace a lost one, before a restart uses fewer
_LOOK_SECONDS = 1.0
_CONNECT_SECONDS, _RESPONSE_SECONDS = 5.0, 30.0  # for a head to accept a connection, and to answer: it may be busy
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # what a client of gRPC sends first
_LOCAL_TIMEOUT = 3.0  # seconds: a local Ray has its resources immediately or never
_LOCAL_ADVICE = (
    "No cluster was found to join, so Ray was started on this host for this run only: start Ray on every node first "
    "(`ray start`), and set RAY_ADDRESS or ray_kwargs.ray_init.address if this host is not one of its nodes "
    "(docs/multinode.md); or decrease trainer.nnodes or trainer.n_gpus_per_node"
)


def ray_cluster(config: schema.Config) -> "RayCluster":
    trainer = config.trainer
    return RayCluster(config.ray_kwargs.ray_init, trainer.device, wait_limits(config), trainer.worker_env)


class RayCluster:
    """Nodes x processes in placement groups.

    A running cluster is used: that of an earlier `ray.init`, of `ray_init["address"]` or RAY_ADDRESS, or one that
    `ray start` made on this host. Otherwise (and with address=local) one is started here and ended by `shutdown`.

    Args:
        ray_init: arguments of `ray.init`.
        device: "auto", "cpu" or "cuda"; "auto" uses GPUs if the cluster has any.
        timeout: limits of waits; a number is the seconds that one call may take before a hang is reported.
    """

    def __init__(
        self,
        ray_init: Mapping[str, Any] | None = None,
        device: str = "auto",
        timeout: float | Limits = CALL_TIMEOUT,
        env: Mapping[str, str] | None = None,
    ):
        self.settings = dict(ray_init or {})
        self.device = device
        self.timeout = timeout
        self.env = dict(env or {})
        self._started, self._can_grow = False, True
        self._groups: dict[str, WorkerGroup] = {}

    @functools.cached_property
    def ray_init(self) -> dict[str, Any]:
        """The arguments of `ray.init`. Raises ValueError for a working directory that does not exist."""
        arguments = {"log_to_driver": True, "include_dashboard": False, **self.settings}
        if self.settings.get("runtime_env"):
            arguments["runtime_env"] = prepare_runtime_env(self.settings["runtime_env"])
        return arguments

    def check(self, config: RunConfig) -> None:
        if self.settings and ray.is_initialized():
            raise ValueError(
                f"ray_kwargs.ray_init sets {', '.join(self.settings)}, but Ray is already running in this process, so "
                "that it would have no effect: pass it to your own ray.init, or remove it here"
            )
        _ = self.ray_init
        self._check_address()

    def start(self, pools: Pools, specs: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        self._connect()
        can_grow, use_gpu = self._can_grow, self._use_gpu()
        # in this thread, which receives Ctrl-C
        reserved = reserve(
            dict.fromkeys(placed[0][1] for placed in pools.values() if not placed[0][1].is_local),
            use_gpu=use_gpu,
            timeout=START_TIMEOUT if can_grow else _LOCAL_TIMEOUT,
            advice="" if can_grow else _LOCAL_ADVICE,
        )

        def start(roles: dict[str, WorkerSpec], pool: ResourcePool) -> dict[str, WorkerGroup]:
            options = {"use_gpu": use_gpu, "timeout": self.timeout, "env": self.env}
            return colocate(roles, pool, placement=reserved[pool], **options)

        self._groups = start_pools(pools, specs, start, self.env)
        return self._groups

    def _connect(self) -> None:
        """Start or join a cluster, unless this process has done so."""
        if not ray.is_initialized():
            for name, limit in CONNECTION_LIMIT.items():
                os.environ.setdefault(name, limit)
            self._started, handler = True, signal.getsignal(signal.SIGTERM)
            try:
                session = self._join_or_start()["session_dir"]
            finally:  # Ray's handler of SIGTERM exits
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, handler)
            # Ray names a session after the process that started it
            self._can_grow = not session.endswith(f"_{os.getpid()}")

    def _use_gpu(self) -> bool:
        """Whether processes get a GPU: this host may have none where the nodes do."""
        return self.device == "cuda" or (self.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)

    def sizes_left(self, nnodes: int, per_node: int) -> list[tuple[int, int]]:
        """Waits a minute for a node that replaces the lost one."""
        self._connect()
        resource, until = "GPU" if self._use_gpu() else "CPU", time.monotonic() + REPLACEMENT_SECONDS
        while True:
            nodes = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
            sizes = smaller_sizes(nodes, nnodes, per_node)
            if sizes[:1] == [(nnodes, per_node)] or time.monotonic() >= until:
                return sizes
            time.sleep(_LOOK_SECONDS)

    def _check_address(self) -> str:
        """The address of the cluster to join; "local": start one.

        Raises ValueError if no cluster responds at an address that is set, for which Ray waits long. Without one, a
        cluster that `ray start` has left is gone if nothing, or another service, listens there.
        """
        setting, asked = "ray_kwargs.ray_init.address", self.settings.get("address")
        if not asked:
            setting, asked = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS")
        address = known = asked or "auto"
        if ray.is_initialized():
            return address
        try:
            if address == "auto":
                known = services.canonicalize_bootstrap_address("auto", self.settings.get("_temp_dir")) or ""
            host, _, port = known.rpartition("://")[2].rpartition(":")
            if port.isdecimal() and host:
                _greet(host.strip("[]"), int(port))
            elif asked == "auto":
                raise ConnectionError("none runs on this host")
        except OSError as error:
            if not asked and not isinstance(error, TimeoutError):
                if known != address:
                    logger.warning("the last Ray cluster, %s, is gone (%s): Ray is started for this run", known, error)
                return "local"
            cluster = f"{setting}={asked}" if asked else f"the last Ray cluster of this host, {known}"
            advice = f"remove {setting}" if asked else "run `ray stop`, or set ray_kwargs.ray_init.address=local"
            raise ValueError(
                f"{cluster}: no Ray cluster listens there ({error}): set the address of a cluster that runs "
                f"(`ray status --address {known}`), start one (`ray start --head`), or {advice}: "
                "Ray is then started for this run only"
            ) from None
        return address

    def _join_or_start(self) -> Mapping[str, Any]:
        """Join a cluster if there is one, otherwise start one that listens on the loopback interface only."""
        address = self._check_address()
        if address != "local":
            return ray.init(**{**self.ray_init, "address": address}).address_info
        with _on_loopback():
            started = ray.init(**{"_node_ip_address": "127.0.0.1", **self.ray_init, "address": "local"}).address_info
        ip = started["node_ip_address"]
        if "_node_ip_address" not in self.settings and not is_loopback(ip):
            logger.warning("Ray %s listens on %s, also for other hosts (docs/security.md)", ray.__version__, ip)
        return started

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        if self._started:
            ray.shutdown()
            self._started, self._can_grow = False, True


def _greet(host: str, port: int) -> None:
    """Raises OSError unless the head of a cluster responds; TimeoutError: it may be busy."""
    with socket.create_connection((host, port), _CONNECT_SECONDS) as connection, connection.makefile("rb") as file:
        connection.settimeout(_RESPONSE_SECONDS)
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            connection.sendall(_HTTP2)
            if file.read(4)[3:] != b"\4":  # the settings of a gRPC server
                raise ConnectionError("another service responds")


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Context in which Ray keeps a loopback address of its node, as it does on macOS, instead of that of the host."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class RayWorkerGroup(WorkerGroup):
    """A Worker class over the ranks of a resource pool, as Ray actors.

    Requires `ray.init()`. The actors hold their resources until `shutdown`, which a `with` block calls.

    Args:
        name: Role shown in errors; the name of the class by default.
        pool: Existing actors that host this role already (see `colocate`).
        **options: Otherwise those of `RayPool`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        resources: ResourcePool,
        name: str | None = None,
        *,
        pool: RayPool | None = None,
        **options: Any,
    ):
        super().__init__(spec.worker_class, resources.world_size, name)
        self._pool = pool or RayPool({self.name: spec}, resources, **options)


def colocate(specs: Mapping[str, WorkerSpec], resources: ResourcePool, **options: Any) -> dict[str, RayWorkerGroup]:
    """Run several roles in the actors of one pool, with the arguments of `RayPool`. Their calls run one after another,
    in call order."""
    pool = RayPool(specs, resources, **options)
    return {role: RayWorkerGroup(spec, resources, role, pool=pool) for role, spec in specs.items()}
