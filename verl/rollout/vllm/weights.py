"""Loads the trainer's weights into vLLM's model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.rollout.engine_copy import EngineReceiver
from verl.rollout.expert_names import ExpertNames
from verl.rollout.vllm.stepping import Job
from verl.weight_sync.base import check_parameters

if TYPE_CHECKING:
    from verl.rollout.vllm.engine import VllmRollout


class VllmReceiver(EngineReceiver):
    """Receives weights by HuggingFace name into the model of a `VllmRollout`.

    vLLM's loaders skip names that they do not know, and may keep old values. So names and shapes must be those of the
    HuggingFace model, and every parameter of vLLM must have been loaded. The canary of the trainer compares the rest.

    Args:
        engine: the rollout engine.
        shapes: returns HuggingFace name -> shape of every parameter.
        filled: whether the model has its weights.
    """

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
            load_weights(model, check_parameters(weights, self.shapes, version), version)

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


# ---- names -----------------------------------------------------------------------------------------------------------


class ParameterNames:
    """Names of the parameters of vLLM's model for those of HuggingFace. vLLM fuses some, such as q, k and v."""

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters())
        self.experts = ExpertNames(self.parameters)
        # of a vision-language model, the language model may have the mapping
        packed = [dict(getattr(m, "packed_modules_mapping", None) or {}) for m in reversed([*model.modules()])]
        self._packed = {part: fused for mapping in packed for fused, parts in mapping.items() for part in parts}
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)

    def target(self, name: str) -> str | None:
        """The parameter that has the weights of a parameter of HuggingFace; None if there is none."""
        if (experts := self.experts.target(name)) is not None:
            return experts
        name = self.experts.renamed(name)
        if self._mapper is not None:
            mapped = self._mapper.apply_list([name])
            name = mapped[0] if mapped else name
        if name in self.parameters:
            return name
        *path, module, kind = name.split(".")
        fused = ".".join([*path, self._packed.get(module, module), kind])
        return fused if fused in self.parameters else None


# ---- layers of experts ----------------------------------------------------------------------------------------------

#: vLLM's kernels that compute with `w13_weight` and `w2_weight` as they are loaded; those for a CPU pack them
_PLAIN, _PACKED = "TRITON", "CPU"


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> the module with `w13_weight` and `w2_weight`, of every layer with experts.

    Raises:
        ValueError: they are computed by kernels with another layout.
    """
    layers = {name: layer for name, layer in model.named_modules() if "w13_weight" in layer._parameters}
    for name, layer in layers.items():
        kernels = _kernels_of(layer)
        if kernels not in (_PLAIN, _PACKED):
            raise ValueError(
                f"rollout.name=vllm: expected experts that are computed by vLLM's kernels {_PLAIN}, or {_PACKED} on a "
                f"CPU, found {kernels} for {name}: weights cannot be pushed into their layout; use rollout.name=native"
            )
    return layers


def _kernels_of(layer: nn.Module) -> str:
    method = layer.quant_method
    return getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__)


@contextmanager
def unpacked(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Context in which the weights of experts have the layout in which they are loaded. Its end packs them again.

    Only kernels for a CPU have another layout: blocks of rows, padded.
    """
    packed = [layer for layer in layers.values() if _kernels_of(layer) == _PACKED]
    for layer in packed:
        experts, hidden = len(layer.w13_weight), layer.hidden_size
        width = layer.moe_config.intermediate_size_per_partition
        _replace(layer, "w13_weight", layer.w13_weight.new_empty(experts, 2 * width, hidden))
        _replace(layer, "w2_weight", layer.w2_weight.new_empty(experts, hidden, width))
    yield
    for layer in packed:
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _replace(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, name, tensor)
