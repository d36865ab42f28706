"""Five updates of the engines megatron and fsdp, compared step by step.

AdamW divides the first moment by the root of the second one plus eps (1e-8). Where a gradient is nearly 0, the order of
float32 sums decides its size and so the update. Single weights of both engines are then further from a float64 run than
1e-5, while losses, gradient norms and log-probs are not (`distances.py` measures both). So there are three runs:

- float64: AdamW with its default eps. Losses, gradient norms and weights are compared at 1e-9.
- float32: the same optimizer. Losses, gradient norms and log-probs are compared at 1e-5.
- conditioned: float32, with eps=1e-5, a tenth of a typical clipped gradient. The same are compared, and the weights:
  the difference of each tensor is at most 1e-5 of its change.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.engines.megatron_cpu import float64
from tests.engines.megatron_cpu.ranks import OPTIMIZER, TWO_ROWS, megatron_engine
from tests.engines.ranks import FLOAT64, make_batch, make_engine, share_of, train
from verl.engines.base import REPLAYS, MicroBatching, TrainEngine
from verl.engines.routing import ROUTED_EXPERTS
from verl.protocol import DataProto

RUNS = ("float32", "conditioned", "float64")  # in this order: the last one replaces functions
CONDITIONED = 1e-5  # eps
STEPS = 5


def five_steps(engine: TrainEngine, batch: DataProto, micro: MicroBatching, run: str) -> dict[str, Any]:
    """The metrics and outputs (b, T) after each update, and the weights after the last."""
    batch, output = share_of(engine, batch), "values" if engine.spec.kind == "value" else "log_probs"
    for group in engine.optimizer.param_groups if run == "conditioned" else ():
        group["eps"] = CONDITIONED
    metrics, outputs = [], []
    for _ in range(STEPS):
        metrics.append(train(engine, batch, micro, steps=1))
        outputs.append(engine.infer(batch, (output,), micro)[output])
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"metrics": metrics, "outputs": outputs, "weights": weights, "dp_rank": engine.dp_rank}


def _without_rounding(module: torch.nn.Module) -> None:
    """Norms of a float64 model in float64; transformers computes them in float32."""
    for each in module.modules():
        if type(each).__name__.endswith("RMSNorm"):
            each.forward = lambda x, each=each: rms_norm(x, each.weight.shape, each.weight, each.variance_epsilon)


def fsdp_runs(path: str, kind: str = "causal_lm", batch: DataProto | None = None) -> dict[str, Any]:
    """The three runs of the fsdp engine on one device, and the initial weights."""
    batch = make_batch() if batch is None else batch
    found = {"start": {name: p.clone() for name, p in make_engine(path, kind=kind).weights()}}
    for run in RUNS:
        engine = make_engine(path, OPTIMIZER, kind=kind, **FLOAT64 if run == "float64" else {})
        if run == "float64":
            _without_rounding(engine.module)
        found[run] = five_steps(engine, batch, MicroBatching(), run)
    return found


def fsdp_on_rank(path: str, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: the float32 run of FSDP2. keys: of `fsdp_config`."""
    torch.set_num_threads(1)
    engine = make_engine(path, OPTIMIZER, sharded=True, **keys)
    return {"float32": five_steps(engine, make_batch(), TWO_ROWS, "float32")}


def megatron_runs(
    path: str, batch: DataProto | None = None, micro: MicroBatching = TWO_ROWS, **keys: Any
) -> dict[str, Any]:
    """For `run_on_ranks`: the three runs, and where the rank is. keys: as `megatron_engine`."""
    torch.set_num_threads(1)
    batch = make_batch() if batch is None else batch
    found = {}
    for run in RUNS:
        if run == "float64":
            float64.install()
            keys = keys | {"dtype": "fp64"}
            override = keys.get("override_transformer_config", {})
            if "moe_router_dtype" in override:
                keys["override_transformer_config"] = override | {"moe_router_dtype": "fp64"}
        engine = megatron_engine(path, **keys)
        found[run] = five_steps(engine, batch, micro, run)
    return found | {"tp": engine.model_parallel_rank, "pp": engine.pipeline_rank, "dp_rank": engine.dp_rank}


def replay_on_rank(path: str, batch: DataProto, micro: MicroBatching = TWO_ROWS, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: the choices that are recorded, and the runs that replay those of the batch."""
    torch.set_num_threads(1)
    engine = megatron_engine(path, **keys)
    recorded = engine.infer(share_of(engine, make_batch()), (ROUTED_EXPERTS,), micro)[ROUTED_EXPERTS]
    compared = share_of(engine, batch.replace())
    compared.meta_info[REPLAYS] = False
    mismatch = train(engine, compared, micro, steps=1)["moe/routing_mismatch"]
    return megatron_runs(path, batch, micro, **keys) | {"recorded": recorded, "mismatch": mismatch}


def assert_equal_runs(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank has the weights, and the data-parallel ranks together the metrics and outputs, of one device."""
    for run in RUNS:
        rel = 1e-9 if run == "float64" else 1e-5
        _assert_equal([rank[run] for rank in ranks], expected[run], rel, run)
        for rank in ranks if run != "float32" else ():
            _assert_same_change(rank[run]["weights"], expected[run]["weights"], expected["start"], rel, run)


def _assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], rel: float, run: str) -> None:
    by_share = {rank["dp_rank"]: rank for rank in reversed(ranks)}  # one rank of those that have the same rows
    shares = [by_share[i] for i in sorted(by_share)]
    for step, theirs in enumerate(expected["metrics"]):
        for name, value in theirs.items():
            where = f"{run}, step {step}: {name}"
            if isinstance(value, tuple):  # a sum and its count
                total, count = (sum(share["metrics"][step][name][i] for share in shares) for i in (0, 1))
                assert total / count == pytest.approx(value[0] / value[1], rel=rel, abs=rel / 100), where
            else:
                for rank in ranks:
                    assert rank["metrics"][step][name] == pytest.approx(value, rel=rel, abs=rel / 100), where
        outputs, wanted = torch.cat([share["outputs"][step] for share in shares]), expected["outputs"][step]
        close = max(rel, 1e-6)  # outputs are float32 in any run
        near = close if run == "float32" else close / 10  # values of a critic, some of which are near 0
        assert torch.allclose(outputs, wanted, rtol=close, atol=near), f"{run}, step {step}"
    for rank in ranks:  # those that share rows all have what they are
        assert all(map(torch.equal, rank["outputs"], by_share[rank["dp_rank"]]["outputs"]))


def _assert_same_change(
    weights: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
    rel: float,
    run: str,
) -> None:
    """The norm of the difference of each weight is a share `rel` of that of its change."""
    assert weights.keys() == expected.keys()
    for name, wanted in expected.items():
        difference, change = (wanted - weights[name]).norm(), (wanted - start[name]).norm()
        assert change > 1e-3 and difference <= rel * change, f"{run}: {name}: {difference / change:.1e}"
