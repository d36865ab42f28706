"""The address of a Ray cluster that is gone is one error, within seconds."""

import socket
import threading
import time

import pytest

ray = pytest.importorskip("ray")

from verl.config import load_config  # noqa: E402
from verl.single_controller.ray.cluster import RayCluster  # noqa: E402


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "no.such.host.invalid:6379"])
@pytest.mark.parametrize("setting", ["RAY_ADDRESS", "ray_kwargs.ray_init.address"])
def test_a_cluster_that_is_gone_is_named(setting, address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of this process may have a cluster
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if setting == "RAY_ADDRESS":
        monkeypatch.setenv(setting, address)
    cluster = RayCluster({} if setting == "RAY_ADDRESS" else {"address": address})
    start = time.monotonic()
    for call in (lambda: cluster.check(load_config()), lambda: cluster.start({}, {})):
        with pytest.raises(ValueError) as caught:
            call()
        assert f"{setting}={address}: no Ray cluster listens there" in str(caught.value)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(("greeting", "reason"), [(b"SSH-2.0-x\r\n", "another service answers"), (b"", "timed out")])
def test_another_service_at_the_address(greeting, reason, monkeypatch):
    """A port that another program has got, or a host that hangs."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("verl.single_controller.ray.cluster._PROBE_SECONDS", 0.5)
    connections = []

    def answer():
        connections.append(listener.accept()[0])
        connections[0].sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match=f"no Ray cluster listens there .*{reason}"):
            RayCluster({"address": f"127.0.0.1:{listener.getsockname()[1]}"})._check_address()


def test_the_record_of_a_cluster_that_is_gone(monkeypatch, caplog):
    """`ray start` leaves one behind when its host or its processes are killed."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: "127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayCluster({})._check_address() == "local"
    assert "the last Ray cluster, " in caplog.text and ":1, is gone (" in caplog.text
    with pytest.raises(ValueError, match="address=auto: no Ray cluster listens there"):
        RayCluster({"address": "auto"})._check_address()


@pytest.mark.parametrize("address", ["auto", "local", "", "name"])
def test_other_addresses_are_those_of_ray(address, monkeypatch):
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayCluster({"address": address} if address else {})._check_address() == (address or "auto")
