"""LoRA-only sync: the engine generates with what the trainer computes, and only the adapters are sent."""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, qwen2, run_on_ranks, save_model, train
from tests.rollout.test_weight_sync import groups, hf, native, together
from tests.rollout.test_weight_sync_methods import engine_of
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.gathering import gather_tensors
from verl.engines.parallel import full_tensor
from verl.protocol import DataProto
from verl.rollout.request import SamplingParams, make_requests
from verl.weight_sync import CollectiveSync, ModuleReceiver, ReplicaSync, receive_collective
from verl.weight_sync.adapters import sends_adapters
from verl.workers.rollout.role import CastWeightSource

pytest.importorskip("peft")

LORA = {"lora_rank": 3, "lora_alpha": 6}
MICRO = MicroBatching(rows=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(qwen2(), tmp_path_factory.mktemp("model"))


def empty_rollout(path, make):
    module = AutoModelForCausalLM.from_pretrained(path).eval()
    return make(module, weights=ModuleReceiver(module))


def log_prob_gap(engine, rollout) -> float:
    """The largest difference of log-probs of greedy responses."""
    prompts = [[1, 2, 3], [4], [5, 6]]
    params = SamplingParams(max_tokens=8, stop_token_ids=(), temperature=0.0, ignore_eos=True)
    found = rollout.generate(make_requests(prompts, params))
    columns = build_sequences(prompts, [c.token_ids for c in found], pad_token_id=0)
    trained = engine.infer(DataProto.from_dict(columns), ("log_probs",), MICRO)["log_probs"]
    return (trained - torch.tensor([c.log_probs for c in found])).abs().max().item()


@pytest.mark.parametrize("make", [hf, native])
def test_only_adapters_are_sent_and_merging_does_not_drift(make, path):
    engine, rollout = make_engine(path, OPTIMIZER, **LORA), empty_rollout(path, make)
    receiver = rollout.receiver()
    sender, group = groups(2)
    sync = CollectiveSync(sender, adapters=True)
    source = CastWeightSource(engine, torch.float32)
    base = {name: value.clone() for name, value in engine.base_weights(None)}
    of_base = sum(value.nbytes for value in base.values())
    of_adapters = sum(value.nbytes for _, value in engine.adapter_weights())
    assert of_adapters < of_base
    for version in range(6):
        reports = together(
            lambda v=version: sync.push(source, v), lambda v=version: receive_collective(receiver, group, v)
        )
        sent = of_adapters + (of_base if version == 0 else 0)
        assert [(r.version, r.bytes) for r in reports] == [(version, sent)] * 2
        assert reports[0].checksum == reports[1].checksum != 0
        assert log_prob_gap(engine, rollout) < 1e-5
        train(engine, make_batch(), MICRO, steps=1)
    # the engine's weights are rounded once, however many pushes there were
    for name in receiver.shapes:
        change = (receiver.stored(name) - base[name]).abs().max()
        assert change == 0 or "_proj." in name
    receiver.receive_adapters(engine.adapter_config(), engine.adapter_weights(), 6)
    for name, merged in engine.weights():
        torch.testing.assert_close(receiver.stored(name), merged.detach(), rtol=0, atol=1e-7, msg=name)
    zero = [(name, torch.zeros_like(value)) for name, value in engine.adapter_weights()]
    receiver.receive_adapters(engine.adapter_config(), zero, 7)
    for name, value in base.items():
        assert torch.equal(receiver.stored(name), value), name


def test_an_engine_that_has_lost_its_weights_gets_the_base_again(path):
    engine, rollout = make_engine(path, OPTIMIZER, **LORA), empty_rollout(path, native)
    sync, receiver = ReplicaSync(rollout, adapters=True), rollout.receiver()
    source = CastWeightSource(engine, torch.float32)
    first, second = sync.push(source, 0).bytes, sync.push(source, 1).bytes
    receiver.release()
    assert sync.push(source, 2).bytes == first > second
    assert log_prob_gap(engine, rollout) < 1e-5
    merged = ReplicaSync(rollout).push(source, 3)
    assert merged.bytes == first - second
    assert log_prob_gap(engine, rollout) < 1e-5


def tensors_in_memory() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is torch.Tensor]


def test_a_released_receiver_keeps_no_copy_of_the_base_weights():
    module = torch.nn.Linear(5, 7, bias=False)
    receiver, before = ModuleReceiver(torch.nn.ModuleDict({"a": module}), filled=True), tensors_in_memory()
    pair = {"base_model.model.a.lora_A.weight": (2, 5), "base_model.model.a.lora_B.weight": (7, 2)}
    adapters = ((name, torch.ones(shape)) for name, shape in pair.items())
    receiver.receive_adapters({"scaling": {"a": 0.5}}, adapters, 1)
    del adapters
    known = set(map(id, before))
    assert [found.shape for found in tensors_in_memory() if id(found) not in known] == [(7, 5)]
    receiver.release()
    assert [found.shape for found in tensors_in_memory() if id(found) not in known] == []


def test_wrong_adapters_are_refused(path):
    engine, rollout = make_engine(path, OPTIMIZER, **LORA), empty_rollout(path, native)
    receiver, config = rollout.receiver(), engine.adapter_config()
    with pytest.raises(ValueError, match="has no weights: push them first"):
        receiver.receive_adapters(config, engine.adapter_weights(), 1)
    ReplicaSync(rollout).push(CastWeightSource(engine, None), 1)
    tensors = list(engine.adapter_weights())
    with pytest.raises(ValueError, match=r"version 2: one of lora_A and lora_B of model.layers.* is missing"):
        receiver.receive_adapters(config, tensors[1:], 2)
    with pytest.raises(ValueError, match=r"adapters of version 2: expected names .*, found 'model.norm.weight'"):
        receiver.receive_adapters(config, [("model.norm.weight", torch.ones(1))], 2)


class TakesNoAdapters:
    def receive(self, weights, version):
        list(weights)

    def release(self):
        raise AssertionError("not called")


def test_what_is_pushed_follows_the_setting_and_the_engine(path):
    # setting, has_adapters, accepts_adapters, cheaper
    assert sends_adapters("auto", True, True, True) and sends_adapters("adapters", True, True, False)
    for refused in (
        ("merged", True, True, True),
        ("auto", False, True, True),
        ("auto", True, False, True),
        ("auto", True, True, False),
        ("adapters", False, True, True),
    ):
        assert not sends_adapters(*refused), refused
    with pytest.raises(ValueError, match=r"rollout.lora_sync=adapters: expected a rollout engine"):
        sends_adapters("adapters", True, False, True)
    engine = make_engine(path, OPTIMIZER, **LORA)
    with pytest.raises(ValueError, match=r"TakesNoAdapters does not support adapters: set rollout.lora_sync=merged"):
        ReplicaSync(engine_of(TakesNoAdapters()), adapters=True).push(CastWeightSource(engine, None), 0)


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
