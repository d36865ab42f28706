"""The policy's workers: actor and rollout in one process on the same weights, and the reference."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching, TrainEngine
from verl.protocol import DataProto
from verl.registry import import_module
from verl.rollout.base import Generation, RolloutEngine, SamplingParams
from verl.rollout.stop_strings import StopStrings
from verl.single_controller import Coordinates, Dispatch, register
from verl.utils.device import peak_memory, resolve_device
from verl.workers.engine_worker import EngineWorker, micro_batching
from verl.workers.objectives import aggregation, policy_objective
from verl.workers.rollout_build import make_rollout, sample_ids, sampling_in_mode, sampling_params


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
        self.device = resolve_device(device, self.local_rank)
        self.engine: TrainEngine = self.build_engine(
            config.actor.strategy,
            config.model,
            config.actor.fsdp_config,
            config.actor.optim,
            device=device,
            total_training_steps=total_training_steps,
            deterministic=config.rollout.deterministic,
            timeout=config.nccl_timeout,
        )
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
        with nullcontext() if self.rollout.copies_weights else self.engine.on_device():
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
        """One pass over this rank's rows, in their order; reads the meta_info of `update_pass`.

        Without the column old_log_probs the rows are one mini-batch, whose old policy is the current one.
        """
        actor = self.config.actor
        settings = {**self.correction.model_dump(), **actor.model_dump(), **actor.policy_loss.model_dump()}
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        old_is_current = "old_log_probs" not in batch
        with self.update_pass(batch, "actor") as update:
            only_one = len(update.mini_batches) == 1
            assert only_one or not old_is_current, "the policy of a second update is not the old one"
            for mini in update.mini_batches:
                mask = mini.batch["response_mask"]
                agg = aggregation(actor.loss_agg_mode, mask, self.engine, actor.loss_scale_factor)
                objective = policy_objective(actor.policy_loss.loss_mode, settings, agg, old_is_current)
                update.add(self.engine.train_batch(mini, objective, micro, self.config.rollout.temperature))
                self.version += 1
        metrics = update.finish()
        (peak,) = self.engine.max_over_ranks([peak_memory(self.device) / 2**30])
        memory = {"perf/max_memory_allocated_gb": peak} if self.device.type == "cuda" else {}
        return {**metrics, **memory}


class RefWorker(EngineWorker):
    """The reference policy: the weights that training started from."""

    def __init__(self, config: schema.ActorRolloutRefConfig, *, device: str):
        self.config = config
        self.engine = self.build_engine(
            config.ref.strategy,
            config.model,
            config.ref.fsdp_config,
            device=device,
            deterministic=config.rollout.deterministic,
            timeout=config.nccl_timeout,
        )

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
