"""The worker of a rollout in a separate process."""

import math
from typing import Any

import torch

from verl.agents import Prompt
from verl.config import schema
from verl.engines.parallel import init_process_group, reduce_values
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.utils.device import resolve_device, resolve_dtype
from verl.weight_sync import SyncReport, TransferGroup, receive_collective
from verl.workers.rollout.methods import NO_TIMEOUT, RolloutMethods, rollout_env
from verl.workers.rollout.role import Rollout
from verl.workers.rollout.service import FollowingService, GenerationService


class RolloutWorker(RolloutMethods):
    """A rollout engine in a separate process, which only generates.

    Args:
        train_dtype: `fsdp_config.dtype` of the actor; None without training.
        timeout: of collectives, in seconds.
        pause_limit: seconds that `pause_generation` may take: less than the controller waits, whose error does not say
            what the rollout waits for.
        **generation: stop_token_ids, stop and tokenizer, as for `Rollout`.
    """

    def __init__(
        self,
        model: schema.ModelConfig,
        rollout: schema.RolloutEngineConfig,
        *,
        device: str,
        pad_token_id: int,
        train_dtype: str | None = None,
        timeout: float | None = None,
        pause_limit: float = math.inf,
        **generation: Any,
    ):
        on = resolve_device(device, self.local_rank)
        if on.type == "cuda":
            torch.cuda.set_device(on)  # Triton launches kernels on the current device
        dtype = None if train_dtype is None else resolve_dtype(train_dtype, on)
        env = rollout_env(self, rollout, on, pad_token_id, dtype)
        if env.tp_size > 1:
            init_process_group(on, timeout)
        if train_dtype is None and model.lora_adapter_path is None:
            model = model.model_copy(update={"lora_rank": 0})  # adapters that were never trained change nothing
        self.device, self.timeout, self._pause_limit = on, timeout, pause_limit
        self.rollout = Rollout(rollout, model, env, **generation)
        self._group: TransferGroup | None = None
        self._service: GenerationService | FollowingService | None = None
        self._is_paused = False

    def max_over_ranks(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        host = torch.device("cpu")
        init_process_group(host, self.timeout)
        return reduce_values(values, torch.distributed.ReduceOp.MAX, host, None)

    # ---- weights ------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_receiver(self) -> None:
        """Raise ValueError if the engine accepts no weights."""
        if self.rollout.engine.receiver() is None:
            raise ValueError(
                f"rollout.name={self.rollout.config.name} has no receiver() and cannot receive weights: "
                "set placement.rollout_devices=null"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_to_actor(self, address: tuple[str, int], size: int) -> None:
        """Join the process group of the weight sync, concurrently with the actor's `connect_to_rollout`."""
        self._group = TransferGroup(address, 1 + self.rank, size, self.device, self.timeout or NO_TIMEOUT)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, version: int) -> SyncReport:
        """Receive one push of the actor, concurrently with its `push_weights`."""
        report = receive_collective(self.rollout.engine.receiver(), self._group, version)
        self.rollout.engine.weight_version = version
        return report

    # ---- generation during training -----------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE, mesh="rollout")
    def submit_prompts(self, batch: DataProto | None) -> None:
        """Start to generate in the background: one trajectory per row, in groups of rows with one uid. batch: the
        columns of `generate_sequences`, one batch per tensor-parallel group; None: nothing."""
        if batch is None:
            return
        if self._service is None:
            self._service = self.rollout.serve(self._pause_limit)
            if not self._is_paused:
                self._service.resume()
        groups: dict[str, list[Prompt]] = {}
        for uid, prompt in zip(batch.non_tensor_batch["uid"], self.rollout.prompts_of(batch, self.rollout.params)):
            groups.setdefault(uid, []).append(prompt)
        for uid, prompts in groups.items():
            self._service.submit(uid, prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_GROUPS, mesh="rollout")
    def collect_finished(self, timeout: float) -> list[DataProto]:
        """Return the groups that have ended, one batch per group, its rows in the order of `submit_prompts`. Each has
        the columns of `generate_sequences`, uid, and weight_versions: spans (first token, version). Only rank 0 of a
        tensor-parallel group returns any."""
        finished = [] if self._service is None else self._service.collect(timeout)
        batches = []
        for uid, trajectories in finished:
            with_loops = self.rollout.uses_loops(trajectories[0].prompt.columns)
            responses = self.rollout.columns_of(trajectories, lambda widths: widths, with_loops)
            spans = [trajectory.weight_versions for trajectory in trajectories]
            batches.append(responses.replace(uid=[uid] * len(trajectories), weight_versions=spans))
        return batches

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pause_generation(self, partial: bool) -> None:
        """Interrupt the generation in the background; see `GenerationService.pause`."""
        self._is_paused = True
        if self._service is not None:
            self._service.pause(partial)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resume_generation(self) -> None:
        """Continue the generation in the background."""
        self._is_paused = False
        if self._service is not None:
            self._service.resume()
