"""Methods of the role "rollout" for every worker that hosts a rollout engine."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from verl.config import schema
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv
from verl.rollout.request import Completion
from verl.rollout.traits import engine_traits
from verl.single_controller.dispatch import Coordinates, Dispatch, register
from verl.single_controller.worker import Worker

if TYPE_CHECKING:
    from verl.workers.rollout.role import Rollout

#: timeout of a weight transfer in seconds if none is configured: the controller has its own timeout
NO_TIMEOUT = 86400.0


class RolloutMethods(Worker, ABC):
    """Registered methods of the role "rollout", for workers with an attribute `rollout`."""

    rollout: "Rollout"

    def layout(self, mesh: str | None = None) -> Coordinates:
        """In the mesh "rollout", the ranks of a tensor-parallel group of the engine have the same prompts, regardless
        of model parallelism in training."""
        if mesh != "rollout":
            return super().layout(mesh)
        env = self.rollout.env
        return Coordinates(dp=env.tp_group, tp=env.tp_rank)

    @abstractmethod
    def max_over_ranks(self, values: list[float]) -> list[float]:
        """The maximum of each value over all ranks of the group."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="rollout")
    def generate_sequences(self, batch: DataProto) -> DataProto | None:
        """Generate one trajectory per row; see `Rollout.generate`."""
        return self.rollout.generate(batch, self.max_over_ranks)

    @register(dispatch_mode=Dispatch.ONE_TO_GROUPS, mesh="rollout")
    def canary_response(self, prompt_ids: list[int], max_tokens: int) -> Completion | None:
        """See `Rollout.canary_response`. Rank 0 of each tensor-parallel group returns it."""
        return self.rollout.canary_response(prompt_ids, max_tokens)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def samples_policy(self) -> bool:
        """Whether the engine generates with the policy."""
        return self.rollout.engine.samples_policy

    @register(dispatch_mode=Dispatch.ONE_TO_GROUPS, mesh="rollout")
    def has_compared_weights(self) -> bool:
        """See `Rollout.has_compared_weights`."""
        return self.rollout.has_compared_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Free all memory of generation. Weights must be synced before the next generation."""
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_rollout_cache(self) -> None:
        """Free the KV cache. The weights are kept."""
        self.rollout.free_cache()


def rollout_env(
    worker: Worker,
    config: schema.RolloutEngineConfig,
    device: torch.device,
    pad_token_id: int,
    compute_dtype: torch.dtype | None,
    training: schema.EngineConfig | schema.MegatronConfig | None = None,
) -> RolloutEnv:
    """The `RolloutEnv` of a worker. training: how training on the same devices is sharded; None: the rollout has its
    own devices."""
    size = config.tensor_model_parallel_size
    if worker.world_size % size:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {worker.world_size} rollout ranks"
        )
    stride = 1
    if training is not None and engine_traits(config.name).joins_training_groups:
        stride = _stride(size, training, worker.world_size, worker.rank_env.local_world_size)
    ranks = worker.rank, worker.world_size, worker.local_rank
    tp_rank = worker.rank // stride % size
    return RolloutEnv(*ranks, device, pad_token_id, compute_dtype, tp_rank, size, stride)


def _stride(size: int, training: schema.EngineConfig | schema.MegatronConfig, ranks: int, on_host: int) -> int:
    """The distance of two ranks of a tensor-parallel group, so that the shard of a rank is inside of its slice, as in
    HybridFlow (Sheng et al. 2024, arXiv 2409.19256, section 5). The shards of FSDP count as tensor-parallel. A group
    does not leave the host. 1: consecutive ranks."""
    stages = 1
    if isinstance(training, schema.MegatronConfig):
        stages, shards = training.pipeline_model_parallel_size, training.tensor_model_parallel_size
    elif (shards := training.tensor_parallel_size) == 1:
        shards = training.fsdp_size if training.fsdp_size != -1 else ranks
    if shards > on_host:
        stages, shards = 1, on_host
    return 1 if shards % size or ranks % (stages * shards) else shards // size
