"""What a training engine offers. An engine computes and updates one model; it does not know what PPO is.

The loss comes to it as an `Objective`: a callable over the model's outputs and the rows of a micro-batch. The gradient
of a mini-batch is the same however it is cut into micro-batches, because every objective returns *sums divided by
counts of the whole mini-batch*, so that the pieces add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from verl.protocol import DataProto

Tensors = dict[str, torch.Tensor]

#: what `infer` and an objective may ask of a model, each (B, T) at the positions of the response tokens
OUTPUTS = ("log_probs", "entropys", "sum_pi_squared", "values")


@dataclass(frozen=True)
class Objective:
    """A loss and the model outputs that it reads.

    loss: (outputs, rows) -> (scalar, metrics). outputs: the `needs`, each (b, T) with gradient; rows: the tensor
    columns of the micro-batch, on the model's device. The scalar is this micro-batch's *share* of the whole loss.
    Metrics: name -> number, or a pair (sum, count), which merges exactly over micro-batches, or a `metrics.Largest`.
    needs: names out of OUTPUTS.
    """

    loss: Callable[[Tensors, Tensors], tuple[torch.Tensor, dict[str, Any]]]
    needs: tuple[str, ...] = ("log_probs",)


@dataclass(frozen=True)
class MicroBatching:
    """How a mini-batch is cut: by a count of rows, or by a budget of tokens (the sum of the rows' lengths).

    rows: rows per micro-batch, None for no limit. tokens: token budget, None for no limit, "auto" for what fills the
    device and fits its memory; excludes `rows`.
    """

    rows: int | None = None
    tokens: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.tokens is not None:
            raise ValueError("micro-batches are cut by a count of rows or by a budget of tokens, not by both")
        for name, value in (("rows", self.rows), ("tokens", self.tokens)):
            if value not in (None, "auto") and value < 1:
                raise ValueError(f"micro-batch {name}: expected at least 1, found {value}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule. Steps of the schedule are counted by `lr_step` (one a training step).

    lr_scheduler_type: "constant" or "cosine" (to min_lr_ratio * lr over total_training_steps, num_cycles half-waves);
    both after lr_warmup_steps of linear warm-up. further: other arguments of torch.optim.AdamW.
    """

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float | None = 1.0
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: int = 0
    total_training_steps: int = -1
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    further: tuple[tuple[str, Any], ...] = ()


class TrainEngine(ABC):
    """One model with its optimizer. B rows, T response tokens."""

    #: the parameters' module; the in-process rollout generates with it
    module: torch.nn.Module
    #: whether the module's parameters are all weights, so that a rollout can run on the module itself
    whole: bool
    #: which part of the rows this rank has, of how many
    dp_rank: int = 0
    dp_size: int = 1
    #: its place among the ranks that have the same rows
    inner_rank: int = 0

    @abstractmethod
    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """A phase in which the weights (and the optimizer's state) are on the device, wherever they are outside of it.

        Every method below takes care of that itself; a phase around several calls spares the moves between them.
        """

    @abstractmethod
    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        """The asked outputs, without gradient: name -> (B, T) float32 on the CPU, 0 outside the response."""

    @abstractmethod
    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        """One optimizer step on a mini-batch. Returns the objective's metrics as pairs (sum, count), and `grad_norm`.

        A gradient that is not finite skips the step and is reported as `grad_skipped` = 1.
        """

    @abstractmethod
    def lr_step(self) -> float:
        """Advance the learning-rate schedule by one training step; the rate that was in force."""

    @abstractmethod
    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Each value summed over the data-parallel ranks: the counts of a mini-batch that is spread over them.

        Ranks that have the same rows count them once.
        """

    @abstractmethod
    def max_over_ranks(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks: widths that all must agree on."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HuggingFace name, full tensor) of every parameter, adapters merged in. All ranks iterate together."""

    def shared_module(self) -> torch.nn.Module | None:
        """The module that holds all parameters unsharded on this device, for a rollout engine in the same process.

        None otherwise: the rollout engine then needs a copy, which `weights` fills.
        """
        return None

    def model_forward(self) -> Any:
        """The batch-invariant forward pass of the model, for `rollout.deterministic`; None without it."""
        return None

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what the model computes with beside its parameters, the same on every rank."""
        return iter(())

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """A context in which `infer` asks the model that training started from.

        Raises ValueError where all weights are trained and that model is gone; with adapters it is still there.
        """

    @abstractmethod
    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        """Write `contents` (any of model, optimizer, extra, hf_model) under `folder`.

        background: return as soon as a copy is in host memory; `finish_save` waits for what is being written then.
        """

    @abstractmethod
    def is_saved(self) -> bool:
        """Whether nothing is being written in the background any more, well or not."""

    @abstractmethod
    def finish_save(self) -> None:
        """Wait for what is being written in the background. Raises the error of a write that failed."""

    @abstractmethod
    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        """Restore what `save` wrote. Raises ValueError when the folder holds another model."""
