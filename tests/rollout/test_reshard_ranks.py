"""Reshards of the built-in training engine over processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.engines.ranks import (
    OPTIMIZER,
    SIZES,
    make_batch,
    make_engine,
    qwen2,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from tests.rollout.test_reshard import Holder
from verl.engines.base import MicroBatching
from verl.rollout.native.slices import SliceReceiver, Slices
from verl.rollout.tensor_parallel import TensorParallel
from verl.weight_sync import ReshardSync
from verl.weight_sync.reshard.sync import Peers


def on_rank(path: str, ranks: int, tp: int, **keys) -> dict:
    """For `run_on_ranks`: what is stored after an update and two pushes, and the full parameters."""
    engine = make_engine(path, OPTIMIZER, sharded=True, **keys)
    rank = torch.distributed.get_rank()
    train(engine, share_of(engine, make_batch(12)), MicroBatching(), steps=1)
    full = {name: tensor.clone() for name, tensor in engine.weights()}
    slices = Slices(engine.module.config, TensorParallel(rank % tp, tp))
    empty = {name: slices.slice_of(name, torch.empty_like(tensor)).contiguous() for name, tensor in full.items()}
    module = Holder(empty)
    receiver = SliceReceiver(module, slices, {name: tensor.shape for name, tensor in full.items()})
    counted, exchange = [0], Peers.start_exchange

    def counting(peers, received, sent, counts, sizes):
        counted[0] += len(received)
        return exchange(peers, received, sent, counts, sizes)

    sync = ReshardSync(SimpleNamespace(receiver=lambda: receiver, weight_version=0), torch.device("cpu"), 5000)
    sync.push(engine, 0)
    Peers.start_exchange = counting
    report = sync.push(engine, 1)
    own = {name: slices.slice_of(name, tensor) for name, tensor in full.items()}
    wrong = [name for name, tensor in own.items() if not torch.equal(tensor, receiver.stored(name))]
    total = sum(tensor.numel() for tensor in empty.values()) * 4
    return {"wrong": wrong, "report": report, "counted": counted[0], "stored": total}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tp", "keys"),
    [
        (2, 2, {}),
        (3, 1, {}),  # uneven shards
        (4, 2, {}),
        (4, 2, {"tensor_parallel_size": 2}),
        (4, 4, {"fsdp_size": 2}),
        (4, 2, {"offload_policy": True}),
        (2, 2, {"experts": 4}),
        (4, 2, {"experts": 4, "expert_parallel_size": 2}),
        (4, 4, {"experts": 4, "expert_parallel_size": 2, "fsdp_size": 2}),
        (2, 2, {"lora_rank": 2, "target_modules": ["q_proj", "down_proj"]}),
    ],
)
def test_fsdp_reshards_to_slices(ranks, tp, keys, tmp_path: Path):
    experts = keys.get("experts", 0)
    sizes = {"head_dim": 8, "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Qwen3MoeConfig(**SIZES, **sizes) if experts else qwen2()
    path = save_model(config, tmp_path / "model")
    keys = {name: value for name, value in keys.items() if name != "experts"}
    found = run_on_ranks(ranks, on_rank, path, ranks, tp, **keys)
    for rank in found:
        report = rank["report"]
        assert not rank["wrong"]
        padding = rank["counted"] - report.bytes  # of parts to 8 bytes, where the shards are uneven
        assert padding == 0 or (ranks == 3 and 0 < padding < 100)
        assert report.bytes + report.kept == rank["stored"]
    if (
        ranks == tp == 2 and not keys and not experts
    ):  # a half of the rows of q, k, v, gate, up and embedding is there already
        hidden, mlp, layers = 32, 48, 2
        columns = layers * (hidden * hidden + hidden * mlp) * 4 // 4  # o and down: a quarter, in float32
        norms = (2 * layers + 1) * hidden * 4 // 2  # a half
        assert [rank["report"].bytes for rank in found] == [columns + norms] * 2
