"""The hosts on which torchrun started processes, as one Ray cluster for the time of a command.

The first process of each host starts a Ray node; they exchange the address through the store of torchrun. The first
host runs the command. The others wait for its end, and then stop their nodes.
"""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO

from torch.distributed import DistError, TCPStore

from verl.single_controller.worker import free_port

_START_LIMIT = 600.0  # seconds for all hosts to arrive, as in torchrun's own rendezvous
_STOP_LIMIT = 20.0  # for the nodes to end
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
#: a host is lost if it does not respond for a minute (docs/multinode.md)
_HEALTH_CHECK = {"RAY_health_check_failure_threshold": "20"}
#: keys of the store
_ADDRESS, _CLUSTER, _STATUS, _LEFT = "verl/address", "verl/cluster", "verl/status", "verl/left"


def run_on_nodes(
    command: Callable[[], int], host: int, hosts: int, store_address: tuple[str, int], holds_store: bool
) -> int:
    """Run `command` on the first host, with a Ray node on each. One process of each host calls it.

    Args:
        host: index of this host.
        hosts: their number.
        store_address: host and port of the store of torchrun.
        holds_store: whether the first host has to start this store, since torchrun did not.

    Returns:
        The exit status of the command, on every host.

    Raises:
        SystemExit: a Ray node ended (with what Ray printed), or the other hosts did not arrive within ten minutes.
    """
    limit, is_master = timedelta(seconds=_START_LIMIT), holds_store and host == 0
    try:
        store = TCPStore(*store_address, is_master=is_master, wait_for_workers=False, timeout=limit)
        return _lead(store, command, hosts) if host == 0 else _follow(store, store_address)
    except DistError as error:
        raise SystemExit(f"error: host {host} of {hosts} lost the others, or they did not start: {error}") from error


def _lead(store: TCPStore, command: Callable[[], int], hosts: int) -> int:
    # the address at which the others reach this host; its own name may be that of the loopback interface
    address, port = store.get(_ADDRESS).decode(), free_port()
    cluster, token = f"{address}:{port}", secrets.token_hex(32)
    os.environ |= {"RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with _ray_node(address, "--head", f"--port={port}", "--include-dashboard=false") as node:
        while not _listens(address, port):
            node.check()
            time.sleep(_LOOK_SECONDS)
        store.set(_CLUSTER, json.dumps([cluster, token]))
        status = 1
        try:
            status = command()
        finally:
            with contextlib.suppress(DistError):  # the other hosts are lost
                store.set(_STATUS, str(status))
                # their nodes end before the head of the cluster does, and read the store, which this process may hold
                until = time.monotonic() + _STOP_LIMIT
                while store.add(_LEFT, 0) < hosts - 1 and time.monotonic() < until:
                    time.sleep(_LOOK_SECONDS)
    return status


def _follow(store: TCPStore, store_address: tuple[str, int]) -> int:
    # the first host handles signals: it may save a checkpoint, for which it needs this node
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the node
    with socket.create_connection(store_address) as connection:
        address, head = connection.getsockname()[0], connection.getpeername()[0]
    store.set(_ADDRESS, head)
    cluster, token = json.loads(store.get(_CLUSTER))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with _ray_node(address, f"--address={cluster}") as node:
        while not store.check([_STATUS]):
            node.check()
            time.sleep(_LOOK_SECONDS)
        status = int(store.get(_STATUS))
    store.add(_LEFT, 1)
    return status


class _Node(subprocess.Popen):
    """`ray start` in the foreground. Ends with this process.

    Args:
        output: file for what it prints.
    """

    def __init__(self, command: list[str], output: IO[str]):
        self.output = output
        super().__init__(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_HEALTH_CHECK | os.environ,
            start_new_session=True,  # Ctrl-C of a terminal is for the command
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def check(self) -> None:
        """Raise SystemExit if the node has ended."""
        if self.poll() is not None:
            self.output.seek(0)
            raise SystemExit(f"error: the Ray node of this host ended ({self.returncode}):\n{self.output.read()}")


@contextlib.contextmanager
def _ray_node(address: str, *options: str) -> Iterator[_Node]:
    """A Ray node of this host with all of its processors and GPUs."""
    cpus = f"--num-cpus={len(os.sched_getaffinity(0))}"
    options = (*options, f"--node-ip-address={address}", cpus, "--disable-usage-stats")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        node = _Node(command, output)
        try:
            yield node
        finally:
            node.terminate()
            try:
                node.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                node.kill()


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True
