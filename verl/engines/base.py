"""The contract of a training engine, and the registry of engines that `strategy` selects from.

An engine computes and updates one model. It does not know PPO: the loss arrives as an `Objective`, a callable over the
model's outputs and the tensor columns of a micro-batch. Every objective returns *sums divided by counts of the whole
mini-batch*, so the shares of the micro-batches add up to the same gradient for any split.

A custom engine is listed in `imports` and selected with `actor_rollout_ref.actor.strategy=my_engine`:

    from verl.engines import EngineSpec, TrainEngine, register_train_engine

    class MyEngine(TrainEngine): ...

    @register_train_engine("my_engine")
    def make(spec: EngineSpec) -> TrainEngine:
        return MyEngine(spec)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from verl.config import schema
from verl.engines.traits import TrainTraits, built_in_strategies, strategy_traits
from verl.protocol import DataProto
from verl.registry import Registry, load_object
from verl.utils.shards import Shard

Tensors = dict[str, torch.Tensor]

#: model outputs that `infer` and an objective may request, each (B, T) at the positions of the response tokens; `infer`
#: also has routed_experts (B, P + T, layers, k), the choices of the routers, in engines that support router replay
OUTPUTS = ("log_probs", "entropys", "sum_pi_squared", "values")
#: with the trait `candidates` of an engine, also candidate_log_probs (B, T, K) of the tokens of a column candidate_ids;
#: or, in `infer` with a number K in this entry of meta_info, of the K most probable tokens, and their candidate_ids
NUM_CANDIDATES = "num_candidates"

#: entry of meta_info, for a batch with the column routed_experts: False compares it with the choices of the routers
#: instead of replaying it
REPLAYS = "replays_routing"


@dataclass(frozen=True)
class Objective:
    """A loss and the model outputs that it reads.

    Attributes:
        loss: (outputs, columns) -> (scalar, metrics). `outputs` holds the `needs`, each (b, T) with gradient; `columns`
            holds the tensor columns of the micro-batch on the model's device. The scalar is this micro-batch's *share*
            of the mini-batch loss. A metric is a number, a pair (sum, count), which merges exactly over micro-batches,
            or a `metrics.Largest`.
        needs: names out of `OUTPUTS`.
    """

    loss: Callable[[Tensors, Tensors], tuple[torch.Tensor, dict[str, Any]]]
    needs: tuple[str, ...] = ("log_probs",)


@dataclass(frozen=True)
class MicroBatching:
    """How a mini-batch is split into micro-batches: by sequences or by tokens.

    Attributes:
        rows: sequences per micro-batch; None for no limit.
        tokens: token budget of a micro-batch; None for no limit, "auto" for a size that keeps the device busy and fits
            its memory. Excludes `rows`.
    """

    rows: int | None = None
    tokens: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.tokens is not None:
            raise ValueError("micro-batches are split by rows or by tokens: expected one of them, found both")
        for name, value in (("rows", self.rows), ("tokens", self.tokens)):
            if value not in (None, "auto") and value < 1:
                raise ValueError(f"micro-batch {name}: expected at least 1, found {value}")


@dataclass(frozen=True)
class EngineSpec:
    """The arguments of an engine: sections of the configuration and the rank that it runs on.

    Attributes:
        kind: "causal_lm" (policy, reference), "value" (critic: one number per token) or "reward" (the same number from
            a sequence classifier whose head is in the checkpoint).
        model: the `model` section.
        engine: the `fsdp_config` section (precision, sharding, offloading); the `megatron` section for
            strategy=megatron.
        optimizer: the `optim` section; None builds a model for inference only.
        total_training_steps: length of the run, for a schedule that does not set its own.
        deterministic: batch-invariant mode (`rollout.deterministic`).
        timeout: timeout of collectives in seconds; None for no limit.
        device: device of this rank.
        rank, world_size, local_rank: the rank among all ranks of the worker group, and on its host.
    """

    kind: Literal["causal_lm", "value", "reward"]
    model: schema.ModelConfig
    engine: schema.EngineConfig | schema.MegatronConfig = field(default_factory=schema.EngineConfig)
    optimizer: schema.OptimConfig | None = None
    total_training_steps: int = -1
    deterministic: bool = False
    timeout: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


class TrainEngine(ABC):
    """One model with its optimizer. B samples, T response tokens.

    Attributes:
        dp_rank: index of the share of the samples that this rank computes.
        dp_size: number of shares.
        model_parallel_rank: rank among the ranks that compute the same samples (tensor or sequence parallelism) with
            the same layers.
        pipeline_rank: pipeline stage.
        replicas: the replicas of the weights that this rank belongs to, the smallest one first. Ranks with the same
            number hold the weights together, or those of the experts. Empty: one replica.
        gathers_one_by_one: whether `weights` gathers parameters one by one, so that reading `shards` is faster.
    """

    dp_rank: int = 0
    dp_size: int = 1
    model_parallel_rank: int = 0
    pipeline_rank: int = 0
    replicas: tuple[int, ...] = ()
    gathers_one_by_one: bool = False

    # ---- computing ----------------------------------------------------------------------------------------------

    @abstractmethod
    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        """Forward pass without gradient.

        Returns:
            name -> (B, T) float32 on the CPU for each of `outputs`, 0 outside the response.

        With a column routed_experts, the routers of a mixture of experts replay it, here and in `train_batch`. With the
        columns kept_tokens and kept_counts, the outputs are those of the distribution over these tokens, here and in
        `train_batch`. An engine with the trait `token_filters` has a further argument `token_filter`
        (`modeling.token_filter`), and returns these columns if it is set.
        """

    @abstractmethod
    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        """One optimizer step on a mini-batch.

        Returns:
            The metrics of the objective as pairs (sum, count), `grad_norm`, and `grad_skipped`, which is 1 if the
            gradient or the loss was not finite and the step was skipped.
        """

    @abstractmethod
    def lr_step(self) -> float:
        """Advance the learning-rate schedule by one training step. Returns the previous learning rate."""

    @abstractmethod
    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum each value over the data-parallel ranks, e.g. the token count of a mini-batch.

        Ranks that compute the same samples count once.
        """

    @abstractmethod
    def max_over_ranks(self, values: list[float]) -> list[float]:
        """Maximum of each value over all ranks, e.g. a width that all ranks must agree on."""

    # ---- weights ------------------------------------------------------------------------------------------------

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor) of every parameter, adapters merged. Collective: all ranks must
        iterate."""

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights` in the dtype of the rollout engine. A tensor is valid until the next one is read.

        Override it if casting before gathering is cheaper. None: not cast.
        """
        for name, tensor in self.weights():
            yield name, tensor if dtype is None else tensor.to(dtype)

    def shard_layout(self) -> Sequence[Shard] | None:
        """The chunk of each parameter that `shards` yields on this rank; the same object in every call.

        A parameter may have several shards, such as the heads of a fused projection, or none on this rank. Every
        element is on some rank. None: shards cannot be read; `weights` is used.
        """
        return None

    def shards(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of `shard_layout`, in its order, adapters merged. Collective: all ranks must iterate."""
        return iter(())

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Context in which `infer` uses the initial weights.

        Raises:
            ValueError: full-parameter training, which overwrites the initial weights.
        """

    def shared_module(self) -> torch.nn.Module | None:
        """The module with all parameters, unsharded, on this device; None if there is none.

        A rollout engine in the same process can generate with it, without a copy of the weights.
        """
        return None

    def model_forward(self) -> Any | None:
        """The batch-invariant forward pass of the model, for generation that is bitwise equal to training; or None.

        A rollout engine runs it on `shared_module` or on a copy of the weights.
        """
        return None

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the model's buffers, which are equal on all ranks."""
        return iter(())

    # ---- memory -------------------------------------------------------------------------------------------------

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        """Context in which the weights (and the optimizer state) are on the device; contexts nest.

        Every method enters what it needs. An outer context around several calls avoids repeated transfers. Default:
        nothing is ever offloaded.
        """
        yield

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def non_finite_state(self) -> list[str]:
        """Names of the trained weights and optimizer state that are broken, the same on every rank.

        Broken: NaN or infinity; for weights also magnitudes beyond 1e6. Called by all ranks after the
        updates of a step and before each checkpoint; such state is not saved.
        """
        return []

    @abstractmethod
    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        """Write a checkpoint.

        Args:
            contents: any of "model", "optimizer", "extra" (schedule) and "hf_model".
            background: return as soon as the state is copied to host memory; `finish_save` waits for the write.
        """

    @abstractmethod
    def is_saved(self) -> bool:
        """Whether the background write has ended, successfully or not."""

    @abstractmethod
    def finish_save(self) -> None:
        """Wait for the background write. Raises its error."""

    @abstractmethod
    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        """Restore a checkpoint written by `save`. Raises ValueError if it is of a different model."""


EngineFactory = Callable[[EngineSpec], TrainEngine]

#: strategy -> factory
ENGINES: Registry[EngineFactory] = Registry("training engine (strategy)")


def register_train_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Register a factory (spec) -> TrainEngine under a value of `strategy`."""
    return ENGINES.register(name)


def _register_built_in(traits: TrainTraits) -> None:
    @register_train_engine(traits.name)
    def make(spec: EngineSpec) -> TrainEngine:  # at use: imports the engine
        return load_object(*traits.factory.split(":"))(spec)


for _traits in built_in_strategies().values():
    _register_built_in(_traits)


def check_device(strategy: str, device: torch.device) -> None:
    """Raise ValueError if a built-in engine is not installed or does not run on the device."""
    if check := strategy_traits(strategy).check_device:
        load_object(*check.split(":"))(device)


def make_engine(strategy: str, spec: EngineSpec) -> TrainEngine:
    """Make the engine registered as `strategy`.

    Raises:
        ValueError: no engine is registered under the name, or its factory returns something else.
    """
    engine = ENGINES[strategy](spec)
    if not isinstance(engine, TrainEngine):
        raise ValueError(f"strategy={strategy}: expected a factory that returns a TrainEngine, found {engine!r:.80}")
    return engine
