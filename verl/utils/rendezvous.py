"""The store and the sockets of process groups, on the network interface that they need.

`torch.distributed` lets rank 0 listen on all interfaces, and the store has no authentication: a host that can connect
to its port can change what the ranks read. Here it listens on the address of rank 0, which is the loopback interface
for a run on one host.
"""

import ipaddress
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: variables that choose the network interface of Gloo and NCCL
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bypass_proxies() -> None:
    """Add the loopback addresses to NO_PROXY: servers of this host are not reached through a proxy."""
    for name in ("no_proxy", "NO_PROXY"):  # libraries read one of the two
        hosts = os.environ.get(name) or os.environ.get(name.swapcase()) or ""
        if hosts.strip() != "*":
            listed = [host.strip() for host in hosts.split(",") if host.strip()]
            os.environ[name] = ",".join(dict.fromkeys([*listed, *_LOOPBACK]))


def tcp_store(
    host: str, port: int, world_size: int | None, is_master: bool, timeout: timedelta, wait_for_workers: bool = True
) -> "TCPStore":
    """A TCPStore whose master listens on `host` only. Raises ValueError if the master cannot listen at this address."""
    from torch.distributed import TCPStore

    if not is_master:
        return TCPStore(host, port, world_size, False, timeout, wait_for_workers)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on {host}:{port} ({error}): expected an address of this host and a free port "
            "(MASTER_ADDR, MASTER_PORT)"
        ) from error
    # the store closes the descriptor
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers, master_listen_fd=listener.detach())


def join_default_group(backend: str, timeout: timedelta | None = None) -> None:
    """Join the process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 listens on MASTER_ADDR only.

    Args:
        backend: as in `torch.distributed.init_process_group`.
        timeout: of the collectives; None: torch's default.
    """
    from torch import distributed as dist
    from torch.distributed.constants import default_pg_timeout

    env = os.environ
    use_interface_to(env["MASTER_ADDR"])
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a script under torchrun, which hosts the store
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    wait = timeout or default_pg_timeout
    store = tcp_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world_size, rank == 0, wait)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def use_interface_to(host: str) -> None:
    """Let Gloo and NCCL use the network interface, which each rank finds for its own host, over which this process
    reaches rank 0. By default, Gloo takes the address of the host's name, often 127.0.1.1, and NCCL the first interface
    that is up. Variables that are set already keep their values."""
    interface = interface_to(host)
    for name in _INTERFACE_VARIABLES if interface else ():
        os.environ.setdefault(name, interface)


def interface_to(host: str) -> str | None:
    """The name of the network interface over which this host reaches `host`; None if no interface has the address."""
    if is_loopback(host):
        return "lo0" if sys.platform == "darwin" else "lo"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it selects the route
            local = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == local for a in addresses)), None)


def is_loopback(host: str) -> bool:
    """Whether an address or host name is of the loopback interface, as far as it is known without a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
