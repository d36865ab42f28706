"""Speed of the policy update. One JSON line per measurement, then a table.

    python benchmarks/train_step.py                         # one GPU: attention, lm_head, updates
    python benchmarks/train_step.py --suite rl --variants plain,fused --profile
    python benchmarks/train_step.py --suite cpu             # any machine, tiny

`rl`: 512 responses of 128 + 512 tokens at the shape of Qwen2.5-0.5B, 8 per prompt and then one per prompt: the update
(policy loss with KL, no entropy loss; one optimizer step) and the forward pass of the reference. `16k`, `long`: long
sequences at the shapes of Qwen3.
Weights are random. Variants: `transformers` (the unmodified model, padded batches with SDPA, log-probs from chunks of
float32 logits that are recomputed in the backward pass), and the engine with each of its `kernels`.

`mfu`: floating-point operations of the model (matmuls with the weights, causal attention, lm_head for the response
tokens; three times the forward pass for an update; nothing for recomputation) divided by the seconds and by the dense
peak rate of the GPU. `floor`: the same operations at the rate of large matmuls measured in this run.
"""

import argparse
import gc
import json
import math
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.config import schema  # noqa: E402
from verl.data.sequences import build_sequences  # noqa: E402
from verl.engines.base import EngineSpec, MicroBatching  # noqa: E402
from verl.engines.loading import ModelSpec  # noqa: E402
from verl.engines.torch_engine import TorchEngine  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.workers.engine_worker import aggregation  # noqa: E402
from verl.workers.policy import policy_objective  # noqa: E402

DATASHEET_TFLOPS = {"NVIDIA H100": 989.4, "NVIDIA H200": 989.4, "NVIDIA A100": 312.0}


def shape(kind: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int) -> dict:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    }


SHAPES = {
    "0.43M": shape("qwen2", 128, 256, 2, 4, 2, 32, 553),
    "0.5B": shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936),  # of Qwen2.5
    "0.6B": shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),  # of Qwen3
    "4B": shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936),
}


@dataclass(frozen=True)
class Work:
    """rows of prompt + response tokens, `samples` per prompt; micro: tokens per micro-batch.

    checkpointing: activations computed again.
    """

    name: str
    shape: str
    rows: int
    prompt: int
    response: int
    micro: int
    checkpointing: bool = False
    samples: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.response)

    def flops(self) -> float:
        """FLOPs of a forward pass; a shared prompt counts once, and lm_head only for response tokens."""
        s = SHAPES[self.shape]
        hidden, heads = s["hidden_size"], s["num_attention_heads"] * s["head_dim"]
        keys = s["num_key_value_heads"] * s["head_dim"]
        weights = s["num_hidden_layers"] * (hidden * (2 * heads + 2 * keys) + 3 * hidden * s["intermediate_size"])
        prompts, answer_tokens = self.rows // self.samples, self.rows * self.response
        pairs = prompts * self.prompt * (self.prompt + 1) / 2
        pairs += answer_tokens * (self.prompt + (self.response + 1) / 2)
        attention = s["num_hidden_layers"] * 4 * heads * pairs
        head = 2 * hidden * s["vocab_size"] * answer_tokens
        return 2 * weights * (prompts * self.prompt + answer_tokens) + attention + head

    def batch(self) -> DataProto:
        generator = torch.Generator().manual_seed(1)
        vocabulary = SHAPES[self.shape]["vocab_size"]
        ids = torch.randint(vocabulary, (self.rows, self.prompt + self.response), generator=generator).tolist()
        prompts = [ids[i - i % self.samples][: self.prompt] for i in range(self.rows)]
        columns = build_sequences(prompts, [r[self.prompt :] for r in ids], pad_token_id=0)
        answered = columns["responses"].shape
        for name in ("old_log_probs", "ref_log_prob"):
            columns[name] = torch.full(answered, -math.log(vocabulary))  # roughly that of random weights
        columns["advantages"] = torch.randn(answered, generator=generator)
        return DataProto.from_dict(columns)


WORKS = {
    "cpu": [Work("rl", "0.43M", 128, 16, 64, 16384)],
    "rl": [Work("rl", "0.5B", 512, 128, 512, 16384, samples=8), Work("rl", "0.5B", 512, 128, 512, 16384)],
    "16k": [Work("16k", "0.6B", 8, 512, 15872, 16384)],
    "long": [
        Work("64k", "0.6B", 2, 512, 65024, 65536, checkpointing=True),
        Work("16k", "4B", 4, 512, 15872, 16384, checkpointing=True),
        Work("64k", "4B", 1, 512, 65024, 65536, checkpointing=True),
    ],
}
SETTINGS = {"clip_ratio": 0.2, "entropy_coeff": 0.0, "use_kl_loss": True, "kl_loss_coef": 1e-3, "kl_loss_type": "k3"}


#: class of kernel -> what its names contain; the first that fits
KERNEL_CLASSES = {
    "attention": "flash|fmha|sdpa|cudnn",
    "matmuls": "nvjet|gemm|gemv|xmma|cutlass|splitK",
    "sums and norms": "_norm_(gradient_)?kernel",
    "SwiGLU": "_swiglu",
    "rotary embedding": "_rotary",
    "logits": "_statistics_kernel|^_gradient_kernel",
    "optimizer": "multi_tensor",
    "reductions": "reduce_kernel|ReduceOp",
    "index, sort, embedding": "index|sort|embedding|scatter|gather|scan|Radix|select|Merge|unique|cub",
    "casts and copies": "copy|Memcpy|CatArray",
    "memset, fill": "Memset|Fill",
    "other element-wise": "elementwise",
    "rest": "",
}


class Engine:
    """The training engine. kernels: as in `ModelSpec`."""

    def __init__(self, work: Work, folder: Path, device: torch.device, kernels: str):
        torch.manual_seed(0)
        narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
        section = schema.ModelConfig(path=str(folder), enable_gradient_checkpointing=work.checkpointing)
        spec = EngineSpec("causal_lm", section, optimizer=schema.OptimConfig(), device=device)
        model = ModelSpec(section, device=device, compute_dtype=narrow, kernels=kernels, random_init=True)
        self.work = work
        self.engine = TorchEngine(spec, model=model)
        self.micro = MicroBatching(tokens=work.micro)

    def update(self, batch: DataProto) -> float:
        agg = aggregation("token-mean", batch.batch["response_mask"], self.engine, None)
        metrics = self.engine.train_batch(batch, policy_objective("vanilla", SETTINGS, agg), self.micro)
        return metrics["grad_norm"]

    def reference(self, batch: DataProto) -> float:
        return self.engine.infer(batch, ("log_probs",), self.micro)["log_probs"].mean().item()


class Transformers:
    """Plain transformers: padded batches, SDPA, log-probs of float32 logits in chunks."""

    def __init__(self, work: Work, folder: Path, device: torch.device):
        torch.manual_seed(0)
        self.work, self.device = work, device
        config = AutoConfig.from_pretrained(folder)
        with device:
            self.module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        if work.checkpointing:
            self.module.train()
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6, fused=device.type == "cuda")

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """(b, T) log-probs of the responses; all rows of a batch have the same length here."""
        hidden = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state

        def of_chunk(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.module.lm_head(states).float()
            return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)

        states, targets = hidden[:, self.work.prompt - 1 : -1], ids[:, self.work.prompt :]
        chunks = zip(states.flatten(0, 1).split(4096), targets.flatten().split(4096))
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(parts).view(targets.shape)

    def _pieces(self, batch: DataProto):
        rows = max(1, self.work.micro // (self.work.prompt + self.work.response))
        for piece in batch.split(rows):
            yield {name: value.to(self.device) for name, value in piece.tensors.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def update(self, batch: DataProto) -> float:
        for rows in self._pieces(batch):
            with self._autocast():
                new = self.log_probs(rows["input_ids"])
            ratio = (new - rows["old_log_probs"]).exp()
            a = rows["advantages"]
            gap = rows["ref_log_prob"] - new
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + 1e-3 * (gap.exp() - gap - 1)
            (loss.sum() / (self.work.rows * self.work.response)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    @torch.no_grad()
    def reference(self, batch: DataProto) -> float:
        with self._autocast():
            return torch.cat([self.log_probs(rows["input_ids"]) for rows in self._pieces(batch)]).mean().item()


def build(variant: str, work: Work, folder: Path, device: torch.device) -> Engine | Transformers:
    return Transformers(work, folder, device) if variant == "transformers" else Engine(work, folder, device, variant)


def seconds_of(call: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """(seconds, result of the call)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measured_flops(device: torch.device) -> float:
    """FLOP/s of a large matmul of random bf16 matrices (float32 on a CPU)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = statistics.median(seconds_of(lambda: torch.mm(a, b) is None, device)[0] for _ in range(8))
    return 2 * size**3 / seconds


def measure(work: Work, variant: str, args: argparse.Namespace, flops: float) -> dict:
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoConfig.for_model(**SHAPES[work.shape]).save_pretrained(folder)
        start = time.perf_counter()
        built = build(variant, work, folder, device)
        ready = time.perf_counter() - start
    batch = work.batch()
    first = seconds_of(lambda: built.update(batch), device)[0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    updates = [seconds_of(lambda: built.update(batch), device) for _ in range(args.repeats)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    built.reference(batch)
    passes = [seconds_of(lambda: built.reference(batch), device) for _ in range(args.repeats)]
    busy: dict[str, float | None] = dict.fromkeys(("update", "reference"))
    if args.profile:
        for name, call in (("update", built.update), ("reference", built.reference)):
            found, busy[name] = profile(lambda call=call: call(batch), device)
            print(f"{work.name} {variant}: {name}", found, sep="\n", flush=True)
    update, reference = (statistics.median(s for s, _ in found) for found in (updates, passes))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu x {torch.get_num_threads()}"
    rate = DATASHEET_TFLOPS.get(name)
    return {
        "benchmark": "train_step",
        **asdict(work),
        "variant": variant,
        "update_seconds": round(update, 4),
        "reference_seconds": round(reference, 4),
        **{f"{name}_kernel_seconds": seconds and round(seconds, 4) for name, seconds in busy.items()},
        "tokens_per_second": round(work.tokens / update),
        "update_tflop": round(3 * work.flops() / 1e12, 3),
        "mfu": round(3 * work.flops() / update / rate / 1e12, 4) if rate else None,
        "reference_mfu": round(work.flops() / reference / rate / 1e12, 4) if rate else None,
        "floor_seconds": round(3 * work.flops() / flops, 4),
        "times_floor": round(update * flops / (3 * work.flops()), 2),
        "first_update_seconds": round(first, 2),
        "build_seconds": round(ready, 2),
        "peak_gib": peak and round(peak, 2),
        "grad_norm": updates[-1][1],
        "mean_log_prob": passes[-1][1],
        "device": name,
        "versions": {"python": platform.python_version()} | {n: metadata.version(n) for n in ("torch", "transformers")},
        "command": " ".join(["python", *sys.argv]),
    }


def profile(call: Callable[[], float], device: torch.device) -> tuple[str, float | None]:
    """Where the time of a call goes: milliseconds by class of kernel, and the slowest operations or kernels.

    And the seconds of all kernels, which other work on the host does not lengthen.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as profiler:
        seconds, _ = seconds_of(call, device)
    operations = profiler.key_averages()
    table = operations.table(sort_by=f"self_{device.type}_time_total", row_limit=45, max_name_column_width=110)
    if device.type != "cuda":
        return table, None
    classes = dict.fromkeys(KERNEL_CLASSES, 0.0)
    for operation in operations:
        name = next(name for name, pattern in KERNEL_CLASSES.items() if re.search(pattern, operation.key))
        classes[name] += operation.self_device_time_total / 1e3
    lines = [f"{name:>22} {took:9.1f} ms {took / seconds / 10:5.1f} %" for name, took in classes.items()]
    busy = sum(classes.values())
    lines.append(f"{'idle':>22} {seconds * 1e3 - busy:9.1f} ms of {seconds * 1e3:.1f}")
    return "\n".join([*lines, table]), busy / 1e3


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=WORKS, action="append", help="default: rl, 16k and long on a GPU, else cpu")
    parser.add_argument("--variants", default="transformers,plain,fused" if gpu else "transformers,plain")
    parser.add_argument("--shapes", help="only works of these shapes, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--profile", action="store_true", help="also print a profile of an update")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    return parser.parse_args()


def table(lines: list[dict]) -> str:
    names = [
        "name",
        "shape",
        "rows",
        "samples",
        "prompt",
        "response",
        "micro",
        "variant",
        "update_seconds",
        "reference_seconds",
    ]
    names += ["tokens_per_second", "mfu", "reference_mfu", "times_floor", "first_update_seconds", "peak_gib"]
    rows = [names] + [[str(line[name]) for name in names] for line in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows)


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    suites = args.suite or (["rl", "16k", "long"] if args.device == "cuda" else ["cpu"])
    works = [work for suite in suites for work in WORKS[suite]]
    if args.shapes:
        works = [work for work in works if work.shape in args.shapes.split(",")]
    flops = measured_flops(torch.device(args.device))
    print(json.dumps({"benchmark": "device_speed", "tflops": round(flops / 1e12, 2)}), flush=True)
    lines = []
    for work in works:
        for variant in args.variants.split(","):
            try:
                line = measure(work, variant, args, flops)
            except Exception:  # one variant that fails (out of memory, say) does not cost the others
                traceback.print_exc()
                free()
                continue
            lines.append(line)
            free()
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
