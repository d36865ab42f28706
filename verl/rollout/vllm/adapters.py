"""LoRA adapters that vLLM applies: its arguments, and the receiver that loads them from tensors in memory.

The engine has one adapter, in slot 0 of vLLM's LoRA manager, and every request names it. A push overwrites it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.config import schema
from verl.modeling.huggingface import experts_of
from verl.modeling.vision import is_vision_config
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.vllm.weights import ParameterNames, VllmReceiver, load_weights
from verl.weight_sync.adapters import matrix_pairs
from verl.weight_sync.base import AdapterConfig, AdapterReceiver, check_parameters

log = logging.getLogger(__name__)

_ID = 1  # of the adapter
_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers of the policy whose adapters are trained.

    Attributes:
        names: HuggingFace names of the linear layers.
        rank: the largest rank of a layer.
    """

    names: tuple[str, ...]
    rank: int

    @classmethod
    def from_config(cls, config: AdapterConfig) -> "AdaptedLayers":
        """The layers of an adapter configuration (`TrainEngine.adapter_config`)."""
        return cls(tuple(config["scaling"]), max(config["r"], *(config.get("rank_pattern") or {}).values(), 0))

    @property
    def modules(self) -> list[str]:
        """The last parts of the names, such as q_proj."""
        return sorted({name.rpartition(".")[2] for name in self.names})


def applied_layers(copy: EngineCopy, env: RolloutEnv) -> AdaptedLayers | None:
    """The layers whose adapters vLLM applies; None: it gets merged weights. The log of rank 0 says which, and why.

    Raises:
        ValueError: `lora_sync=adapters`, and it cannot apply them.
    """
    config, log_line = copy.config, log.info if env.rank == 0 else log.debug
    if env.adapters is None or not isinstance(config, schema.RolloutConfig):
        return None
    if config.lora_sync == "merged":
        log_line("rollout.lora_sync=merged: vllm gets all weights in every push, adapters merged")
        return None
    layers = AdaptedLayers.from_config(env.adapters)
    reasons = list(obstacles(copy, layers))
    if not reasons:
        log_line(
            "rollout.lora_sync=%s: vllm applies the adapters of %d layers (rank %d); the base weights are pushed once",
            *(config.lora_sync, len(layers.names), layers.rank),
        )
        return layers
    if config.lora_sync == "adapters":
        raise ValueError(
            f"rollout.lora_sync=adapters: vllm cannot apply these adapters: {'; '.join(reasons)}: set "
            "rollout.lora_sync=merged"
        )
    log_line("rollout.lora_sync=auto: vllm gets merged weights in every push: %s", "; ".join(reasons))
    return None


def lora_request() -> Any:
    """The LoRA request attached to every prompt. The path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, "/policy")


def lora_args(layers: AdaptedLayers) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which it applies adapters to these layers, and to no others."""
    rank = next(rank for rank in _MAX_RANKS if rank >= layers.rank)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": layers.modules,
    }


def obstacles(copy: EngineCopy, layers: AdaptedLayers) -> Iterator[str]:
    """Why vLLM cannot apply the adapters of these layers."""
    if layers.rank > _MAX_RANKS[-1]:
        yield f"expected a rank of at most {_MAX_RANKS[-1]}, found {layers.rank}"
    outside = [name for name in layers.names if ".language_model." not in f".{name}."]
    if is_vision_config(copy.hf_config) and outside:
        yield f"expected adapters in the language model only, found {outside[0]}"
    if experts_of(copy.hf_config):
        yield "with LoRA, vLLM chooses kernels for experts that weights cannot be pushed into, or that need a GPU"
    elif not _supports_adapters(copy):
        yield f"vLLM's model for {copy.hf_config.model_type} does not support LoRA"


def _supports_adapters(copy: EngineCopy) -> bool:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry, supports_lora

    model = copy.model
    overrides = {"hf_overrides": dict(model.override_config)} if model.override_config else {}
    args = EngineArgs(model.path, trust_remote_code=model.trust_remote_code, skip_tokenizer_init=True, **overrides)
    config = args.create_model_config()
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
    return supports_lora(model_class)


class VllmAdapterReceiver(AdapterReceiver, VllmReceiver):
    """Receives the base weights once, and then adapters, which vLLM applies without merging them.

    The layers and shapes of a push must be those that the trainer adapts. The canary of the trainer compares the rest.
    After `receive`, the engine has the base weights, but does not generate before it has adapters.
    """

    def __init__(self, *args: Any, layers: AdaptedLayers, **keys: Any):
        """layers: the layers with adapters; the others are arguments of `VllmReceiver`."""
        super().__init__(*args, **keys)
        self._layers = layers

    def check_filled(self) -> None:
        """Raise ValueError unless the base weights and the adapters have been received."""
        if self.has_base and not self.filled:
            raise ValueError(
                "the rollout engine has the base weights, but no adapters: push them first (WeightSync.push), or set "
                "rollout.lora_sync=merged"
            )
        super().check_filled()

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Receive the base weights. Raises ValueError like `VllmReceiver.receive`, and if requests are running."""
        self.has_base = False
        with self._updating(version, idle=True, is_last=False) as model, _unwrapped(model):
            load_weights(model, check_parameters(weights, self.shapes, version), version)
        self.has_base = True

    @torch.no_grad()
    def receive_adapters(
        self, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """See `AdapterReceiver.receive_adapters`. Requests of `generate_one` may be running, as in `receive`.

        Raises:
            ValueError: no base weights, unknown, repeated or missing layers, another shape, or adapters that vLLM did
                not load.
        """
        if not self.has_base:
            super().check_filled()
        with self._updating(version) as model:
            pairs = checked_pairs(tensors, self._layers, self.shapes, version)
            load_adapter(model, version, pairs, config["scaling"])

    def release(self) -> None:
        """See `WeightReceiver.release`. The base weights, which are not trained, are moved to host memory."""
        if not self.has_base:
            super().release()
            return
        with self._requests.exclusive("release()", idle=True):
            self.filled = False
            self._memory.sleep()


def checked_pairs(
    tensors: Iterable[tuple[str, torch.Tensor]], layers: AdaptedLayers, shapes: Mapping[str, torch.Size], version: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (layer, A, B) of a push, and check that each layer is sent once.

    Args:
        tensors: (PEFT name, tensor).
        layers: the layers with adapters.
        shapes: HuggingFace name -> shape of every parameter of the base model.
        version: weight version, for errors.

    Raises:
        ValueError: unknown, repeated or missing layers, or another shape.
    """
    missing = set(layers.names)
    for layer, a, b in matrix_pairs(tensors, version):
        if layer not in missing:
            raise ValueError(f"adapters of version {version}: layer {layer!r} is unknown or was sent twice")
        rows, columns = shapes[f"{layer}.weight"]
        if (a.shape[1], b.shape[0]) != (columns, rows) or not a.shape[0] == b.shape[1] <= layers.rank:
            raise ValueError(
                f"adapters of version {version}: {layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, expected "
                f"(r, {columns}) and ({rows}, r) with r up to {layers.rank}"
            )
        missing.remove(layer)
        yield layer, a, b
    if missing:
        raise ValueError(f"adapters of version {version}: {len(missing)} are missing, first {sorted(missing)[:3]}")


def load_adapter(
    model: nn.Module,
    version: int,
    pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    scaling: Mapping[str, float],
) -> None:
    """Load an adapter into vLLM's LoRA manager; layers that are not among the pairs have none.

    Args:
        model: vLLM's model.
        version: weight version.
        pairs: (HuggingFace name of the layer, A, B).
        scaling: layer -> factor of B A.

    Raises:
        ValueError: vLLM applies no adapter to a layer.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager, names = model.lora_manager, ParameterNames(model)
    weights, rank, dtype = {}, 0, manager.lora_config.lora_dtype
    for layer, a, b in pairs:
        module = (names.target(f"{layer}.weight") or "").removesuffix(".weight")
        if module not in manager.modules:
            raise ValueError(
                f"adapters of version {version}: vLLM applies no adapter to {layer}: set rollout.lora_sync=merged"
            )
        # of a fused layer, the name of its slice
        is_fused = len(manager.packed_modules.get(module, ())) > 1
        name = f"{module.rpartition('.')[0]}.{layer.rpartition('.')[2]}" if is_fused else module
        a, b = a.to("cpu", dtype), (b.float() * scaling[layer]).to("cpu", dtype)
        weights[name] = LoRALayerWeights(name, rank=len(a), lora_alpha=len(a), lora_a=a, lora_b=b)
        rank = max(rank, len(a))
    manager.remove_adapter(_ID)
    manager.add_adapter(LoRAModel(_ID, rank, weights))
    manager.activate_adapter(_ID)


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[None]:
    """Context in which vLLM's layers are those without adapters, so that its loaders find them by their names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for name, layer in wrapped:
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped:
            model.set_submodule(name, layer)
