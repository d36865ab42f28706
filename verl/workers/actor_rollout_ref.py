"""The policy's workers: actor and rollout in one process on the same weights, and the reference."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, TrainEngine
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.registry import import_module
from verl.rollout.base import Generation, RolloutEngine, SamplingParams
from verl.rollout.stop_strings import StopStrings
from verl.single_controller import Coordinates, Dispatch, register
from verl.utils.device import peak_memory
from verl.workers.build import (
    make_engine,
    make_rollout,
    micro_batching,
    model_config,
    optimizer_config,
    sample_ids,
    sampling_in_mode,
    sampling_params,
)
from verl.workers.engine_worker import EngineWorker
from verl.workers.objectives import aggregation, policy_objective


class ActorRolloutWorker(EngineWorker):
    """Generates with the policy, gives its log-probs, and updates it.

    config: the `actor_rollout_ref` section. correction: `algorithm.rollout_correction`, for losses that read it.
    response_length: tokens of an answer at most. stop_token_ids, stop: its ends.
    """

    def __init__(
        self,
        config: schema.ActorRolloutRefConfig,
        *,
        correction: schema.RolloutCorrectionConfig,
        imports: Sequence[str] = (),
        device: str,
        total_training_steps: int,
        response_length: int,
        pad_token_id: int,
        stop_token_ids: tuple[int, ...],
        stop: StopStrings | None = None,
    ):
        self.config = config
        self.checkpoint = config.actor.checkpoint
        self.correction = correction
        self.sampling = sampling_params(config.rollout, response_length, stop_token_ids, stop)
        self.pad_token_id = pad_token_id
        for address in imports:
            import_module(address)
        section, exact = config.actor.fsdp_config, config.rollout.deterministic
        model = model_config(config.model, section, device, self.local_rank, deterministic=exact)
        self.device = model.device
        optimizer = optimizer_config(config.actor.optim, total_training_steps)
        self.engine: TrainEngine = make_engine(model, section, optimizer, self.world_size, config.nccl_timeout)
        self.rollout: RolloutEngine = make_rollout(self.engine, config.rollout, pad_token_id)
        self.version = 0  # of the weights: the number of updates

    def layout(self, mesh: str | None = None) -> Coordinates:
        """The mesh "rollout" is generation's: each rank answers prompts of its own, whatever it shares in training."""
        return Coordinates(dp=self.rank) if mesh == "rollout" else super().layout(mesh)

    # ---- generating ---------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ND_COMPUTE, mesh="rollout")
    def generate_sequences(self, batch: DataProto) -> DataProto:
        """One answer per row.

        Reads the columns prompt_ids, uid and sample_index (which sample of its prompt a row is), and
        meta_info["sampling"]: "train", "greedy" or "validate".
        """
        prompts = list(batch.non_tensor_batch["prompt_ids"])
        params = sampling_in_mode(self.sampling, batch.meta_info["sampling"], self.config.rollout.val_kwargs)
        answers = self._generate(prompts, params, sample_ids(batch))
        # the ranks' columns are joined, so they agree on the widths
        widest = [float(max(map(len, prompts))), float(max(len(a.token_ids) for a in answers))]
        prompt_width, response_width = (int(width) for width in self.engine.max_over_ranks(widest))
        columns = build_sequences(
            prompts,
            [a.token_ids for a in answers],
            self.pad_token_id,
            prompt_width=prompt_width,
            response_width=response_width,
        )
        log_probs = torch.zeros(columns["responses"].shape)
        log_probs[columns["response_mask"].bool()] = torch.tensor([p for a in answers for p in a.log_probs])
        cut = sum(a.finish_reason == "length" for a in answers)
        tokens = sum(len(a.token_ids) for a in answers)
        metrics = {
            "response_length/clip_ratio": (cut, len(answers)),
            "rollout/tokens_per_second": (tokens, self.rollout.stats.seconds),
        }
        return DataProto.from_dict({**columns, "rollout_log_probs": log_probs}, meta_info={"metrics": metrics})

    def _generate(self, prompts: list[list[int]], params: SamplingParams, ids: list[int]) -> list[Generation]:
        """With the weights of now, and their memory given back where rollout.free_cache_engine says so."""
        self.rollout.wake()
        if self.rollout.copies_weights:
            self.rollout.load_weights(self.engine.weights(), self.version)
        with nullcontext() if self.rollout.copies_weights else self.engine.loaded():
            answers = self.rollout.generate(prompts, params, ids)
        if self.config.rollout.free_cache_engine:
            self.rollout.sleep()
        return answers

    # ---- log-probs ----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys of the current policy; sum_pi_squared too when meta_info["outputs"] names it."""
        rollout = self.config.rollout
        micro = micro_batching(
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
        )
        outputs = ("log_probs", *batch.meta_info["outputs"])
        found = self.engine.infer(batch, outputs, micro, temperature=rollout.temperature)
        found["old_log_probs"] = found.pop("log_probs")
        return DataProto.from_dict(found)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The column ref_log_prob, where adapters are trained: the reference is the same model without them."""
        with self.engine.reference():
            return _ref_log_prob(self.engine, self.config, batch)

    # ---- training -----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows, in the order that they have.

        meta_info["mini_batch_rows"]: rows of one optimizer step, over all ranks. meta_info["last_pass"]: whether the
        learning-rate schedule moves on afterwards (once a training step, however many passes that makes).
        Without the column old_log_probs the rows are one mini-batch, whose old policy is the current one.
        """
        actor = self.config.actor
        settings = {**self.correction.model_dump(), **actor.model_dump(), **actor.policy_loss.model_dump()}
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        sums, old_is_current = MetricSums(), "old_log_probs" not in batch
        with self.engine.loaded(optimizer=True):
            minis = batch.split(batch.meta_info["mini_batch_rows"] // self.engine.dp_size)
            assert len(minis) == 1 or not old_is_current, "the policy of a second update is not the old one"
            for mini in minis:
                mask = mini.batch["response_mask"]
                agg = aggregation(actor.loss_agg_mode, mask, self.engine, actor.loss_scale_factor)
                objective = policy_objective(actor.policy_loss.loss_mode, settings, agg, old_is_current)
                metrics = self.engine.train_batch(mini, objective, micro, self.config.rollout.temperature)
                sums.add({name if "/" in name else f"actor/{name}": value for name, value in metrics.items()})
                self.version += 1
        lr = {"actor/lr": self.engine.lr_step()} if batch.meta_info["last_pass"] else {}
        (peak,) = self.engine.max_over_ranks([peak_memory(self.device) / 2**30])
        memory = {"perf/max_memory_allocated_gb": peak} if self.device.type == "cuda" else {}
        return {**sums.result(), **lr, **memory}


class RefWorker(EngineWorker):
    """The reference policy: the weights that training started from."""

    def __init__(self, config: schema.ActorRolloutRefConfig, *, device: str):
        self.config = config
        section, exact = config.ref.fsdp_config, config.rollout.deterministic
        model = model_config(config.model, section, device, self.local_rank, deterministic=exact)
        self.engine = make_engine(model, section, None, self.world_size, config.nccl_timeout)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The column ref_log_prob."""
        return _ref_log_prob(self.engine, self.config, batch)


def _ref_log_prob(engine: TrainEngine, config: schema.ActorRolloutRefConfig, batch: DataProto) -> DataProto:
    ref = config.ref
    micro: MicroBatching = micro_batching(
        ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
    )
    found = engine.infer(batch, ("log_probs",), micro, temperature=config.rollout.temperature)
    return DataProto.from_dict({"ref_log_prob": found["log_probs"]})
