"""The training engine of `strategy=megatron`.

An update:

    rows -> micro-batches -> megatron-core's pipeline schedule (forward, loss, backward) -> reduce gradients
         -> norm, clipping, optimizer step

Every rank of a pipeline gets the same rows; the last stage computes the outputs, and broadcasts them to the others.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from verl.checkpoints.shard_files import Boxes, BoxSavePlanner
from verl.config import schema
from verl.config.checks.megatron import OPTIMIZER_PLACEMENT
from verl.engines.base import EngineSpec, MicroBatching, Objective, Tensors, TrainEngine
from verl.engines.checkpoint import LARGEST_WEIGHT, CheckpointWriter, load_extra, save_description
from verl.engines.loading import ModelSpec, empty_module
from verl.engines.megatron import convert
from verl.engines.megatron.checkpoint import EngineState
from verl.engines.megatron.checks import check_architecture, check_sizes, refuse_images
from verl.engines.megatron.layout import conversions
from verl.engines.megatron.memory import AutoRecompute, Storages, optimizer_tensors
from verl.engines.megatron.model import TokenGPT
from verl.engines.megatron.routing import StageRouting
from verl.engines.megatron.runtime import check_device, join_groups
from verl.engines.megatron.weight_files import WeightFiles
from verl.engines.megatron.weights import WeightGatherer, WeightShards, global_names, load_weights, mark_shards
from verl.engines.memory import OnDevice
from verl.engines.micro_batch import MetricSums, plan_micro_batches, split_to, take_rows
from verl.engines.optimizer import clip_gradients, lr_multiplier
from verl.engines.parallel import reduce_values
from verl.engines.routing import ROUTED_EXPERTS, check_routing, set_replay
from verl.modeling.attention import attends_in_one_call
from verl.modeling.huggingface import read_config
from verl.modeling.packing import ModelInput, build_input, row_lengths, to_device
from verl.modeling.sequence_parallel import SequenceRanks
from verl.protocol import DataProto
from verl.utils.device import resolve_dtype
from verl.utils.shards import Shard

logger = logging.getLogger("verl.engines")

_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")


@dataclass(frozen=True)
class _MicroBatch:
    """Rows of a batch, their columns on the host, and the input of the forward pass."""

    rows: list[int]
    columns: Tensors
    model_input: ModelInput


@final
class MegatronEngine(TrainEngine):
    """A megatron-core GPT model with AdamW. `spec.engine` is the `megatron` section."""

    gathers_one_by_one = True

    def __init__(self, spec: EngineSpec):
        if not isinstance(spec.engine, schema.MegatronConfig):
            raise ValueError(f"strategy=megatron: expected a megatron section, found {type(spec.engine).__name__}")
        check_device(spec.device)
        self.spec, self.section, self.device = spec, spec.engine, spec.device
        self.hf = read_config(spec.model.path, spec.model.override_config, spec.model.trust_remote_code)
        _check_settings(spec)
        check_architecture(self.hf, spec.model.path)
        check_sizes(self.hf, self.section)
        self.ranks = ranks = join_groups(spec, self.section)
        self.dp_rank, self.dp_size = ranks.d, ranks.d_size
        self.model_parallel_rank = ranks.c * ranks.t_size + ranks.t
        self.pipeline_rank = ranks.p
        self.replicas = ranks.replicas
        self.dtype = resolve_dtype(self.section.dtype, spec.device)
        checkpointing = spec.optimizer is not None and spec.model.enable_gradient_checkpointing
        self.config = convert.decoder_config(self.hf, self.section, ranks, self.dtype, checkpointing is True)
        # frees outputs that are sent; a GPU's stream still has them then, a send of gloo has not
        self.config.deallocate_pipeline_outputs = spec.device.type == "cuda"
        self._table = conversions(self.hf, spec.kind)
        self.chunks = self._build()
        load_weights(self.chunks, self._table, WeightFiles(spec.model.path), ranks)
        self._gatherer = WeightGatherer(self.chunks, self._table, ranks)
        self._shards = WeightShards(self.chunks, self._table, ranks)
        self._stages: list[Any] = list(self.chunks)
        self._routing = StageRouting(self.chunks, self.hf, ranks) if self.config.num_moe_experts else None
        self._writer = CheckpointWriter()
        self.steps = 0  # position in the learning-rate schedule
        self.optimizer: Any = None
        if spec.optimizer is not None:
            self._prepare_training(spec.optimizer)
        self._prepare_offload()
        self._sequence_ranks = None
        if ranks.c_size > 1:
            self._sequence_ranks = SequenceRanks(ranks.groups.get_context_parallel_group(), ranks.c, ranks.c_size)
        self._recompute = None
        is_open = self.section.override_transformer_config.recompute_granularity is None
        if checkpointing == "auto" and is_open and spec.device.type == "cuda":
            self._recompute = AutoRecompute(self.chunks, ranks, self._sequence_ranks)

    def _build(self) -> list[TokenGPT]:
        """This stage's chunks of the model, on the device."""
        p, size = self.ranks.p, self.ranks.p_size
        virtual = self.section.virtual_pipeline_model_parallel_size
        chunks = []
        for i in range(virtual or 1):
            chunk = TokenGPT(
                self.config,
                self.hf,
                self.spec.kind,
                pre_process=p == 0 and i == 0,
                post_process=p == size - 1 and i == (virtual or 1) - 1,
                vp_stage=i if virtual else None,
            )
            chunk.model_type = ModelType.encoder_or_decoder
            chunk.requires_grad_(self.spec.optimizer is not None)
            mark_shards([chunk], self._table)
            chunks.append(chunk.to(self.device))
        return chunks

    def _prepare_training(self, optim: schema.OptimConfig) -> None:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.section.use_distributed_optimizer
        )
        self._stages = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = lambda stages, *_, **__: finalize_model_grads(stages)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
                clip_grad=optim.clip_grad,
                use_distributed_optimizer=self.section.use_distributed_optimizer,
            ),
            self._stages,
            config_overrides={},  # the same weight decay for all parameters, as in the other engines
            use_gloo_process_groups=False,
        )
        self._lr_factor = lr_multiplier(optim, self.spec.total_training_steps)
        self._set_lr()

    # ---- memory -------------------------------------------------------------------------------------------------

    def _prepare_offload(self) -> None:
        """Move the weights, gradients and optimizer state that are offloaded between phases to the host."""
        weights = [p for chunk in self.chunks for p in chunk.parameters()]
        self._weights_used: list[OnDevice] = []
        self._update_used: list[OnDevice] = []
        if self.optimizer is not None and self.section.optimizer_offload:
            storages = Storages(lambda: optimizer_tensors(self.optimizer, weights))
            self._update_used.append(OnDevice(storages.move, self.device))
        if self.optimizer is not None and self.section.grad_offload:
            buffers = [x for stage in self._stages for x in (*stage.buffers, *stage.expert_parallel_buffers)]
            storages = Storages(lambda: [buffer.grad_data for buffer in buffers], keep=False)
            self._update_used.append(OnDevice(storages.move, self.device))
        if self.section.param_offload:
            self._weights_used.append(OnDevice(Storages(lambda: weights).move, self.device))

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        with ExitStack() as used:
            for each in (*self._weights_used, *(self._update_used if optimizer else ())):
                used.enter_context(each)
            yield

    # ---- computing ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        refuse_images(batch.non_tensor_batch)
        names = (*_INPUTS, *set_replay(self._routing, batch))
        columns = {name: batch.column(name).cpu() for name in names}
        records = ROUTED_EXPERTS in outputs
        micro_batches = self._micro_batches(columns, micro, shares_prefix=not records)
        routing = check_routing(self._routing) if records else self._routing
        result_names = tuple(name for name in outputs if name != ROUTED_EXPERTS) or ("log_probs",)
        gathered = torch.zeros(len(result_names), *columns["responses"].shape, dtype=torch.float32, device=self.device)

        def make_store(computed: Tensors, micro_batch: _MicroBatch) -> Callable:
            def store(_: Any, non_loss_data: bool) -> None:
                for i, name in enumerate(result_names):
                    gathered[i, micro_batch.rows] = computed[name].to(gathered.dtype)

            return store

        if routing is not None:
            routing.begin(columns.get(ROUTED_EXPERTS), records=records)
        with self.on_device():
            self._run(micro_batches, result_names, temperature, make_store, forward_only=True)
        if self.ranks.p_size > 1:
            pipeline = self.ranks.groups.get_pipeline_model_parallel_group()
            dist.broadcast(gathered, self.ranks.last_stage(), group=pipeline)
        result = {name: values for name, values in zip(result_names, gathered.cpu()) if name in outputs}
        if records:
            rows, inputs = zip(*((micro_batch.rows, micro_batch.model_input) for micro_batch in micro_batches))
            result[ROUTED_EXPERTS] = routing.recorded(rows, inputs)
        return result

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        refuse_images(batch.non_tensor_batch)
        set_replay(self._routing, batch)
        columns = {name: batch.column(name).cpu() for name in batch.tensors}
        micro_batches = self._micro_batches(columns, micro, shares_prefix=not self._has_router_losses)
        sums, routing = MetricSums(), self._routing

        def loss_of(outputs: Tensors, micro_batch: _MicroBatch) -> Callable:
            def compute(_: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
                columns = {name: to_device(values, self.device) for name, values in micro_batch.columns.items()}
                loss, metrics = objective.loss(outputs, columns)
                sums.add(metrics, rows=len(micro_batch.rows))
                return loss, torch.zeros((), dtype=torch.int, device=self.device), None

            return compute

        self._set_router_losses(micro_batches)
        with self.on_device(optimizer=True):
            if self._recompute is not None:
                tokens = [micro_batch.model_input.input_ids.shape[1] for micro_batch in micro_batches]
                self._recompute.choose(tokens, self.optimizer, self.max_over_ranks)
            if routing is not None:
                routing.begin(columns.get(ROUTED_EXPERTS), trains=True, counts=self.spec.kind == "causal_lm")
            for stage in self._stages:
                stage.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(micro_batches, objective.needs, temperature, loss_of, forward_only=False)
            metrics = self._shared_metrics(sums) | self._step()
        if routing is not None and routing.counts:
            metrics |= routing.metrics(self.sum_over_ranks)
        return metrics

    def _run(
        self,
        micro_batches: list[_MicroBatch],
        outputs: tuple[str, ...],
        temperature: float,
        consume: Callable[[Tensors, _MicroBatch], Callable],
        forward_only: bool,
    ) -> None:
        """Run megatron-core's schedule. `consume` makes the function that the last stage calls with its outputs."""

        def forward_step(iterator: Iterator[_MicroBatch], stage: Any) -> tuple[Any, Callable]:
            micro_batch = next(iterator)
            output = stage(micro_batch.model_input, outputs, temperature)
            # the schedule asks the output for its device
            return output if isinstance(output, torch.Tensor) else output[outputs[0]], partial(
                consume(output, micro_batch)
            )

        schedule = get_forward_backward_func()
        iterators = [iter(micro_batches) for _ in self._stages]
        longest = max(micro_batch.model_input.input_ids.shape[1] for micro_batch in micro_batches)
        schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._stages if len(self._stages) > 1 else self._stages[0],
            num_microbatches=len(micro_batches),
            seq_length=longest * self.ranks.c_size,  # over all context-parallel ranks
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @property
    def _has_router_losses(self) -> bool:
        """Whether the loss has terms of the routers: means over all tokens, a prompt counts for each of its rows."""
        section = self.section.override_transformer_config
        return self.config.num_moe_experts is not None and bool(section.moe_aux_loss_coeff or section.moe_z_loss_coeff)

    def _set_router_losses(self, micro_batches: list[_MicroBatch]) -> None:
        """Set the coefficients of the experts' auxiliary losses, of which the mini-batch gets the mean over tokens.

        megatron-core multiplies the loss of a micro-batch by the tokens of a rank.
        """
        if not self._has_router_losses:
            return
        section = self.section.override_transformer_config
        local = sum(micro_batch.model_input.input_ids.shape[1] for micro_batch in micro_batches)
        (total,) = self.sum_over_ranks([local])  # over data-parallel ranks, of the share of a context-parallel rank
        share = self.ranks.t_size / total
        self.config.moe_aux_loss_coeff = section.moe_aux_loss_coeff * share
        if section.moe_z_loss_coeff is not None:
            self.config.moe_z_loss_coeff = section.moe_z_loss_coeff * share

    def _micro_batches(self, columns: Tensors, micro: MicroBatching, shares_prefix: bool) -> list[_MicroBatch]:
        """Split rows into micro-batches. shares_prefix: a prompt may be computed once for all its rows."""
        lengths = row_lengths(columns["attention_mask"])
        shares_prefix = (
            shares_prefix
            and ROUTED_EXPERTS not in columns  # recorded for every token of every row
            and self.ranks.c_size == 1
            and attends_in_one_call(lengths, self.dtype, self.device)
        )
        chunks = plan_micro_batches(lengths, micro, columns if shares_prefix else None, self.ranks.c_size)
        chunks = split_to(chunks, self._number_of_micro_batches(len(chunks)))
        micro_columns = [take_rows(columns, rows) for rows in chunks]
        inputs = [build_input(c, remove_padding=True, shared_prefix=shares_prefix) for c in micro_columns]
        multiple = self.ranks.c_size * self.ranks.t_size
        if not self.config.variable_seq_lengths:
            longest = max(x.input_ids.shape[1] for x in inputs)
            multiple *= -(-longest // multiple)
        inputs = [x.padded_to(multiple) for x in inputs]
        if self._sequence_ranks is not None:
            inputs = [x.share_of(self._sequence_ranks) for x in inputs]
        inputs = [x.to(self.device) for x in inputs]
        return [_MicroBatch(*fields) for fields in zip(chunks, micro_columns, inputs)]

    def _number_of_micro_batches(self, minimum: int) -> int:
        """`minimum` or more: a multiple of interleaved stages, the same on ranks that exchange tokens for experts."""
        if self.config.num_moe_experts is not None:
            minimum = int(self.max_over_ranks([float(minimum)])[0])
        stages = self.ranks.p_size if self.section.virtual_pipeline_model_parallel_size else 1
        return -(-minimum // stages) * stages

    def _shared_metrics(self, sums: MetricSums) -> dict[str, Any]:
        """The metrics of the last stage, on all stages."""
        group = self.ranks.groups.get_data_parallel_group()
        metrics = [sums.result(lambda values: reduce_values(values, dist.ReduceOp.MAX, self.device, group))]
        if self.ranks.p_size > 1:
            pipeline = self.ranks.groups.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(metrics, self.ranks.last_stage(), group=pipeline, device=self.device)
        return metrics[0]

    # ---- optimizer ----------------------------------------------------------------------------------------------

    def _step(self) -> dict[str, float]:
        """Clip the gradient and take an optimizer step; skip it if the gradient is not finite."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            logger.warning("the gradient norm is %s: skipping this update", norm)
            return {"grad_norm": norm, "grad_skipped": 1.0}
        optimizers = self.optimizer.chained_optimizers  # experts with separate ranks have another optimizer
        gradients = [p.grad for part in optimizers for p in part.get_parameters() if p.grad is not None]
        if gradients:
            clip_gradients(gradients, gradients[0].new_tensor(norm), self.spec.optimizer.clip_grad)
        self.optimizer.step_with_ready_grads()
        return {"grad_norm": norm, "grad_skipped": 0.0}

    def _set_lr(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.optimizer.lr * self._lr_factor(self.steps)

    def lr_step(self) -> float:
        rate = self.spec.optimizer.lr * self._lr_factor(self.steps)
        self.steps += 1
        self._set_lr()
        return rate

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.SUM, self.device, self.ranks.groups.get_data_parallel_group())

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_values(values, dist.ReduceOp.MAX, self.device, dist.group.WORLD)

    # ---- weights ------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.on_device():
            yield from self._gatherer.gather()

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        with self.on_device():
            yield from self._gatherer.gather(dtype=dtype)

    def shard_layout(self) -> Sequence[Shard]:
        return self._shards.layout

    def shards(self) -> Iterator[torch.Tensor]:
        with self.on_device():
            yield from self._shards.read()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self.chunks[0].rotary.named_buffers():
            yield f"model.rotary_emb.{name}", buffer

    def reference(self) -> AbstractContextManager[None]:
        raise ValueError("strategy=megatron trains all weights, so the initial weights are not available")

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def non_finite_state(self) -> list[str]:
        parameters = global_names(self.chunks)
        names = [conversion.name for conversion in self._table]
        with self.on_device():
            broken = [
                float(name in parameters and not parameters[name].abs().max() <= LARGEST_WEIGHT) for name in names
            ]
        return [name for name, is_broken in zip(names, self.max_over_ranks(broken)) if is_broken]

    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        folder, state = Path(folder), self._state()
        shards: Boxes = {}
        with self.on_device(optimizer="optimizer" in contents):
            if "model" in contents:
                shards |= state.weights()
            if "optimizer" in contents:
                shards |= state.optimizer_state()
        full: Tensors = {}
        for name, tensor in self.weights() if "hf_model" in contents else ():
            if self.ranks.is_first_rank:
                full[name] = tensor.cpu()
        steps = self.steps

        def write_files() -> None:
            if not self.ranks.is_first_rank:
                return
            module = empty_module(ModelSpec(self.spec.model, self.spec.kind, model_dtype=self.dtype))
            if full:
                module.save_pretrained(folder / "huggingface", state_dict=full)
            else:
                save_description(module, folder / "huggingface")
            if "extra" in contents:
                torch.save({"steps": steps}, folder / "extra.pt")

        self._writer.start(folder, shards, write_files, background, BoxSavePlanner())
        if not background:
            dist.barrier()

    def _state(self) -> EngineState:
        return EngineState(self.chunks, self._table, self.ranks, self.optimizer)

    def is_saved(self) -> bool:
        return self._writer.is_done()

    def finish_save(self) -> None:
        self._writer.finish()

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        folder = Path(folder)
        if "model" not in contents:
            raise ValueError(f"checkpoint.load_contents is {list(contents)}: strategy=megatron needs model in it")
        with self.on_device(optimizer=True):
            self._state().load(folder, with_optimizer="optimizer" in contents and self.optimizer is not None)
        if self.optimizer is not None and "extra" in contents:
            self.steps = load_extra(folder)["steps"]
            self._set_lr()


def _check_settings(spec: EngineSpec) -> None:
    """Raise ValueError for settings that the engine does not support."""
    unsupported = {
        "LoRA adapters (model.lora_rank, model.lora_adapter_path)": spec.model.has_adapters,
        "model.use_liger": spec.model.use_liger,
        "rollout.deterministic": spec.deterministic,
        "a reward model": spec.kind == "reward",
        "optim.override_optimizer_config": bool(_optimizer_keys(spec)),
        f"megatron.dtype={spec.engine.dtype}": spec.engine.dtype in ("fp64", "float64", "fp16", "float16"),
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ValueError(f"strategy=megatron does not support {name}: remove it, or use strategy=fsdp")


def _optimizer_keys(spec: EngineSpec) -> set[str]:
    """Keys of `optim.override_optimizer_config` that change results; the others are named in the log."""
    keys = set(spec.optimizer.override_optimizer_config or ()) if spec.optimizer is not None else set()
    if without_effect := sorted(keys & OPTIMIZER_PLACEMENT):
        logger.info(
            "optim.override_optimizer_config: %s: no effect with strategy=megatron (use megatron.optimizer_offload)",
            ", ".join(without_effect),
        )
    return keys - OPTIMIZER_PLACEMENT
