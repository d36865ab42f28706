"""On a GPU: strategy=megatron with its kernels in bfloat16 computes what the fsdp engine computes in float32."""

import dataclasses
import importlib.util
import os

import pytest
import torch

from tests.engines.megatron_cpu.ranks import MODELS, OPTIMIZER
from tests.engines.ranks import make_batch, make_spec, run_on_ranks, save_model, share_of, train
from verl.config import schema
from verl.engines.base import MicroBatching, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]
NAMES = {"t": "tensor_model_parallel_size", "e": "expert_model_parallel_size", "et": "expert_tensor_parallel_size"}


def on_rank(path: str, strategy: str = "megatron", dtype: str = "bf16", **sizes: int) -> dict:
    """For `run_on_ranks`: log-probs, entropies and the metrics of an update. sizes: t, e, et."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    spec = make_spec(path, OPTIMIZER)
    keys = {NAMES[name]: size for name, size in sizes.items()}
    section = schema.MegatronConfig(dtype=dtype, **keys) if strategy == "megatron" else schema.EngineConfig(dtype=dtype)
    world = int(os.environ["WORLD_SIZE"]) if strategy == "megatron" else 1
    spec = dataclasses.replace(spec, device=device, engine=section, rank=rank, world_size=world)
    engine, micro = make_engine(strategy, spec), MicroBatching(tokens=64)
    batch = share_of(engine, make_batch(samples=2))
    found = engine.infer(batch, ("log_probs", "entropys"), micro)
    return {"dp_rank": engine.dp_rank, "outputs": found, "metrics": train(engine, batch, micro, steps=1)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: save_model(MODELS[name], tmp_path_factory.mktemp(name)) for name in ("llama", "qwen3", "qwen3_moe")}


def assert_close(ranks: list[dict], expected: dict) -> None:
    shares = {rank["dp_rank"]: rank for rank in ranks}
    for name, wanted in expected["outputs"].items():
        found = torch.cat([shares[i]["outputs"][name] for i in sorted(shares)])
        assert (found - wanted).abs().mean() < 5e-3, name
    for rank in ranks:
        assert rank["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=0.03)


@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen3_moe"])
def test_one_gpu(model, paths):
    assert_close(run_on_ranks(1, on_rank, paths[model]), *run_on_ranks(1, on_rank, paths[model], "fsdp", "fp32"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("model", "sizes"),
    [("llama", {"t": 2}), ("qwen3", {"t": 2}), *(("qwen3_moe", x) for x in ({"t": 2}, {"t": 2, "et": 1}, {"e": 2}))],
)
def test_two_gpus(model, sizes, paths):
    (expected,) = run_on_ranks(1, on_rank, paths[model], "fsdp", "fp32")
    assert_close(run_on_ranks(2, on_rank, paths[model], **sizes), expected)
