"""Tests over several ranks: a tiny model, a batch with a loss, and real processes that form a gloo group."""

import copy
import dataclasses
import functools
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import EngineSpec, MicroBatching, Objective
from verl.engines.loading import resolve_model
from verl.engines.sharding import FSDP2
from verl.engines.torch_engine import TorchEngine
from verl.processes.child import start_reports
from verl.processes.fork_server import ForkedProcess, server_for
from verl.protocol import DataProto
from verl.single_controller.worker import free_port
from verl.workers.critic import value_objective
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

VOCABULARY = 32
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ROWS = 8
PRELOAD = ("transformers.models.qwen2.modeling_qwen2", "peft", "tensordict")
LONGEST = 120.0  # seconds that ranks may take: a hang ends with their stacks, well before pytest's own limit
UNEVEN = MicroBatching(tokens=14)  # gives the ranks different numbers of micro-batches
OPTIMIZER = schema.OptimConfig(lr=1e-2, lr_scheduler_type="cosine", total_training_steps=9)
SETTINGS = {"clip_ratio": 0.2, "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
SETTINGS |= {"kl_loss_type": "low_var_kl"}


#: four experts, two for each token
MIXTURES: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def qwen2(heads: int = 4, kv_heads: int = 2) -> Qwen2Config:
    sizes = SIZES | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Qwen2Config(**sizes, tie_word_embeddings=True)


def save_model(config: PretrainedConfig, folder: Path, kind: str = "causal_lm") -> str:
    """A random model with weights large enough for a wrong position to show."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.num_labels = 1
    auto = AutoModelForCausalLM if kind == "causal_lm" else AutoModelForTokenClassification
    model = auto.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def make_spec(
    path: str,
    optimizer: schema.OptimConfig | None = None,
    *,
    kind: str = "causal_lm",
    device: str = "cpu",
    timeout: float | None = None,
    **keys: Any,
) -> EngineSpec:
    """An engine spec. keys: of the sections `model` and `fsdp_config`."""
    of_model = {name: keys.pop(name) for name in list(keys) if name in schema.ModelConfig.model_fields}
    return EngineSpec(
        kind=kind,
        model=schema.ModelConfig(path=str(path), **of_model),
        engine=schema.EngineConfig(**keys),
        optimizer=optimizer,
        timeout=timeout,
        device=torch.device(device),
    )


def make_engine(
    path: str,
    optimizer: schema.OptimConfig | None = None,
    *,
    sharded: bool = False,
    kernels: str = "plain",
    random_init: bool = False,
    module: torch.nn.Module | None = None,
    **keys: Any,
) -> TorchEngine:
    """An engine on one device, or sharded over the ranks of this process group. keys: as `make_spec`."""
    spec = make_spec(path, optimizer, **keys)
    model = dataclasses.replace(resolve_model(spec), kernels=kernels, random_init=random_init)
    return TorchEngine(spec, FSDP2(spec) if sharded else None, model=model, module=module)


def make_batch(rows: int = ROWS, samples: int = 1) -> DataProto:
    """Rows of 1 to 8 prompt and response tokens. samples: rows with the same prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (rows, 2), generator=generator).tolist()
    ids = [[torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    prompts = [ids[i - i % samples][0] for i in range(rows)]
    columns = build_sequences(prompts, [response for _, response in ids], pad_token_id=0)
    shape = columns["responses"].shape
    names = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    noise = {name: torch.randn(shape, generator=generator) for name in names}
    return DataProto.from_dict(columns | {k: v * 0.1 - 3.4 if "log" in k else v for k, v in noise.items()})


def objective_of(
    engine: TorchEngine, batch: DataProto, mode: str = "token-mean", scale_factor: float | None = None
) -> Objective:
    """The objective of a policy or a critic. mode, scale_factor: how the losses of tokens are aggregated."""
    agg = aggregation(mode, batch.batch["response_mask"], engine, scale_factor)
    is_value = engine.spec.kind == "value"
    return value_objective(0.5, 1.0, agg) if is_value else policy_objective("vanilla", SETTINGS, agg)


def train(engine: TorchEngine, batch: DataProto, micro: MicroBatching, steps: int = 2) -> dict[str, Any]:
    """Updates on one and the same batch; the metrics of the last."""
    metrics = {}
    for _ in range(steps):
        metrics = engine.train_batch(batch, objective_of(engine, batch), micro)
        engine.lr_step()
    return metrics


def share_of(engine: TorchEngine, batch: DataProto) -> DataProto:
    """The rows of the engine's data-parallel rank."""
    return batch.chunk(engine.dp_size)[engine.dp_rank]


def results(engine: TorchEngine, batch: DataProto, micro: MicroBatching, steps: int = 2) -> dict[str, Any]:
    """What engines are compared by: metrics and weights after two updates, and the outputs then."""
    batch = share_of(engine, batch)
    metrics = train(engine, batch, micro, steps)
    output = "values" if engine.spec.kind == "value" else "log_probs"
    outputs = engine.infer(batch, (output,), micro)[output]
    return {"weights": dict(engine.weights()), "metrics": metrics, "outputs": outputs, "dp_rank": engine.dp_rank}


def assert_same(ranks: list[dict[str, Any]], expected: dict[str, Any], atol: float = 2e-5) -> None:
    """Every rank has the weights, and the data-parallel ranks together the metrics and outputs, of one device.

    atol: of the weights after the updates. Adam divides by the gradient's size, so where a gradient is nearly 0 its
    float32 noise is blown up; in float64 (1e-9) nothing of that is left to hide a mistake.
    """
    for rank in ranks:
        assert rank["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert torch.allclose(rank["weights"][name], value, rtol=1e-5, atol=atol), name
        assert abs(rank["metrics"]["grad_norm"] - expected["metrics"]["grad_norm"]) < 1e-4
        for name in (name for name in expected["metrics"] if name.startswith("moe/")):
            assert rank["metrics"][name] == pytest.approx(expected["metrics"][name]), name
    by_share = {rank["dp_rank"]: rank for rank in reversed(ranks)}  # one rank of those that have the same rows
    shares = [by_share[i] for i in sorted(by_share)]
    for name, (total, count) in ((k, v) for k, v in expected["metrics"].items() if isinstance(v, tuple)):
        found = [sum(share["metrics"][name][i] for share in shares) for i in (0, 1)]
        assert abs(found[0] / found[1] - total / count) < 1e-4, name
    outputs = torch.cat([share["outputs"] for share in shares])
    assert torch.allclose(outputs, expected["outputs"], rtol=1e-4, atol=1e-4)
    for rank in ranks:  # those that share rows all have what they are
        assert torch.equal(rank["outputs"], by_share[rank["dp_rank"]]["outputs"])


def main() -> None:
    """In the process of a rank: run the function that the file of the first argument contains."""
    request, reports = map(int, sys.argv[1:])
    start_reports(reports)
    with os.fdopen(request, "rb") as file:
        os.environ["MASTER_PORT"], out, function = pickle.load(file)
    rank = os.environ["RANK"]
    try:
        result = function()
    except BaseException:
        Path(out, f"error{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the other ranks may wait for this one in a collective
    torch.save(result, Path(out, f"rank{rank}.pt"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # the end of an interpreter takes longer than most of the functions


def _start(rank: int, world: int) -> tuple[ForkedProcess, int]:
    """The process of a rank, and the pipe from which it reads what to do."""
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    reader, writer = os.pipe()
    try:
        return server_for(env).start("tests.engines.ranks", [reader], env, reports=True, preload=PRELOAD), writer
    finally:
        os.close(reader)


def _wait(processes: Sequence[ForkedProcess]) -> str:
    """Until all have ended or one has failed. Returns where each thread stands when they take longer than LONGEST."""
    limit = time.monotonic() + LONGEST
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        if time.monotonic() > limit:
            for process in processes:
                process.request_stacks()
            time.sleep(1)  # for them to be written
            return "\n".join(f"rank {rank}:\n{process.read_stacks()}" for rank, process in enumerate(processes))
        time.sleep(0.01)
    return ""


def run_on_ranks(world: int, function: Callable, *args: Any, **kwargs: Any) -> list[Any]:
    """function(*args, **kwargs) in `world` processes with the variables of a launcher; its results in rank order.

    Raises AssertionError with the traceback of the ranks that fail, or with the stacks of all when they have not ended
    within LONGEST. The processes are forked from a server that has imported what they need.
    """
    with tempfile.TemporaryDirectory() as out:
        processes, pipes = zip(*(_start(rank, world) for rank in range(world)))
        try:
            # the port is chosen when the server has imported everything: meanwhile another program could take it
            request = pickle.dumps((str(free_port()), out, functools.partial(function, *args, **kwargs)))
            for pipe in pipes:
                with os.fdopen(pipe, "wb") as file:
                    file.write(request)
            stacks = _wait(processes)
        finally:
            ends = [process.exit_message() for process in processes]
            for process in processes:
                process.kill()
                process.close()
        assert not stacks, f"not done after {LONGEST:.0f} s:\n{stacks}"
        errors = [path.read_text() for path in sorted(Path(out).glob("error*.txt"))]
        assert not errors and all(end is not None and end.endswith("status 0") for end in ends), (
            "\n".join(errors) or ends
        )
        return [torch.load(Path(out, f"rank{rank}.pt"), weights_only=False) for rank in range(world)]


def engine_on_rank(path: str, micro: MicroBatching, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: the results of a sharded engine. keys: as `make_engine`."""
    return results(make_engine(path, OPTIMIZER, sharded=True, **keys), make_batch(), micro)


FLOAT64 = {"model_dtype": "fp64", "dtype": "fp64"}


def engine_alone(path: str, **keys: Any) -> dict[str, Any]:
    """The results of one device. keys: as `make_engine`."""
    return results(make_engine(path, OPTIMIZER, **keys), make_batch(), MicroBatching())


#: path, micro-batches, keys of the model, keys of the layout over ranks
Case = tuple[str, MicroBatching, dict[str, Any], dict[str, Any]]


def engines_on_rank(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For `run_on_ranks`: the results of several sharded engines in float64, one after another."""
    return [engine_on_rank(path, micro, **keys, **layout, **FLOAT64) for path, micro, keys, layout in cases]


def assert_same_on_ranks(world: int, cases: Sequence[Case]) -> None:
    """The engines of all cases give the numbers of one device on `world` ranks, all in one process group."""
    for case, found in zip(cases, zip(*run_on_ranks(world, engines_on_rank, cases))):
        path, _, keys, layout = case
        shared = layout.get("tensor_parallel_size", 1) * layout.get("ulysses_sequence_parallel_size", 1)
        # a norm of single heads is that of transformers under tensor parallelism, which computes in float32
        atol = 1e-3 if "kernels" in keys and "tensor_parallel_size" in layout else 1e-9
        try:
            assert {rank["dp_rank"] for rank in found} == set(range(world // shared))
            assert_same(found, engine_alone(path, **keys, **FLOAT64), atol)
        except AssertionError as error:
            error.add_note(f"case: {case}")
            raise
