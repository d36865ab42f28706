"""Workers of the policy: the actor, which hosts a rollout engine if they share devices, and the reference policy."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

import verl.weight_sync as weight_sync  # loads a method at its first use
from verl.algorithms.actor_loss import actor_loss
from verl.algorithms.distillation import TOP_K
from verl.algorithms.masked import LossAggregation
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.columns import KEPT_TOKENS
from verl.config import schema
from verl.engines.base import NUM_CANDIDATES, REPLAYS, MicroBatching, Objective, Tensors, TrainEngine
from verl.modeling.token_filter import NO_TOKEN, TokenFilter
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import free_port
from verl.utils.device import peak_memory, resolve_device, resolve_dtype
from verl.weight_sync.base import SyncReport, WeightSync
from verl.workers.engine_worker import EngineWorker, aggregation, micro_batching, update_micro_batching
from verl.workers.rollout.methods import NO_TIMEOUT, RolloutMethods, rollout_env
from verl.workers.rollout.role import Rollout, bucket_bytes


class ActorWorker(RolloutMethods, EngineWorker):
    """Computes log-probs of the policy and updates it. Also generates, unless the rollout has separate devices.

    Args:
        correction: for losses that read it.
        distillation: the section `distillation.distillation_loss`; None: no distillation.
        hosts_rollout: whether this process also generates.
        **generation: stop_token_ids, stop and tokenizer, as for `Rollout`.
    """

    def __init__(
        self,
        config: schema.ActorRolloutRefConfig,
        *,
        correction: schema.RolloutCorrectionConfig,
        device: str,
        total_training_steps: int,
        pad_token_id: int,
        distillation: Mapping[str, Any] | None = None,
        hosts_rollout: bool = True,
        **generation: Any,
    ):
        self.config = config
        self.checkpoint = config.actor.checkpoint
        self.correction = correction
        self.distillation = distillation
        self.device = resolve_device(device, self.local_rank)
        self.engine: TrainEngine = self.build_engine(
            config.actor.strategy,
            config.model,
            config.actor.engine,
            config.actor.optim,
            device=device,
            total_training_steps=total_training_steps,
            deterministic=config.rollout.deterministic,
            timeout=config.nccl_timeout,
        )
        self.compute_dtype = resolve_dtype(config.actor.engine.dtype, self.device)
        self._sync: WeightSync | None = None  # to rollout ranks with separate devices
        if not hosts_rollout:
            return
        env = rollout_env(
            self,
            config.rollout,
            self.device,
            pad_token_id,
            self.compute_dtype,
            config.actor.engine,
        )
        self.rollout = Rollout(config.rollout, config.model, env, train_engine=self.engine, **generation)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return self.engine.max_over_ranks(values)

    # ---- weights ------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def transfer_address(self) -> tuple[str, int]:
        """A free (host, port) of rank 0, for rollout ranks on separate devices."""
        return self.env["MASTER_ADDR"], free_port()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_to_rollout(self, address: tuple[str, int], size: int) -> None:
        """Join the process group of the weight sync, concurrently with the rollout's `connect_to_actor`. Rank 0 sends;
        the other ranks only take part in gathering the weights."""
        rollout, group = self.config.rollout, None
        if self.rank == 0:
            group = weight_sync.TransferGroup(address, 0, size, self.device, self.config.nccl_timeout or NO_TIMEOUT)
        self._sync = weight_sync.CollectiveSync(
            group, self.compute_dtype, bucket_bytes(rollout), check_every=rollout.check_every
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def push_weights(self, version: int) -> SyncReport:
        """Push the weights to the rollout engine in this process, or to the connected rollout ranks."""
        if self._sync is None:
            return self.rollout.sync_weights(version)
        return self._sync.push(self.engine, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def canary_log_probs(self, batch: DataProto) -> torch.Tensor:
        """The log-probs (B, T) of the same responses on every rank, at temperature 1."""
        return self.engine.infer(batch, ("log_probs",), MicroBatching())["log_probs"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def computes_in_16_bits(self) -> bool:
        """Whether the trainer or the rollout does, so that their log-probs differ more."""
        rollout = self.config.rollout.dtype
        rollout_dtype = self.compute_dtype if rollout == "auto" else resolve_dtype(rollout, self.device)
        return min(self.compute_dtype.itemsize, rollout_dtype.itemsize) < 4

    # ---- log-probs ----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Columns old_log_probs and those of meta_info["outputs"], such as entropys and sum_pi_squared."""
        outputs = ("log_probs", *batch.meta_info["outputs"])
        infer, rollout = self.engine.infer, self.config.rollout
        if "kept_tokens" in outputs:
            outputs = tuple(name for name in outputs if name not in KEPT_TOKENS)
            infer = partial(infer, token_filter=TokenFilter(rollout.top_k, rollout.top_p, rollout.min_p))
        values = _infer(infer, self.config, rollout, batch, outputs)
        values["old_log_probs"] = values.pop("log_probs")
        if (kept := values.get("kept_tokens")) is not None:
            (width,) = self.engine.max_over_ranks([float(kept.shape[1])])
            values["kept_tokens"] = pad(kept, (0, int(width) - kept.shape[1]), value=NO_TOKEN)
        return DataProto.from_dict(values)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob of a LoRA run, whose reference policy is the same model with the adapters disabled."""
        with self.engine.reference():
            return _ref_log_prob(self.engine, self.config, batch)

    # ---- training -----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows, in order. Reads the meta_info of `update_pass`. Without the column
        old_log_probs, the rows must be one mini-batch: the current policy is the old policy."""
        actor = self.config.actor
        settings = {**self.correction.model_dump(), **actor.loss_settings}
        micro = update_micro_batching(actor)
        old_is_current = "old_log_probs" not in batch
        batch.meta_info[REPLAYS] = actor.router_replay.mode != "disabled"
        with self.update_pass(batch, "actor") as update:
            assert len(update.mini_batches) <= 1 or not old_is_current, "after one update the policy is not the old one"
            for mini in update.mini_batches:
                mask = mini.batch["response_mask"]
                agg = aggregation(actor.loss_agg_mode or "token-mean", mask, self.engine, actor.loss_scale_factor)
                loss_mode = actor.policy_loss.loss_mode
                objective = policy_objective(loss_mode, settings, agg, old_is_current, self.distillation)
                update.add(self.engine.train_batch(mini, objective, micro, self.config.rollout.temperature))
        metrics = update.finish()
        if self.device.type != "cuda":
            return metrics
        peaks = [peak_memory(self.device), torch.cuda.max_memory_reserved(self.device)]
        allocated, reserved, used = self.engine.max_over_ranks(
            [size / 2**30 for size in (*peaks, -torch.cuda.mem_get_info(self.device)[0])]
        )
        memory = {"max_memory_allocated_gb": allocated, "max_memory_reserved_gb": reserved, "memory_free_gb": -used}
        return metrics | {f"perf/{name}": size for name, size in memory.items()}


def policy_objective(
    loss_mode: str,
    settings: Mapping[str, Any],
    agg: LossAggregation,
    old_is_current: bool = False,
    distillation: Mapping[str, Any] | None = None,
) -> Objective:
    """`actor_loss` with the model outputs that it reads. See `actor_loss` for the arguments."""
    get_policy_loss_fn(loss_mode)  # an unknown name fails here
    fixed = {"settings": settings, "agg": agg, "old_is_current": old_is_current, "distillation": distillation}
    needs = ("log_probs", "entropys") if settings["entropy_coeff"] or old_is_current else ("log_probs",)
    if distillation is not None and distillation["loss_mode"] == TOP_K:
        needs += ("candidate_log_probs",)
    return Objective(partial(actor_loss, loss_mode=loss_mode, **fixed), needs)


class RefWorker(EngineWorker):
    """The reference policy: the initial weights."""

    def __init__(self, config: schema.ActorRolloutRefConfig, *, device: str):
        self.config = config
        self.engine = self.frozen_engine(config.model, device)

    def frozen_engine(self, model: schema.ModelConfig, device: str) -> TrainEngine:
        """An engine without an optimizer, with the settings of the reference policy."""
        config = self.config
        return self.build_engine(
            config.ref.strategy,
            model,
            config.ref.engine,
            device=device,
            deterministic=config.rollout.deterministic,
            timeout=config.nccl_timeout,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob."""
        return _ref_log_prob(self.engine, self.config, batch)


class TeacherWorker(RefWorker):
    """The frozen teachers of distillation. models: teacher -> its `model` section."""

    def __init__(self, config: schema.ActorRolloutRefConfig, models: Mapping[str, schema.ModelConfig], *, device: str):
        self.config = config
        self.engines = {key: self.frozen_engine(model, device) for key, model in models.items()}
        self.engine = next(iter(self.engines.values()))  # all of them have the same layout

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Column teacher_log_probs of the teacher meta_info["teacher"]; with meta_info[NUM_CANDIDATES], also
        candidate_ids and teacher_candidate_log_probs."""
        names = {"log_probs": "teacher_log_probs"}
        if NUM_CANDIDATES in batch.meta_info:
            names |= {"candidate_ids": "candidate_ids", "candidate_log_probs": "teacher_candidate_log_probs"}
        values = _infer(
            self.engines[batch.meta_info["teacher"]].infer, self.config, self.config.ref, batch, tuple(names)
        )
        return DataProto.from_dict({column: values[name] for name, column in names.items()})


def _ref_log_prob(engine: TrainEngine, config: schema.ActorRolloutRefConfig, batch: DataProto) -> DataProto:
    values = _infer(engine.infer, config, config.ref, batch, ("log_probs",))
    return DataProto.from_dict({"ref_log_prob": values["log_probs"]})


def _infer(
    infer: Callable[..., Tensors], config: schema.ActorRolloutRefConfig, keys: Any, batch: DataProto, outputs: tuple
) -> Tensors:
    """The outputs at the temperature of the rollout, split by the log_prob_* keys of the section `keys`."""
    rows, tokens = keys.log_prob_micro_batch_size_per_gpu, keys.log_prob_max_token_len_per_gpu
    micro = micro_batching(rows, keys.log_prob_use_dynamic_bsz, tokens)
    return infer(batch, outputs, micro, temperature=config.rollout.temperature)
