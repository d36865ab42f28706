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


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the first frame of an HTTP/2 server


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"SSH-2.0-x\r\n"], "another service responds"),  # a port that another program has got
        ([b""], "timed out"),  # a host that hangs
        ([SETTINGS[:2]], "timed out"),
        ([SETTINGS], None),
        ([SETTINGS[:2], SETTINGS[2:]], None),  # a busy head, of which a part arrives first
    ],
)
def test_what_answers_at_the_address(parts, reason, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("verl.single_controller.ray.cluster._RESPONSE_SECONDS", 0.5)
    connections = []

    def answer():
        connections.append(listener.accept()[0])
        for part in parts:
            connections[0].sendall(part)
            time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=answer, daemon=True).start()
        if reason is None:
            assert RayCluster({"address": address})._check_address() == address
        else:
            with pytest.raises(ValueError, match=f"no Ray cluster listens there .*{reason}"):
                RayCluster({"address": address})._check_address()


def test_the_record_of_a_cluster_that_is_gone(monkeypatch, caplog):
    """`ray start` leaves one behind when its host or its processes are killed."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("verl.single_controller.ray.cluster._RESPONSE_SECONDS", 0.2)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: "127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayCluster({})._check_address() == "local"
    assert "the last Ray cluster, " in caplog.text and ":1, is gone (" in caplog.text
    with pytest.raises(ValueError, match="address=auto: no Ray cluster listens there"):
        RayCluster({"address": "auto"})._check_address()
    with socket.create_server(("", 0)) as slow:  # it may not be gone
        address = f"127.0.0.1:{slow.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: address)
        with pytest.raises(ValueError, match=r"the last Ray cluster of this host, .*timed out.*run `ray stop`"):
            RayCluster({})._check_address()


@pytest.mark.parametrize("address", ["auto", "local", "", "name"])
def test_other_addresses_are_those_of_ray(address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address == "auto":  # both ways of asking for a cluster that runs
        with pytest.raises(ValueError, match=r"ray_init\.address=auto: no Ray cluster"):
            RayCluster({"address": address})._check_address()
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        with pytest.raises(ValueError, match="RAY_ADDRESS=auto: no Ray cluster"):
            RayCluster({})._check_address()
    else:
        assert RayCluster({"address": address} if address else {})._check_address() == (address or "local")
