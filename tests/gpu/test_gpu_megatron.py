"""On GPUs: strategy=megatron with its kernels in bfloat16 computes what the fsdp engine computes in float32."""

import dataclasses
import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.engines.megatron_cpu.ranks import MODELS, OPTIMIZER
from tests.engines.ranks import make_batch, make_spec, save_model, share_of, train
from verl.config import schema
from verl.engines.base import MicroBatching, make_engine
from verl.single_controller.worker import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]
DENSE, SPARSE = ("llama", "qwen3"), ("mixtral", "qwen3_moe")
T, E, ET = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"


def on_rank(rank: int, world: int, port: int, paths: dict[str, str], strategy: str, section: dict) -> dict[str, dict]:
    """Log-probs and entropies of each model, and the metrics of an update."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in values.items()}
    device, found = torch.device("cuda", rank), {}
    torch.cuda.set_device(device)
    for model, path in paths.items():
        given = (schema.MegatronConfig if strategy == "megatron" else schema.EngineConfig)(**section)
        spec = dataclasses.replace(make_spec(path, OPTIMIZER), device=device, engine=given, rank=rank, world_size=world)
        engine, micro = make_engine(strategy, spec), MicroBatching(tokens=64)
        batch = share_of(engine, make_batch(samples=2))
        outputs = engine.infer(batch, ("log_probs", "entropys"), micro)
        metrics = train(engine, batch, micro, steps=1)
        found[model] = {"dp_rank": engine.dp_rank, "outputs": outputs, "grad_norm": metrics["grad_norm"]}
    return found


def run(world: int, *args) -> list[dict[str, dict]]:
    """`on_rank` in a new process for each rank."""
    port = free_port()
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(on_rank, rank, world, port, *args) for rank in range(world)]
        return [rank.result() for rank in ranks]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: save_model(MODELS[name], tmp_path_factory.mktemp(name)) for name in DENSE + SPARSE}


@pytest.fixture(scope="module")
def expected(paths):
    (found,) = run(1, paths, "fsdp", {"dtype": "fp32"})
    return found


@pytest.mark.parametrize("sizes", [{}, {T: 2}, {T: 2, ET: 1}, {T: 2, E: 2, ET: 1}, {E: 2}])
def test_log_probs_entropies_and_gradient_norms(sizes, paths, expected):
    world = 2 if sizes else 1
    if torch.cuda.device_count() < world:
        pytest.skip("needs two CUDA devices")
    models = SPARSE if {E, ET} & sizes.keys() else DENSE + SPARSE
    ranks = run(world, {name: paths[name] for name in models}, "megatron", {"dtype": "bf16"} | sizes)
    for model in models:
        shares = {rank[model]["dp_rank"]: rank[model] for rank in ranks}
        for name, wanted in expected[model]["outputs"].items():
            found = torch.cat([shares[i]["outputs"][name] for i in sorted(shares)])
            assert (found - wanted).abs().mean() < 5e-3, (model, name)
        norms = [rank[model]["grad_norm"] for rank in ranks]
        assert norms == pytest.approx([expected[model]["grad_norm"]] * world, rel=0.03), model
