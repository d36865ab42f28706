"""Layout of a model and its batch over ranks, for `TorchEngine`: one device, or FSDP2 (`fully_shard`).

With FSDP2, every rank has a shard of each parameter, gradient and optimizer state. Ranks compute different samples or,
within a model-parallel group, different tokens of the same samples (sequence parallelism) or different shards of every
layer (tensor parallelism). Ranks with different samples may share the experts of a layer (expert parallelism).
"""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import GenerationConfig

from verl.checkpoints.safetensors_files import SafetensorsFiles
from verl.engines.base import EngineSpec
from verl.engines.checkpoint import copy_into
from verl.engines.loading import (
    ModelSpec,
    TokenModel,
    check_finite,
    check_sequence_parallel,
    checked,
    empty_module,
    load_module,
)
from verl.engines.memory import HOST
from verl.engines.micro_batch import split_to
from verl.engines.parallel import device_mesh, init_process_group, reduce_values, tensor_parallel
from verl.engines.quantization import check_quantization
from verl.modeling.attention import is_packed, use_default_attention
from verl.modeling.huggingface import around_embeddings
from verl.modeling.model_types import LLAMA_LIKE
from verl.modeling.sequence_parallel import SequenceRanks


class Sharding:
    """The layout of one model over the ranks of a process group; here, the whole model on the device of this process.

    Attributes:
        dp_rank, dp_size: index of the share of the samples that this rank computes, and the number of shares.
        model_parallel_rank: rank among the ranks that compute the same samples.
        sp_size: ranks that share the tokens of a sequence.
        sequence_ranks: the process group of these ranks; None without sequence parallelism.
        replica: index of the replica of the weights that this rank has a shard of.
        is_unsharded: whether this process holds every parameter and computes its full gradient.
        is_first_rank: whether this rank writes the files that are not sharded.
    """

    dp_rank: int = 0
    dp_size: int = 1
    model_parallel_rank: int = 0
    sp_size: int = 1
    sequence_ranks: SequenceRanks | None = None
    replica: int = 0
    is_unsharded: bool = True
    is_first_rank: bool = True

    def build(self, spec: ModelSpec) -> torch.nn.Module:
        """The module that `shard` lays out."""
        return checked(load_module(spec), spec)

    def shard(self, model: TokenModel, spec: ModelSpec) -> None:
        """Shard the parameters of `model`, in place, and load them."""

    def equalize(self, chunks: list[list[int]]) -> list[list[int]]:
        """Split the micro-batches of this rank to the number that every rank needs."""
        return chunks

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss so that the backward pass sums the gradients over ranks."""
        return loss

    def free_gathered(self, model: TokenModel) -> None:
        """Free parameters that a forward pass left gathered."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum each value over the data-parallel ranks."""
        return list(values)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        """Maximum of each value over all ranks."""
        return list(values)


@final
class FSDP2(Sharding):
    """Every rank has a shard of each parameter (ZeRO-3, or ZeRO-2 with reshard_after_forward=false).

    Args:
        spec: `spec.engine` sets the group sizes. The process group is configured by the environment.

    Raises:
        ValueError: sizes that do not divide the number of ranks, or an unsupported combination.
    """

    is_unsharded = False

    def __init__(self, spec: EngineSpec):
        self.section = spec.engine
        self.device = spec.device
        self.sp_size = spec.engine.ulysses_sequence_parallel_size
        self.tp_size = spec.engine.tensor_parallel_size
        self.ep_size = spec.engine.expert_parallel_size
        self._first_copy: torch.nn.Module | None = None
        self._files: SafetensorsFiles | None = None
        init_process_group(spec.device, spec.timeout)
        self.is_first_rank = dist.get_rank() == 0
        self.dp_group = dist.group.WORLD
        self._assign_samples(spec)

    def _assign_samples(self, spec: EngineSpec) -> None:
        """Assign samples to ranks, and make the process groups of ranks that compute the same samples."""
        world, sequence, tensor = dist.get_world_size(), self.sp_size, self.tp_size
        for key, size in (("ulysses_sequence_parallel_size", sequence), ("tensor_parallel_size", tensor)):
            if world % size:
                raise ValueError(f"{key} {size} does not divide the {world} ranks")
        model_parallel = sequence * tensor
        if world % model_parallel:
            raise ValueError(
                f"{model_parallel} ranks would compute the same samples (ulysses_sequence_parallel_size {sequence} x "
                f"tensor_parallel_size {tensor}), which does not divide the {world} ranks"
            )
        self.dp_rank, self.model_parallel_rank = divmod(dist.get_rank(), model_parallel)
        self.dp_size = world // model_parallel
        if model_parallel == 1:
            return
        if sequence > 1 and not spec.model.use_remove_padding:
            raise ValueError("sequence parallelism splits packed sequences: set model.use_remove_padding=true")
        shape = (self.dp_size, sequence, tensor)
        mesh = device_mesh(self.device.type, shape, ("dp", "sequence", "tensor"))
        self.dp_group = mesh.get_group("dp")
        if sequence > 1:
            rank = self.model_parallel_rank // tensor
            self.sequence_ranks = SequenceRanks(mesh.get_group("sequence"), rank, sequence)

    # ---- parameters ---------------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec) -> torch.nn.Module:
        """Build on "meta" on every rank, and open the files of the weights, of which `shard` reads a shard.

        If the weights are not in the files as the module has them, the host of the first rank has a full copy until
        `shard` is done.
        """
        on_host = dataclasses.replace(spec, device=HOST)
        module = empty_module(on_host)
        if self.sequence_ranks is not None:
            check_sequence_parallel(module, self.sp_size, self.tp_size)
        files = files_of(module, on_host)
        if not any(self.max_over_ranks([float(files is None)])):
            self._files = files
            with suppress(OSError):  # there is none
                module.generation_config = GenerationConfig.from_pretrained(files.folder)
            return module
        packs = is_packed(module)
        self._first_copy = checked(load_module(on_host), on_host) if self.is_first_rank else None
        if self._first_copy is not None:
            packs = is_packed(self._first_copy)
            if self._first_copy.can_generate():
                module.generation_config = self._first_copy.generation_config  # part of an exported checkpoint
        if any(self.max_over_ranks([float(not packs)])) and is_packed(module):
            use_default_attention(module)
        return module

    def shard(self, model: TokenModel, spec: ModelSpec) -> None:
        """Shard every decoder layer, then the rest (embedding, final norm and head) as one unit.

        torch warns if a sharded module returns a view, because FSDP2 gathers its parameters for the backward pass in a
        hook on the output tensor: an in-place operation on a view replaces its autograd history, the hook is lost, and
        the gradients are those of freed parameters. Our modules return new tensors (`modeling/packing.py`,
        `layers_cpu.py`), and nothing changes an output in place, so the warning is not filtered: in a model of a user
        it is real.
        """
        device, tensor, module = self.device.type, self.tp_size, model.module
        ranks = dist.get_world_size() // tensor
        shard = ranks if self.section.fsdp_size == -1 else self.section.fsdp_size
        if ranks % shard:
            suffix = f" of a tensor-parallel share (tensor_parallel_size {tensor})" if tensor > 1 else ""
            raise ValueError(f"fsdp_size {shard} does not divide the {ranks} ranks{suffix}")
        self.replica = dist.get_rank() // (shard * tensor)
        names = ("shard",) if shard == ranks else ("replicate", "shard")
        shape = (ranks // shard, shard)[-len(names) :]
        # layers outside of the tensor-parallel plan are sharded over the ranks of a tensor-parallel group too
        full_mesh = device_mesh(device, (*shape[:-1], shard * tensor), names)
        layer_mesh = full_mesh
        if tensor > 1:
            mesh = device_mesh(device, (*shape, tensor), (*names, "tensor"))
            tensor_parallel(module, mesh["tensor"])
            layer_mesh = mesh[names]
        options = self._options(spec)
        if self.ep_size > 1:
            from verl.engines.expert_parallel import EXPERT, check_ranks, shard_experts

            check_ranks(self.ep_size, tensor, shard)
            expert_shape = (*shape[:-1], shard // self.ep_size, self.ep_size)
            shard_experts(module, device_mesh(device, expert_shape, (*names, EXPERT)), **options)
        # Mamba lists a block and its mixer, and BERT the embeddings, which may be tied to the head
        classes, skipped = set(module._no_split_modules or ()), set(around_embeddings(module))
        for layer in list(module.modules()):
            if type(layer).__name__ in classes and layer not in skipped:
                skipped.update(layer.modules())
                fully_shard(layer, mesh=layer_mesh, **options)
        fully_shard(model, mesh=full_mesh, **options)
        self._load_parameters(model, spec.section.path)

    def _options(self, spec: ModelSpec) -> dict[str, Any]:
        on_gpu, is_mixed = self.device.type == "cuda", spec.compute_dtype != spec.model_dtype
        return {
            "reshard_after_forward": self.section.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=spec.compute_dtype if is_mixed else None,
                reduce_dtype=torch.float32 if is_mixed else None,  # gradients are summed in full precision
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(on_gpu) if self.section.offload_policy else OffloadPolicy(),
        }

    @torch.no_grad()
    def _load_parameters(self, model: TokenModel, path: str) -> None:
        """Read the shards of this rank, or broadcast the first rank's parameters and buffers one by one, so that only
        one full tensor exists at a time."""
        device, module = self.device, model.module
        model.to_empty(device=HOST if self.section.offload_policy else device)
        for name, buffer in module.named_buffers():  # FSDP keeps buffers where the layers compute
            owner, _, last = name.rpartition(".")
            layer = module.get_submodule(owner)
            value = type(layer)(module.config).get_buffer(last) if self._files is not None else buffer
            setattr(layer, last, value.to(device))
        if self._files is not None:
            for name, tensor in module.named_parameters():
                _read_shard(tensor, self._files.slice_of(name))
            self._files = None
            shards = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in module.named_parameters())
            check_finite(shards, path, self.max_over_ranks)
            return
        source = _named_tensors(self._first_copy) if self._first_copy is not None else None
        if source is not None and (untied := sorted(source.keys() - _named_tensors(module).keys())):
            raise ValueError(
                f"the files have {untied[0]}, which config.json ties to the embeddings: set "
                "actor_rollout_ref.model.override_config.tie_word_embeddings=false"
            )
        for name, tensor in _named_tensors(module).items():
            if source is not None:
                full = source[name].to(device, tensor.dtype)
            else:
                full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.broadcast(full, 0)
            copy_into(tensor, full)
        self._first_copy = None

    def free_gathered(self, model: TokenModel) -> None:
        """Reshard, since parameters that are still gathered would be used as the weights."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- what ranks must agree on -------------------------------------------------------------------------------

    def equalize(self, chunks: list[list[int]]) -> list[list[int]]:
        """Use the largest number of micro-batches of any rank: ranks gather the layers collectively."""
        (count,) = self.max_over_ranks([float(len(chunks))])
        return split_to(chunks, int(count))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        # FSDP averages the gradients over the ranks, but the shares of an objective must be summed. Tensor-parallel
        # ranks all compute the full loss, which counts once
        return loss * (dist.get_world_size() // self.tp_size)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.SUM, self.device, self.dp_group)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.MAX, self.device, dist.group.WORLD)


def make_sharding(spec: EngineSpec) -> Sharding:
    """One process has the whole model; several shard it with FSDP2.

    Raises:
        ValueError: a setting that needs several processes, in a run with one process.
    """
    check_quantization(spec.model, spec.world_size)
    if spec.world_size > 1:
        return FSDP2(spec)
    if spec.engine.offload_policy:
        raise ValueError("offload_policy needs FSDP with several processes: use param_offload with one process")
    for key in ("ulysses_sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
        size = spec.engine.model_dump()[key]
        if size > 1:
            raise ValueError(f"{key} is {size}, but there is one process: use 1")
    return Sharding()


def files_of(module: torch.nn.Module, spec: ModelSpec) -> SafetensorsFiles | None:
    """The files of a policy's weights if they have exactly its parameters, by name and shape; else None.

    Only for families whose layers are known to compute packed rows (`loading.checked` finds out for others).
    """
    section, folder = spec.section, Path(spec.section.path).expanduser()
    is_plain = spec.kind == "causal_lm" and module.config.model_type in LLAMA_LIKE and is_packed(module)
    if not is_plain or spec.random_init or section.has_adapters or section.quantization == "nf4":
        return None
    try:
        files = SafetensorsFiles(folder)
    except (ValueError, SafetensorError):  # reported by the loader of transformers
        return None
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    saved, needed = files.shapes(), {name: shapes[name] for name, _ in module.named_parameters()}
    return files if needed.items() <= saved.items() <= shapes.items() else None


def _read_shard(tensor: torch.Tensor, file: Any) -> None:
    """Read the shard of a parameter from a slice of a file. Shards along other dimensions are cut from the tensor."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if not placements or placements[-1] != Shard(0) or any(p != Replicate() for p in placements[:-1]):
        copy_into(tensor, file[:].to(tensor.device))
        return
    local, mesh = tensor.to_local(), tensor.device_mesh
    start = mesh.get_coordinate()[-1] * -(-len(tensor) // mesh.size(-1))
    if len(local):  # with more ranks than rows, some have none
        local.copy_(file[start : start + len(local)].to(local.device))


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once."""
    return dict(module.named_parameters()) | dict(module.named_buffers())
