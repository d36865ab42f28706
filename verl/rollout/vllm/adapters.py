"""LoRA adapters that vLLM applies: its arguments, and the receiver that loads them from tensors in memory.

The engine has one adapter, in slot 0 of vLLM's LoRA manager, and every request names it. A push overwrites it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.modeling.huggingface import experts_of
from verl.modeling.vision import is_vision_config
from verl.rollout.adapters import AdaptedLayers, AppliedAdapters
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.vllm.weights import ParameterNames, VllmReceiver, load_weights
from verl.weight_sync.base import check_parameters

_ID = 1  # of the adapter
_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`


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


class VllmAdapterReceiver(AppliedAdapters, VllmReceiver):
    """Receives the base weights once, and then adapters, which vLLM applies without merging them.

    The layers and shapes of a push must be those that the trainer adapts. The canary of the trainer compares the rest.
    """

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Receive the base weights. Raises ValueError like `VllmReceiver.receive`, and if requests are running."""
        self.has_base = False
        with self._updating(version, idle=True, is_last=False) as model, _unwrapped(model):
            load_weights(model, check_parameters(weights, self.shapes, version), version)
        self.has_base = True

    def _load_adapters(
        self, scaling: Mapping[str, float], pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], version: int
    ) -> None:
        with self._updating(version) as model:
            load_adapter(model, version, pairs, scaling)

    def release(self) -> None:
        """See `WeightReceiver.release`. The base weights, which are not trained, are moved to host memory."""
        if not self.has_base:
            super().release()
            return
        with self._requests.exclusive("release()", idle=True):
            self.filled = False
            self._memory.sleep()


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
