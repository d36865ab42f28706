"""On a machine with two GPUs: the native engine over two ranks against one, in numbers and in speed.

    python tests/gpu/run_tp.py [--out FILE.json] [--device cpu] [--only exact]

exact  float32, the width of Qwen2.5-7B with 2 layers and 8192 tokens: greedy and sampled tokens, stop strings,
       agent-loop requests and an abort, with and without CUDA graphs, must be equal, but for sampled tokens at a
       border that rounding moves; log-probs to 1e-4.
speed  bf16, the shape of Qwen2.5-7B with random weights, 128 prompts of 128 tokens, 256 tokens each: tokens per second,
       memory per GPU, and the difference of log-probs while the tokens are equal.

Two processes, one per GPU; the first one also generates alone. --device cpu tries the script itself on a tiny shape.
Prints a table last; exits with 1 if numbers disagree.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

#: fraction of the sampled completions
FLIPS = 0.02

QWEN2_7B = dict(
    architectures=["Qwen2ForCausalLM"], vocab_size=152064, hidden_size=3584, intermediate_size=18944,
    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
    rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
TINY = QWEN2_7B | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024,
)  # fmt: skip


class RandomWeights:
    """A stand-in for the trainer in this process: the same random weights on every rank, by name."""

    def __init__(self, config, device, head: float):
        """head: factor of the output layer. With a large one, few tokens are probable, and rounding changes none."""
        self.config, self.device, self.head = config, device, head

    def shared_module(self):
        return None

    def model_forward(self):
        return None

    def buffers(self) -> Iterator:
        from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

        rotary = Qwen2RotaryEmbedding(self.config)
        return ((f"model.rotary_emb.{name}", buffer) for name, buffer in rotary.named_buffers())

    def weights(self, shapes) -> Iterator:
        import torch

        for name, shape in shapes.items():
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            if drawn.dim() == 1:
                yield name, drawn.mul_(0.05).add_(name.endswith("norm.weight"))
            else:
                yield name, drawn.mul_(0.02 * (self.head if name.startswith("lm_head") else 1.0))


def make_engine(folder: Path, sizes: dict, dtype: str, device, rank: int, size: int, graphs: bool = True):
    """The engine of one rank, with its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.config import schema
    from verl.rollout.base import RolloutEnv
    from verl.rollout.native.factory import make_native

    folder.mkdir(exist_ok=True)
    (folder / f"{rank}").mkdir(exist_ok=True)
    (folder / f"{rank}" / "config.json").write_text(json.dumps(sizes | {"model_type": "qwen2"}))
    model = schema.ModelConfig(path=str(folder / f"{rank}"))
    config = AutoConfig.from_pretrained(folder / f"{rank}")
    # of the environment: all rollout ranks, also if this one generates alone
    env = RolloutEnv(rank, size, rank, device, 0, getattr(torch, dtype), tp_rank=rank, tp_size=size)
    section = schema.RolloutConfig(tensor_model_parallel_size=size, prompt_length=512, response_length=512)
    section = section.model_copy(update={"dtype": "auto", "enforce_eager": not graphs})
    source = RandomWeights(config, device, 5.0 if dtype == "float32" else 1.0)
    engine = make_native(section, model, env, source)
    with torch.device("meta"):
        full = AutoModelForCausalLM.from_config(config)
    engine.receiver().receive(source.weights({name: p.shape for name, p in full.named_parameters()}), 0)
    return engine


# ---- what is generated ------------------------------------------------------------------------------------------


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[(131 * i + 17 * j) % (vocabulary - 10) + 5 for j in range(length)] for i in range(count)]


def exact(engine, vocabulary: int) -> dict:
    """Completions of every kind of call, as plain lists."""
    from tests.rollout.test_tensor_parallel import answer

    prompts = [p[: 1 + 13 * i % 150] for i, p in enumerate(prompts_of(24, 150, vocabulary))]
    prompts[-1] = prompts[-2]
    found = answer(engine, prompts, tokens=48, steps=16)
    return {kind: [(c.token_ids, c.log_probs, c.finish_reason) for c in many] for kind, many in found.items()}


def speed(engine, sizes: dict, rows: int, tokens: int) -> dict:
    """Greedy log-probs, and the speed of sampling after a first call that compiles and captures."""
    import torch

    from verl.rollout.request import SamplingParams, make_requests

    prompts = prompts_of(rows, 128, sizes["vocab_size"])
    sampled = make_requests(prompts, SamplingParams(tokens, (), seed=1))
    engine.generate(sampled)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        engine.generate(sampled)
        seconds.append(time.perf_counter() - start)
    steps = engine.stats.steps
    greedy = engine.generate(make_requests(prompts, SamplingParams(tokens, (), temperature=0)))
    short = make_requests(prompts, SamplingParams(1, (), seed=1))
    engine.generate(short)
    start = time.perf_counter()
    engine.generate(short)
    prefill = time.perf_counter() - start
    return {
        "tokens_per_second": rows * tokens / min(seconds),
        "ms_per_step": 1000 * (min(seconds) - prefill) / steps,
        "prefill_seconds": prefill,
        "greedy": [(c.token_ids, c.log_probs, c.finish_reason) for c in greedy],
        "graphs": len(engine._cuda_decoder.graphs) if torch.cuda.is_available() else 0,
    }


# ---- one rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One engine over `size` ranks. act: what rank 0 does with it."""

    name: str
    dtype: str
    layers: int
    size: int
    act: Callable
    graphs: bool = True


def run_part(part: Part, folder: Path, shape: dict, device, rank: int) -> dict:
    """The results of this rank: those of `act` on rank 0, and memory."""
    import torch

    found, on_gpu = {}, device.type == "cuda"
    engine = make_engine(folder, shape, part.dtype, device, rank, part.size, part.graphs)
    if on_gpu:
        torch.cuda.synchronize()
        found["weights_gb"] = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    if rank == 0:
        with engine.leading():
            found |= part.act(engine)
    else:
        engine.follow()
    if on_gpu:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    engine.free()
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def run_rank(args: argparse.Namespace) -> None:
    """All parts on one rank; rank 0 also alone. Writes rank<i>.json."""
    import torch

    from verl.engines.parallel import init_process_group

    rank, on_gpu = int(os.environ["RANK"]), args.device != "cpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    init_process_group(device, 300.0)
    folder, results = Path(args.folder), {}
    sizes, (rows, tokens) = (QWEN2_7B, (128, 256)) if on_gpu else (TINY, (8, 16))
    small, layers = min(8192, sizes["vocab_size"]), sizes["num_hidden_layers"]

    def all_kinds(engine) -> dict:
        return {"answers": exact(engine, small)}

    def rates(engine) -> dict:
        return speed(engine, sizes, rows, tokens)

    parts = [
        Part("exact, 1 GPU", "float32", 2, 1, all_kinds),
        Part("exact, 2 GPUs", "float32", 2, 2, all_kinds),
        Part("exact, 2 GPUs, no graphs", "float32", 2, 2, all_kinds, graphs=False),
        Part("speed, 1 GPU", "bfloat16", layers, 1, rates),
        Part("speed, 2 GPUs", "bfloat16", layers, 2, rates),
    ]
    for part in parts:
        if args.only not in part.name:
            continue
        torch.distributed.all_reduce(torch.zeros(1))  # the other rank has finished
        shape, start = sizes | {"num_hidden_layers": part.layers}, time.perf_counter()
        if part.dtype == "float32":
            shape["vocab_size"] = small
        found = run_part(part, folder, shape, device, rank) if rank < part.size else {}
        results[part.name] = found | {"seconds": time.perf_counter() - start}
        print(f"rank {rank}: {part.name} done in {results[part.name]['seconds']:.1f} s", flush=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.all_reduce(torch.zeros(1))
    os._exit(0)


# ---- the comparison ---------------------------------------------------------------------------------------------


def compare_exact(found: dict, expected: dict) -> list[str]:
    """Completions that differ. Sums over ranks round differently, so a random number at the border of two tokens may
    choose the other one: at most FLIPS of the sampled completions may differ from some token on."""
    problems, flips, sampled = [], [], 0
    for kind, answers in expected.items():
        sampled += len(answers) * (kind != "greedy")
        for row, (a, b) in enumerate(zip(found[kind], answers, strict=True)):
            shared = min(len(a[0]), len(b[0])) if kind == "aborted" else max(len(a[0]), len(b[0]))
            first = next((i for i, (x, y) in enumerate(zip(a[0][:shared], b[0])) if x != y), None)
            worst = max((abs(x - y) for x, y in zip(a[1][:first], b[1][:first])), default=0.0)
            text = f"{kind}, row {row}: first other token {first}, log-probs before it differ by {worst:.2g}"
            if worst > 1e-4 or (first is None and (a[2] != b[2] or (kind != "aborted" and a[0] != b[0]))):
                problems.append(text)
            elif first is not None:
                (problems if kind == "greedy" else flips).append(text)
    return problems + (flips if len(flips) > FLIPS * sampled else [])


def compare_greedy(found: list, expected: list) -> dict:
    """Differences of log-probs up to and including the last token before the first one that differs."""
    differences, equal = [], 0
    for a, b in zip(found, expected, strict=True):
        shared = next((i for i, (x, y) in enumerate(zip(a[0], b[0])) if x != y), len(b[0]))
        differences += [abs(x - y) for x, y in zip(a[1][:shared], b[1][:shared])]
        equal += shared == len(b[0])
    return {
        "tokens_compared": len(differences),
        "rows_equal": equal,
        "mean": sum(differences) / max(1, len(differences)),
        "max": max(differences, default=0.0),
    }


def summarize(ranks: list[dict]) -> tuple[dict, list[str]]:
    leader, problems, table = ranks[0], [], {}
    if "exact, 1 GPU" in leader:
        for name in ("exact, 2 GPUs", "exact, 2 GPUs, no graphs"):
            found = compare_exact(leader[name]["answers"], leader["exact, 1 GPU"]["answers"])
            problems += [f"{name}: {problem}" for problem in found]
            table[name] = f"{sum(map(len, leader[name]['answers'].values()))} completions, {len(found)} differ"
    if "speed, 1 GPU" in leader:
        one, two = leader["speed, 1 GPU"], leader["speed, 2 GPUs"]
        greedy = compare_greedy(two.pop("greedy"), one.pop("greedy"))
        if greedy["mean"] > 0.02 or greedy["tokens_compared"] < len(ranks):
            problems.append(f"bf16 log-probs differ: {greedy}")
        table |= {"speed, 1 GPU": one, "speed, 2 GPUs": two, "bf16 log-probs": greedy}
        table["speed, 2 GPUs, rank 1"] = ranks[1]["speed, 2 GPUs"]
        table["speedup"] = two["tokens_per_second"] / one["tokens_per_second"]
    return table, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", choices=("", "exact", "speed"))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        run_rank(args)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29537"}
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--device", args.device, "--only", args.only, "--folder", folder]
        ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.2)
        failed = [process.poll() for process in ranks if process.poll()]
        for process in ranks:
            process.kill()
            process.wait()
        if failed:
            print(f"a rank failed with status {failed[0]}")
            return 1
        table, problems = summarize([json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2)])
    table["total_seconds"] = time.perf_counter() - start
    print(json.dumps(table | {"problems": problems[:20]}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(table | {"problems": problems}, indent=1))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
