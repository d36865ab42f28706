"""One GRPO step of this library against TRL's GRPOTrainer: same model, prompts, reward, token counts and optimizer.

    python benchmarks/grpo_step.py                                  # a GPU: 0.5B, 64 prompts x 8, 128 + 512 tokens
    python benchmarks/grpo_step.py --suite cpu --trl-python PYTHON  # any machine: 0.43 M parameters, 16 x 8, 16 + 64

Everything is generated here: random weights, a tokenizer, prompts of random digits; nothing is downloaded. Responses
always have the maximum length; their reward is the fraction of even digits. Each trainer runs in a separate process
with a time limit. On a CPU both alternate step by step, so that both see the same load of the machine; on a GPU they
run one after the other, since memory is compared too. One JSON line per trainer and setting, and one that compares
them: seconds are medians over the steps after the warm-up, `faster` is the median ratio of paired steps (by wall clock,
and by CPU time, which is more reliable on a shared machine). The exit status is 1 if a trainer fails.

TRL runs with its fast options: vLLM in its process, Liger, checkpointing and micro-batches of --trl-rows rows on a GPU,
transformers' generate on a CPU (PYTHON: an environment with trl, if this one has none). This library runs with its
defaults. `peak_gib`: sampled peak of the device memory, of all processes; on a CPU, peak resident memory.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "trl", "vllm", "liger-kernel", "accelerate")


@dataclass(frozen=True)
class Work:
    """A step: prompts x samples responses of `new` tokens to prompts of `prompt` tokens; one optimizer update.

    With experts, the model is a Qwen3-MoE: 8 of `experts` experts of size `mlp` per token.
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    prompts: int
    samples: int
    prompt: int
    new: int
    experts: int = 0

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


SUITES = {
    "gpu": Work(896, 4864, 24, 14, 2, 151936, True, prompts=64, samples=8, prompt=128, new=512),  # Qwen2.5-0.5B
    "gpu-7b": Work(3584, 18944, 28, 28, 4, 152064, False, prompts=16, samples=8, prompt=128, new=128),  # Qwen2.5-7B
    "gpu-7b-long": Work(3584, 18944, 28, 28, 4, 152064, False, prompts=32, samples=8, prompt=512, new=512),
    "gpu-long": Work(1536, 8960, 28, 12, 2, 151936, True, prompts=4, samples=4, prompt=128, new=32768 - 128),
    # layers of Qwen3-30B-A3B: 8 of 48, with 64 of 128 experts; 3.2B parameters
    "gpu-moe": Work(2048, 768, 8, 32, 4, 151936, False, prompts=32, samples=8, prompt=128, new=256, experts=64),
    "cpu": Work(128, 256, 2, 4, 2, 554, False, prompts=16, samples=8, prompt=16, new=64),
    "cpu-moe": Work(128, 64, 2, 4, 2, 554, False, prompts=16, samples=8, prompt=16, new=64, experts=16),
}
LEARNING_RATE = 1e-6
#: options that the processes of the trainers need too
HANDED_ON = ("suite", "steps", "warm-up", "threads", "trl-rows")


def even_digits(response: str) -> float:
    """The reward: the fraction of even digits among the characters of a response."""
    return sum(map(response.count, "02468")) / max(1, len(response))


# ------------------------------------------------------------------------------------------- what both read: made once
def model_config(work: Work, end: int | None = None, fill: int | None = None) -> "PretrainedConfig":
    """The config of a model of this shape. end, fill: tokens that end and pad a response."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    experts = {"num_experts": work.experts, "num_experts_per_tok": 8, "moe_intermediate_size": work.mlp}
    return (Qwen3MoeConfig if work.experts else Qwen2Config)(
        **(experts | {"head_dim": 128} if work.experts else {}),
        hidden_size=work.hidden,
        intermediate_size=work.mlp,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        vocab_size=work.vocabulary,
        tie_word_embeddings=work.tied,
        max_position_embeddings=max(4096, work.prompt + work.new),
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=fill,
    )


def make_inputs(work: Work, folder: Path, rows: int) -> None:
    """A model with random weights and its tokenizer in folder/model, prompts in folder/prompts.jsonl."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, Qwen2Tokenizer

    # without merges a text is one token per byte, also ten digits; the other tokens appear only in responses
    end, fill = "<|endoftext|>", "<|fill|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(work.vocabulary - len(alphabet) - 2)]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *words, end, fill])}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token=end, pad_token=fill).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = model_config(work, vocabulary[end], vocabulary[fill])
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    model.save_pretrained(folder / "model")
    del model
    if gpu:
        torch.cuda.empty_cache()  # for the runs, which are other processes
    generator = random.Random(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(rows):
            prompt = "".join(generator.choices("0123456789", k=work.prompt))
            file.write(json.dumps({"prompt": prompt, "answer": "even"}) + "\n")


def task_overrides(work: Work, folder: Path) -> list[str]:
    """The settings of GRPO on the inputs of `make_inputs`: files, sizes, and responses of the maximum length."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'prompts.jsonl'}",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={work.prompt}",
        f"data.max_response_length={work.new}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.n={work.samples}",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]


def compute_score(data_source, solution_str: str, ground_truth, extra_info) -> float:
    """The reward function of this library's trainer, which loads this file."""
    return even_digits(solution_str)


# --------------------------------------------------------------------------------------------------- in the processes
class Reporter:
    """The child process: reports the seconds of each step, and waits for the command to continue."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # output of libraries goes to stderr
        self.start = self.used = self.peak = 0.0

    def watch_memory(self) -> None:
        """Sample the device's memory in use until the process ends."""
        import torch

        def sample() -> None:
            while True:
                free, total = torch.cuda.mem_get_info()
                self.peak = max(self.peak, (total - free) / 2**30)
                time.sleep(0.02)

        if torch.cuda.is_available():
            threading.Thread(target=sample, daemon=True).start()

    def step_done(self, **facts: float | None) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = self.peak
        else:
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = {"seconds": time.perf_counter() - self.start, "processor_seconds": time.process_time() - self.used}
        self.out.write(json.dumps({**seconds, "peak_gib": peak, **facts}) + "\n")
        self.out.flush()
        self.go()

    def go(self) -> None:
        """Wait for the command to start the next step."""
        sys.stdin.readline()
        self.start, self.used = time.perf_counter(), time.process_time()


def run_ours(work: Work, folder: Path, args: argparse.Namespace, reporter: Reporter) -> None:
    from verl.trainer.local_trainer import LocalPPOTrainer

    actor = "actor_rollout_ref.actor."
    overrides = [
        *task_overrides(work, folder),
        f"{actor}ppo_mini_batch_size={work.prompts}",
        f"{actor}optim.lr={LEARNING_RATE}",
        f"{actor}optim.weight_decay=0",
        f"{actor}use_kl_loss={str(args.betas[0] > 0).lower()}",
        f"{actor}kl_loss_coef={args.betas[0]}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={folder / f'run_{args.betas[0]}'}",
        "trainer.logger=[jsonl]",
        "trainer.save_at_end=false",  # a save is no step
        *args.set,
    ]
    trainer = LocalPPOTrainer(overrides=overrides)
    init_workers = trainer.init_workers

    def ready() -> None:
        init_workers()
        reporter.watch_memory()
        reporter.go()

    trainer.init_workers = ready
    trainer.on_step.append(
        lambda report: reporter.step_done(
            new_tokens=report.metrics["response_length/mean"],
            logprob_gap_mean=report.metrics["rollout/logprob_gap_mean"],
            logprob_gap_max=report.metrics["rollout/logprob_gap_max"],
            **{f"{name}_seconds": seconds for name, seconds in report.timings.items()},
        )
    )
    trainer.fit()


def trl_config(work: Work, folder: Path, args: argparse.Namespace):
    """TRL's settings for this work: its fast options, otherwise the same values."""
    import torch
    from trl import GRPOConfig

    gpu = torch.cuda.is_available()
    micro = args.trl_rows if gpu else work.rows
    on_gpu = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": work.prompt + work.new,
        "use_liger_kernel": True,
        "generation_kwargs": {"ignore_eos": True},
    }
    on_cpu = {"use_cpu": True, "generation_kwargs": {"min_new_tokens": work.new}}
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=work.rows // micro,
        num_generations=work.samples,
        max_completion_length=work.new,
        max_steps=args.steps + (len(args.betas) - 1) * (args.steps - args.warm_up),
        beta=args.betas[0],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        bf16=gpu,
        gradient_checkpointing=gpu,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(on_gpu if gpu else on_cpu),
    )


def run_trl(work: Work, folder: Path, args: argparse.Namespace, reporter: Reporter) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").open(encoding="utf-8")]

    class Report(TrainerCallback):
        """A step ends when its metrics are logged, after the update; then the next beta may start."""

        def on_train_begin(self, *_, **__) -> None:
            reporter.watch_memory()
            reporter.go()

        def on_log(self, _, state, __, logs: dict, **___) -> None:
            turn = max(0, state.global_step - args.warm_up) // (args.steps - args.warm_up)
            trainer.beta = args.betas[min(turn, len(args.betas) - 1)]
            if "reward" in logs:
                gap = "sampling/sampling_logp_difference/"
                reporter.step_done(
                    new_tokens=logs["completions/mean_length"],
                    logprob_gap_mean=logs.get(gap + "mean"),
                    logprob_gap_max=logs.get(gap + "max"),
                )

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [even_digits(text) for text in completions],
        args=trl_config(work, folder, args),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Report()],
    )
    trainer.train()


TRAINERS: dict[str, Callable[[Work, Path, argparse.Namespace, Reporter], None]] = {"ours": run_ours, "trl": run_trl}


# ------------------------------------------------------------------------------------------------------- the comparison
class Child:
    """A trainer in a separate process, killed at its time limit. betas: one after another. script: what it runs."""

    def __init__(self, name: str, folder: Path, betas: list[float], args: argparse.Namespace, script: str = __file__):
        python = args.trl_python if name == "trl" else sys.executable
        command = [python, str(Path(script).resolve()), "--child", name, "--folder", str(folder), *args.of_child]
        command.append(f"--betas={','.join(map(str, betas))}")
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        self.name, self.began, self.steps = name, time.perf_counter(), []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, encoding="utf-8"
        )
        self.timer = threading.Timer(args.limit, self.process.kill)
        self.timer.start()

    def step(self) -> bool:
        """Run one more step; False if the process has ended."""
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        line = self.process.stdout.readline()
        if line:
            self.steps.append(json.loads(line))
            if len(self.steps) == 1:
                self.first = time.perf_counter() - self.began
        return bool(line)

    def end(self, expected: int) -> list[str]:
        """End the process. Returns what went wrong if it has not run all steps."""
        over_time = not self.timer.is_alive()
        self.timer.cancel()
        summary = f"{self.name}: {len(self.steps)} of {expected} steps"
        if len(self.steps) < expected:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)  # its pipe has closed: its status follows
        status = self.process.poll()
        self.process.kill()
        self.process.wait()
        if len(self.steps) >= expected and expected > 0:
            return []
        reason = "was killed at --limit" if over_time else f"ended with status {status}"
        return [f"{summary}; its process {reason} (see its output above)"]

    def line(self, work: Work, steps: list[dict], args: argparse.Namespace, setting: dict) -> dict:
        reported = sorted(name for name, value in steps[-1].items() if value is not None) if steps else []
        medians = {name: float(f"{statistics.median(s[name] for s in steps):.5g}") for name in reported}
        return {
            "benchmark": "grpo_step",
            "trainer": self.name,
            **setting,
            **asdict(work),
            "steps": len(steps),
            "start_to_end_of_first_step_seconds": round(self.first, 2) if self.steps else None,
            **medians,
            "tokens_per_second": round(work.rows * (work.prompt + work.new) / medians["seconds"]) if steps else None,
            "seconds_of_steps": [round(step["seconds"], 4) for step in steps],
        }


def compare(
    work: Work, folder: Path, args: argparse.Namespace, theirs: list[str], failures: list[str]
) -> Iterator[dict]:
    """Run all trainers: yield the line of each at its end, and the comparison with this library. failures: extended."""
    measured: dict[float, list[dict]] = {}
    count = args.steps - args.warm_up
    for beta in args.betas:
        children = [Child(name, folder, [beta], args) for name in ("ours", *(theirs if args.alternate else ()))]
        for _ in range(args.steps):
            if not all([child.step() for child in children]):
                break
        found = {child.name: child.steps[args.warm_up :] for child in children}
        for child in children:
            failures += child.end(args.steps)
            yield child.line(work, found[child.name], args, {"beta": beta})
        measured[beta] = found.pop("ours")
        yield from (compared(name, measured[beta], steps, beta) for name, steps in found.items())
    for name in () if args.alternate else theirs:
        child = Child(name, folder, args.betas, args)
        for i, beta in enumerate(args.betas):
            for _ in range(args.steps if i == 0 else count):
                child.step()
            steps = child.steps[args.warm_up + i * count :]
            yield child.line(work, steps, args, {"beta": beta})
            yield compared(name, measured[beta], steps, beta)
        failures += child.end(args.steps + (len(args.betas) - 1) * count)


def compared(name: str, ours: list[dict], theirs: list[dict], beta: float) -> dict:
    """The line with the speedup of this library, from the available pairs of steps."""
    line = {"benchmark": "grpo_step_compared", "with": name, "beta": beta}
    for key, quantity in (("faster", "seconds"), ("faster_by_processor_time", "processor_seconds")):
        ratios = [b[quantity] / a[quantity] for a, b in zip(ours, theirs) if quantity in b]
        if ratios:
            line[key] = round(statistics.median(ratios), 2)
            line[f"{key}_least_and_most"] = [round(min(ratios), 2), round(max(ratios), 2)]
    if ours and theirs:
        line["memory_of_theirs"] = round(ours[-1]["peak_gib"] / theirs[-1]["peak_gib"], 3)
    return line


def versions(python: str) -> dict[str, str]:
    """Package versions of an interpreter."""
    code = "import json, importlib.metadata as m\n"
    code += "found = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
    code += f"print(json.dumps({{n: found[n] for n in {PACKAGES} if n in found}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True, encoding="utf-8").stdout)


def facts(args: argparse.Namespace) -> dict:
    """Metadata of a record."""
    import torch

    gpu = torch.cuda.is_available()
    words = [word if word != args.trl_python else "PYTHON" for word in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name() if gpu else f"cpu, {args.threads} threads",
        "python": platform.python_version(),
        "versions": {"ours": versions(sys.executable), "trl": versions(args.trl_python)},
        "verl": metadata.version("verl") if "verl" in {d.name for d in metadata.distributions()} else "this checkout",
        "command": " ".join(["python benchmarks/grpo_step.py", *words]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, help="default: gpu if there is one")
    parser.add_argument("--against", default="trl", help="trl, or an empty string for this library only")
    parser.add_argument("--betas", default="0.04,0", help="weights of the KL to the reference")
    parser.add_argument("--steps", type=int, help="steps per trainer, including the warm-up; default 5, 20 on a CPU")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--alternate", action=argparse.BooleanOptionalAction, help="alternate steps; default: on a CPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--limit", type=float, default=600, help="time limit of one process in seconds")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter with trl")
    parser.add_argument("--trl-rows", type=int, default=16, help="rows of TRL's micro-batches on a GPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of this library")
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.betas = [float(beta) for beta in args.betas.split(",")]
    return args


def child(args: argparse.Namespace) -> None:
    reporter = Reporter()
    import torch

    torch.set_num_threads(args.threads)
    TRAINERS[args.child](SUITES[args.suite], args.folder, args, reporter)


def main() -> None:
    args = parse()
    if args.child:
        child(args)
        return
    import torch

    args.suite = args.suite or ("gpu" if torch.cuda.is_available() else "cpu")
    args.alternate = args.suite == "cpu" if args.alternate is None else args.alternate
    args.steps = args.steps or (20 if args.suite == "cpu" else 5)
    if args.steps <= args.warm_up:
        sys.exit(f"--steps={args.steps}: expected more than --warm-up={args.warm_up}, whose steps are not measured")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    work, record = SUITES[args.suite], facts(args) | {"lines": []}
    theirs = list(filter(None, args.against.split(",")))
    args.of_child = [f"--{name}={vars(args)[name.replace('-', '_')]}" for name in HANDED_ON]
    args.of_child += [f"--set={setting}" for setting in args.set]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        make_inputs(work, Path(name), work.prompts * args.steps * len(args.betas))
        for line in compare(work, Path(name), args, theirs, failures):
            print(json.dumps(line), flush=True)
            record["lines"].append(line)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
