"""Every family of docs/models.md in bf16 on a GPU: training and rollout against transformers in float32.

    python tests/gpu/run_families.py --out FILE.json [--families qwen3 mamba2] [--jobs 8] [--device cpu]

The tiny models of `tests/models`. Per family, mean absolute differences of log-probs in nats:

noise     transformers in bf16 against float32: what rounding costs
training  the engine of strategy=fsdp, packed or padded, against transformers in float32
native, hf  log-probs that the rollout engine reports against those of training, for the tokens that it sampled

A difference above `bound` of the noise is wrong. Cells that docs/models.md does not list as right are skipped, as are
families that the installed transformers does not have or cannot compute in bf16. A table comes last; exits with 1 if a
cell is wrong or fails. A refusal, of a version of transformers for example, is none.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}

if TYPE_CHECKING:
    import torch

    from verl.engines.base import TrainEngine

COLUMNS = ("noise", "training", "native", "hf")


def bound(noise: float) -> float:
    """Largest mean difference of two computations in bf16 of a model in which rounding costs `noise`.

    Each is `noise` from float32, and a mixture of experts may choose other experts.
    """
    return 3 * noise + 0.005


def gap(one: "list[torch.Tensor]", other: "list[torch.Tensor]") -> float:
    """Mean absolute difference of the log-probs of responses."""
    pairs = [(a.double().cpu() - b.double().cpu()).abs() for a, b in zip(one, other, strict=True)]
    return sum(float(pair.sum()) for pair in pairs) / sum(map(len, pairs))


def trained(engine: "TrainEngine", prompts: list[list[int]], responses: list[list[int]]) -> "list[torch.Tensor]":
    """The log-probs of each response by the training engine."""
    from tests.models.checks import batch_of, log_probs_of

    return [row[: len(each)] for row, each in zip(log_probs_of(engine, batch_of(prompts, responses)), responses)]


def rollout_gap(engine: "TrainEngine", kind: str, device: str, prompts: list[list[int]]) -> float:
    """The difference of a rollout engine from training, for the tokens that it samples."""
    import torch

    from verl.config import schema
    from verl.rollout.base import RolloutEnv, make_rollout_engine
    from verl.rollout.request import SamplingParams, make_requests

    env = RolloutEnv(0, 1, 0, torch.device(device), 0, compute_dtype=torch.bfloat16)
    section = schema.RolloutConfig(name=kind, prompt_length=16, response_length=16, gpu_memory_utilization=0.02)
    rollout = make_rollout_engine(kind, section, engine.spec.model, env, engine)
    completions = rollout.generate(make_requests(prompts, SamplingParams(14, (2,), seed=3)))
    sampled = [torch.tensor(completion.log_probs) for completion in completions]
    return gap(sampled, trained(engine, prompts, [list(completion.token_ids) for completion in completions]))


def measure(name: str, device: str) -> dict[str, Any]:
    """The differences of a family by column, and the errors of the cells that failed."""
    import torch

    from tests.models.cells import recorded
    from tests.models.checks import load, log_probs_alone, save_family, sequences
    from verl.config import schema
    from verl.engines.base import EngineSpec, make_engine

    logging.disable(logging.WARNING)
    result: dict[str, Any] = {"family": name, "errors": {}, "refused": {}}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        prompts, responses = sequences()
        try:
            path = save_family(name, Path(folder)).path
            module = load(path).to(device)
            expected = log_probs_alone(module, prompts, responses)
            result["noise"] = gap(log_probs_alone(module.to(torch.bfloat16), prompts, responses), expected)
        except Exception as error:  # nothing of this project runs here
            result["refused"]["transformers"] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            return result
        del module
        for column in COLUMNS[1:]:
            if not recorded(name, "sft" if column == "training" else column).is_accepted:
                continue
            try:
                if column == "training":
                    spec = EngineSpec("causal_lm", schema.ModelConfig(path=path), schema.EngineConfig(dtype="bf16"))
                    engine = make_engine("fsdp", spec)
                    result["rows"] = "packed" if engine.packs else "padded"
                    result[column] = gap(trained(engine, prompts, responses), expected)
                elif "rows" in result:
                    result[column] = rollout_gap(engine, column, device, prompts)
            except ValueError as error:
                result["refused"][column] = str(error).split("\n")[0][:300]
            except Exception as error:  # the outcome of a cell, whatever it is
                result["errors"][column] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            if result.get(column, 0) > (limit := bound(result["noise"])):
                result["errors"][column] = f"wrong: expected at most {limit:.3g}, found {result[column]:.3g}"
    return result


def main() -> None:
    from tests.models.cells import TINY

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--families", nargs="*", default=list(TINY))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=400, help="families that have not begun then are left out")
    args = parser.parse_args()
    import torch

    start, results = time.monotonic(), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        futures = {name: pool.submit(measure, name, args.device) for name in args.families}
        for name, future in futures.items():
            try:
                results.append(future.result(max(0.1, args.seconds - (time.monotonic() - start))))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"[:300]
                results.append({"family": name, "errors": {"process": failure}, "refused": {}})
        for process in list(pool._processes.values()) if time.monotonic() - start > args.seconds else ():
            process.kill()
    record = {
        "command": "python tests/gpu/run_families.py --out FILE.json",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "seconds": round(time.monotonic() - start),
        "families": results,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'family':28}" + "".join(f"{column:>10}" for column in COLUMNS) + "  rows")
    for row in results:
        numbers = "".join(f"{row[c]:10.4f}" if c in row else f"{'-':>10}" for c in COLUMNS)
        print(f"{row['family']:28}{numbers}  {row.get('rows', '-')}", *(row["errors"] | row["refused"]).items())
    wrong = [row["family"] for row in results if row["errors"]]
    refused = [row["family"] for row in results if row["refused"]]
    print(f"{len(results)} families, {record['seconds']} s; wrong: {wrong}; refused or not in transformers: {refused}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
