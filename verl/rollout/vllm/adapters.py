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
from verl.rollout.vllm.settings import Capabilities
from verl.rollout.vllm.slices import ParameterNames
from verl.rollout.vllm.weights import VllmReceiver
from verl.weight_sync.verify import sum_of_bits, wrap

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


def obstacles(copy: EngineCopy, capabilities: Capabilities, layers: AdaptedLayers) -> Iterator[str]:
    """Why vLLM cannot apply the adapters of these layers."""
    if not capabilities.adapters:
        yield f"vLLM {capabilities.version} cannot load an adapter from tensors"
        return
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

    A push is verified: the layers and shapes are those that the trainer adapts; the bits of the matrices that vLLM
    multiplies with add up to those that were sent (over the ranks of a tensor-parallel group), scaling included; all
    other layers have no adapter.
    """

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Receive the base weights. Raises ValueError like `VllmReceiver.receive`, and if requests are running."""
        self.has_base = False
        with self._updating(version, idle=True, is_last=False) as model, _unwrapped(model):
            self._load(model, weights, version)
        self.has_base = True

    def _load_adapters(
        self, scaling: Mapping[str, float], pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], version: int
    ) -> None:
        with self._updating(version) as model:
            _Loading(model, version, pairs, scaling).verify()

    def release(self) -> None:
        """See `WeightReceiver.release`. The base weights, which are not trained, are moved to host memory."""
        if not self.has_base:
            super().release()
            return
        with self._requests.exclusive("release()", idle=True):
            self.filled = False
            self._memory.sleep()


class _Loading:
    """Loads an adapter into vLLM's LoRA manager.

    Args:
        model: vLLM's model.
        version: weight version.
        pairs: (HuggingFace name of the layer, A, B).
        scaling: layer -> factor of B A.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
        scaling: Mapping[str, float],
    ):
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.version = version
        self._manager = manager = model.lora_manager
        self._names = ParameterNames(model)
        self._sent: dict[tuple[str, int, str], int] = {}  # module, slice of a fused layer, and matrix -> sum of bits
        weights, rank, dtype = {}, 0, manager.lora_config.lora_dtype
        for layer, a, b in pairs:
            module, index, name = self._target(layer)
            a, b = a.to("cpu", dtype), (b.float() * scaling[layer]).to("cpu", dtype)
            self._sent[module, index, "A"], self._sent[module, index, "B"] = (int(sum_of_bits(m)) for m in (a, b))
            weights[name] = LoRALayerWeights(name, rank=len(a), lora_alpha=len(a), lora_a=a, lora_b=b)
            rank = max(rank, len(a))
        manager.remove_adapter(_ID)
        manager.add_adapter(LoRAModel(_ID, rank, weights))
        manager.activate_adapter(_ID)

    def _target(self, layer: str) -> tuple[str, int, str]:
        """The module of vLLM with the adapter of a layer, the slice of it, and the name of the slice."""
        module = (self._names.target(f"{layer}.weight") or "").removesuffix(".weight")
        if module not in self._manager.modules:
            raise ValueError(
                f"adapters of version {self.version}: vLLM applies no adapter to {layer}: set rollout.lora_sync=merged"
            )
        parts = self._manager.packed_modules.get(module, [module])
        if len(parts) == 1:
            return module, 0, module
        name = f"{module.rpartition('.')[0]}.{layer.rpartition('.')[2]}"
        return module, parts.index(name), name

    def verify(self) -> None:
        """Raise ValueError unless vLLM multiplies with what was sent. Collective over the tensor-parallel group."""
        slot = self._manager.lora_index_to_id.index(_ID)
        keys, stored = [], []
        for module, layer in sorted(self._manager.modules.items()):
            for matrix, stacks in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                for index, stack in enumerate(stacks if isinstance(stacks, tuple) else (stacks,)):
                    keys.append((module, index, matrix))
                    stored.append(sum_of_bits(stack[slot]))
        sums = torch.stack(stored).cpu()
        total, ranks = _sum_over_group(sums)
        for key, of_rank, of_group in zip(keys, sums.tolist(), total.tolist()):
            sent = self._sent.pop(key, 0)
            # replicated: each rank has all of it; sharded: the ranks together, or several copies of a head
            if of_rank != sent and of_group not in [wrap(copies * sent) for copies in range(1, ranks + 1)]:
                raise ValueError(
                    f"adapters of version {self.version}: matrix {key[2]} of vLLM's layer {key[0]} is not what was "
                    "sent: the rollout engine would generate with a stale adapter"
                )
        assert not self._sent, self._sent


def _sum_over_group(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum over the tensor-parallel group, and its size. Collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    total = values.clone()
    if group.world_size > 1:
        torch.distributed.all_reduce(total, group=group.cpu_group)
    return total, group.world_size


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
