"""Generation speed of the rollout engines. One JSON line per measurement, then a table.

    python benchmarks/rollout.py --engines native,hf                       # this machine's CPU: three small models
    python benchmarks/rollout.py --engines native,hf --suite h200          # one GPU: 0.5B to 7B
    python benchmarks/rollout.py --engines native,vllm --suite vllm --shape 0.5B
    python benchmarks/rollout.py --engines native,hf,vllm --vllm-python PYTHON --threads 2
    python benchmarks/rollout.py --engines native,hf --suite families      # one GPU: models without fused layers
    python benchmarks/rollout.py --shape 0.5B --rows 256 --prompt 128 --new 256 --lengths lognormal --samples 8

Weights are random; all engines have the same weights, prompts and number of new tokens per response (no stop token).
Engines alternate in one process, `--repeats` times after one warm-up: seconds are medians, and ratios are medians over
the repeats. Prefill is included. `floor` is the time for the same work if the device only read each weight once per
step and every key and value once, or only computed, whichever is longer, at the copy and matmul speeds measured in the
same run.

With --vllm-python, vLLM runs in a process of that interpreter (an environment that has vLLM), which waits while other
engines run. On a CPU it uses its fastest settings: no graphs and no compilation, one process, all threads.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.rollout.native.engine import NativeRollout  # noqa: E402
from verl.rollout.request import SamplingParams, make_requests  # noqa: E402


def shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool = True) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


SHAPES = {
    "0.43M": shape(128, 256, 2, 4, 2, 553, tied=False),
    "13M": shape(384, 1024, 8, 6, 2, 553),
    "31M": shape(384, 1024, 8, 6, 2, 48000),
    "0.5B": shape(896, 4864, 24, 14, 2, 151936),  # of Qwen2.5
    "1.5B": shape(1536, 8960, 28, 12, 2, 151936),
    "7B": shape(3584, 18944, 28, 28, 4, 152064, tied=False),
}
#: of families without fused layers, 0.3B to 0.6B parameters; with experts, a quarter of them per token
_MIXTURE = {"n_routed_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
FAMILIES = {
    "smollm3": shape(896, 4864, 24, 14, 2, 151936),
    "qwen3_5_text": shape(896, 3072, 24, 8, 2, 151936)
    | {"head_dim": 128, "linear_num_value_heads": 16, "linear_num_key_heads": 8},
    "deepseek_v3": shape(768, 2048, 16, 12, 12, 65536)
    | _MIXTURE
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 384, "n_shared_experts": 1},
    "gpt_oss": shape(768, 512, 16, 16, 4, 65536) | {"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
    "glm4_moe": shape(768, 2048, 16, 12, 4, 65536)
    | _MIXTURE
    | {"head_dim": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    # for a CPU
    "smollm3-small": shape(384, 1024, 8, 6, 2, 553),
    "qwen3_5_text-small": shape(384, 1024, 8, 6, 2, 553)
    | {"head_dim": 64, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
    "gpt_oss-small": shape(384, 256, 8, 6, 2, 553) | {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
}
SHAPES |= {name: sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1} for name, sizes in FAMILIES.items()}


#: settings of vLLM's build for a CPU with which small models are fastest
VLLM_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Work:
    """The workload.

    rows: responses; samples: responses per prompt; lengths: "even" (all `new`) or "lognormal" (sigma 1, at most `new`,
    median `new` / 4); sampling: options of SamplingParams.
    """

    shape: str
    rows: int
    prompt: int
    new: int
    samples: int = 1
    lengths: str = "even"
    top_p: float = 1.0

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        vocabulary = SHAPES[self.shape]["vocab_size"]
        distinct = torch.randint(vocabulary, (self.rows // self.samples, self.prompt), generator=generator).tolist()
        return [prompt for prompt in distinct for _ in range(self.samples)]

    def limits(self) -> list[int]:
        if self.lengths == "even":
            return [self.new] * self.rows
        generator = torch.Generator().manual_seed(2)
        drawn = torch.randn(self.rows, generator=generator).exp() * self.new / 4
        return drawn.round().long().clamp(1, self.new).tolist()


CPU_SUITE = [Work(name, 64, 16, 64) for name in ("0.43M", "13M", "31M")]
CPU_SUITE += [Work("0.43M", 128, 64, 64, samples=8), Work("0.43M", 128, 16, 64, samples=8, lengths="lognormal")]
H200_SUITE = [Work("0.5B", rows, 128, 256) for rows in (64, 256)]
H200_SUITE += [Work("0.5B", rows, 128, 512) for rows in (512, 1024, 2048)]
H200_SUITE += [
    Work("0.5B", 512, 128, 512, samples=8),
    Work("0.5B", 1024, 128, 2048, samples=8, lengths="lognormal"),
    Work("0.5B", 256, 128, 256, top_p=0.95),
    Work("1.5B", 256, 128, 256),
    Work("7B", 256, 512, 512),
    Work("7B", 256, 512, 512, samples=8),
]
VLLM_SUITE = [
    Work("0.5B", 256, 128, 256),
    Work("0.5B", 1024, 128, 512),
    Work("0.5B", 512, 128, 2048, lengths="lognormal"),
    Work("7B", 256, 128, 256),
]
FAMILY_SUITE = [Work(name, 256, 128, 128) for name in FAMILIES if not name.endswith("-small")]
SMALL_SUITE = [Work(name, 64, 16, 64) for name in FAMILIES if name.endswith("-small")]
SMALL_SUITE += [Work("smollm3-small", 128, 16, 64, samples=8, lengths="lognormal")]
SUITES = {
    "families": FAMILY_SUITE,
    "small-families": SMALL_SUITE,
    "cpu": CPU_SUITE,
    "h200": H200_SUITE,
    "vllm": VLLM_SUITE,
}
Engine = Callable[[list[list[int]], list[int], int], None]


def native(module: torch.nn.Module, work: Work, longest: int) -> Engine:
    engine = NativeRollout(module)

    def run(prompts: list[list[int]], limits: list[int], seed: int) -> None:
        params = SamplingParams(max(limits), (), seed=seed, ignore_eos=True, top_p=work.top_p)
        completions = engine.generate(make_requests(prompts, params, limits=limits))
        assert [len(completion.token_ids) for completion in completions] == limits

    return run


def transformers_generate(module: torch.nn.Module, work: Work, longest: int, **options) -> Engine:
    """All responses have the longest length: `generate` has no limit per row."""

    def run(prompts: list[list[int]], limits: list[int], seed: int) -> None:
        ids = torch.tensor(prompts, device=module.device)
        config = GenerationConfig(
            max_new_tokens=max(limits), do_sample=True, top_k=0, top_p=work.top_p, pad_token_id=0, **options
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            output = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert output.shape[1] == ids.shape[1] + max(limits)

    return run


@cache
def vllm_server(config: str, dtype: str, longest: int) -> Any:
    """One engine for all settings of a model, since it takes minutes to start. It has other random weights, with the
    same speed."""
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    os.environ.update({} if torch.cuda.is_available() else VLLM_ON_CPU)
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(config, encoding="utf-8")
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=1024,
        **({"gpu_memory_utilization": 0.6} if torch.cuda.is_available() else on_cpu),
    )


def vllm(module: torch.nn.Module, work: Work, longest: int) -> Engine:
    from vllm import SamplingParams as VllmParams

    module.config.architectures = [type(module).__name__]
    dtype = str(module.dtype).removeprefix("torch.")
    llm = vllm_server(module.config.to_json_string(use_diff=False), dtype, longest)

    def run(prompts: list[list[int]], limits: list[int], seed: int) -> None:
        params = [
            VllmParams(max_tokens=n, ignore_eos=True, logprobs=0, seed=None, top_p=work.top_p, detokenize=False)
            for n in limits
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert [len(request.outputs[0].token_ids) for request in outputs] == limits

    return run


class Elsewhere:
    """An engine in a process of another interpreter, which runs when it is called."""

    def __init__(self, python: str, name: str, work: Work, args: argparse.Namespace, longest: int):
        command = [python, str(Path(__file__).resolve()), "--serve", name, "--longest", str(longest)]
        for option in ("shape", "top_p", "device", "dtype", "threads"):
            value = getattr(args, option) if option in ("device", "dtype", "threads") else getattr(work, option)
            command += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self.versions: dict[str, str] = json.loads(self.process.stdout.readline())

    def __call__(self, prompts: list[list[int]], limits: list[int], seed: int) -> None:
        self.process.stdin.write(json.dumps([prompts, limits, seed]) + "\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            raise RuntimeError(f"the process of another engine has ended with {self.process.wait()}; see its output")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve(args: argparse.Namespace) -> None:
    """The process of `Elsewhere`."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    work = Work(args.shape, 1, 1, 1, top_p=args.top_p)
    run = ENGINES[args.serve](make_module(work, args), work, args.longest)
    out.write(json.dumps(versions()) + "\n")
    out.flush()
    for line in sys.stdin:
        run(*json.loads(line))
        out.write("done\n")
        out.flush()


ENGINES: dict[str, Callable[[torch.nn.Module, Work, int], Engine]] = {
    "native": native,
    "hf": transformers_generate,
    "hf-static": partial(transformers_generate, cache_implementation="static"),
    "vllm": vllm,
}


def make_module(work: Work, args: argparse.Namespace) -> torch.nn.Module:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    model_type = work.shape.removesuffix("-small") if work.shape in FAMILIES else "qwen2"
    with device:
        config = AutoConfig.for_model(model_type, **SHAPES[work.shape], dtype=dtype)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    function: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    wait(device)
    start = clock()
    function()
    wait(device)
    return clock() - start


@dataclass(frozen=True)
class Speed:
    """Measured device speed: FLOP/s of a matmul, bytes per second read plus written."""

    flops: float
    bytes: float


def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    n, size = (8192, 1 << 31) if device.type == "cuda" else (1024, 1 << 27)
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    source = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    products = [seconds_of(lambda: torch.mm(a, b), device) for _ in range(8)]
    copies = [seconds_of(lambda: target.copy_(source), device) for _ in range(8)]
    return Speed(2 * n**3 / min(products), 2 * size / min(copies))


def floor_seconds(work: Work, module: torch.nn.Module, speed: Speed) -> float | None:
    """None for a family whose layers are not those of Qwen2."""
    if work.shape in FAMILIES:
        return None
    config, limits = module.config, work.limits()
    width = module.dtype.itemsize
    embedding = config.vocab_size * config.hidden_size
    inner = sum(p.numel() for p in module.parameters()) - embedding * (1 if config.tie_word_embeddings else 2)
    head_size = config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * width
    total = 2 * inner * work.prompt * work.rows / work.samples / speed.flops
    for step in range(max(limits)):
        rows = sum(limit > step for limit in limits)
        arithmetic = 2 * (inner + embedding) * rows / speed.flops
        memory = ((inner + embedding) * width + rows * (work.prompt + step) * cached) / speed.bytes
        total += max(arithmetic, memory)
    return total


def versions() -> dict[str, str]:
    packages = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton", "vllm"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return packages


def measure(work: Work, names: Sequence[str], args: argparse.Namespace, speed: Speed, longest: int) -> list[dict]:
    """longest: maximum of prompt plus response over the settings of this model."""
    device, module = torch.device(args.device), make_module(work, args)
    prompts, limits = work.prompts(), work.limits()
    engines: dict[str, Engine] = {}
    for name in names:
        away = name == "vllm" and args.vllm_python
        engines[name] = Elsewhere(away, name, work, args, longest) if away else ENGINES[name](module, work, longest)
    first = {name: seconds_of(lambda e=e: e(prompts, limits, 0), device) for name, e in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    # CPU time is less informative than wall time, but more reliable on a shared machine
    clock = time.process_time if args.cpu_time else time.perf_counter
    for seed in range(1, args.repeats + 1):
        for name, engine in engines.items():
            seconds[name].append(seconds_of(lambda e=engine, s=seed: e(prompts, limits, s), device, clock))
    floor = floor_seconds(work, module, speed)
    lines = []
    for name in names:
        median = statistics.median(seconds[name])
        lines.append(
            {
                "benchmark": "rollout",
                "engine": name,
                **asdict(work),
                "parameters": sum(p.numel() for p in module.parameters()),
                "tokens": sum(limits),
                "tokens_per_second": round(sum(limits) / median),
                "clock": "processor time" if args.cpu_time else "wall",
                "seconds": round(median, 4),
                "all_seconds": [round(s, 4) for s in seconds[name]],
                "first_seconds": round(first[name], 3),
                "times_floor": floor and round(median / floor, 2),
                "native_is_faster": faster(seconds[name], seconds["native"]) if "native" in names else None,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
                "dtype": args.dtype,
                "versions": engines[name].versions if isinstance(engines[name], Elsewhere) else versions(),
                "command": " ".join(["python", *("PYTHON" if w == args.vllm_python else w for w in sys.argv)]),
            }
        )
    for engine in engines.values():
        if isinstance(engine, Elsewhere):
            engine.close()
    if device.type == "cuda":
        del engines, module
        torch.cuda.empty_cache()
    return lines


def faster(these: list[float], than: list[float]) -> float:
    """Ratio of the seconds: the median over repeats, which other load on the machine affects equally."""
    return round(statistics.median(a / b for a, b in zip(these, than)), 2)


def table(lines: list[dict]) -> str:
    rows = [["shape", "rows", "prompt+new", "samples", "lengths", "engine", "tok/s", "x floor", "native/this"]]
    for line in lines:
        lengths = line["lengths"] + (f" top_p {line['top_p']}" if line["top_p"] < 1 else "")
        rows.append(
            [line["shape"], line["rows"], f"{line['prompt']}+{line['new']}", line["samples"], lengths, line["engine"]]
            + [f"{line['tokens_per_second']:,}", line["times_floor"], line["native_is_faster"]]
        )
    return aligned(rows)


def aligned(rows: list[list]) -> str:
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).rjust(w) for cell, w in zip(row, widths)) for row in rows)


def profile(work: Work, args: argparse.Namespace) -> str:
    """Where the native engine's time goes: the operations or kernels that take longest, in microseconds per step.

    A call's prefill and its hand-over to the host are spread over its steps.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    device = torch.device(args.device)
    engine, prompts, limits = NativeRollout(make_module(work, args)), work.prompts(), work.limits()
    params = SamplingParams(max(limits), (), ignore_eos=True, top_p=work.top_p)
    engine.generate(make_requests(prompts, params, limits=limits))
    gpu = device.type == "cuda"
    with record(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        engine.generate(make_requests(prompts, params, limits=limits))
        wait(device)
    steps = engine.stats.steps
    spent = [
        (e.self_device_time_total if gpu else e.self_cpu_time_total, e.count, e.key) for e in profiler.key_averages()
    ]
    total = sum(time for time, _, _ in spent)
    rows = [["us/step", "share", "calls/step", "us/call", "kernel" if gpu else "operation"]]
    for took, count, name in sorted(spent, reverse=True)[:25]:
        numbers = [f"{took / steps:.1f}", f"{took / total:.1%}", f"{count / steps:.1f}", f"{took / count:.2f}"]
        rows.append([*numbers, name[:90]])
    wall = engine.stats.seconds / steps * 1e6
    title = f"{work.shape}, {work.rows} rows: {steps} steps of {wall:.0f} us, {total / steps:.0f} us of work in each"
    return title + "\n" + aligned(rows)


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="native,hf", help=f"of {', '.join(ENGINES)}, separated by commas")
    parser.add_argument("--suite", choices=SUITES, help="a list of settings; the default without --shape")
    parser.add_argument("--shape", choices=SHAPES, help="shape of one setting, or filter of the --suite")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1, help="responses per prompt")
    parser.add_argument("--lengths", choices=["even", "lognormal"], default="even")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds, over all threads")
    parser.add_argument("--profile", action="store_true", help="also print a profile")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--vllm-python", help="interpreter with vLLM, if this one has none")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--longest", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.vllm_python and args.cpu_time:
        parser.error("--cpu-time counts the time of this process; vLLM's is another one: leave one of the two out")
    return args


def main() -> None:
    args = parse()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of other processes
        torch.set_num_threads(args.threads)
    if args.serve:
        serve(args)
        return
    single = Work(args.shape, args.rows, args.prompt, args.new, args.samples, args.lengths, args.top_p)
    works = SUITES[args.suite or ("h200" if args.device == "cuda" else "cpu")]
    if args.shape:
        works = [work for work in works if work.shape == args.shape] if args.suite else [single]
    speed = measure_speed(torch.device(args.device), getattr(torch, args.dtype))
    print(json.dumps({"benchmark": "device_speed", "tflops": speed.flops / 1e12, "gb_per_s": speed.bytes / 1e9}))
    lines = []
    for work in works:
        longest = max(other.prompt + other.new for other in works if other.shape == work.shape)
        for line in measure(work, args.engines.split(","), args, speed, longest):
            lines.append(line)
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        if args.profile:
            print(profile(work, args), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
