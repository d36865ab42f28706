"""RankActor: the Ray actor of one rank, with its workers."""

import faulthandler
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

import ray

from verl.processes.streams import redact_output
from verl.single_controller.dispatch import Call
from verl.single_controller.remote_batch import Columns, Packed, load_call, pack_result
from verl.single_controller.worker import RankEnv, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import WorkerError
from verl.utils.log import setup_worker_logging
from verl.utils.redaction import learn_secrets
from verl.utils.rendezvous import bypass_proxies

Reply = tuple[bool, tuple[Packed, ray.ObjectRef | None] | WorkerError | None, float, float]
"""(True, (packed result, its `Columns`), time, duration in seconds) or (False, error, time, duration)."""


@dataclass(frozen=True)
class ActorInfo:
    """The node and process of an actor, as Ray started it.

    Attributes:
        actor_id, node_id: Ray's ids.
        host, port: Address of the node, and a free port.
        gpus: Those that Ray assigned to the actor.
        pid: The process of the actor.
        host_name: Name of the node's host.
    """

    actor_id: str
    node_id: str
    host: str
    gpus: list
    port: int
    pid: int
    host_name: str


class RankActor:
    """One rank: its workers, one per role.

    Ray runs two groups of methods concurrently, one thread each: the calls of workers, and reporting what the first
    thread is doing ("control").

    Args:
        secrets: Those of the controller's settings, which no log and no error of this process may show.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        learn_secrets(secrets)
        redact_output()
        self._workers: dict[str, Worker] = {}
        self._rank = 0
        self._running_since: float | None = None

    def info(self) -> ActorInfo:
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        process = os.getpid(), socket.gethostname()
        return ActorInfo(context.get_actor_id(), context.get_node_id(), host, ray.get_gpu_ids(), free_port(), *process)

    def start(self, specs: Mapping[str, WorkerSpec], rank_env: RankEnv, env: dict[str, str], folder: str) -> Reply:
        """Construct the workers.

        Args:
            folder: Working directory of the controller, to which relative paths of a run refer. Used if it exists on
                this node and Ray was not given a working directory.
        """
        os.environ.update(env)
        bypass_proxies()
        if "working_dir" not in ray.get_runtime_context().runtime_env and os.path.isdir(folder):
            os.chdir(folder)
        self._rank = rank_env.rank
        setup_worker_logging(rank_env.rank)
        role, since = "", time.monotonic()
        try:
            for role, spec in specs.items():
                self._workers[role] = spec.build(rank_env)
        except BaseException as error:
            return self._failed(error, role, "__init__", since)
        return True, None, time.time(), time.monotonic() - since

    def run(self, role: str, method: str, packed: Packed, padding: int, collect: bool, *columns: Columns) -> Reply:
        """Run one call. columns: those of the sources that its arguments refer to."""
        since = self._running_since = time.monotonic()
        try:
            args, kwargs = load_call(packed, columns)
            result, large = pack_result(Call(args, kwargs, padding, collect).run(self._workers, role, method))
            return True, (result, large and ray.put(large)), time.time(), time.monotonic() - since
        except BaseException as error:  # including SystemExit: a worker that calls sys.exit() is reported
            return self._failed(error, role, method, since)
        finally:
            self._running_since = None

    def _failed(self, error: BaseException, role: str, method: str, since: float) -> Reply:
        return False, WorkerError.from_exception(error, role, method, self._rank), time.time(), time.monotonic() - since

    def progress(self) -> tuple[float | None, str]:
        """Seconds since the running call started, None if there is none; and the stacks of all threads."""
        since = self._running_since
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return since and time.monotonic() - since, file.read().decode(errors="replace")
