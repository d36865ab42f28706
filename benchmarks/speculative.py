"""Speculative decoding against plain decoding, alternating in one process. One JSON line per setting, then a table.

    python benchmarks/speculative.py                                   # one GPU: 0.5B, 64 rows of 4,096 tokens
    python benchmarks/speculative.py --shape 13M --rows 16 --new 512 --threads 1 --cpu-time
    python benchmarks/speculative.py --model SmolLM2-135M-Instruct --rows 8 --new 512 --greedy

Without --model, the weights are made so that the text copies itself: token v is followed by its successor in a circle
of --circle tokens, except once in --jump tokens, where a random token begins another circle. So drafts are right from
the second round of a circle on. The layers compute as usual, but add next to nothing. --circle 0: no token repeats.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.rollout import SHAPES, Work, aligned, make_module, seconds_of, versions  # noqa: E402
from verl.rollout.native.engine import NativeRollout  # noqa: E402
from verl.rollout.native.speculation import PromptLookup  # noqa: E402
from verl.rollout.request import SamplingParams, make_requests  # noqa: E402

_QUESTIONS = (
    "List the numbers from 1 to 200.",
    "Write the word banana one hundred times.",
    "Repeat this sentence many times: the quick brown fox jumps over the lazy dog.",
    "Write a Python class with ten methods that each return a number.",
)


@torch.no_grad()
def make_copying(module: torch.nn.Module, circle: int, jump: float) -> None:
    """Set embedding and head so that a token is followed by its successor in its circle, with probability 1 - 1/jump
    approximately."""
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    vocabulary, hidden = embedding.shape
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(1e-4)
    embedding.copy_(torch.nn.functional.normalize(torch.randn_like(embedding, dtype=torch.float32), dim=-1))
    # the right logit is scale sqrt(H); the others are normal with deviation `scale`
    width, least = math.sqrt(hidden), math.log(vocabulary * jump)
    scale = width - math.sqrt(width**2 - 2 * least)
    tokens = torch.arange(vocabulary, device=embedding.device)
    size = circle or vocabulary
    first = tokens // size * size
    after = first + (tokens - first + 1) % (vocabulary - first).clamp_max(size)
    head[after] = embedding * scale


def make_engines(args: argparse.Namespace) -> tuple[torch.nn.Module, list[list[int]], dict[str, NativeRollout]]:
    if args.model:
        dtype = getattr(torch, args.dtype)
        module = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        chats = [[{"role": "user", "content": text}] for text in _QUESTIONS]
        encoded = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        encoded = [each if isinstance(each, list) else each["input_ids"] for each in encoded]
        prompts = [encoded[i % len(encoded)] for i in range(args.rows)]
    else:
        SHAPES["copying"] = SHAPES[args.shape] | {"tie_word_embeddings": False}
        work = Work("copying", args.rows, args.prompt, args.new)
        module, prompts = make_module(work, args), work.prompts()
        make_copying(module, args.circle, args.jump)
    engines = {"plain": NativeRollout(module, graphs=not args.eager)}
    for count in args.drafts:
        lookup = PromptLookup(count, args.longest, args.shortest)
        engines[f"{count} drafts"] = NativeRollout(module, graphs=not args.eager, lookup=lookup)
    return module, prompts, engines


def measure(args: argparse.Namespace) -> list[dict]:
    module, prompts, engines = make_engines(args)
    device, clock = torch.device(args.device), time.process_time if args.cpu_time else time.perf_counter
    params = SamplingParams(args.new, (), ignore_eos=True, temperature=0.0 if args.greedy else 1.0)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    answers = {}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            requests = make_requests(prompts, params)

            def run(name=name, engine=engine, requests=requests) -> None:
                answers[name] = engine.generate(requests)

            took = seconds_of(run, device, clock)
            if repeat:  # the first one warms up
                seconds[name].append(took)
    lines = []
    for name, engine in engines.items():
        pairs = list(zip(answers["plain"], answers[name]))
        stats = engine.stats
        lines.append(
            {
                "benchmark": "speculative",
                "engine": name,
                "model": Path(args.model).name if args.model else args.shape,
                "rows": args.rows,
                "prompt": round(statistics.mean(map(len, prompts))),
                "new": args.new,
                "circle": None if args.model else args.circle,
                "jump": None if args.model else args.jump,
                "sampling": "greedy" if args.greedy else "temperature 1",
                "parameters": sum(p.numel() for p in module.parameters()),
                "tokens_per_second": round(stats.tokens / statistics.median(seconds[name])),
                "speedup": round(statistics.median(a / b for a, b in zip(seconds["plain"], seconds[name])), 2),
                "steps": stats.steps,
                "drafts": stats.drafts,
                "acceptance": round(stats.accepted / stats.drafts, 3) if stats.drafts else None,
                "equal_rows": sum(a.token_ids == b.token_ids for a, b in pairs),
                "clock": "processor time" if args.cpu_time else "wall",
                "all_seconds": [round(s, 3) for s in seconds[name]],
                "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
                "dtype": args.dtype,
                "versions": versions(),
                "command": " ".join(["python", *sys.argv]),
            }
        )
    return lines


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; its responses to four questions with long answers")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=4096)
    parser.add_argument("--circle", type=int, default=64, help="tokens after which the text repeats")
    parser.add_argument("--jump", type=float, default=512, help="mean number of tokens between two random ones")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4], help="drafts per step; one engine for each")
    parser.add_argument("--longest", type=int, default=4, help="prompt_lookup_max")
    parser.add_argument("--shortest", type=int, default=2, help="prompt_lookup_min")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds, over all threads")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    lines = measure(args)
    for line in lines:
        print(json.dumps(line), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    names = ("engine", "rows", "new", "tokens_per_second", "speedup", "steps", "acceptance", "equal_rows")
    print(aligned([list(names), *[[line[name] for name in names] for line in lines]]))


if __name__ == "__main__":
    main()
