"""Engines of `strategy=megatron` on a CPU, for tests over one or several ranks."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.engines.ranks import OPTIMIZER as COSINE
from tests.engines.ranks import SIZES, make_batch, make_spec, qwen2, results, share_of, train
from tests.hybrid_groups import HybridGroups
from verl.config import schema
from verl.engines.base import MicroBatching, TrainEngine, make_engine
from verl.rollout.native.slices import SliceReceiver, Slices
from verl.rollout.tensor_parallel import TensorParallel
from verl.weight_sync import ReshardSync
from verl.weight_sync.reshard.sync import Peers

#: clips every gradient
OPTIMIZER = COSINE.model_copy(update={"clip_grad": 0.02})
TWO_ROWS = MicroBatching(rows=2)
FOUR_LAYERS = SIZES | {"num_hidden_layers": 4}
#: a vocabulary that two ranks do not divide
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": qwen2(),
    "qwen3": Qwen3Config(**SIZES | {"vocab_size": 33}, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False),
    # the first layer is dense; the probabilities of the chosen experts do not sum to 1
    "qwen3_moe": Qwen3MoeConfig(
        **FOUR_LAYERS,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        mlp_only_layers=[0],
    ),
    "deep": Qwen3Config(**FOUR_LAYERS, head_dim=8, tie_word_embeddings=True),
    "wide": LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=False),
}


def megatron_engine(
    path: str, optimizer: schema.OptimConfig | None = OPTIMIZER, *, kind: str = "causal_lm", **keys: Any
) -> TrainEngine:
    """An engine in float32. keys: of the sections `model` and `megatron`; t, p, c, e, et, v: parallel sizes."""
    from tests.engines.megatron_cpu import shim

    shim.install()
    names = {"t": "tensor_model_parallel_size", "p": "pipeline_model_parallel_size", "c": "context_parallel_size"}
    names |= {"e": "expert_model_parallel_size", "et": "expert_tensor_parallel_size"}
    names |= {"v": "virtual_pipeline_model_parallel_size"}
    keys = {names.get(name, name): value for name, value in keys.items()}
    of_model = {name: keys.pop(name) for name in list(keys) if name in schema.ModelConfig.model_fields}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}.items():
        os.environ.setdefault(name, value)
    spec = dataclasses.replace(
        make_spec(path, optimizer, kind=kind, **of_model),
        engine=schema.MegatronConfig(**{"dtype": "fp32"} | keys),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return make_engine("megatron", spec)


def save_and_resume(path: str, folder: Path, resume: Path | None, steps: int = 1, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: resume from a checkpoint, take steps, save another one."""
    engine = megatron_engine(path, **keys)
    contents = ("model", "optimizer", "extra", "hf_model")
    if resume is not None:
        engine.load(resume, contents[:3])
    found = results(engine, make_batch(), MicroBatching(rows=2), steps)
    found["weights"] = {name: tensor.clone() for name, tensor in found["weights"].items()}
    engine.save(folder, contents)
    engine.finish_save()
    return found


class Received(SliceReceiver):
    """Of one rank of a tensor-parallel rollout, with slices of a model of the same architecture."""

    def __init__(self, path: str, groups: HybridGroups, rank: int):
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        slices = Slices(module.config, TensorParallel(groups.generation(rank)[1], groups.generation_tp))
        shapes = {name: p.shape for name, p in module.named_parameters()}
        for name, p in module.named_parameters():
            p.data = torch.full_like(slices.slice_of(name, p.data), float("nan"), memory_format=torch.contiguous_format)
        super().__init__(module, slices, shapes)


def reshard_on_rank(path: str, groups: HybridGroups, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: push the updated weights twice, by reshard and gathered, and compare what is stored."""
    torch.set_num_threads(1)
    engine = megatron_engine(path, **keys)
    assert (engine.dp_size * keys.get("c", 1), engine.pipeline_rank) == (groups.dp, groups.training(dist.get_rank())[0])
    train(engine, share_of(engine, make_batch()), TWO_ROWS, steps=1)
    rank, counted, exchange = dist.get_rank(), [], Peers.start_exchange

    def counting(peers: Peers, received: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int]) -> Any:
        counted.append(counts)
        return exchange(peers, received, sent, counts, sizes)

    ours, gathered = (Received(path, groups, rank) for _ in range(2))
    rollout = SimpleNamespace(receiver=lambda: ours, weight_version=None)
    sync = ReshardSync(rollout, torch.device("cpu"), 16 * 1024)
    Peers.start_exchange = counting
    for version in range(2):
        counted.clear()
        report = sync.push(engine, version)
    Peers.start_exchange = exchange
    gathered.receive(engine.weights(), 1)
    names = [name for name, _ in ours.module.named_parameters()]
    by_rank = torch.tensor(counted).sum(0).tolist()
    return {
        "differs": [name for name in names if not torch.equal(ours.stored(name), gathered.stored(name))],
        "parameters": len(names),
        "received": report.bytes,
        "kept": report.kept,
        "checksum": report.checksum,
        "counted": sum(by_rank),
        "sources": [other for other, size in enumerate(by_rank) if size],
    }


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of sharded files, whole."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in described.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state
