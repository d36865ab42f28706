"""Cost of `rollout.deterministic`, and a check that the mismatch is 0. One JSON line per measurement, then a table.

    python benchmarks/deterministic.py                        # one GPU, the shape of Qwen2.5-0.5B
    python benchmarks/deterministic.py --shape tiny --rows 128 --prompt 16 --new 64 --dtype fp32   # any machine

Weights are random. Per mode: generation (tokens/s), old log-probs and an update of the same samples (seconds), each the
best of the repeats, and the difference between rollout and training log-probs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.config import schema  # noqa: E402
from verl.data.sequences import build_sequences  # noqa: E402
from verl.engines.base import EngineSpec, MicroBatching  # noqa: E402
from verl.engines.loading import ModelSpec  # noqa: E402
from verl.engines.torch_engine import TorchEngine  # noqa: E402
from verl.modeling import attention  # noqa: E402
from verl.modeling.batch_invariant import model as batch_invariant  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.rollout.native.engine import NativeRollout  # noqa: E402
from verl.rollout.request import SamplingParams, make_requests  # noqa: E402
from verl.utils.device import resolve_device, resolve_dtype  # noqa: E402
from verl.workers.engine_worker import aggregation  # noqa: E402
from verl.workers.policy import policy_objective  # noqa: E402

#: hidden, MLP, layers, heads, key heads, vocabulary
SHAPES = {
    "tiny": (96, 256, 3, 6, 2, 128),
    "13M": (384, 1024, 6, 6, 2, 4096),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
}
MODES = ("normal", "deterministic")
LOSS = {"clip_ratio": 0.2, "entropy_coeff": 0.0, "use_kl_loss": False}


def build(shape: str, mode: str, device: torch.device, dtype: torch.dtype, longest: int) -> TorchEngine:
    hidden, mlp, layers, heads, key_heads, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    exact = mode == "deterministic"
    config._attn_implementation = batch_invariant.NAME if exact else attention.NAME
    torch.manual_seed(0)
    with device:
        module = Qwen2ForCausalLM(config)
    kernels = "batch_invariant" if exact else "fused" if device.type == "cuda" else "plain"
    section = schema.ModelConfig(enable_gradient_checkpointing=False)
    spec = EngineSpec("causal_lm", section, optimizer=schema.OptimConfig(lr=1e-6), device=device)
    model = ModelSpec(section, device=device, compute_dtype=dtype, kernels=kernels)
    return TorchEngine(spec, model=model, module=module)


def seconds_of(call: Callable[[], object], device: torch.device) -> tuple[float, object]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def measure(mode: str, args: argparse.Namespace, device: torch.device) -> dict:
    dtype = resolve_dtype(args.dtype, device)
    engine = build(args.shape, mode, device, dtype, args.prompt + args.new)
    vocabulary = engine.module.config.vocab_size
    rollout = NativeRollout(
        engine.module,
        dtype=dtype if mode == "normal" and dtype != torch.float32 else None,
        forward=engine.model_forward(),
        memory_share=0.4,
    )
    prompts = torch.randint(1, vocabulary, (args.rows // args.samples, args.prompt), generator=torch.manual_seed(1))
    prompts = [row for row in prompts.tolist() for _ in range(args.samples)]
    best: dict[str, float] = {}
    for _ in range(args.repeats):
        took, completions = seconds_of(
            lambda: rollout.generate(make_requests(prompts, SamplingParams(args.new, ()))), device
        )
        best["generate"] = min(took, best.get("generate", took))
    rollout.sleep()
    columns = build_sequences(prompts, [completion.token_ids for completion in completions], 0)
    sampled = torch.tensor([completion.log_probs for completion in completions])
    batch = DataProto.from_dict({**columns, "rollout_log_probs": sampled, "advantages": torch.randn(sampled.shape)})
    micro = MicroBatching(tokens=args.tokens)
    for _ in range(args.repeats):
        took, outputs = seconds_of(lambda: engine.infer(batch, ("log_probs",), micro), device)
        best["log_probs"] = min(took, best.get("log_probs", took))
    gap = (outputs["log_probs"] - sampled).abs()
    agg = aggregation("token-mean", batch.batch["response_mask"], engine, None)
    objective = policy_objective("vanilla", LOSS, agg, old_is_current=True)
    for i in range(args.repeats):
        took, metrics = seconds_of(lambda: engine.train_batch(batch, objective, micro), device)
        best["update"] = min(took, best.get("update", took))
        if i == 0:
            in_update = metrics["rollout/logprob_gap_max"][0]
    setting = {"shape": args.shape, "rows": args.rows, "prompt": args.prompt, "new": args.new, "samples": args.samples}
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return setting | {
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "tokens_per_second": round(args.rows * args.new / best["generate"]),
        "log_prob_seconds": round(best["log_probs"], 3),
        "update_seconds": round(best["update"], 3),
        "gap_mean": gap.mean().item(),
        "gap_max": gap.max().item(),
        "gap_max_in_update": in_update,
        "grad_norm": metrics["grad_norm"],
        "peak_gib": peak if peak is None else round(peak, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def table(lines: list[dict]) -> str:
    columns = ("shape", "dtype", "mode", "tokens_per_second", "log_prob_seconds", "update_seconds")
    columns += ("gap_mean", "gap_max", "gap_max_in_update", "grad_norm", "peak_gib")
    rows = [columns, *(tuple(str(line[name]) for name in columns) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    device = resolve_device(args.device)
    lines = []
    for mode in args.modes.split(","):
        lines.append(measure(mode, args, device))
        print(json.dumps(lines[-1]), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    print(table(lines))


if __name__ == "__main__":
    main()
