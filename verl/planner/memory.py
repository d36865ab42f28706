"""Bytes per device in each phase of a step, as the engines of this project allocate them.

A phase has the weights and optimizer states of all roles on the device, and the working memory of the role that runs.
Activations are the tensors that the fused layers save (`modeling/layers.py`); the choice of micro-batches and
checkpointing is that of `engines/token_budget.py`. Of a vision-language model, every prompt token counts as a token of
an image. Not modelled: fragmentation of the allocator, and tools.
"""

from collections.abc import Mapping, Sequence

from verl.engines.quantization import BYTES as QUANTIZED_BYTES
from verl.engines.token_budget import (
    CACHED_TOKENS,
    MAX_AUTO_TOKENS,
    WORKING_LAYERS,
    ActivationBytes,
    choose_micro_batching,
    token_budget,
    tower_activations,
)
from verl.modeling.log_probs import CHUNK_ELEMENTS, KEPT_BYTES, KEPT_SHARE
from verl.planner.devices import Device
from verl.planner.workload import Job, Role, rows_per_rank, tokens_of

#: tokens of a prefill of the engines
PREFILL_TOKENS = 8192

#: bytes of the weight and the two indices of a token and one of its experts
_PAIR_BYTES = 20

Items = dict[str, float]
"""What -> bytes per device."""

#: name of the phase -> role that runs, in the order of a step
PHASES = {
    "generation": "actor",
    "old log-probs": "actor",
    "reference log-probs": "ref",
    "values": "critic",
    "reward model": "reward",
    "teacher log-probs": "teacher",
    "cost model": "cost",
    "update of the critic": "critic",
    "update of the actor": "actor",
    "weight push": "actor",
}


def activation_bytes(role: Role, sequence_parallel: bool = False) -> ActivationBytes:
    """Bytes per token that the layers keep for the backward pass, without and with checkpointing.

    Args:
        role: the role, with its layout.
        sequence_parallel: tensor-parallel ranks also split what is between the matrices.
    """
    s, c = role.shape, role.compute_bytes
    stream = c if role.layout.devices > 1 else max(c, role.weight_bytes)  # FSDP2 casts the embedding
    norms = 2 * (stream + c) * s.hidden + 2 * stream
    attention = c * (s.q_size + 2 * s.kv_size) + c * s.q_size + 4 * s.heads
    attention += c * (s.q_size + 2 * s.kv_size) * s.head_norms
    mlp = c * 3 * s.mlp_width + _expert_bytes(role)
    adapters = c * (2 * s.hidden + s.q_size + s.mlp_width) if role.lora_rank else 0
    layer = (attention + mlp + adapters) / role.layout.tensor
    layer += norms / (role.layout.tensor if sequence_parallel else 1)
    if sequence_parallel and role.fuses_experts and role.layout.expert_tensor_size > 1:  # tokens are gathered
        layer += c * s.hidden * s.sparse_layers / s.layers
    plain = s.layers / role.layout.pipeline * layer
    inputs = s.layers / role.layout.pipeline * s.hidden * (stream + (c if stream > c else 0))
    return ActivationBytes(plain, inputs / (role.layout.tensor if sequence_parallel else 1) + layer)


def _expert_bytes(role: Role) -> float:
    """Bytes per token and layer that experts keep beyond those of an MLP of their total width; may be negative."""
    s, c = role.shape, role.compute_bytes
    pairs = s.active_experts * s.sparse_layers / s.layers
    if not role.fuses_experts:  # inputs and outputs of every expert of a token
        return pairs * c * 2 * s.hidden
    received = c * s.hidden if role.spreads_experts or role.layout.expert > 1 else 0  # the tokens of other ranks
    # activations are computed again (`modeling/fused_experts.py`)
    return pairs * (_PAIR_BYTES - c * s.expert_mlp + received)


def tower_bytes(role: Role) -> ActivationBytes:
    """Bytes per image token that the vision tower keeps for the backward pass, without and with checkpointing."""
    vision = role.shape.vision
    if vision is None or role.lora_rank or role.freezes_tower or not role.trains:
        return ActivationBytes(0.0, 0.0)
    sizes = vision.layers, vision.hidden, vision.mlp, vision.patches
    return tower_activations(*sizes, role.compute_bytes, max(role.compute_bytes, role.weight_bytes))


def weights(job: Job, role: Role) -> float:
    """Bytes of the stored weights of a role on one device."""
    if job.model_parallel:
        return role.compute_bytes * role.megatron_share
    linear = role.shape.matrices(0) if role.is_quantized else 0
    stored = linear * QUANTIZED_BYTES + (role.parameters - linear) * role.weight_bytes
    return (stored + (role.trained_bytes * role.trained if role.lora_rank else 0)) / role.layout.shards


def optimizer_bytes(job: Job, role: Role) -> float:
    """Bytes of Adam's moments on one device; with Megatron, also of the float32 copy of 16-bit weights."""
    layout = role.layout
    if job.model_parallel:
        size = 8 if role.compute_bytes == 4 else 12
        return size * (role.trained / layout.devices if role.sharded_optimizer else role.trains * role.megatron_share)
    return 2 * (1 if role.has_8bit_optimizer else role.trained_bytes) * role.trained / layout.shards


def gradients(job: Job, role: Role) -> float:
    """Bytes of the gradients on one device."""
    if job.model_parallel:
        return 4 * role.megatron_share if role.trains else 0.0
    return role.trained_bytes * role.trained / role.layout.shards


def gathered(job: Job, role: Role, training: bool) -> float:
    """Bytes of casts of the weights or, with FSDP2, of what is gathered at a time: two layers, and the embedding with
    the output layer. In training, the gradients of these, reduced in float32, are there too; that of the embedding
    comes last, when the activations are freed."""
    shape, c, layout = role.shape, role.compute_bytes, role.layout
    if job.model_parallel:
        return 0.0
    narrow = c != role.weight_bytes
    if layout.devices == 1:
        return c * role.parameters if narrow else 0.0
    tower = shape.vision.tower if shape.vision is not None else 0  # also gathered layer by layer
    root = role.parameters - shape.layers * shape.layer_parameters - tower
    layers = 2 * shape.layer_parameters / layout.tensor
    if training and not role.lora_rank:
        head = 0 if shape.tied or role.value_head else shape.embedding
        return layers * (2 * c + (4 if narrow else 0)) + (root + head) * c
    return (layers + root) * c


def _response_share(job: Job, role: Role, device: Device) -> float:
    """Response tokens of a micro-batch, as a share of its tokens."""
    tokens = tokens_of(job, role, rows_per_rank(job, role.layout.data), device.kind == "cuda")
    return tokens.response / tokens.total


def _own_vocabulary(job: Job, role: Role) -> int:
    """Entries of the vocabulary whose logits a rank computes."""
    return role.shape.vocabulary // (role.layout.tensor if job.model_parallel else 1)


def logits(job: Job, role: Role, tokens: float, device: Device, training: bool) -> float:
    """Bytes of the logits of a micro-batch: those that are kept for the backward pass, and one chunk."""
    if role.value_head:
        return 0.0
    c, on_gpu = role.compute_bytes, device.kind == "cuda"
    vocabulary = _own_vocabulary(job, role)
    rows = tokens * _response_share(job, role, device)
    total = rows * vocabulary * c
    chunk_rows = max(1, CHUNK_ELEMENTS[device.kind] // vocabulary)
    chunks = max(1, -(-rows // chunk_rows))
    chunk = (rows / chunks if on_gpu else min(rows, chunk_rows)) * vocabulary * c
    if not training:
        return chunk
    fits = total <= (KEPT_SHARE * device.memory if on_gpu else KEPT_BYTES)
    return total + chunk if fits or chunks == 1 else 2 * chunk


def update_choice(job: Job, role: Role, device: Device, taken: float) -> tuple[int, bool]:
    """(tokens of a micro-batch, whether activations are recomputed) of an update. taken: bytes that are not free."""
    longest = -(-job.length // role.layout.sequence)
    if device.kind == "cpu":
        tokens = role.update_tokens if role.update_tokens is not None else max(CACHED_TOKENS, longest)
        return tokens, role.checkpointing is True
    used, vocabulary = _activation_bytes(job, role), _own_vocabulary(job, role)
    layers, pipeline = role.shape.layers, role.layout.pipeline
    layer = WORKING_LAYERS * used.plain * pipeline / layers
    free = device.memory - device.reserved - taken
    free -= min(MAX_AUTO_TOKENS * vocabulary * role.compute_bytes, KEPT_SHARE * device.memory) + 3 * min(
        CHUNK_ELEMENTS["cuda"], MAX_AUTO_TOKENS * vocabulary
    ) * role.compute_bytes * (not role.value_head)
    if job.model_parallel:  # which decides for its largest micro-batch (`engines/megatron/memory.py`)
        size = tokens_of(job, role, rows_per_rank(job, role.layout.data) / role.updates, on_gpu=True).total
        tokens = max(longest, role.update_tokens or MAX_AUTO_TOKENS)
        kept = used.plain * min(pipeline, max(1, size / tokens)) + layer
        fits = token_budget(ActivationBytes(kept, kept), int(free)).plain >= max(longest, min(tokens, size))
        return tokens, role.checkpointing is True or (role.checkpointing == "auto" and not fits)
    planned = used.plus(ActivationBytes(layer, layer)).plus(tower_bytes(role))
    budget = token_budget(planned, int(free))
    return choose_micro_batching(role.update_tokens, longest, budget, role.checkpointing)


def _activation_bytes(job: Job, role: Role) -> ActivationBytes:
    return activation_bytes(role, job.model_parallel and role.sequence_parallel)


def update_items(job: Job, role: Role, device: Device, taken: float) -> Items:
    """Bytes that an update needs beside weights and optimizer state. taken: bytes of everything else on the device."""
    items = {"gathered weights": gathered(job, role, training=True)}
    if not job.model_parallel:
        items["gradients"] = gradients(job, role)
    tokens, checkpoints = update_choice(job, role, device, taken + sum(items.values()))
    largest = tokens_of(job, role, rows_per_rank(job, role.layout.data) / role.updates, device.kind == "cuda").total
    tokens = min(tokens, max(largest, job.length / role.layout.sequence))
    used = _activation_bytes(job, role)
    in_flight = min(role.layout.pipeline, max(1.0, largest / tokens))
    layer = used.plain * role.layout.pipeline / role.shape.layers
    items["activations"] = tokens * in_flight * (used.checkpointed if checkpoints else used.plain)
    # input and output of the last norm, and the states of responses
    head_states = role.shape.hidden * (max(role.compute_bytes, role.weight_bytes) + 2 * role.compute_bytes)
    items["activations"] += tokens * head_states
    images, tower = tokens * (1 - _response_share(job, role, device)), tower_bytes(role)
    items["activations"] += images * (tower.checkpointed if checkpoints else tower.plain)
    # the gradients of one layer's activations come after those of the logits are freed
    items["logits, working memory"] = max(logits(job, role, tokens, device, training=True), tokens * layer)
    if job.model_parallel or largest > tokens:  # Megatron has gradient buffers all the time
        return items
    # one backward pass: its begin, with the gradient of the output layer, or its end, with all gradients and one layer
    head = 0.0 if role.value_head or role.lora_rank else role.shape.embedding * role.weight_bytes / role.layout.shards
    begin = items | {"gradients": min(items["gradients"], head)}
    end = items | {"activations": tokens * layer, "logits, working memory": tokens * layer}
    return max(begin, end, key=total)


def infer_items(job: Job, role: Role, device: Device) -> Items:
    """Working memory of a pass without gradients."""
    longest = -(-job.length // role.layout.sequence)
    tokens = max(role.infer_tokens or MAX_AUTO_TOKENS, longest)
    share = tokens_of(job, role, rows_per_rank(job, role.layout.data), device.kind == "cuda").total
    tokens = min(tokens, max(share, longest))
    s, c = role.shape, role.compute_bytes
    layer = tokens * (2 * max(c, role.weight_bytes) * s.hidden + c * 3 * s.mlp_width / role.layout.tensor)
    return {
        "gathered weights": gathered(job, role, training=False),
        "activations": layer,
        "logits, working memory": logits(job, role, tokens, device, training=False),
    }


def rollout_weights(job: Job, role: Role) -> float:
    """Bytes of the engine's copy of the weights on one device; 0 if it uses those of the trainer."""
    alone = role.name == "actor" and role.layout.devices == 1 and not job.model_parallel
    shared = alone and job.traits.shares_weights and not role.lora_rank
    if shared and (not job.traits.own_dtype or role.compute_bytes == role.weight_bytes):
        return 0.0
    return role.parameters * role.compute_bytes / job.rollout_tensor


def rollout_rows(job: Job, role: Role) -> int:
    """Sequences of a step that one replica of the engine generates."""
    return rows_per_rank(job, max(1, role.layout.devices // job.rollout_tensor))


def kv_cache_bytes(job: Job, role: Role, rows: int) -> float:
    """Bytes of the KV cache of `rows` sequences on one device. The prompt of a group is stored once."""
    groups = -(-rows // job.samples)
    tokens = groups * job.prompt_tokens + rows * job.response_tokens
    return tokens * role.shape.kv_bytes(role.compute_bytes) / job.rollout_tensor


def generation_items(job: Job, role: Role, device: Device, taken: float) -> Items:
    """Bytes of generation on one device, by item. taken: bytes of everything else."""
    weights = rollout_weights(job, role)
    rows = min(rollout_rows(job, role), job.max_rows)
    s, c = role.shape, role.compute_bytes
    prefill = min(PREFILL_TOKENS, -(-rows // job.samples) * job.prompt_tokens)
    working = rows * s.vocabulary * (c + 4) + prefill * (2 * s.hidden + 3 * s.mlp_width / job.rollout_tensor) * c
    needed, least = kv_cache_bytes(job, role, rows), kv_cache_bytes(job, role, 1)
    if device.kind == "cpu":  # what an engine reserves beyond that is never written, so it takes no memory
        cache = needed
    elif job.traits.own_memory_share:
        cache = max(least, job.memory_share * device.memory - weights - working)
    else:
        free = device.memory - device.reserved - taken - weights - working
        cache = max(least, min(needed, 0.9 * max(0.0, free), job.memory_share * device.memory))
    return {"rollout weights": weights, "KV cache": cache, "logits, working memory": working}


def push_items(job: Job, role: Role) -> Items:
    """Memory of a weight push on one device: buckets, and the largest parameter gathered."""
    if role.layout.devices == 1 and role.name == job.generator and job.traits.shares_weights:
        return {"rollout weights": rollout_weights(job, role)}
    size = min(job.bucket_bytes, role.parameters * role.compute_bytes)
    copy = rollout_weights(job, role) if job.generator == "actor" else 0.0
    buckets = (4 if job.generator == "actor" else 2) * size
    return {"rollout weights": copy, "buckets": buckets + role.shape.largest_tensor() * role.weight_bytes}


def group_memory(job: Job, device: Device, roles: Sequence[Role]) -> dict[str, Items]:
    """Bytes per device of every phase on the devices that these roles share.

    Args:
        roles: the roles on these devices, with their layouts.

    Returns:
        Phase -> what -> bytes.
    """
    by_name = {role.name: role for role in roles}
    phases: dict[str, Items] = {}
    for phase in PHASES:
        role = by_name.get(job.generator if phase == "generation" else PHASES[phase])
        if role is None or (phase == "old log-probs" and not job.old_log_probs):
            continue
        updates = phase.startswith("update")
        items = _persistent(job, roles, role, updates)
        taken = sum(items.values())
        if phase == "generation":
            more = generation_items(job, role, device, taken)
        elif updates:
            more = update_items(job, role, device, taken)
        elif phase == "weight push":
            more = push_items(job, role)
        else:
            more = infer_items(job, role, device)
        phases[phase] = items | more
        if device.reserved:
            phases[phase]["process"] = device.reserved
    return phases


def _persistent(job: Job, roles: Sequence[Role], active: Role, updates: bool) -> Items:
    """Weights and optimizer states on the device while a role runs, whose offloaded weights are there too. Megatron's
    buffers of gradients are with the weights."""
    items = {"weights": 0.0, "optimizer": 0.0} | ({"gradients": 0.0} if job.model_parallel else {})
    for role in roles:
        if role.name == "rollout":  # its weights are those of the engine
            continue
        if role is active or not role.param_offload:
            items["weights"] += weights(job, role)
            if job.model_parallel:
                items["gradients"] += gradients(job, role)
        if (role is active and updates) or not role.optimizer_offload:
            items["optimizer"] += optimizer_bytes(job, role)
    return items


def total(items: Mapping[str, float]) -> float:
    """The sum of the bytes."""
    return sum(items.values())
