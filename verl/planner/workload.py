"""What is planned: the roles of a run, a step's batch, and how a role is laid out over devices. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from verl.modeling.model_types import MIXTURES
from verl.planner.shapes import ModelShape
from verl.rollout.traits import EngineTraits, engine_traits


@dataclass(frozen=True)
class Layout:
    """How a model is laid out over devices.

    Attributes:
        devices: number of devices.
        tensor, pipeline, sequence: sizes of model parallelism; the rest is data parallelism. sequence: of Ulysses, or
            Megatron's context parallelism.
        shard: devices that share the parameters of the engines fsdp and fsdp2, in a tensor-parallel share; -1: all.
        expert: devices that share the experts of a layer (Megatron).
        expert_tensor: tensor-parallel size of experts; None: that of the other layers.
    """

    devices: int
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    shard: int = -1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share every expert with Megatron."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_shards(self) -> int:
        """Into how many shards Megatron divides the experts."""
        return self.expert * self.expert_tensor_size * self.pipeline

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.pipeline * self.sequence)

    @property
    def shards(self) -> int:
        """Into how many shards the engines fsdp and fsdp2 divide the parameters."""
        return self.devices if self.shard == -1 else min(self.devices, self.shard * self.tensor)

    def is_possible(self, shape: ModelShape) -> bool:
        """Whether the sizes divide the devices, the heads, the layers and the experts."""
        size = self.tensor * self.pipeline * self.sequence
        heads = shape.heads % (self.tensor * self.sequence) == 0 and shape.kv_heads % self.tensor == 0
        experts = shape.experts % self.expert == 0 and self.devices % self.expert_shards == 0
        return self.devices % size == 0 and heads and shape.layers % self.pipeline == 0 and experts


@dataclass(frozen=True)
class Role:
    """A model of the run.

    Attributes:
        name: actor, rollout, ref, critic, reward or, in simulations, cost.
        trains: whether it has gradients and an optimizer.
        value_head: one output instead of logits.
        lora_rank: rank of the trained adapters; 0: all weights are trained. adapts_experts: experts have adapters too.
        is_quantized: the linear layers under adapters have 4 bits. has_8bit_optimizer: moments have 8.
        freezes_tower: the vision tower is not trained, nor with adapters.
        weight_bytes, compute_bytes: bytes of an element of the stored weights, and of the computation.
        checkpointing: recompute activations; "auto": on a GPU, if memory requires it.
        update_tokens, infer_tokens: tokens of a micro-batch of one rank; None: chosen by the engine.
        sequence_parallel: Megatron's tensor-parallel ranks also split the activations between the matrices.
        sharded_optimizer: Megatron's distributed optimizer.
        fuses_layers: FSDP has the layers of `modeling/layers.py`, if the model type is supported.
        spreads_experts: FSDP spreads the experts over ranks (expert parallelism).
        updates: optimizer steps per pass over the batch. epochs: passes.
        layout: sizes of model parallelism; `devices` is set by the placement.
    """

    name: str
    shape: ModelShape
    trains: bool = False
    value_head: bool = False
    lora_rank: int = 0
    adapts_experts: bool = False
    is_quantized: bool = False
    has_8bit_optimizer: bool = False
    freezes_tower: bool = False
    weight_bytes: int = 4
    compute_bytes: int = 2
    checkpointing: bool | Literal["auto"] = "auto"
    update_tokens: int | None = None
    infer_tokens: int | None = None
    param_offload: bool = False
    optimizer_offload: bool = False
    sequence_parallel: bool = True
    sharded_optimizer: bool = True
    fuses_layers: bool = True
    spreads_experts: bool = False
    updates: int = 1
    epochs: int = 1
    layout: Layout = Layout(1)

    @property
    def fuses_experts(self) -> bool:
        """Whether experts are computed by `modeling/fused_experts.py`, which keeps fewer activations."""
        return self.fuses_layers and self.shape.model_type in MIXTURES

    @property
    def parameters(self) -> int:
        return self.shape.parameters(self.value_head)

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        if not self.trains:
            return 0
        if self.lora_rank:
            return self.shape.lora_parameters(self.lora_rank, self.adapts_experts)
        vision = self.shape.vision
        return self.parameters - (vision.tower if vision is not None and self.freezes_tower else 0)

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained parameter; adapters are float32."""
        return max(4, self.weight_bytes) if self.lora_rank else self.weight_bytes

    @property
    def megatron_share(self) -> float:
        """Parameters of one rank with Megatron: tensor- and pipeline-parallel ranks share them, others the experts."""
        experts = self.shape.expert_parameters
        layout = self.layout
        return (self.parameters - experts) / (layout.tensor * layout.pipeline) + experts / layout.expert_shards

    def on(self, devices: int) -> "Role":
        """The role on this number of devices."""
        return replace(self, layout=replace(self.layout, devices=devices))


@dataclass(frozen=True)
class Job:
    """A run: its roles and a step's batch.

    Attributes:
        roles: the actor first. Without a role `rollout`, the actor's devices generate.
        prompts, samples: of a step; samples are per prompt.
        prompt_tokens, response_tokens: lengths, the same for every sample.
        old_log_probs: whether the step has a pass for old log-probs.
        engine: name of the rollout engine.
        rollout_tensor: tensor-parallel size of the rollout.
        memory_share: share of the device memory that the rollout may use.
        max_rows: largest number of concurrent sequences of an engine.
        eager: the engine runs without CUDA graphs.
        sleeps: engines with a memory share free it during training.
        bucket_bytes: bucket of the weight sync.
        replays: router replay, with which every sample's prompt is computed.
        model_parallel: ranks compute with slices of the model; otherwise weights are gathered layer by layer (FSDP2).
        overlaps: generation of the next batch runs during training, on separate devices.
        generations: responses that are generated per response that is trained on (2 for ReMax).
        strict: a batch that the ranks do not divide is not possible; otherwise the largest share counts.
    """

    roles: tuple[Role, ...]
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    old_log_probs: bool = False
    engine: str = "native"
    rollout_tensor: int = 1
    memory_share: float = 0.5
    max_rows: int = 1024
    eager: bool = False
    sleeps: bool = True
    bucket_bytes: int = 512 * 2**20
    replays: bool = False
    model_parallel: bool = False
    overlaps: bool = False
    generations: int = 1
    strict: bool = True

    @property
    def traits(self) -> EngineTraits:
        """The traits of the rollout engine."""
        return engine_traits(self.engine)

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles)

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    @property
    def generator(self) -> str:
        """The role whose devices generate."""
        return "rollout" if "rollout" in self.names else "actor"

    def with_roles(self, names: Sequence[str], **changes: object) -> "Job":
        """A copy with other attributes of some roles."""
        roles = tuple(replace(role, **changes) if role.name in names else role for role in self.roles)
        return replace(self, roles=roles)


@dataclass(frozen=True)
class Tokens:
    """Tokens that one rank computes: of prompts and of responses."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


def shares_prefix(job: Job, role: Role, on_gpu: bool) -> bool:
    """Whether the training engine computes a prompt once for its samples (`attends_in_one_call`)."""
    wide_adapters = role.lora_rank and on_gpu and role.compute_bytes > 2
    if job.replays or role.shape.padded or role.layout.sequence > 1 or wide_adapters:
        return False
    return not on_gpu or (role.compute_bytes == 2 and job.length < 4096)


def tokens_of(job: Job, role: Role, rows: float, on_gpu: bool) -> Tokens:
    """The tokens of `rows` sequences on one rank. A shared prefix counts once for the samples that are together."""
    # balancing the ranks spreads the samples of a prompt over them
    together = max(1.0, min(job.samples / role.layout.data, rows)) if shares_prefix(job, role, on_gpu) else 1.0
    share = 1 / role.layout.sequence
    return Tokens(share * rows / together * job.prompt_tokens, share * rows * job.response_tokens)


def rows_per_rank(job: Job, data: int) -> int:
    """Sequences of a step on the rank that has most."""
    return -(-job.responses // data)
