"""Print how far five float32 updates of the engines fsdp and megatron are from five float64 updates, as JSON lines.

    python -W ignore -m tests.engines.megatron_cpu.distances deep qwen3_moe

After each of five updates: the largest relative distance of gradient norms, and the largest distance of losses and
other metrics (relative, but to 0.01 at least) and of log-probs. After the last: the largest distance of a weight, the
largest one of a tensor relative to its change (norms), and the same over all weights. AdamW has its default eps (1e-8).
The float64 run is that of fsdp on one device; for megatron, a float64 run is compared with it too.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.engines.megatron_cpu import compare
from tests.engines.megatron_cpu.ranks import MODELS
from tests.engines.ranks import run_on_ranks, save_model


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


def cases(path: str, exact: dict[str, Any], is_sparse: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, the runs of its ranks)."""
    yield "fsdp, one device", [exact]
    for world, keys in ((2, {}), (4, {}), (2, {"ulysses_sequence_parallel_size": 2})):
        name = f"fsdp, {world} ranks{''.join(f', {key}={size}' for key, size in keys.items())}"
        yield name, run_on_ranks(world, compare.fsdp_on_rank, path, **keys)
    for world, sizes in layouts(is_sparse):
        name = "".join(f", {key}={size}" for key, size in sizes.items() if size > 1)
        yield f"megatron, {world} ranks{name}", run_on_ranks(world, compare.megatron_runs, path, **sizes)


def main(names: list[str]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = save_model(MODELS[name], Path(folder))
            exact = compare.fsdp_runs(path)
            for case, ranks in cases(path, exact, "moe" in name or name == "mixtral"):
                for run in ("float32", "float64") if case.startswith("megatron") else ("float32",):
                    found = distance([rank[run] for rank in ranks], exact["float64"], exact["start"])
                    print(json.dumps({"model": name, "case": case, "run": run} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
