"""Print how far five float32 updates of the engines fsdp and megatron are from five float64 updates, as JSON lines.

    python -W ignore -m tests.engines.megatron_cpu.distances deep qwen3_moe

After each of five updates: the largest relative distance of gradient norms, and the largest one of losses and other
metrics (relative, but to 0.01 at least) and of log-probs. After the last: the largest distance of a weight, the largest
one of a tensor relative to its change (norms), and the same over all weights. AdamW as in the tests, with eps 1e-8, and
with eps 1e-5 (`conditioned`).
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engines.megatron_cpu import compare
from tests.engines.megatron_cpu.ranks import MODELS, OPTIMIZER, TWO_ROWS
from tests.engines.ranks import make_batch, make_engine, run_on_ranks, save_model


def fsdp_on_rank(path: str, **keys: Any) -> dict[str, Any]:
    """For `run_on_ranks`: the float32 runs of FSDP2. keys: of `fsdp_config`."""
    torch.set_num_threads(1)
    engines = {run: make_engine(path, OPTIMIZER, sharded=True, **keys) for run in compare.RUNS[:2]}
    return {run: compare.five_steps(engine, make_batch(), TWO_ROWS, run) for run, engine in engines.items()}


def distance(ranks: list[dict[str, Any]], expected: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Distances of one run over ranks from that of one device."""
    by_share = {rank["dp_rank"]: rank for rank in reversed(ranks)}
    shares = [by_share[i] for i in sorted(by_share)]
    norms, metrics, outputs = [], [], []
    for step, theirs in enumerate(expected["metrics"]):
        norms.append(abs(ranks[0]["metrics"][step]["grad_norm"] / theirs["grad_norm"] - 1))
        for name, value in ((k, v) for k, v in theirs.items() if isinstance(v, tuple)):
            total, count = (sum(share["metrics"][step][name][i] for share in shares) for i in (0, 1))
            wanted = value[0] / value[1]
            metrics.append(abs(total / count - wanted) / max(abs(wanted), 0.01))
        outputs.append(torch.cat([x["outputs"][step] for x in shares]) - expected["outputs"][step])
    weights = {name: ranks[0]["weights"][name].double() - wanted for name, wanted in expected["weights"].items()}
    changes = {name: wanted - start[name] for name, wanted in expected["weights"].items()}
    total, moved = (torch.stack([x.norm() for x in each.values()]).norm() for each in (weights, changes))
    found = {
        "gradient norms": max(norms),
        "metrics": max(metrics),
        "log-probs": max(float(x.abs().max()) for x in outputs),
        "a weight": max(float(x.abs().max()) for x in weights.values()),
        "a tensor": max(float(x.norm() / changes[name].norm()) for name, x in weights.items()),
        "all weights": float(total / moved),
    }
    return {name: float(f"{value:.1e}") for name, value in found.items()}


def layouts(is_sparse: bool) -> Iterator[tuple[int, dict[str, int]]]:
    """(ranks, sizes) of all products of t, p, c and e of 1 and 2."""
    for sizes in itertools.product((1, 2), repeat=4 if is_sparse else 3):
        t, p, c, e = (*sizes, 1)[:4]
        yield t * p * max(c, e), dict(zip("tpce", sizes))


def main(names: list[str]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = save_model(MODELS[name], Path(folder))
            exact = compare.fsdp_runs(path)
            is_sparse = "moe" in name or name == "mixtral"
            cases: list[tuple[str, Any]] = [("fsdp, one device", lambda exact=exact: [exact])]
            for world, keys in ((2, {}), (4, {}), (2, {"ulysses_sequence_parallel_size": 2})):
                cases.append(
                    (f"fsdp, {world} ranks {keys or ''}", partial(run_on_ranks, world, fsdp_on_rank, path, **keys))
                )
            for world, sizes in layouts(is_sparse):
                which = ", ".join(f"{k}={v}" for k, v in sizes.items() if v > 1)
                cases.append(
                    (
                        f"megatron, {which or 'one rank'}",
                        partial(run_on_ranks, world, compare.megatron_runs, path, **sizes),
                    )
                )
            for case, ranks in ((case, call()) for case, call in cases):
                for run in compare.RUNS if case.startswith("megatron") else compare.RUNS[:2]:
                    reference = exact["float64"] if run != "conditioned" else exact["conditioned float64"]
                    line = {"model": name, "case": case, "run": run}
                    line |= distance([rank[run] for rank in ranks], reference, exact["start"])
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
