"""The training engine of several ranks: parameters, gradients and optimizer state sharded by FSDP2 (`fully_shard`).

Every rank holds its shard of each parameter. What a rank computes is its own rows of a batch, or, of the rows that a
few ranks share, its own tokens (sequence parallelism) or its own part of every layer (tensor parallelism).
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.engines.base import MicroBatching, OptimizerConfig, Tensors
from verl.engines.checkpoint import copy_into
from verl.engines.distributed import device_mesh, init_process_group, reduce_values
from verl.engines.loading import ModelConfig, empty_module, load_checked
from verl.engines.micro_batch import plan, split_to, token_budget
from verl.engines.offload import HOST, OffloadConfig
from verl.engines.tensor_parallel import tensor_parallel
from verl.engines.torch_engine import HFEngine
from verl.modeling.sequence_parallel import SequenceRanks


@dataclass(frozen=True)
class ShardingConfig:
    """How a model is spread over the ranks.

    fsdp_size: ranks that share one copy of the parameters (or of a tensor-parallel part of them), -1 for all; fewer
    gives copies of shards (HSDP).
    reshard_after_forward: free the gathered parameters of a layer between its forward and backward pass (ZeRO-3);
    otherwise keep them (ZeRO-2). offload: keep shards in host memory and bring each layer to the device when it runs.
    sequence_parallel: ranks that share the tokens of the same rows. tensor_parallel: neighbouring ranks that share the
    layers for the same tokens. timeout: seconds that a rank waits for the others, None for a day.
    """

    fsdp_size: int = -1
    reshard_after_forward: bool = True
    offload: bool = False
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    timeout: float | None = None


class FSDPEngine(HFEngine):
    """Every rank holds its shard of each parameter."""

    whole = False
    all_here = False

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        sharding: ShardingConfig | None = None,
        offload: OffloadConfig | None = None,
    ):
        """Raises ValueError for sizes that do not divide, besides what HFEngine raises."""
        self.sharding = sharding or ShardingConfig()
        self.ranks_of_a_row = self.sharding.sequence_parallel
        init_process_group(config.device, self.sharding.timeout)
        self._share_rows(config)
        if self.sharding.offload:  # FSDP keeps the shards in host memory all the time
            offload = None
        super().__init__(config, optimizer, offload=offload)

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    # ---- spreading rows and model -------------------------------------------------------------------------------

    def _share_rows(self, config: ModelConfig) -> None:
        """Which ranks have the same rows, and which ranks have the others."""
        world, sequence, tensor = dist.get_world_size(), self.sharding.sequence_parallel, self.sharding.tensor_parallel
        for key, size in (("ulysses_sequence_parallel_size", sequence), ("tensor_parallel_size", tensor)):
            if world % size:
                raise ValueError(f"{key} {size} does not divide the {world} ranks")
        sharing = sequence * tensor
        if world % sharing:
            raise ValueError(
                f"{sharing} ranks are to share their rows (ulysses_sequence_parallel_size {sequence} x "
                f"tensor_parallel_size {tensor}), which does not divide the {world} ranks"
            )
        self.dp_rank, self.inner_rank = divmod(dist.get_rank(), sharing)
        self.dp_size = world // sharing
        self._dp_group = dist.group.WORLD
        if sharing == 1:
            return
        if tensor > 1 and config.lora is not None:
            raise ValueError("LoRA adapters are not spread over tensor-parallel ranks: set tensor_parallel_size=1")
        if sequence > 1 and not config.use_remove_padding:
            raise ValueError("sequence parallelism splits packed rows: set model.use_remove_padding=true")
        shape = (self.dp_size, sequence, tensor)
        mesh = device_mesh(config.device.type, shape, ("dp", "sequence", "tensor"))
        self._dp_group = mesh.get_group("dp")
        if sequence > 1:
            self.sequence_ranks = SequenceRanks(mesh.get_group("sequence"), self.inner_rank // tensor, sequence)

    def _build(self) -> torch.nn.Module:
        """Parameters without memory on every rank; the first one's host has a whole copy until they are filled."""
        config = dataclasses.replace(self.config, device=HOST)
        self._source = load_checked(config) if self.is_first else None
        module = empty_module(config)
        if self._source is not None and self._source.can_generate():
            module.generation_config = self._source.generation_config  # belongs to what a checkpoint exports
        if self.sequence_ranks is not None:
            self.sequence_ranks.check_heads(module.config.num_attention_heads // self.sharding.tensor_parallel)
        return module

    def _distribute(self) -> None:
        """Shard every decoder layer, then the rest (embedding, last norm and projection) as one more unit."""
        device, tensor = self.config.device.type, self.sharding.tensor_parallel
        ranks = dist.get_world_size() // tensor
        shard = ranks if self.sharding.fsdp_size == -1 else self.sharding.fsdp_size
        if ranks % shard:
            of = f" of a tensor-parallel part (tensor_parallel_size {tensor})" if tensor > 1 else ""
            raise ValueError(f"fsdp_size {shard} does not divide the {ranks} ranks{of}")
        names = ("shard",) if shard == ranks else ("replicate", "shard")
        shape = (ranks // shard, shard)[-len(names) :]
        # all that the ranks of a tensor-parallel group compute alike is sharded over them too
        whole = device_mesh(device, (*shape[:-1], shard * tensor), names)
        of_layers = whole
        if tensor > 1:
            mesh = device_mesh(device, (*shape, tensor), (*names, "tensor"))
            tensor_parallel(self.module, mesh["tensor"])
            of_layers = mesh[names]
        options = self._sharding_options()
        layer_classes = set(self.module._no_split_modules or ())
        for layer in self.module.modules():
            if type(layer).__name__ in layer_classes:
                fully_shard(layer, mesh=of_layers, **options)
        fully_shard(self.model, mesh=whole, **options)
        self._fill()

    def _sharding_options(self) -> dict[str, Any]:
        on_gpu, narrow = self.config.device.type == "cuda", self.config.compute_dtype != self.config.model_dtype
        return {
            "reshard_after_forward": self.sharding.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.config.compute_dtype if narrow else None,
                reduce_dtype=torch.float32 if narrow else None,  # gradients are summed in full precision
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(on_gpu) if self.sharding.offload else OffloadPolicy(),
        }

    @torch.no_grad()
    def _fill(self) -> None:
        """Hand the first rank's parameters and buffers to all, one after another, so that none is whole for long."""
        device = self.config.device
        self.model.to_empty(device=HOST if self.sharding.offload else device)
        for name, buffer in self.module.named_buffers():  # FSDP keeps these where the layers compute
            owner, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(owner), last, buffer.to(device))
        source = _named_tensors(self._source) if self._source is not None else None
        for name, tensor in _named_tensors(self.module).items():
            if source is not None:
                whole = source[name].to(device, tensor.dtype)
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.broadcast(whole, 0)
            copy_into(tensor, whole)
        self._source = None

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        with super().loaded(optimizer):
            yield
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what a forward pass left gathered would pass for the parameters

    # ---- what ranks must agree on -------------------------------------------------------------------------------

    def _plan(self, lengths: list[int], micro: MicroBatching, columns: Tensors | None) -> list[list[int]]:
        """As many micro-batches on every rank as on the one that needs most: the layers are gathered together.

        A budget of tokens is one rank's; ranks that share rows have as many budgets together.
        """
        budget = token_budget(lengths, micro)
        if budget is not None:
            micro = MicroBatching(tokens=budget * self.sharding.sequence_parallel)
        pieces = plan(lengths, micro, columns)
        (count,) = self.max_over_ranks([float(len(pieces))])
        return split_to(pieces, int(count))

    def _backward(self, loss: torch.Tensor) -> None:
        # FSDP takes the mean of the gradients over the ranks; an objective's shares add up, so their sum is wanted.
        # Tensor-parallel ranks all have the whole loss, which counts once
        (loss * (dist.get_world_size() // self.sharding.tensor_parallel)).backward()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.SUM, self.config.device, self._dp_group)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.MAX, self.config.device, dist.group.WORLD)


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once."""
    return dict(module.named_parameters()) | dict(module.named_buffers())
