"""The built-in training engine: a HuggingFace decoder with AdamW, on one device or sharded by FSDP2.

Everything that depends on the number of ranks is in the `Sharding` object. An update:

    columns -> plan (which rows form which micro-batch) -> per micro-batch: input, forward, loss, backward -> step
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.tensor import DTensor

from verl.columns import KEPT_TOKENS
from verl.engines import checkpoint, memory, optimizer
from verl.engines.base import NUM_CANDIDATES, EngineSpec, MicroBatching, Objective, Tensors, TrainEngine
from verl.engines.gathering import gather_tensors, local_shard, shard_of
from verl.engines.loading import ModelSpec, TokenModel, checked, log_padding, resolve_model
from verl.engines.memory import HostMemory, OnDevice, move_module, move_optimizer
from verl.engines.micro_batch import MetricSums, host_columns, join_rows, plan_micro_batches, take_rows
from verl.engines.routing import (
    ROUTED_EXPERTS,
    add_statistics,
    check_routing,
    recorded_experts,
    routing_metrics,
    set_replay,
)
from verl.engines.sharding import Sharding, make_sharding
from verl.engines.token_budget import CACHED_TOKENS, TokenBudget, choose_micro_batching, token_budget
from verl.modeling.attention import attends_in_one_call, is_packed
from verl.modeling.casting import cast_at_use
from verl.modeling.fp8 import use_fp8
from verl.modeling.layers import use_kernels
from verl.modeling.linear import WeightCache
from verl.modeling.moe import RoutingStatistics
from verl.modeling.packing import build_input, padding_reason, row_lengths, to_device
from verl.modeling.token_filter import TokenFilter
from verl.modeling.vision import INDEX, Media, tower_of
from verl.protocol import DataProto
from verl.utils.shards import Shard

if TYPE_CHECKING:
    from verl.engines.lora import Adapters
    from verl.modeling.batch_invariant.model import BatchInvariantForward

logger = logging.getLogger("verl.engines")

_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")


@dataclass(frozen=True)
class _Plan:
    rows: list[list[int]]  # row indices of each micro-batch
    shared_prefix: bool  # compute a prompt once for all its rows
    candidates: int | None = None  # most probable tokens per position, instead of those of the columns
    token_filter: TokenFilter | None = None  # determines the kept tokens, unless the columns have them


@final
class TorchEngine(TrainEngine):
    """A HuggingFace model, with master weights in model_dtype (float32) and computation in compute_dtype.

    Args:
        sharding: layout over the ranks; by default one device.
        model: how to build the model; default: `resolve_model(spec)`.
        module: an existing module instead of loading one; single device only.
    """

    def __init__(
        self,
        spec: EngineSpec,
        sharding: Sharding | None = None,
        *,
        model: ModelSpec | None = None,
        module: torch.nn.Module | None = None,
    ):
        self.spec = spec
        self.sharding = sharding if sharding is not None else Sharding()
        self.model_spec = model if model is not None else resolve_model(spec)
        self.device = spec.device
        self.dp_rank, self.dp_size = self.sharding.dp_rank, self.sharding.dp_size
        self.model_parallel_rank = self.sharding.model_parallel_rank
        trains = spec.optimizer is not None
        self.module = self.sharding.build(self.model_spec) if module is None else checked(module, self.model_spec)
        use_fp8(self.module, spec.model.quantization, self.device)  # after `checked`: rounding enlarges differences
        self.model = TokenModel(self.module, self.model_spec)
        self.packs = is_packed(self.module)
        if spec.model.use_remove_padding and not self.packs and self.sharding.is_first_rank:
            reason = padding_reason(self.module) or "packed rows do not get the logits of each row alone"
            log_padding(type(self.module).__name__, reason)
        self.module.eval()
        self.adapters: Adapters | None = None
        if self.model_spec.section.has_adapters:
            from verl.engines import lora  # at use: imports peft

            self.adapters = lora.Adapters(self.module)
        else:
            self.module.requires_grad_(trains)
        if trains and spec.model.freeze_vision_tower:
            tower_of(self.module)[1].requires_grad_(False)
        self._checkpoints_activations = False
        self._activation_bytes: memory.ActivationBytes | None = None  # measured at the first update
        self._logged_choice = ""
        self._statistics: RoutingStatistics | None = None  # set during an update of a mixture of experts
        if trains:
            self._checkpoint_activations(spec.model.enable_gradient_checkpointing is True)
        self._weight_cache = WeightCache()
        use_kernels(self.module, self.model_spec.kernels, self._weight_cache)
        if self.model_spec.casts_at_use and self.sharding.is_unsharded:
            cast_at_use(self.module, self.model_spec.compute_dtype)
        self.sharding.shard(self.model, self.model_spec)
        self.replicas = (self.sharding.replica,)
        if self.model.vision is not None:
            self.model.vision.always = not self.sharding.is_unsharded
        self._writer = checkpoint.CheckpointWriter()
        self._weights_used: AbstractContextManager[None] = nullcontext()
        self._optimizer_used: AbstractContextManager[None] = nullcontext()
        moves = not spec.engine.offload_policy  # FSDP's own policy keeps the shards in host memory all the time
        if spec.optimizer is not None:
            self._unverified = self.adapters is not None
            self.optimizer = optimizer.make_optimizer(spec.optimizer, self.module, self.device)
            factor = optimizer.lr_multiplier(spec.optimizer, spec.total_training_steps)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
            if moves and spec.engine.optimizer_offload:
                move = partial(move_optimizer, self.optimizer, HostMemory())
                self._optimizer_used = OnDevice(move, self.device)
        if moves and spec.engine.param_offload:
            self._weights_used = OnDevice(partial(move_module, self.model, HostMemory()), self.device)

    # ---- computing ----------------------------------------------------------------------------------------------

    def infer(
        self,
        batch: DataProto,
        outputs: tuple[str, ...],
        micro: MicroBatching,
        temperature: float = 1.0,
        token_filter: TokenFilter | None = None,
    ) -> Tensors:
        names = (*_INPUTS, *set_replay(self.model.routing, batch), *(n for n in KEPT_TOKENS if n in batch))
        columns, media = host_columns(batch, names, self.module.config)
        plan = self._plan(columns, micro, shares_prefix=ROUTED_EXPERTS not in outputs)
        plan = replace(plan, candidates=batch.meta_info.get(NUM_CANDIDATES), token_filter=token_filter)
        chunks = []
        with self.on_device(), torch.no_grad(), self._fixed_weights(training=False):
            for rows in plan.rows:
                micro_outputs = self._forward(take_rows(columns, rows), plan, outputs, temperature, media)
                chunks.append((rows, {k: v.to("cpu", non_blocking=True) for k, v in micro_outputs.items()}))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once, not for every micro-batch
        return join_rows(chunks, len(batch))

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        set_replay(self.model.routing, batch)
        columns, media = host_columns(batch, tuple(batch.tensors), self.module.config)
        sums, losses = MetricSums(), []
        routing = self.model.routing if self.spec.kind == "causal_lm" else None
        self._statistics = RoutingStatistics(routing) if routing is not None else None
        with self.on_device(optimizer=True):
            self.optimizer.zero_grad(set_to_none=True)
            plan = self._plan(columns, micro, training=True)
            with self._fixed_weights(training=True):
                for rows in plan.rows:
                    share = take_rows(columns, rows)
                    outputs = self._forward(share, plan, objective.needs, temperature, media)
                    share = {name: to_device(values, self.device) for name, values in share.items()}
                    loss, metrics = objective.loss(outputs, share)  # verl/algorithms: policy_losses, losses
                    self.sharding.scale_loss(loss).backward()
                    losses.append(loss.detach())
                    sums.add(metrics, rows=len(rows))
            metrics = sums.result(self.max_over_ranks) | self._step(torch.stack(losses).sum())
        statistics, self._statistics = self._statistics, None
        if statistics is not None:
            metrics |= routing_metrics(statistics, self.sharding.sequence_ranks, self.sum_over_ranks)
        return metrics

    def _forward(
        self, columns: Tensors, plan: _Plan, outputs: tuple[str, ...], temperature: float, media: Media | None
    ) -> Tensors:
        """Outputs (b, T) of a micro-batch. The input is built on the host without synchronizing with the device."""
        model_input = build_input(columns, self.packs, plan.shared_prefix, media).with_kept(columns, plan.token_filter)
        if plan.candidates is not None:
            model_input = replace(model_input, candidates=plan.candidates)
        if self.sharding.sequence_ranks is not None:
            model_input = model_input.share_of(self.sharding.sequence_ranks)
        model_input = model_input.to(self.device)
        values_by_name = self.model(model_input, tuple(name for name in outputs if name != ROUTED_EXPERTS), temperature)
        if self._statistics is not None:
            add_statistics(self._statistics, model_input)
        if ROUTED_EXPERTS in outputs:
            values_by_name[ROUTED_EXPERTS] = recorded_experts(self.model.routing, model_input)
        return values_by_name

    def _fixed_weights(self, training: bool) -> AbstractContextManager[None]:
        """Context without weight updates: fused layers may cache casts and, in training, accumulate gradients."""
        unsharded = self.sharding.is_unsharded
        return self._weight_cache.fixed_weights(keep=unsharded, accumulate_gradients=training and unsharded)

    # ---- micro-batches ------------------------------------------------------------------------------------------

    def _plan(
        self, columns: Tensors, micro: MicroBatching, training: bool = False, shares_prefix: bool = True
    ) -> _Plan:
        """Split rows into micro-batches, the same number on every rank."""
        if ROUTED_EXPERTS in columns or not shares_prefix:  # recorded for every token of every row
            check_routing(self.model.routing)
            shares_prefix = False
        lengths = row_lengths(columns["attention_mask"])
        if training:
            micro = self._choose_micro_batching(lengths, micro, INDEX in columns)
        # a prompt is computed once for all its rows if attention processes all rows in one call
        shared_prefix = shares_prefix and self.packs and self.sharding.sp_size == 1
        shared_prefix = shared_prefix and attends_in_one_call(lengths, self.model_spec.compute_dtype, self.device)
        shared, ranks = columns if shared_prefix else None, self.sharding.sp_size
        rows = plan_micro_batches(lengths, micro, shared, ranks, padded=not self.packs)
        return _Plan(self.sharding.equalize(rows), shared_prefix)

    def _choose_micro_batching(self, lengths: list[int], micro: MicroBatching, images: bool = False) -> MicroBatching:
        """Resolve tokens="auto" and activation checkpointing "auto" for an update, from the free memory."""
        is_auto, checkpointing = micro.tokens == "auto", self.spec.model.enable_gradient_checkpointing
        if checkpointing == "auto" and self.adapters is not None and self.adapters.experts:
            checkpointing = True  # W + B A of the experts of every layer would be kept
        if self.device.type == "cpu":
            return MicroBatching(tokens=max(CACHED_TOKENS, *lengths)) if is_auto else micro
        if not (is_auto or checkpointing == "auto"):
            return micro
        budget, longest = self._token_budget(images), -(-max(lengths) // self.sharding.sp_size)
        largest = 0 if is_auto else micro.tokens or (micro.rows or len(lengths)) * longest
        # all ranks must decide alike, so the rank with the least memory decides
        local = [-budget.plain, -budget.checkpointed, longest, largest]
        plain, checkpointed, longest, largest = map(int, self.max_over_ranks([float(value) for value in local]))
        budget = TokenBudget(-plain, -checkpointed)
        tokens, checkpointing_on = choose_micro_batching(None if is_auto else largest, longest, budget, checkpointing)
        choice = "recomputed" if checkpointing_on else "kept"
        if self.sharding.is_first_rank and self._logged_choice != choice:
            self._logged_choice = choice
            logger.info(
                "%s tokens fit with all activations, %s with checkpointing: activations are %s",
                budget.plain,
                budget.checkpointed,
                choice,
            )
        self._checkpoint_activations(checkpointing_on)
        return MicroBatching(tokens=tokens) if is_auto else micro

    def _token_budget(self, images: bool = False) -> TokenBudget:
        """The tokens that fit into free memory, after subtracting everything else that an update allocates."""
        spec, vocabulary = self.model_spec, self.model.vocab_size
        if self._activation_bytes is None:
            self._checkpoint_activations(False)
            with self._fixed_weights(training=False):
                self._activation_bytes = memory.measure_activations(self.probe_forward, self.module, vocabulary)
        free = memory.free_bytes(spec.device)
        free -= memory.update_bytes(self.module.parameters(), self.optimizer)
        if self.sharding.is_unsharded and spec.compute_dtype != spec.model_dtype:
            free -= sum(p.numel() for p in self.module.parameters()) * spec.compute_dtype.itemsize  # cached casts
        free -= memory.logits_bytes(vocabulary, spec.compute_dtype.itemsize, spec.device)
        used, size = self._activation_bytes, spec.compute_dtype.itemsize
        return token_budget(memory.with_images(used, self.module, size) if images else used, free)

    def probe_forward(self, tokens: int) -> Tensors:
        """The outputs of a forward pass over one sequence of `tokens` tokens, to measure its memory."""
        ids = torch.zeros(1, tokens * self.sharding.sp_size, dtype=torch.long)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 1:]}
        columns["position_ids"] = torch.arange(ids.shape[1])[None]
        outputs = ("log_probs",) if self.spec.kind == "causal_lm" else ("values",)
        return self._forward(columns, _Plan([], False), outputs, 1.0, None)

    def _checkpoint_activations(self, on: bool) -> None:
        if on == self._checkpoints_activations:
            return
        self._checkpoints_activations = on
        self.module.train(on)  # transformers checkpoints in training mode only; there is no dropout
        with warnings.catch_warnings():  # its new name does not exist in every supported release of transformers
            warnings.simplefilter("ignore", FutureWarning)
            if on:
                self.module.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                self.module.gradient_checkpointing_disable()

    # ---- optimizer ----------------------------------------------------------------------------------------------

    def _step(self, loss: torch.Tensor) -> dict[str, float]:
        """Clip the gradient and take a step; skip it if gradient or loss (this rank's share) is not finite."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        assert parameters, "no parameter got a gradient: the loss does not depend on the model"
        norm = optimizer.gradient_norm([p.grad for p in parameters])
        if any(self.max_over_ranks([float(~(norm.isfinite() & loss.isfinite()))])):
            logger.warning("the gradient norm is %s, the loss %s: skipping this update", norm.item(), loss.item())
            self.optimizer.zero_grad(set_to_none=True)
            return {"grad_norm": norm.item(), "grad_skipped": 1.0}
        optimizer.clip_gradients([p.grad for p in parameters], norm, self.spec.optimizer.clip_grad)
        before = [p.detach().clone() for p in parameters] if self._unverified else []
        if self.spec.engine.stochastic_rounding and self.model_spec.model_dtype == torch.bfloat16:
            optimizer.step_with_stochastic_rounding(self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if before and norm > 0 and self.schedule.get_last_lr()[0] > 0:
            optimizer.check_change(parameters, before)
            self._unverified = False
        return {"grad_norm": norm.item(), "grad_skipped": 0.0}

    def lr_step(self) -> float:
        rate = self.schedule.get_last_lr()[0]
        with warnings.catch_warnings():  # torch warns about the order of calls if the first update was skipped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.schedule.step()
        return rate

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return self.sharding.sum_over_ranks(values)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return self.sharding.max_over_ranks(values)

    # ---- weights and memory -------------------------------------------------------------------------------------

    @property
    def has_full_weights(self) -> bool:
        """Whether the parameters of `module` are the full weights: unsharded, without adapters."""
        return self.sharding.is_unsharded and self.adapters is None

    def shared_module(self) -> torch.nn.Module | None:
        return self.module if self.has_full_weights else None

    def model_forward(self) -> "BatchInvariantForward | None":
        if not self.model.batch_invariant:
            return None
        from verl.modeling.batch_invariant.model import BatchInvariantForward

        return BatchInvariantForward(self.model)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.rollout_weights(None)

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = self.adapters
        parameters = adapters.merged() if adapters is not None else _detached(self.module.named_parameters())
        return self._gathered(parameters, dtype)

    def shard_layout(self) -> Sequence[Shard] | None:
        return self._shard_layout

    @cached_property
    def _shard_layout(self) -> Sequence[Shard] | None:
        parameters = self.adapters.base() if self.adapters is not None else self.module.named_parameters()
        layout = [shard_of(name, tensor) for name, tensor in parameters]
        return None if None in layout else layout

    def shards(self) -> Iterator[torch.Tensor]:
        with self.on_device():
            if self.adapters is None:
                yield from (local_shard(tensor) for tensor in self.module.parameters())
                return
            for (_, base), (_, merged) in zip(self.adapters.base(), self.adapters.merged()):
                yield local_shard(merged, base)

    def _gathered(
        self, parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with self.on_device():
            yield from gather_tensors(parameters, dtype)

    def reference(self) -> AbstractContextManager[None]:
        if self.adapters is None:
            raise ValueError("all weights are trained, so the initial weights are not available")
        return self.adapters.reference()

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        with self._weights_used, self._optimizer_used if optimizer else nullcontext():
            yield
            self.sharding.free_gathered(self.model)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def non_finite_state(self) -> list[str]:
        tensors = checkpoint.trained_state(self.module, self.optimizer)
        shards = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        broken = self.max_over_ranks([float(is_broken) for is_broken in checkpoint.are_broken(shards)])
        return [name for name, is_broken in zip(tensors, broken) if is_broken]

    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        folder = Path(folder)
        self._writer.finish()
        with self.on_device(optimizer=True):
            shards, full_state = self._state(contents, checkpoint.host_copy if background else checkpoint.on_host)
        self._writer.start(folder, shards, partial(self._write_known, folder, full_state), background)

    def is_saved(self) -> bool:
        return self._writer.is_done()

    def finish_save(self) -> None:
        self._writer.finish()

    def _state(self, contents: tuple[str, ...], keep: Callable[[Any], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shards of this rank, unsharded state), with each tensor passed through `keep`."""
        shards: dict[str, Any] = {}
        full_state: dict[str, Any] = {"huggingface": {}}
        if "hf_model" in contents or ("model" in contents and self.has_full_weights):
            full_state["huggingface"] = self._collect(self.weights(), keep)
            full_state["huggingface"] |= checkpoint.persistent_buffers(self.module, keep)
        if "model" in contents and self.adapters is not None:
            full_state["lora_adapter"] = self._collect(
                self._gathered(_detached(self.adapters.parameters()), None), keep
            )
        elif "model" in contents and not self.has_full_weights:
            shards["model"] = keep(checkpoint.model_state(self.model))
        if "optimizer" in contents:
            shards["optimizer"] = keep(checkpoint.optimizer_state(self.model, self.optimizer))
        if "extra" in contents:
            full_state["extra"] = {"schedule": self.schedule.state_dict()}
        return shards, full_state

    def _collect(self, tensors: Iterable[tuple[str, torch.Tensor]], keep: Callable[[Any], Any]) -> dict[str, Any]:
        """Gather full tensors, kept on the first rank only."""
        collected = {}
        for name, tensor in tensors:
            if self.sharding.is_first_rank:
                collected[name] = keep(tensor)
        return collected

    def _write_known(self, folder: Path, full_state: dict[str, Any]) -> None:
        if not self.sharding.is_first_rank:
            return
        if full_state["huggingface"]:
            # the names of the module, which `load` reads; transformers reads them too
            names = {"save_original_format": False} if self.model.vision is not None else {}
            self.module.save_pretrained(folder / "huggingface", state_dict=full_state["huggingface"], **names)
        else:
            checkpoint.save_description(self.module, folder / "huggingface")
        if "lora_adapter" in full_state:
            self.adapters.save(folder / "lora_adapter", full_state["lora_adapter"])
        if "extra" in full_state:
            torch.save(full_state["extra"], folder / "extra.pt")

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        folder = Path(folder)
        self._writer.finish()
        if not {"model", "hf_model"} & set(contents):
            raise ValueError(
                f"checkpoint.load_contents is {list(contents)}: without model (or hf_model) the run would resume with "
                "its initial weights; add model"
            )
        with self.on_device(optimizer=True):
            if self.adapters is not None:
                self.adapters.load(folder / "lora_adapter")
            else:
                checkpoint.load_model(folder, self.model, self.module)
            if "optimizer" in contents:
                # the moments of the checkpoint, with the learning rate and the decay of this run
                groups = self.optimizer.param_groups
                settings = [{name: value for name, value in g.items() if name != "params"} for g in groups]
                checkpoint.load_optimizer(folder, self.model, self.optimizer)
                for group, own_settings in zip(self.optimizer.param_groups, settings):
                    group.update(own_settings)
        if "extra" in contents:
            # the position in the schedule; its rates and its length are this run's
            schedule, saved = self.schedule, checkpoint.load_extra(folder)["schedule"]
            schedule.load_state_dict({name: value for name, value in saved.items() if name != "base_lrs"})
            rates = [lr * factor(schedule.last_epoch) for lr, factor in zip(schedule.base_lrs, schedule.lr_lambdas)]
            for group, rate in zip(self.optimizer.param_groups, rates):
                group["lr"] = rate
            schedule._last_lr = rates


def make_torch_engine(spec: EngineSpec) -> TorchEngine:
    """Factory of the strategies "fsdp" and "fsdp2"."""
    return TorchEngine(spec, make_sharding(spec))


def _detached(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        yield name, parameter.detach()
