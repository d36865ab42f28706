"""Sync to an engine that applies LoRA adapters: it has the weights of training, and only the adapters are sent."""

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, qwen2, run_on_ranks, save_model, train
from tests.rollout.test_weight_sync import groups, together
from tests.rollout.test_weight_sync_methods import engine_of
from verl.engines.base import MicroBatching
from verl.engines.gathering import gather_tensors
from verl.engines.parallel import full_tensor
from verl.weight_sync import AdapterReceiver, CollectiveSync, ReplicaSync, receive_collective
from verl.weight_sync.adapters import matrix_pairs, sends_adapters

pytest.importorskip("peft")

LORA = {"lora_rank": 3, "lora_alpha": 6}
MICRO = MicroBatching(rows=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(qwen2(), tmp_path_factory.mktemp("model"))


class Applies(AdapterReceiver):
    """An engine's receiver that keeps the base weights and the adapters."""

    def __init__(self):
        self.base, self.adapters, self.config = {}, {}, None

    def receive(self, weights, version):
        self.base, self.has_base = {name: tensor.clone() for name, tensor in weights}, True

    def receive_adapters(self, config, tensors, version):
        self.config = config
        self.adapters = {layer: (a.clone(), b.clone()) for layer, a, b in matrix_pairs(tensors, version)}

    def release(self):
        self.base, self.has_base = {}, False

    def check(self, engine) -> None:
        """It computes with the weights of training: W + scaling * B A."""
        for name, merged in engine.weights():
            weight = self.base[name]
            if (pair := self.adapters.get(name.removesuffix(".weight"))) is not None:
                weight = weight + pair[1] @ pair[0] * self.config["scaling"][name.removesuffix(".weight")]
            torch.testing.assert_close(weight, merged.detach(), rtol=0, atol=1e-6, msg=name)


def test_the_base_weights_are_sent_once_and_then_only_the_adapters(path):
    engine, receiver, (sender, group) = make_engine(path, OPTIMIZER, **LORA), Applies(), groups(2)
    sync = CollectiveSync(sender, torch.float32, adapters=True)
    of_base = sum(value.nbytes for _, value in engine.base_weights(None))
    of_adapters = sum(value.nbytes for _, value in engine.adapter_weights())
    assert of_adapters < of_base
    for version in range(3):
        reports = together(
            lambda v=version: sync.push(engine, v), lambda v=version: receive_collective(receiver, group, v)
        )
        sent = of_adapters + (of_base if version == 0 else 0)
        assert [(r.version, r.bytes) for r in reports] == [(version, sent)] * 2
        assert reports[0].checksum == reports[1].checksum != 0
        receiver.check(engine)
        train(engine, make_batch(), MICRO, steps=1)


def test_an_engine_that_has_lost_its_weights_gets_the_base_again(path):
    engine, receiver = make_engine(path, OPTIMIZER, **LORA), Applies()
    sync = ReplicaSync(engine_of(receiver), adapters=True)
    first, second = sync.push(engine, 0).bytes, sync.push(engine, 1).bytes
    receiver.release()
    assert sync.push(engine, 2).bytes == first > second
    receiver.check(engine)
    assert ReplicaSync(engine_of(receiver)).push(engine, 3).bytes == first - second


class TakesNoAdapters:
    def receive(self, weights, version):
        list(weights)

    def release(self):
        raise AssertionError("not called")


@pytest.mark.parametrize("setting", ["auto", "merged", "adapters"])
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
def test_what_is_pushed_follows_the_setting_and_the_engine(setting, has_adapters, accepts):
    if setting == "adapters" and has_adapters and not accepts:
        with pytest.raises(ValueError, match=r"rollout.lora_sync=adapters: expected a rollout engine"):
            sends_adapters(setting, has_adapters, accepts)
        return
    assert sends_adapters(setting, has_adapters, accepts) == (setting != "merged" and has_adapters and accepts)


def test_an_engine_that_takes_no_adapters_is_named(path):
    engine = make_engine(path, OPTIMIZER, **LORA)
    with pytest.raises(ValueError, match=r"TakesNoAdapters does not support adapters: set rollout.lora_sync=merged"):
        ReplicaSync(engine_of(TakesNoAdapters()), adapters=True).push(engine, 0)


def gathered_on_rank(path: str) -> dict:
    """What `gather_tensors` returns for several sizes of a bucket, compared with gathering one by one."""
    results = {}
    for keys in ({}, LORA):
        engine = make_engine(path, OPTIMIZER, sharded=True, **keys)
        named = list(engine.module.named_parameters())
        for bucket_bytes in (1, 3000, 1 << 30):
            for dtype in (None, torch.bfloat16):
                found = list(gather_tensors(iter(named), dtype, bucket_bytes))
                assert [name for name, _ in found] == [name for name, _ in named]
                for (name, full), (_, parameter) in zip(found, named):
                    expected = full_tensor(parameter.detach())
                    assert torch.equal(full, expected if dtype is None else expected.to(dtype)), name
                results[str((bool(keys), bucket_bytes, dtype))] = len(found)
    return results


@pytest.mark.slow
def test_parameters_gathered_in_buckets_are_those_gathered_one_by_one(path):
    one, other = run_on_ranks(2, gathered_on_rank, path)
    assert one == other and len(one) == 12
