"""The hosts on which torchrun started processes, as one Ray cluster for the time of a command.

The first process of each host starts a Ray node; they exchange the address through the store of torchrun. The first
host runs the command. The others wait for its end, and then stop their nodes.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import IO

from torch.distributed import DistError, TCPStore

_START_LIMIT = 600.0  # seconds for all hosts to arrive, as in torchrun's own rendezvous
_CONNECT_LIMIT = 60.0  # for a second connection to the first host
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
    with contextlib.ExitStack() as stack:
        try:
            store = TCPStore(*store_address, is_master=is_master, wait_for_workers=False, timeout=limit)
            if host > 0:
                return _follow(store, store_address)
            stack.enter_context(_head_node(store))
        except DistError as error:
            raise SystemExit(
                f"error: host {host} of {hosts} lost the others, or they did not start: {error}"
            ) from error
        status = 1
        try:
            status = command()
        finally:
            _dismiss(store, hosts, status)
    return status


@contextlib.contextmanager
def _head_node(store: TCPStore) -> Iterator[None]:
    """The node of the first host, whose address the others and Ray in this process get."""
    # the address at which the others reach this host; its own name may be that of the loopback interface
    address, token = store.get(_ADDRESS).decode(), secrets.token_hex(32)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with _ray_node(address, "--head", "--port=0", "--include-dashboard=false") as node:
        while not (started := re.search(r"--address='(.+?)'", node.printed())):
            node.check()
            time.sleep(_LOOK_SECONDS)
        os.environ["RAY_ADDRESS"] = started[1]
        store.set(_CLUSTER, json.dumps([started[1], token]))
        yield


def _dismiss(store: TCPStore, hosts: int, status: int) -> None:
    """End the others: their nodes end before the head does, and read the store, which this process may hold."""
    with contextlib.suppress(DistError):  # they are lost
        store.set(_STATUS, str(status))
        until = time.monotonic() + _STOP_LIMIT
        while store.add(_LEFT, 0) < hosts - 1 and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)


def _follow(store: TCPStore, store_address: tuple[str, int]) -> int:
    # the first host handles signals: it may save a checkpoint, for which it needs this node
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the node
    with socket.create_connection(store_address, _CONNECT_LIMIT) as connection:
        address, head = connection.getsockname()[0], connection.getpeername()[0]
    store.set(_ADDRESS, head)
    cluster, token = json.loads(store.get(_CLUSTER))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with _ray_node(address, f"--address={cluster}") as node:
        status: Future[int] = Future()
        threading.Thread(target=_look, args=(store, status), daemon=True).start()
        while not status.done():
            if node.poll() is not None:
                try:
                    socket.create_connection(store_address, 5).close()
                except OSError as error:
                    reason = f"{address} cannot reach {head} ({error}): the link is cut, or the host is down"
                    raise SystemExit(f"error: network fault: {reason}") from None
            node.check()
            time.sleep(_LOOK_SECONDS)
    store.add(_LEFT, 1)
    return status.result()


def _look(store: TCPStore, status: Future[int]) -> None:
    """Wait for the exit status of the command. Over a link that is cut, a call of the store never returns."""
    try:
        while not store.check([_STATUS]):
            time.sleep(_LOOK_SECONDS)
        status.set_result(int(store.get(_STATUS)))
    except DistError as error:
        status.set_exception(error)


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

    def printed(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")

    def check(self) -> None:
        """Raise SystemExit if the node has ended."""
        if self.poll() is not None:
            raise SystemExit(f"error: the Ray node of this host ended ({self.returncode}):\n{self.printed()}")


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
