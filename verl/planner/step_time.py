"""Seconds of a step: FLOPs, bytes and collectives over the rates of a device.

Matmuls and attention are compute-bound, element-wise kernels and decoding are bandwidth-bound. Collectives of FSDP2
overlap with the computation on a GPU. The stages of a step follow HybridFlow (Sheng et al. 2024, arXiv 2409.19256):
generation, preparation (log-probs, values, scores) and training.
"""

import math
from dataclasses import dataclass, replace

from verl.planner.devices import GIB, Device
from verl.planner.memory import (
    PREFILL_TOKENS,
    kv_cache_bytes,
    rollout_rows,
    rollout_weights,
    update_choice,
)
from verl.planner.workload import Job, Layout, Role, Tokens, rows_per_rank, tokens_of

#: seconds of vLLM's and SGLang's host per row and decoding step (benchmarks/results/rollout_h200.jsonl: 6.5 ms for 256
#: rows, 25 ms for 1024)
SERVER_ROW_SECONDS = 24e-6
#: bytes/s at which these engines map and clear their KV cache when they wake up (vllm_h200.json, engines_h200.json:
#: generation takes 0.2 to 0.3 s longer than its steps)
WAKE_RATE = 200 * GIB
#: bytes read and written by the optimizer per trained parameter: AdamW, the gradient norm and clipping, in float32
ADAM_BYTES = 44
#: FLOPs of the backward pass of attention, as a multiple of the forward pass at the same rate
ATTENTION_BACKWARD = 3.1
#: bytes/s between a device and its host
HOST_LINK = 40e9
#: layers with adapters have the forward pass of transformers, not the fused one (benchmarks/results/planner_cpu.json)
ADAPTER_FACTOR = 1.6
#: seconds of a pass of a mixture of experts on a GPU, relative to dense layers with as many FLOPs: permutations and
#: grouped matmuls of small experts (benchmarks/results/engines_h200.json); of layers that are not fused
#: ("layers_of_transformers"), and of Megatron
EXPERTS_FACTOR, PLAIN_EXPERTS_FACTOR, MEGATRON_EXPERTS_FACTOR = 1.1, 1.9, 1.25
#: seconds of a layer with experts in a decoding step of the engine native on a GPU, beside those of a dense layer
EXPERTS_DECODE_SECONDS = 0.18e-3
#: bytes that the layers of a vision tower, which are those of transformers, read and write in a forward pass of a patch
#: under autocast, per element of the hidden size and of the MLP size: counted for Qwen2.5-VL (tests/planner/
#: test_vision.py); a backward pass has twice as many
TOWER_BYTES = (240, 10)
#: bytes/s at which the images of a micro-batch are copied to one tensor and to the device
PIXEL_RATE = 1.6e9
#: seconds of the host to launch a layer in a training pass on a GPU, forward or backward, relative to a forward pass
#: without gradients (of a profile at 0.5B)
TRAINING_LAUNCHES = 3.0
#: a matmul in float32 on a GPU, relative to 16 bits
FLOAT32_FACTOR = 1 / 12


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward pass on one rank by cause, before overlap."""

    matmul: float
    attention: float
    elementwise: float
    fixed: float
    images: float = 0.0

    def seconds(self, device: Device, training: bool = False) -> float:
        """On a GPU, kernels are launched while others run; on a CPU, all of it adds up. images: seconds of the host
        before the first kernel."""
        busy = self.matmul + self.attention + self.elementwise
        launches = self.fixed * (TRAINING_LAUNCHES if training else 1)
        return (max(busy, launches) if device.kind == "cuda" else busy + self.fixed) * device.forward + self.images

    def backward_seconds(self, device: Device, adapters: bool) -> float:
        """The backward pass: gradients of inputs and, without adapters, of weights."""
        busy = (1 if adapters else 2) * self.matmul + ATTENTION_BACKWARD * self.attention + 2 * self.elementwise
        launches = self.fixed * TRAINING_LAUNCHES
        return (max(busy, launches) if device.kind == "cuda" else busy + 2 * self.fixed) * device.backward


def matmul_rate(role: Role, device: Device) -> float:
    """FLOP/s of the matmuls of a role."""
    return device.matmul * (FLOAT32_FACTOR if device.kind == "cuda" and role.compute_bytes == 4 else 1)


def forward_pass(role: Role, tokens: Tokens, job: Job, device: Device, micro_batches: float) -> Pass:
    """One forward pass of one rank over `tokens`, in this number of micro-batches."""
    s, c, layout = role.shape, role.compute_bytes, role.layout
    ranks = layout.tensor * layout.pipeline
    head = 0 if role.value_head else s.embedding
    matmul = 2 * (tokens.total * s.matrices() + tokens.response * head) / ranks
    if role.lora_rank:
        matmul += 2 * tokens.total * s.lora_parameters(role.lora_rank) / ranks  # those of experts are merged
    # a token attends to those before it
    keys = tokens.response * (job.prompt_tokens + job.response_tokens / 2) + tokens.prompt * job.prompt_tokens / 2
    attention = 4 * s.q_size * s.layers * keys / ranks
    dispatched = 4 * s.active_experts * s.hidden * s.sparse_layers / s.layers  # to the experts and back
    layer = (24 * s.hidden + 6 * s.mlp_width + 4 * (s.q_size + 2 * s.kv_size) + 2 * dispatched) * c / 2
    moved = tokens.total * s.layers * layer / ranks + tokens.response * (0 if role.value_head else s.vocabulary * c)
    rate = matmul_rate(role, device)
    text = Pass(
        matmul / rate,
        attention / (device.attention_rate(job.length, s.head_dim) * rate / device.matmul),
        moved / device.bandwidth,
        micro_batches * s.layers / layout.pipeline * device.layer_seconds,
    )
    return text if s.vision is None else _with_images(text, role, tokens, job, device)


def _with_images(text: Pass, role: Role, tokens: Tokens, job: Job, device: Device) -> Pass:
    """A forward pass with its images: every prompt token is one of an image."""
    vision, rate, ranks = role.shape.vision, matmul_rate(role, device), role.layout.tensor * role.layout.pipeline
    patches = tokens.prompt * vision.patches
    length = job.prompt_tokens * vision.patches  # all patches of an image attend to each other
    attention = 4 * vision.hidden * vision.layers * patches * length
    moved = patches * vision.layers * (TOWER_BYTES[0] * vision.hidden + TOWER_BYTES[1] * vision.mlp)
    return Pass(
        text.matmul + 2 * patches * vision.tower / ranks / rate,
        text.attention + attention / ranks / (device.attention_rate(length, 64) * rate / device.matmul),
        text.elementwise + moved / ranks / device.bandwidth,
        text.fixed,
        patches * vision.values * 4 / PIXEL_RATE,
    )


def collective_seconds(size: float, devices: int, device: Device) -> float:
    """Seconds to gather or reduce-scatter `size` bytes over neighboring devices."""
    if devices == 1:
        return 0.0
    return size * (devices - 1) / devices / device.link_of(devices) + device.latency * math.log2(devices)


def all_reduce_seconds(size: float, devices: int, device: Device) -> float:
    """Seconds to add up `size` bytes over neighboring devices: of a reduce-scatter and a gather, in one kernel."""
    if devices == 1:
        return 0.0
    return 2 * collective_seconds(size, devices, device) - device.latency * math.log2(devices)


def activations_exchange(role: Role, tokens: float, device: Device) -> float:
    """Seconds of the collectives of tensor and sequence parallelism in one forward pass."""
    s, c, layout = role.shape, role.compute_bytes, role.layout
    size = tokens * s.hidden * c
    layers = s.layers / layout.pipeline
    seconds = 0.0
    if layout.tensor > 1:  # two all-reduces per layer
        seconds += layers * 4 * collective_seconds(size, layout.tensor, device)
    if layout.expert > 1:  # two all-to-alls per layer with experts, of the tokens of each expert and of its outputs
        count = 2 * s.sparse_layers / layout.pipeline
        seconds += count * collective_seconds(size * s.active_experts, layout.expert, device)
    if layout.sequence > 1:  # two all-to-alls per layer, of queries, keys, values and outputs
        seconds += layers * 4 * collective_seconds(size / layout.sequence, layout.sequence, device)
    return seconds


def _overlapped(compute: float, exchange: float, device: Device) -> float:
    return max(compute, exchange) if device.kind == "cuda" else compute + exchange


def _bubble(role: Role, micro_batches: float) -> float:
    """What the idle time of pipeline parallelism multiplies the computation with."""
    return 1 + (role.layout.pipeline - 1) / max(1.0, micro_batches)


def _is_fsdp(job: Job, role: Role) -> bool:
    return not job.model_parallel and role.layout.devices > 1


def _engine_factor(job: Job, role: Role, device: Device) -> float:
    """What FSDP2 over several devices, layers with adapters and experts multiply the computation with."""
    factor = device.sharded if _is_fsdp(job, role) else 1.0
    if role.shape.experts and device.kind == "cuda":
        fused = MEGATRON_EXPERTS_FACTOR if job.model_parallel else EXPERTS_FACTOR
        factor *= fused if role.fuses_experts else PLAIN_EXPERTS_FACTOR
    return factor * (ADAPTER_FACTOR if role.lora_rank else 1.0)


def _hook_seconds(job: Job, role: Role, device: Device, passes: float) -> float:
    """Seconds of the hooks of FSDP2 in so many passes over the model."""
    return passes * role.shape.layers * device.sharded_layer_seconds if _is_fsdp(job, role) else 0.0


def infer_seconds(job: Job, role: Role, device: Device) -> float:
    """Seconds of a pass without gradients over the batch."""
    tokens = tokens_of(job, role, rows_per_rank(job, role.layout.data), device.kind == "cuda")
    size = max(role.infer_tokens or 16384, job.length)
    count = max(1.0, math.ceil(tokens.total / size))
    compute = forward_pass(role, tokens, job, device, count).seconds(device) * _bubble(role, count)
    compute = compute * _engine_factor(job, role, device) + _hook_seconds(job, role, device, count)
    exchange = _gather_seconds(job, role, device) * count
    return _overlapped(compute, exchange, device) + activations_exchange(role, tokens.total, device)


def _gather_seconds(job: Job, role: Role, device: Device) -> float:
    """Seconds to gather all weights once with FSDP2."""
    layout = role.layout
    if job.model_parallel or layout.devices == 1:
        return 0.0
    size = role.parameters * role.compute_bytes / layout.tensor
    return collective_seconds(size, layout.shards // layout.tensor, device) + role.shape.layers * device.latency


def update_seconds(job: Job, role: Role, device: Device, taken: float = 0.0) -> float:
    """Seconds of all updates of a step. taken: bytes of everything else on the device."""
    tokens = tokens_of(job, role, rows_per_rank(job, role.layout.data) / role.updates, device.kind == "cuda")
    size, checkpoints = update_choice(job, role, device, taken)
    count = max(1.0, math.ceil(tokens.total / size))
    passed = forward_pass(role, tokens, job, device, count)
    compute = passed.seconds(device, training=True) * (2 if checkpoints else 1)
    compute += passed.backward_seconds(device, role.lora_rank > 0)
    passes = 2 * (1.5 if checkpoints else 1)
    compute = compute * _engine_factor(job, role, device) + _hook_seconds(job, role, device, count * passes)
    gather = _gather_seconds(job, role, device)
    reduce = _reduce_seconds(job, role, device)
    exchange = count * (2 * gather + reduce) if not job.model_parallel else 0.0
    busy = _overlapped(compute * _bubble(role, count), exchange, device)
    busy += passes * activations_exchange(role, tokens.total, device)
    once = reduce if job.model_parallel else 0.0
    once += role.trained / role.layout.shards * ADAM_BYTES / device.bandwidth
    if role.optimizer_offload or role.param_offload:
        once += 2 * role.weight_bytes * 3 * role.parameters / role.layout.shards / HOST_LINK
    once += device.update_seconds
    return role.updates * role.epochs * (busy + once)


def _reduce_seconds(job: Job, role: Role, device: Device) -> float:
    """Seconds to reduce the gradients over the data-parallel ranks; with Megatron, also to gather the new weights."""
    layout = role.layout
    if layout.devices == 1:
        return 0.0
    if not job.model_parallel:
        return collective_seconds(4 * role.trained / layout.tensor, layout.shards // layout.tensor, device)
    if layout.data == 1:
        return 0.0
    # all tensor- and pipeline-parallel ranks of a node share its links
    size = (4 + role.compute_bytes) * role.megatron_share
    within = layout.devices <= device.per_node
    link = device.link if within else min(device.link, device.node_link / min(device.per_node, layout.tensor))
    return size * (layout.data - 1) / layout.data / link


def generation_seconds(job: Job, role: Role, device: Device, taken: float = 0.0) -> float:
    """Seconds to generate the responses of a step. taken: bytes of everything else on the device."""
    rows, tensor = rollout_rows(job, role), job.rollout_tensor
    alive = min(rows, job.max_rows, _concurrent_rows(job, role, device, taken))
    groups = -(-rows // job.samples)
    s, c = role.shape, role.compute_bytes
    prompts = Tokens(groups * job.prompt_tokens, 0.0)
    engine_role = replace(role, layout=Layout(tensor, tensor), lora_rank=0)  # as the rollout engine computes it
    count = max(1.0, prompts.total / PREFILL_TOKENS)
    prefill = forward_pass(engine_role, prompts, job, device, count).seconds(device)
    prefill += activations_exchange(engine_role, prompts.total, device)
    computed, read = s.matrices() + s.embedding, s.matrices(s.experts_hit(alive)) + s.embedding
    rate = matmul_rate(role, device)
    matmul = max(2 * alive * computed / tensor / rate, read * c / tensor / device.bandwidth)
    context = job.prompt_tokens + job.response_tokens / 2
    cache = alive * context * s.kv_bytes(c) / tensor / device.bandwidth
    sampling = alive * s.vocabulary * 2 * (c + 4) / device.bandwidth
    layer_seconds = device.layer_seconds if job.eager else device.decode_seconds
    step = (matmul + cache + sampling + s.layers * layer_seconds) * device.decode
    if s.experts and device.kind == "cuda":
        step += s.sparse_layers * EXPERTS_DECODE_SECONDS
    if tensor > 1:
        step += 2 * s.layers * all_reduce_seconds(alive * s.hidden * c, tensor, device)
    wake = 0.0
    if job.traits.is_external:
        # the next step is scheduled while one runs, unless several ranks must take the same steps
        host = alive * SERVER_ROW_SECONDS
        step = max(step, host) if tensor == 1 else step + host
        if device.kind == "cuda" and job.sleeps and role.name == "actor":
            wake = max(0.0, job.memory_share * device.memory - rollout_weights(job, role)) / WAKE_RATE
    return job.generations * (prefill + job.response_tokens * step * rows / alive) + wake


def _concurrent_rows(job: Job, role: Role, device: Device, taken: float) -> int:
    """Sequences whose KV cache fits."""
    weights = rollout_weights(job, role)
    if job.traits.own_memory_share:
        free = job.memory_share * device.memory - weights
    elif device.kind == "cpu":
        return job.max_rows
    else:
        free = min(device.memory - device.reserved - taken - weights, job.memory_share * device.memory)
    return max(1, int(free / (kv_cache_bytes(job, role, job.samples) / job.samples)))


def push_seconds(job: Job, role: Role, device: Device, generator: Role) -> float:
    """Seconds of a weight push from the actor to the devices that generate."""
    size = role.parameters * role.compute_bytes
    if generator is not role:
        joined = role.layout.devices + generator.layout.devices
        return device.push_seconds + size / device.link_of(joined)
    if role.layout.devices == 1 and job.traits.shares_weights:
        return size * 3 / device.bandwidth if rollout_weights(job, role) else 0.0
    if job.model_parallel:
        # all-gather inside a micro data-parallel group (HybridFlow, table 2)
        t, p, tg = role.layout.tensor, role.layout.pipeline, job.rollout_tensor
        share = max(0.0, (t * p - tg) / (tg * t * p))
        return device.push_seconds + share * size / device.link_of(max(1, t * p // tg))
    return device.push_seconds + collective_seconds(size, role.layout.shards, device)
