"""Weight sync over files, adapters apart, and verification of what a receiver stores."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.rollout.test_weight_sync import CPU, Trained, groups, make_module, together
from verl.weight_sync import (
    CollectiveSync,
    ModuleReceiver,
    ReplicaSync,
    local_sync,
    receive_collective,
)


def engine_of(receiver):
    return SimpleNamespace(receiver=lambda: receiver, weight_version=-1)


# ---- what a receiver stores -------------------------------------------------------------------------------------


class Forgets(ModuleReceiver):
    """A receiver that keeps the old value of one parameter, or of all."""

    def __init__(self, module, forgotten):
        super().__init__(module, filled=True)
        self.forgotten = forgotten

    def receive(self, weights, version):
        kept = {name: self.stored(name).clone() for name in self.forgotten}
        super().receive(weights, version)
        for name, value in kept.items():
            self.module.get_parameter(name).data.copy_(value)


NAMES = [name for name, _ in make_module().named_parameters()]


@pytest.mark.parametrize(("forgotten", "count"), [(NAMES[3:4], 1), (NAMES, 16)])
def test_a_parameter_that_was_not_loaded_is_named(forgotten, count):
    # the norms are 1 in both modules, so 5 of the 21 parameters do not differ
    text = (
        f"version 4 were not loaded: after Forgets.receive, {count} of 21 parameters differ .*first .'{forgotten[0]}'"
    )
    rollout = engine_of(Forgets(make_module(1), forgotten))
    with pytest.raises(ValueError, match=text):
        ReplicaSync(rollout).push(Trained(make_module(0)), 4)
    assert rollout.weight_version == -1
    sender, receiver = groups(2)
    found = together(
        lambda: CollectiveSync(sender).push(Trained(make_module(0)), 4),
        lambda: receive_collective(Forgets(make_module(1), forgotten), receiver, 4),
    )
    for error in found:
        assert isinstance(error, ValueError) and "Forgets.receive" in str(error) and forgotten[0] in str(error)


def test_the_checksum_is_the_same_on_every_rank_that_stores_the_same():
    targets = [ModuleReceiver(make_module(seed), filled=True) for seed in (1, 2)]
    reports = [ReplicaSync(engine_of(target)).push(Trained(make_module(0)), 4) for target in targets]
    other = ReplicaSync(engine_of(targets[0])).push(Trained(make_module(3)), 4)
    assert reports[0].checksum == reports[1].checksum != other.checksum


# ---- the choice of a method -------------------------------------------------------------------------------------


def test_a_method_that_does_not_fit_the_engine_is_refused():
    shared, copied = engine_of(None), engine_of(ModuleReceiver(make_module()))
    for engine, name in ((shared, "InProcessSync"), (copied, "ReplicaSync")):
        assert type(local_sync("auto", engine, CPU, bucket_bytes=1)).__name__ == name
    with pytest.raises(ValueError, match=r"rollout.weight_sync=reshard: .* is synchronized by 'replica': use auto"):
        local_sync("reshard", copied, CPU, bucket_bytes=1)


def test_shards_are_read_for_a_full_copy_where_that_is_preferred():
    copied = engine_of(ModuleReceiver(make_module()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for prefers, name in ((False, "ReplicaSync"), (True, "ReshardSync")):
            sync = local_sync("auto", copied, CPU, bucket_bytes=1, has_shards=True, prefers_shards=prefers)
            assert type(sync).__name__ == name
    finally:
        dist.destroy_process_group()
