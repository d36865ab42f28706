"""The address of a Ray cluster that is gone is one error, within seconds."""

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


@pytest.mark.parametrize("address", ["auto", "local", "", "name"])
def test_other_addresses_are_those_of_ray(address, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayCluster({"address": address} if address else {})._check_address() == (address or "auto")
