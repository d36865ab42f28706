"""Rates of this host, for benchmarks/planner.py: matmuls, memory, collectives, and the engines on a small model.

A pass over few tokens gives the fixed costs of a layer, passes over many give the factors `forward`, `backward` and
`decode`, which correct the analytic model. Figures are medians; those of collectives are minima.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import EngineSpec, MicroBatching, Objective
from verl.engines.torch_engine import TorchEngine
from verl.modeling import attention
from verl.planner import step_time
from verl.planner.devices import Device, host_profile
from verl.planner.shapes import ModelShape
from verl.planner.workload import Job, Role
from verl.protocol import DataProto
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import Request, SamplingParams

#: of the model and the batch that are measured
CPU_PROBE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2048}
GPU_PROBE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000}
CPU_ROWS, GPU_ROWS = 32, 256
PROMPT, RESPONSE = 32, 64
REPEATS = 3


def calibrate(device: torch.device, log: Callable[[str], None] = lambda line: None) -> Device:
    """Measure the profile of this host.

    Args:
        log: receives a line per measurement.
    """
    profile = host_profile(device)
    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    matmul = 2 * size**3 / _median(lambda: torch.mm(a, a), device)
    block = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    other = torch.empty_like(block)
    bandwidth = 2 * block.nbytes / _median(lambda: other.copy_(block), device)
    profile = replace(profile, matmul=matmul, bandwidth=bandwidth, source="calibrated on this host")
    log(f"matmul {matmul / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s")
    if device.type == "cpu":
        profile = replace(profile, attention=matmul / 2, **_collective_rates())
        log(f"collectives {profile.link / 1e9:.2f} GB/s, {profile.latency * 1e6:.0f} us")
    profile = with_engine_rates(profile, device)
    log(f"factors: forward {profile.forward:.2f}, backward {profile.backward:.2f}, decode {profile.decode:.2f}")
    return profile


def _median(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median seconds of a call, after one that is not counted."""
    # one thread of a CPU: its processor time, which other programs do not change
    single = device.type == "cpu" and torch.get_num_threads() == 1
    seconds, clock = [], time.process_time if single else time.perf_counter
    for _ in range(repeats + 1):
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds[1:])


def _collective_rates() -> dict[str, float]:
    """Rate and latency of a gather between two processes of this host, in processor time: it is mostly copying."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        (latency, seconds), _ = pool.map(_gather_seconds, (0, 1), [f"file://{folder}/store"] * 2)
    rate = 2**22 * 4 / max(1e-9, seconds - latency)  # each rank receives the half of the other one
    return {"link": rate, "node_link": rate, "latency": latency}


def _gather_seconds(rank: int, store: str) -> list[float]:
    """Seconds of a gather of few and of many numbers, in one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    least = []
    for size in (2, 2**22):
        x, out, seconds = torch.ones(size), [torch.empty(size), torch.empty(size)], []
        for _ in range(15):
            start = time.process_time()
            dist.all_gather(out, x)
            seconds.append(time.process_time() - start)
        least.append(min(seconds))
    dist.barrier()
    dist.destroy_process_group()
    return least


# ---- the engines ----------------------------------------------------------------------------------------------------


def probe_job(shape: ModelShape, rows: int, prompt: int, response: int, compute_bytes: int) -> Job:
    """The job that is measured: one process, one update."""
    role = Role("actor", shape, trains=True, compute_bytes=compute_bytes)
    return Job((role,), rows, 1, prompt, response, max_rows=rows)


def _columns(rows: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (rows, prompt + response), generator=generator).tolist()
    columns = build_sequences([row[:prompt] for row in ids], [row[prompt:] for row in ids], pad_token_id=0)
    columns["advantages"] = torch.randn(columns["responses"].shape, generator=generator)
    return DataProto.from_dict(columns)


def _requests(rows: int, prompt: int, response: int, vocabulary: int) -> Sequence[Request]:
    generator = torch.Generator().manual_seed(2)
    params = SamplingParams(response, (), seed=0, ignore_eos=True)
    prompts = torch.randint(vocabulary, (rows, prompt), generator=generator).tolist()
    return [Request(ids, params, i) for i, ids in enumerate(prompts)]


def with_engine_rates(profile: Device, device: torch.device) -> Device:
    """The profile with the rates of the training engine and of the engine native."""
    on_gpu = device.type == "cuda"
    sizes, rows = (GPU_PROBE, GPU_ROWS) if on_gpu else (CPU_PROBE, CPU_ROWS)
    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False, **sizes)
    shape, vocabulary = ModelShape.from_config(config.to_dict(), "probe"), sizes["vocab_size"]
    with device:
        module = Qwen2ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    section = schema.ModelConfig(path="probe", enable_gradient_checkpointing=False)
    engine = TorchEngine(EngineSpec("causal_lm", section, optimizer=schema.OptimConfig(), device=device), module=module)
    micro, compute = MicroBatching(tokens="auto"), 2 if on_gpu else 4
    batch = _columns(rows, PROMPT, RESPONSE, vocabulary)
    tiny = _columns(1, 4, 4, vocabulary)
    infer = _median(lambda: engine.infer(batch, ("log_probs",), micro), device)
    fixed = _median(lambda: engine.infer(tiny, ("log_probs",), micro), device)
    objective = Objective(
        lambda outputs, columns: (-(outputs["log_probs"] * columns["advantages"]).mean(), {}), ("log_probs",)
    )
    update = _median(lambda: engine.train_batch(batch, objective, micro), device)
    rollout = NativeRollout(module, dtype=torch.bfloat16 if on_gpu else None)
    slow = _median(lambda: rollout.generate(_requests(1, 4, RESPONSE, vocabulary)), device)
    generated = _median(lambda: rollout.generate(_requests(rows, PROMPT, RESPONSE, vocabulary)), device)
    profile = replace(
        profile,
        layer_seconds=fixed / shape.layers,
        decode_seconds=slow / RESPONSE / shape.layers,
    )
    return _corrected(profile, probe_job(shape, rows, PROMPT, RESPONSE, compute), infer, update, generated)


def _corrected(profile: Device, job: Job, infer: float, update: float, generated: float) -> Device:
    """The profile whose predictions for `job` are the measured seconds of a forward pass, an update and generation."""
    role = job.roles[0]
    profile = replace(profile, forward=infer / step_time.infer_seconds(job, role, profile))
    forward = step_time.update_seconds(job, role, replace(profile, backward=0.0))
    backward = step_time.update_seconds(job, role, replace(profile, backward=1.0)) - forward
    profile = replace(profile, backward=max(0.1, (update - forward) / backward))
    prefill = step_time.generation_seconds(job, role, replace(profile, decode=0.0))
    decode = step_time.generation_seconds(job, role, profile) - prefill
    return replace(profile, decode=max(0.1, (generated - prefill) / decode))
