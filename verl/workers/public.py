"""Worker classes under the names of public verl, for subclasses of them in the `role_worker_mapping` of a trainer.

    class MyWorker(ActorRolloutRefWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self):
            super().init_model()   # self.engine is the training engine, self.rollout the rollout engine

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_log_prob(self, data): ...

The constructor is (config, role), and `init_model` loads the model. The trainer adds what else the worker needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl.planner.devices import known_gpu
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.critic import CriticWorker as _Critic
from verl.workers.engine_worker import EngineWorker, forward_flops
from verl.workers.policy import ActorWorker, RefWorker
from verl.workers.reward_model import RewardModelWorker as _RewardModel


class _PublicWorker(EngineWorker):
    """Postpones the constructor of the worker of its role to `init_model`."""

    #: further arguments of that constructor; set by the trainer before `__init__`
    settings: Mapping[str, Any] | None = None

    def __init__(self, config: Any, role: str = "", **kwargs: Any):
        if self.settings is None:
            raise TypeError(
                f"{type(self).__name__}: a worker is constructed by its trainer: give the class in role_worker_mapping"
            )
        self.config, self.role = config, role

    def _base(self) -> type[EngineWorker]:
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, the optimizer and, of the actor, the rollout engine."""
        self._base().__init__(self, self.config, **self.settings)

    def __getattr__(self, name: str) -> Any:  # called for names that do not exist
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: models and optimizers are self.engine, a verl.engines.base."
            "TrainEngine, and exist after init_model()"
        )


class ActorRolloutRefWorker(_PublicWorker, ActorWorker):
    """The actor, which also generates unless the rollout has separate devices; or the reference policy."""

    def _base(self) -> type[EngineWorker]:
        return RefWorker if self.role == "ref" else ActorWorker

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._base().compute_ref_log_prob(self, data)


class CriticWorker(_PublicWorker, _Critic):
    """The critic."""

    def _base(self) -> type[EngineWorker]:
        return _Critic


class RewardModelWorker(_PublicWorker, _RewardModel):
    """The reward model."""

    def _base(self) -> type[EngineWorker]:
        return _RewardModel


class FlopsCounter:
    """The rate of the floating-point operations of updates of a model, by its Hugging Face configuration."""

    def __init__(self, config: Any):
        self.shape = ModelShape.from_config(config.get_text_config().to_dict())

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **options: Any) -> tuple[float, float]:
        """Rates in 10^12 per second: of an update on rows of these tokens, and the GPU's peak (inf: not known)."""
        gpu = known_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        update = 3 * forward_flops(self.shape, batch_seqlens, outputs=sum(batch_seqlens))
        return update / delta_time / 1e12, gpu.peak / 1e12 if gpu else float("inf")
