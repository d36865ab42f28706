"""The training engine of one device: a HuggingFace causal language model, or a critic on the same trunk."""

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.engines import checkpoint, memory
from verl.engines.base import MicroBatching, Objective, OptimizerConfig, Tensors, TrainEngine
from verl.engines.checkpoint import CheckpointWriter
from verl.engines.distributed import clip_gradients, full_tensor, gradient_norm
from verl.engines.loading import ModelConfig, TokenModel, checked, load_checked
from verl.engines.lora import Adapters
from verl.engines.metrics import MetricSums
from verl.engines.micro_batch import plan
from verl.engines.offload import OffloadConfig, OnDevice, move_optimizer
from verl.modeling import attention
from verl.modeling.batch_invariant.model import Forward
from verl.modeling.layers import use_kernels
from verl.modeling.linear import Phase
from verl.modeling.packing import ModelInput, build_input, row_lengths, to_device
from verl.modeling.sequence_parallel import SequenceRanks
from verl.protocol import DataProto

logger = logging.getLogger("verl.engines")

#: tokens of an update's micro-batch on a CPU: the fewer, the more of what they leave for the backward pass is in caches
CACHED_TOKENS = 5120

_READS = ("input_ids", "attention_mask", "position_ids", "responses")


class HFEngine(TrainEngine):
    """One device, one model. Parameters in model_dtype (float32 masters), compute in compute_dtype."""

    #: how many ranks share the tokens of a row, and the way between them
    ranks_of_a_row: int = 1
    sequence_ranks: SequenceRanks | None = None
    #: whether parameters are all here, and their gradients nobody else's business
    all_here: bool = True

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        module: torch.nn.Module | None = None,
        offload: OffloadConfig | None = None,
    ):
        """optimizer: None builds a model for inference only. module: a ready model instead of loading one."""
        offload = offload or OffloadConfig()
        self.config = config
        self.optimizer_config = optimizer
        self.module = self._build() if module is None else checked(module, config.kind)
        self.model = TokenModel(self.module, config)
        self.module.eval()
        self.adapters = Adapters(self.module) if config.lora is not None else None
        if self.adapters is None:
            self.module.requires_grad_(optimizer is not None)
        self._checkpointing = False
        self._kept: memory.Kept | None = None  # what tokens cost, measured at the first update
        self._said = ""
        if optimizer is not None:
            self._checkpoint(config.gradient_checkpointing is True)
        self._phase = Phase()
        use_kernels(self.module, config.kernels, self._phase)
        self._distribute()
        self._writer = CheckpointWriter()
        self._weights_used: AbstractContextManager[None] = nullcontext()
        self._optimizer_used: AbstractContextManager[None] = nullcontext()
        if optimizer is not None:
            self._unproven = self.adapters is not None
            if self.adapters is not None and self.is_first:
                logger.info("adapters: %s", self.adapters.describe())
            self.optimizer = make_optimizer(optimizer, self.module, config.device)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_multiplier(optimizer))
            if offload.optimizer:
                self._optimizer_used = OnDevice(partial(move_optimizer, self.optimizer), config.device)
        if offload.params:
            self._weights_used = OnDevice(self.model.to, config.device)

    def _build(self) -> torch.nn.Module:
        return load_checked(self.config)

    def _distribute(self) -> None:
        """Spread the model over ranks; one device holds it whole."""

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        with self._weights_used, self._optimizer_used if optimizer else nullcontext():
            yield

    # ---- computing ----------------------------------------------------------------------------------------------

    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        columns = _columns(batch, _READS)
        lengths = row_lengths(columns["attention_mask"])
        shares = self._shares_prompts(lengths)
        found = {name: torch.zeros(columns["responses"].shape, dtype=torch.float32) for name in outputs}
        pieces = []
        with self.loaded(), torch.no_grad(), self._weights_stay(training=False):
            for rows in self._plan(lengths, micro, columns if shares else None):
                given = self.model(self._input(columns, rows, shares), outputs, temperature)
                pieces.append((rows, {k: v.float().to("cpu", non_blocking=True) for k, v in given.items()}))
        if self.config.device.type == "cuda":
            torch.cuda.synchronize(self.config.device)  # once, not for every piece
        for rows, given in pieces:
            for name, values in given.items():
                found[name][rows] = values
        return found

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        columns = _columns(batch, tuple(batch.tensors))
        lengths = row_lengths(columns["attention_mask"])
        shares = self._shares_prompts(lengths)
        sums = MetricSums()
        with self.loaded(optimizer=True):
            self.optimizer.zero_grad(set_to_none=True)
            micro = self._fitted(lengths, micro)
            with self._weights_stay(training=True):
                for rows in self._plan(lengths, micro, columns if shares else None):
                    share = {name: values[rows] for name, values in columns.items()}
                    outputs = self.model(self._input(share, None, shares), objective.needs, temperature)
                    share = {name: to_device(values, self.config.device) for name, values in share.items()}
                    loss, metrics = objective.loss(outputs, share)
                    self._backward(loss)
                    sums.add(metrics, rows=len(rows))
            return sums.result(self.max_over_ranks) | self._step()

    def _weights_stay(self, training: bool) -> AbstractContextManager[None]:
        """A phase in which fused layers may keep what they make of the weights, and in training add up gradients."""
        return self._phase(keep=self.all_here, add_gradients=training and self.all_here)

    def _plan(self, lengths: list[int], micro: MicroBatching, columns: Tensors | None) -> list[list[int]]:
        """Row indices of each micro-batch. columns: as `plan` has them."""
        return plan(lengths, micro, columns)

    def _shares_prompts(self, lengths: list[int]) -> bool:
        """Whether rows with the same prompt compute it once: where attention takes all rows in one call."""
        config = self.config
        if not config.use_remove_padding or self.ranks_of_a_row > 1:
            return False
        in_one_call = config.compute_dtype.itemsize == 2 and sum(lengths) < attention.LONG_ROWS * len(lengths)
        return config.device.type == "cpu" or in_one_call

    def _fitted(self, lengths: list[int], micro: MicroBatching) -> MicroBatching:
        """How to cut an update and, where that is left open, whether activations are kept: as free memory allows."""
        config, is_open = self.config, micro.tokens == "auto"
        if config.device.type == "cpu":
            return MicroBatching(tokens=max(CACHED_TOKENS, *lengths)) if is_open else micro
        if not (is_open or config.gradient_checkpointing == "auto"):
            return micro
        room, longest = self._room(), -(-max(lengths) // self.ranks_of_a_row)
        largest = 0 if is_open else micro.tokens or (micro.rows or len(lengths)) * longest
        said = [-room.plain, -room.checkpointed, longest, largest]  # all ranks decide alike: by the tightest of them
        plain, checkpointed, longest, largest = map(int, self.max_over_ranks([float(value) for value in said]))
        room = memory.Room(-plain, -checkpointed)
        budget, again = memory.settle(None if is_open else largest, longest, room, config.gradient_checkpointing)
        words = "computed again" if again else "kept"
        if self.is_first and self._said != words:
            self._said = words
            logger.info("%s tokens fit with all activations, %s without: they are %s", room.plain, -checkpointed, words)
        self._checkpoint(again)
        return MicroBatching(tokens=budget) if is_open else micro

    def _room(self) -> memory.Room:
        """The tokens that fit into the memory that is free now, an update's needs beside them taken off."""
        config, vocabulary = self.config, self.model.vocab_size
        if self._kept is None:
            self._checkpoint(False)
            with self._weights_stay(training=False):
                self._kept = memory.measure_kept(self._trial, self.module, vocabulary)
        free = memory.free_bytes(config.device)
        free -= memory.update_bytes(self.module.parameters(), self.optimizer)
        if self.all_here and config.compute_dtype != config.model_dtype:
            free -= sum(p.numel() for p in self.module.parameters()) * config.compute_dtype.itemsize  # copies in it
        return memory.room(
            self._kept, free - memory.logits_bytes(vocabulary, config.compute_dtype.itemsize, config.device)
        )

    def _trial(self, tokens: int) -> Tensors:
        """The outputs of a forward pass over so many tokens, one row."""
        ids = torch.zeros(1, tokens * self.ranks_of_a_row, dtype=torch.long)
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 1:]}
        rows["position_ids"] = torch.arange(ids.shape[1])[None]
        outputs = ("values",) if self.config.kind == "value" else ("log_probs",)
        return self.model(self._input(rows, None), outputs, 1.0)

    def _checkpoint(self, on: bool) -> None:
        """Compute activations again in the backward pass from here on, or keep them."""
        if on == self._checkpointing:
            return
        self._checkpointing = on
        self.module.train(on)  # transformers checkpoints in this mode alone; there is no dropout
        with warnings.catch_warnings():  # its new name is not known to every supported release of transformers
            warnings.simplefilter("ignore", FutureWarning)
            if on:
                self.module.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                self.module.gradient_checkpointing_disable()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _step(self) -> dict[str, float]:
        """Clip, and step unless the gradient is broken."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        assert parameters, "no parameter got a gradient: the loss does not depend on the model"
        norm = gradient_norm([p.grad for p in parameters])
        if not torch.isfinite(norm):
            logger.warning("the gradient's norm is %s: this update is skipped", norm.item())
            self.optimizer.zero_grad(set_to_none=True)
            return {"grad_norm": norm.item(), "grad_skipped": 1.0}
        if self.optimizer_config.clip_grad is not None:
            clip_gradients([p.grad for p in parameters], norm, self.optimizer_config.clip_grad)
        before = [p.detach().clone() for p in parameters] if self._unproven else []
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if before and norm > 0 and self.schedule.get_last_lr()[0] > 0:
            self._check_change(parameters, before)
        return {"grad_norm": norm.item(), "grad_skipped": 0.0}

    def _check_change(self, parameters: list[torch.nn.Parameter], before: list[torch.Tensor]) -> None:
        """The first update of adapters must have changed them: training that changes nothing looks like training."""
        changed = any(not torch.equal(full_tensor(p.detach()), full_tensor(old)) for p, old in zip(parameters, before))
        if not changed:
            raise RuntimeError("an update with a gradient changed none of the trained parameters")
        self._unproven = False

    def _input(self, columns: Tensors, rows: list[int] | None, shares: bool = False) -> ModelInput:
        """What the model reads of some rows, None for all; put together on the host, which waits for no device then."""
        chosen = {k: columns[k] if rows is None else columns[k][rows] for k in _READS}
        whole = build_input(chosen, self.config.use_remove_padding, shares)
        own = whole if self.sequence_ranks is None else whole.share_of(self.sequence_ranks)
        return own.to(self.config.device)

    def lr_step(self) -> float:
        rate = self.schedule.get_last_lr()[0]
        with warnings.catch_warnings():  # torch takes a first update that was skipped for a mistake in the order
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.schedule.step()
        return rate

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return list(values)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return list(values)

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        return self.adapters is None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what all ranks know."""
        return True

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.loaded():
            if self.adapters is not None:
                yield from self.adapters.weights()
                return
            for name, parameter in self.module.named_parameters():
                yield name, full_tensor(parameter.detach())

    def shared_module(self) -> torch.nn.Module | None:
        return self.module if self.all_here else None

    def model_forward(self) -> Forward | None:
        return Forward(self.model) if self.config.kernels == "invariant" else None

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers()

    def reference(self) -> AbstractContextManager[None]:
        if self.adapters is None:
            raise ValueError("all weights are trained: the model that training started from is not there any more")
        return self.adapters.reference()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        folder = Path(folder)
        self._writer.finish()
        with self.loaded(optimizer=True):
            shards, known = self._state(contents, checkpoint.host_copy if background else _on_host)
        self._writer.start(folder, shards, partial(self._write_known, folder, known), background)

    def is_saved(self) -> bool:
        return self._writer.is_done()

    def finish_save(self) -> None:
        self._writer.finish()

    def _state(self, contents: tuple[str, ...], keep: Callable[[Any], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's shards and what all ranks know, each tensor as `keep` makes it of what is in use."""
        shards: dict[str, Any] = {}
        known: dict[str, Any] = {"huggingface": {}}
        if "hf_model" in contents or ("model" in contents and self.whole):
            known["huggingface"] = self._collect(self.weights(), keep) | _persistent_buffers(self.module, keep)
        if "model" in contents and self.adapters is not None:
            known["lora_adapter"] = self._collect(self.adapters.tensors(), keep)
        elif "model" in contents and not self.whole:
            shards["model"] = keep(checkpoint.model_state(self.model))
        if "optimizer" in contents:
            shards["optimizer"] = keep(checkpoint.optimizer_state(self.model, self.optimizer))
        if "extra" in contents:
            known["extra"] = {"schedule": self.schedule.state_dict()}
        return shards, known

    def _collect(self, tensors: Iterable[tuple[str, torch.Tensor]], keep: Callable[[Any], Any]) -> dict[str, Any]:
        """Whole tensors, kept by the first rank; the others only help to gather them."""
        kept = {}
        for name, tensor in tensors:
            if self.is_first:
                kept[name] = keep(tensor)
        return kept

    def _write_known(self, folder: Path, known: dict[str, Any]) -> None:
        if not self.is_first:
            return
        if known["huggingface"]:
            self.module.save_pretrained(folder / "huggingface", state_dict=known["huggingface"])
        else:
            checkpoint.save_description(self.module, folder / "huggingface")
        if "lora_adapter" in known:
            self.adapters.save(folder / "lora_adapter", known["lora_adapter"])
        if "extra" in known:
            torch.save(known["extra"], folder / "extra.pt")

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        folder = Path(folder)
        self._writer.finish()
        if not {"model", "hf_model"} & set(contents):
            raise ValueError(
                f"checkpoint.load_contents is {list(contents)}: without model (or hf_model) the run would go on with "
                "the weights that it began with"
            )
        with self.loaded(optimizer=True):
            if self.adapters is not None:
                self.adapters.load(folder / "lora_adapter")
            else:
                checkpoint.load_model(folder, self.model, self.module)
            if "optimizer" in contents:
                # the moments of the checkpoint, with the learning rate and the decay that this run asks for
                groups = self.optimizer.param_groups
                settings = [{name: value for name, value in g.items() if name != "params"} for g in groups]
                checkpoint.load_optimizer(folder, self.model, self.optimizer)
                for group, own in zip(self.optimizer.param_groups, settings):
                    group.update(own)
        if "extra" in contents:
            # where the schedule stands; the rates are this run's, and so is the step at which it ends
            schedule, saved = self.schedule, _read(folder / "extra.pt")["schedule"]
            schedule.load_state_dict({name: value for name, value in saved.items() if name != "base_lrs"})
            rates = [lr * factor(schedule.last_epoch) for lr, factor in zip(schedule.base_lrs, schedule.lr_lambdas)]
            for group, rate in zip(self.optimizer.param_groups, rates):
                group["lr"] = rate
            schedule._last_lr = rates


def make_optimizer(config: OptimizerConfig, module: torch.nn.Module, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained. Raises ValueError for an argument that it does not have."""
    named = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    further = dict(config.further)
    known = set(inspect.signature(torch.optim.AdamW).parameters) - {"params", "lr", "betas", "weight_decay"}
    if not set(further) <= known:
        raise ValueError(
            f"override_optimizer_config: {sorted(set(further) - known)} are not further arguments of AdamW; expected "
            f"some of {sorted(known)} (lr, betas and weight_decay have keys of their own beside it)"
        )
    if device.type in ("cpu", "cuda") and "foreach" not in further:
        named["fused"] = True
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], **named | further)


def _persistent_buffers(module: torch.nn.Module, keep: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's files."""
    filed = module.state_dict().keys()
    return {name: keep(buffer) for name, buffer in module.named_buffers() if name in filed}


def _on_host(state: Any) -> Any:
    """A whole tensor in host memory; shards are written from where they are."""
    return state.cpu() if isinstance(state, torch.Tensor) else state


def _columns(batch: DataProto, names: tuple[str, ...]) -> Tensors:
    """On the host, where micro-batches are put together."""
    return {name: batch.column(name).cpu() for name in names}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(
            f"the checkpoint has no {path.name} (looked at {path}); was it saved without it (save_contents)?"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def lr_multiplier(config: OptimizerConfig) -> Callable[[int], float]:
    """step -> factor on the learning rate: linear warm-up, then constant or cosine."""
    known = ("constant", "cosine")
    if config.lr_scheduler_type not in known:
        raise ValueError(f"lr_scheduler_type: expected one of {known}, found {config.lr_scheduler_type!r}")
    warmup, total = config.lr_warmup_steps, config.total_training_steps
    if config.lr_scheduler_type == "cosine" and total <= warmup:
        raise ValueError(f"a cosine schedule needs more total steps ({total}) than warm-up steps ({warmup})")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        wave = 0.5 * (1 + math.cos(2 * math.pi * config.num_cycles * progress))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * wave

    return factor
