"""The training engine of several ranks: parameters, gradients and optimizer state sharded by FSDP2 (`fully_shard`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.engines.base import MicroBatching, OptimizerConfig
from verl.engines.distributed import init_process_group, reduce_values
from verl.engines.hf import HFEngine
from verl.engines.micro_batch import plan, split_to
from verl.engines.model import ModelConfig


@dataclass(frozen=True)
class ShardingConfig:
    """How a model is spread over the ranks.

    fsdp_size: ranks that share one copy of the parameters, -1 for all; fewer gives copies of shards (HSDP).
    reshard_after_forward: free the gathered parameters of a layer between its forward and backward pass (ZeRO-3);
    otherwise keep them (ZeRO-2). offload: keep shards in host memory and bring each layer to the device when it runs.
    """

    fsdp_size: int = -1
    reshard_after_forward: bool = True
    offload: bool = False


class FSDPEngine(HFEngine):
    """Every rank holds 1/shard of each parameter, and its own rows of each batch."""

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        sharding: ShardingConfig | None = None,
        module: torch.nn.Module | None = None,
    ):
        self.sharding = sharding or ShardingConfig()
        init_process_group(config.device)
        super().__init__(config, optimizer, module)

    # ---- spreading the model ------------------------------------------------------------------------------------

    def _distribute(self) -> None:
        """Shard every decoder layer, then the rest (embedding, last norm and projection) as one more unit."""
        world, shard = dist.get_world_size(), self.sharding.fsdp_size
        shard = world if shard == -1 else shard
        if world % shard:
            raise ValueError(f"fsdp_size {shard} does not divide the {world} ranks")
        shape, names = ((world,), ("shard",)) if shard == world else ((world // shard, shard), ("replicate", "shard"))
        self.mesh = init_device_mesh(self.config.device.type, shape, mesh_dim_names=names)
        narrow = self.config.compute_dtype != self.config.model_dtype
        options = {
            "mesh": self.mesh,
            "reshard_after_forward": self.sharding.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.config.compute_dtype if narrow else None,
                reduce_dtype=torch.float32 if narrow else None,  # gradients are summed in full precision
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy() if self.sharding.offload else OffloadPolicy(),
        }
        layer_classes = set(self.module._no_split_modules or ())
        for layer in self.module.modules():
            if type(layer).__name__ in layer_classes:
                fully_shard(layer, **options)
        fully_shard(self.model, **options)

    # ---- what ranks must agree on -------------------------------------------------------------------------------

    def _plan(self, lengths: list[int], micro: MicroBatching) -> list[list[int]]:
        """As many micro-batches on every rank as on the one that needs most: the layers are gathered together."""
        pieces = plan(lengths, micro)
        (count,) = self.max_over_ranks([float(len(pieces))])
        return split_to(pieces, int(count))

    def _backward(self, loss: torch.Tensor) -> None:
        # FSDP takes the mean of the gradients over the ranks; an objective's shares add up, so their sum is wanted
        (loss * dist.get_world_size()).backward()

    def _clip_gradient(self, limit: float) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.SUM, self.config.device, None)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.MAX, self.config.device, None)

    # ---- weights ------------------------------------------------------------------------------------------------

    whole = False

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HuggingFace name, full tensor): gathered one at a time, on every rank. All ranks must iterate together."""
        for name, p in self.module.named_parameters():
            full = p.detach()
            yield name, full.full_tensor() if isinstance(full, DTensor) else full

    def _save_huggingface(self, folder: Path, contents: tuple[str, ...]) -> None:
        full = {name: tensor.cpu() for name, tensor in self.weights()} if "hf_model" in contents else None
        if self.is_first and full is not None:
            self.module.save_pretrained(folder, state_dict=full)
        elif self.is_first:
            self.module.config.save_pretrained(folder)
        dist.barrier()

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0
