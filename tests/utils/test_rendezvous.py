"""Rank 0 of a run on one host listens on the loopback interface only."""

import os
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.applications import Starlette

from tests.programs import run_python
from verl.server.http import ServerThread
from verl.single_controller.worker import free_port
from verl.utils.rendezvous import bypass_proxies, interface_to, is_loopback, tcp_store

ROOT = Path(__file__).parents[2]
JOIN = """
import os, sys
import torch, torch.distributed as dist
from tests.sockets import listening
from verl.utils.rendezvous import join_default_group
join_default_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), *sorted({str(address) for address in listening(os.getpid())}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_group_on_one_host_listens_on_loopback_only():
    """Store and Gloo of both ranks."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    assert run_python("-c", "", cwd=ROOT, env=env).returncode == 0  # the libraries are imported before a port is chosen
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: run_python("-c", JOIN, cwd=ROOT, env=env | {"RANK": rank}), "01"))
    assert [rank.stdout for rank in ranks] == ["2 127.0.0.1\n"] * 2, [rank.stderr for rank in ranks]


def test_a_port_that_is_taken_is_named():
    port = free_port()
    store = tcp_store("127.0.0.1", port, 1, True, timedelta(seconds=20))
    store.set("key", "value")
    assert tcp_store("127.0.0.1", port, 1, False, timedelta(seconds=20)).get("key") == b"value"
    with pytest.raises(ValueError, match=rf"rank 0 cannot listen on 127.0.0.1:{port}.*MASTER_PORT"):
        tcp_store("127.0.0.1", port, 1, True, timedelta(seconds=20))


def test_an_address_of_another_host_is_refused():
    with pytest.raises(ValueError, match=r"rank 0 cannot listen on 192\.0\.2\.77:"):
        tcp_store("192.0.2.77", free_port(), 1, True, timedelta(seconds=20))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False), ("n1", False)],
)
def test_loopback_addresses(host, expected):
    assert is_loopback(host) is expected


def test_the_interface_is_that_of_the_route_to_the_host():
    """Also for this host itself, by one of its addresses; hosts that cannot be found have none."""
    assert interface_to("127.0.0.1") == ("lo0" if sys.platform == "darwin" else "lo")
    assert interface_to("no-such-host.invalid") is None
    addresses = {
        a.address: name
        for name, interface in psutil.net_if_addrs().items()
        for a in interface
        if a.family == socket.AF_INET and not is_loopback(a.address)
    }
    assert all(interface_to(address) == name for address, name in addresses.items())


def test_a_free_port_is_kept_until_a_server_listens_there():
    ports = [free_port() for _ in range(64)]
    assert len(set(ports)) == 64
    for port in ports[:3]:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            assert server.accept()


@pytest.mark.parametrize(
    "before", [{}, {"NO_PROXY": "a.example, 127.0.0.1"}, {"no_proxy": "a.example"}, {"NO_PROXY": "*"}]
)
def test_servers_on_this_host_are_reached_without_a_proxy(before, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", **before}.items():
        monkeypatch.setenv(name, value)
    bypass_proxies()
    assert urllib.request.proxy_bypass("127.0.0.1") and urllib.request.proxy_bypass("localhost")
    assert urllib.request.proxy_bypass("a.example") == bool(before)
    with ServerThread(Starlette()) as server:
        assert httpx.get(f"{server.url}/none").status_code == 404
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://localhost:{server.port}/none")
