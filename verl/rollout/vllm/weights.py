"""Loads the trainer's weights into vLLM's model."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from verl.rollout.engine_copy import EngineReceiver
from verl.rollout.vllm.slices import NotSliced, ParameterNames, Slices, expert_layers, find_slices, unpacked
from verl.rollout.vllm.stepping import Job
from verl.weight_sync.base import SlicedWeights, StoredWeights, check_parameters, describe_error
from verl.weight_sync.reshard.plan import Stored

if TYPE_CHECKING:
    from verl.rollout.vllm.engine import VllmRollout

log = logging.getLogger(__name__)


class VllmReceiver(EngineReceiver, StoredWeights):
    """Receives weights by HuggingFace name into the model of a `VllmRollout`.

    vLLM's loaders skip names that they do not know, and may keep old values. So names and shapes must be those of the
    HuggingFace model, and a sync compares what vLLM stores, if it stores all parameters as rows and columns.

    Args:
        engine: the rollout engine.
        shapes: returns HuggingFace name -> shape of every parameter.
        filled: whether the model has its weights.
    """

    _slices: Slices | None = None
    _has_searched = False  # for the slices

    def __init__(self, engine: "VllmRollout", shapes: Callable[[], dict[str, torch.Size]], filled: bool):
        super().__init__(engine.stepper, engine.memory, shapes, filled)
        self._engine = engine

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightReceiver.receive`. Parameters are cast to the engine's dtype.

        Requests of `generate_one` may be running: they continue with the new weights, and their KV cache is computed
        again.

        Raises:
            ValueError: unknown, repeated or missing parameters, another shape, or weights that vLLM did not load.
        """
        with self._updating(version) as model:
            self._load(model, weights, version)

    def _load(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if not self._has_searched:
            try:
                self._search_slices(model)
            except Exception as error:  # of a loader that is called with other values than weights
                log.warning("rollout.name=vllm: pushed weights are not compared with what vLLM stores: %s", error)
        load_weights(model, check_parameters(weights, self.shapes, version), version)

    def _search_slices(self, model: nn.Module) -> None:
        """Find what vLLM stores of each parameter, once. Its weights are overwritten."""
        self._has_searched = True
        self._slices = find_slices(model, self.shapes)

    def stored(self, name: str) -> torch.Tensor | None:
        return self._slices.stored(name) if self._slices is not None else None

    def slice_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        return self._slices.layout[name].cut(full)

    @contextmanager
    def _session(self, version: int, running: list[Job]) -> Iterator[nn.Module]:
        """Yields vLLM's model."""
        try:
            yield engine_model(self._engine.llm)
        finally:
            self._engine.llm.reset_prefix_cache(reset_running_requests=bool(running))
            if self._engine.reads_images:
                self._engine.llm.llm_engine.reset_encoder_cache()
        for job in running:
            job.versions.append((len(job.token_ids), version))


class VllmSliceReceiver(VllmReceiver, SlicedWeights):
    """A `VllmReceiver` whose slices a sync can write, if vLLM stores all parameters as rows and columns."""

    prefers_slices = True  # vLLM's loaders are slow: a call for every parameter

    def obstacle(self) -> str:
        """See `SlicedWeights.obstacle`. Collective over all rollout ranks. The model has no weights afterwards.

        Raises:
            RuntimeError: on every rank, if one has failed for another reason than the layout of its parameters.
        """
        obstacle, failure = "", None
        try:
            with self._updating(version=0, idle=True, is_last=False) as model:
                self._search_slices(model)
        except NotSliced as error:
            obstacle = str(error)
        except Exception as error:  # the others wait in the collective below: they are told, and it is raised after it
            failure = error
        outcomes: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
        dist.all_gather_object(outcomes, (obstacle, "" if failure is None else describe_error(failure)))
        failed = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if failed:
            more = f" ({len(failed)} of {len(outcomes)} ranks failed)" if len(failed) > 1 else ""
            raise RuntimeError(
                f"weight sync: expected to find the slices that vLLM stores on every rollout rank, found an error on "
                f"{failed[0]}{more}: fix its cause, or set rollout.weight_sync=replica, which does not need them"
            ) from failure
        return next((reason for reason, _ in outcomes if reason), "")

    def slice_layout(self) -> Mapping[str, Stored]:
        assert self._slices is not None
        return self._slices.layout

    @contextmanager
    def open_slices(self, version: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `SlicedWeights.open_slices`. Requests of `generate_one` may be running, as in `receive`."""
        assert self._slices is not None
        with self._updating(version):
            yield self._slices.writable()


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Load all parameters by vLLM's loaders.

    Raises:
        ValueError: vLLM's model does not have one of them, or has another one.
    """
    names = ParameterNames(model)
    missing = set(names.parameters)

    def cast() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            target = names.target(name)
            if target is None:
                raise ValueError(f"rollout.name=vllm: vLLM's model has no parameter for {name!r}: it is not supported")
            missing.discard(target)
            parameter = names.parameters[target]
            yield from names.experts.unfused(name, tensor.detach().to(parameter.device, parameter.dtype))

    with unpacked(expert_layers(model)):
        stream = cast()
        model.load_weights(stream)
        for _ in stream:  # a loader may stop early
            pass
    if missing:
        raise ValueError(f"weights of version {version}: vLLM's parameters {sorted(missing)[:3]} were not loaded")


def engine_model(llm: Any) -> nn.Module:
    """vLLM's model in this process."""
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    return model
