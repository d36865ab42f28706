"""FP8 linear layers (`model.quantization=fp8`) against bf16, on one GPU. One JSON line per measurement.

    python benchmarks/fp8.py decode update mismatch --out FILE.json    # Hopper: random weights
    python benchmarks/fp8.py learning --seeds 1 2 3 --out FILE.json    # any machine: a tiny model

`decode`: tokens per second of `rollout.name=native`, prompts included, and the bytes of the weights that it reads.
`update`: seconds of an update (policy loss, AdamW) and of a forward pass (log-probs) with layers of the same shape, of
which the activations are kept, or computed again.
`mismatch`: the difference between the log-probs that the rollout reports and those that the training engine computes
for the same tokens with the same weights, without a correction; also for a rollout in FP8 beside training in bf16.
`learning`: GRPO on the task `reverse` of the quickstart, from the same start for each seed.

Both runs of a measurement have the same weights, prompts and sizes; seconds are medians after a warm-up.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rollout import SHAPES
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import EngineSpec, MicroBatching
from verl.engines.loading import resolve_model
from verl.engines.torch_engine import TorchEngine
from verl.modeling.fp8 import use_fp8
from verl.protocol import DataProto
from verl.rollout.native.decoder import Decoder, Layer, Projection
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import SamplingParams, make_requests
from verl.workers.engine_worker import aggregation
from verl.workers.policy import policy_objective

DTYPES = (None, "fp8")
GIB = 2**30
SETTINGS = {"clip_ratio": 0.2, "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k3"}
#: layers of the model of `update`: its float32 weights, gradients and moments fit into 80 GB
UPDATE_LAYERS = 8


def median_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompts_of(rows: int, tokens: int, vocabulary: int) -> list[list[int]]:
    return torch.randint(1, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1)).tolist()


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the tensors that a decode step reads, without the KV cache."""
    tensors: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[value.data_ptr()] = value.nbytes
        elif isinstance(value, Layer | Projection):
            for each in vars(value).values():
                visit(each)

    for value in (decoder.head, decoder.norm, *decoder.layers):
        visit(value)
    return sum(tensors.values())


def decode(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    sizes = SHAPES[args.shape]
    params = SamplingParams(args.new, (), seed=1, ignore_eos=True)
    for rows in args.rows:
        requests = make_requests(prompts_of(rows, args.prompt, sizes["vocab_size"]), params)
        for deterministic in (False, True) if rows == args.rows[0] else (False,):
            for quantization in DTYPES:
                with tempfile.TemporaryDirectory() as folder:
                    engine = make_engine(Path(folder), sizes, quantization, device, None, deterministic)
                rollout = rollout_of(engine, engine.module)
                with torch.inference_mode():
                    seconds = median_seconds(partial(rollout.generate, requests), repeats=2)
                weights = None if deterministic else round(weight_bytes(rollout.decoder) / GIB, 2)
                del engine, rollout
                free()
                yield {
                    "measure": "decode",
                    "shape": args.shape,
                    "quantization": quantization,
                    "deterministic": deterministic,
                    "rows": rows,
                    "prompt": args.prompt,
                    "new": args.new,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(rows * args.new / seconds),
                    "weight_gib": weights,
                }


def rollout_of(engine: TorchEngine, module: torch.nn.Module) -> NativeRollout:
    """The native engine on a module, in the dtype and with the forward pass of a training engine."""
    compute = engine.model_spec.compute_dtype
    return NativeRollout(module, dtype=None if compute == module.dtype else compute, forward=engine.model_forward())


def make_engine(
    folder: Path,
    sizes: dict,
    quantization: str | None,
    device: torch.device,
    checkpointing: bool | None,
    deterministic: bool = False,
) -> TorchEngine:
    """A training engine with random weights; without an optimizer if checkpointing is None."""
    torch.manual_seed(0)
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(folder)
    section = schema.ModelConfig(
        path=str(folder), quantization=quantization, enable_gradient_checkpointing=bool(checkpointing)
    )
    optimizer = None if checkpointing is None else schema.OptimConfig(lr=1e-6)
    spec = EngineSpec("causal_lm", section, optimizer=optimizer, device=device, deterministic=deterministic)
    return TorchEngine(spec, model=replace(resolve_model(spec), random_init=True))


def update(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    sizes = SHAPES[args.shape] | {"num_hidden_layers": min(UPDATE_LAYERS, SHAPES[args.shape]["num_hidden_layers"])}
    rows, vocabulary = args.update_tokens // (args.prompt + args.new), sizes["vocab_size"]
    columns = build_sequences(
        prompts_of(rows, args.prompt, vocabulary), prompts_of(rows, args.new, vocabulary), pad_token_id=0
    )
    answered = columns["responses"].shape
    columns["old_log_probs"] = torch.full(answered, -float(torch.tensor(vocabulary).log()))
    columns["advantages"] = torch.randn(answered, generator=torch.Generator().manual_seed(2))
    batch, micro = DataProto.from_dict(columns), MicroBatching(tokens=args.micro_tokens)
    for checkpointing in (False, True):
        for quantization in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                engine = make_engine(Path(folder), sizes, quantization, device, checkpointing)
            agg = aggregation("token-mean", batch.batch["response_mask"], engine, None)
            objective = policy_objective("vanilla", SETTINGS, agg)
            norms: list[float] = []

            def step(engine: TorchEngine = engine, objective: Any = objective, norms: list[float] = norms) -> None:
                norms.append(engine.train_batch(batch, objective, micro)["grad_norm"])

            seconds = median_seconds(step)
            peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
            passes = median_seconds(lambda engine=engine: engine.infer(batch, ("log_probs",), micro))
            del engine, objective, step
            free()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            yield {
                "measure": "update",
                "shape": args.shape,
                "layers": sizes["num_hidden_layers"],
                "quantization": quantization,
                "tokens": rows * (args.prompt + args.new),
                "micro_tokens": args.micro_tokens,
                "checkpointing": checkpointing,
                "update_seconds": round(seconds, 4),
                "log_prob_seconds": round(passes, 4),
                "peak_gib": round(peak, 2),
                "grad_norm": norms[0],
            }


def mismatch(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Training and rollout in bf16, both in FP8, both in FP8 with `rollout.deterministic`, and only the rollout."""
    sizes = SHAPES[args.shape]
    prompts = prompts_of(args.mismatch_rows, args.prompt, sizes["vocab_size"])
    params = SamplingParams(args.new, (), seed=1, ignore_eos=True)
    for training, generation, deterministic in (
        (None, None, False),
        ("fp8", "fp8", False),
        ("fp8", "fp8", True),
        (None, "fp8", False),
    ):
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(Path(folder), sizes, training, device, None, deterministic)
        module = engine.module
        if generation != training:
            module = use_fp8(copy.deepcopy(module).to(engine.model_spec.compute_dtype))
        rollout = rollout_of(engine, module)
        with torch.inference_mode():
            completions = rollout.generate(make_requests(prompts, params))
        rollout.free()
        columns = build_sequences(prompts, [each.token_ids for each in completions], pad_token_id=0)
        batch = DataProto.from_dict(columns)
        trained = engine.infer(batch, ("log_probs",), MicroBatching(tokens=args.micro_tokens))["log_probs"]
        difference = trained - torch.tensor([each.log_probs for each in completions])
        del engine, rollout, module
        free()
        yield {
            "measure": "mismatch",
            "shape": args.shape,
            "training": training,
            "rollout": generation,
            "deterministic": deterministic,
            "tokens": difference.numel(),
            "mean": difference.abs().mean().item(),
            "max": difference.abs().max().item(),
            # E[r - 1 - log r] of the probability ratios r = training / rollout: the KL divergence
            "kl": (difference.exp() - 1 - difference).mean().item(),
            "mean_log_prob": trained.mean().item(),
        }


def learning(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    from benchmarks.learning import Curve, learn, method_of, overrides, start_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = start_model("reverse", folder)
        for seed in args.seeds:
            for quantization in DTYPES:
                curve, out = Curve("reverse", "grpo", seed), folder / f"{quantization}-{seed}"
                common = overrides("reverse", start, folder / "reverse-start" / "data", out, args.steps, seed)
                more = [f"actor_rollout_ref.model.quantization={quantization or 'null'}"]
                more += [f"actor_rollout_ref.{role}.fsdp_config.dtype=bf16" for role in ("actor", "ref")]
                method = method_of("grpo")
                learn(method, curve, [*common, *method.settings, *more])
                lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                differences = [step.get("rollout/logprob_gap_mean") for step in map(json.loads, lines)]
                yield {
                    "measure": "learning",
                    "quantization": quantization,
                    "seed": seed,
                    "steps": args.steps,
                    "reward_first_10": round(statistics.mean(curve.reward[:10]), 4),
                    "reward_last_10": round(statistics.mean(curve.reward[-10:]), 4),
                    "accuracy": curve.accuracy[-1][1],
                    "mismatch": max(filter(None, differences)),
                }


MEASURES = {"decode": decode, "update": update, "mismatch": mismatch, "learning": learning}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="+", choices=MEASURES)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="of `decode`")
    parser.add_argument("--mismatch-rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=384, help="tokens of a response")
    parser.add_argument("--update-tokens", type=int, default=32768)
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60, help="of `learning`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of `learning`")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record = {"command": f"python benchmarks/fp8.py {' '.join(sys.argv[1:])}", "device": name}
    lines = []
    for measure in args.measures:
        for line in MEASURES[measure](args, device):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if args.out:
        args.out.write_text(json.dumps(record | {"lines": lines}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
