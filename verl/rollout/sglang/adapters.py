"""LoRA adapters that SGLang applies: its arguments, and the receiver that sends them to its processes.

SGLang knows one adapter, `NAME`, and every request names it. A push replaces its matrices in the scheduler
(`loader.load_adapter`), so requests that are running continue with the new ones.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verl.modeling.huggingface import experts_of
from verl.modeling.vision import is_vision_config
from verl.rollout.adapters import AdaptedLayers, AppliedAdapters
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.sglang.loader import sums_of_bits
from verl.rollout.sglang.service import Service
from verl.rollout.sglang.weights import FollowerReceiver, SglangReceiver
from verl.weight_sync.base import AdapterConfig, AdapterReceiver

NAME = "policy"
#: layers that SGLang joins to one. It requires the adapters of all of them: those that are missing are sent as zeros
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_INTO = {module: fused for fused, modules in _FUSED.items() for module in modules}
_CPU_COLUMNS = 32  # on a CPU, the slices of an MLP have a multiple of these
_MODULES = {*_FUSED_INTO, "o_proj", "down_proj"}


def lora_args(layers: AdaptedLayers, on_gpu: bool, memory_saver: bool) -> dict[str, Any]:
    """Arguments of `sglang.Engine` with which it applies adapters to these layers.

    memory_saver: whether SGLang frees the base weights, which are then copied to the CPU.
    """
    return {
        "enable_lora": True,
        "max_loras_per_batch": 1,
        "max_lora_rank": layers.rank,
        "lora_target_modules": _completed(layers.modules),
        "enable_weights_cpu_backup": memory_saver,
    } | ({} if on_gpu else {"lora_backend": "torch_native"})


def _completed(modules: Iterable[str]) -> list[str]:
    names = {*modules}
    return sorted(names.union(*(group for group in _FUSED.values() if names & {*group})))


def obstacles(copy: EngineCopy, env: RolloutEnv, layers: AdaptedLayers) -> Iterator[str]:
    """Why SGLang cannot apply the adapters of these layers."""
    if other := sorted({*layers.modules} - _MODULES):
        yield f"expected adapters of {', '.join(sorted(_MODULES))}, found {other[0]}"
    if other := [name for name in layers.names if _number_of(name) is None and name.rpartition(".")[2] in _MODULES]:
        yield f"expected names with .layers.NUMBER., found {other[0]}"
    if not layers.has_one_rank:
        yield "expected one rank for all layers (no rank_pattern)"
    for kind, is_present in (
        ("mixtures of experts", experts_of(copy.hf_config)),
        ("images", is_vision_config(copy.hf_config)),
    ):
        if is_present:
            yield f"it is not supported for models with {kind}"
    text, ranks = copy.hf_config.get_text_config(), env.tp_size
    heads, width = text.num_key_value_heads, text.intermediate_size
    if env.device.type == "cpu" and (heads % ranks or width % (ranks * _CPU_COLUMNS)):
        yield (
            "on a CPU it pads weights, but not adapters: with tensor_model_parallel_size="
            f"{ranks} expected num_key_value_heads divisible by {ranks} and intermediate_size by "
            f"{ranks * _CPU_COLUMNS}, found {heads} and {width}"
        )


def _number_of(layer: str) -> str | None:
    """The number of the decoder layer with this linear layer; None: it has none."""
    match = re.search(r"\.layers\.(\d+)\.", layer)
    return match and match[1]


class SglangAdapterReceiver(AppliedAdapters, SglangReceiver):
    """Receives the base weights once, and then adapters, which SGLang applies without merging them.

    The layers and shapes of a push must be those that the trainer adapts, and every tensor-parallel rank must receive
    the bits that were sent. The canary of the trainer compares the rest.
    """

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Receive the base weights. Raises ValueError like `SglangReceiver.receive`."""
        self.has_base = False
        super().receive(weights, version, is_last=False)
        self.has_base = True

    def _load_adapters(
        self, scaling: Mapping[str, float], pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], version: int
    ) -> None:
        self.filled = False
        matrices = [*self._matrices(scaling, pairs)]
        adapter = {"name": NAME, "rank": self._layers.rank, "modules": _completed(self._layers.modules)}
        with tempfile.TemporaryDirectory(prefix="verl-sglang-") as folder, self._updating(version):
            self._send(matrices, sums_of_bits(matrices), Path(folder), version, adapter)

    def _matrices(
        self, scaling: Mapping[str, float], pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(PEFT name, matrix) to send, B scaled, since SGLang has one factor for all layers."""
        for layer, a, b in self._with_zeros(pairs):
            for kind, matrix in (("A", a), ("B", b.float() * scaling.get(layer, 1.0))):
                yield f"{layer}.lora_{kind}.weight", matrix.to(self._device, self._dtype)

    def _with_zeros(
        self, pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        names = {*self._layers.names}
        for layer, a, b in pairs:
            yield layer, a, b
            path, _, module = layer.rpartition(".")
            group = _FUSED.get(_FUSED_INTO.get(module, ""), ())
            present = [other for other in group if f"{path}.{other}" in names]
            if module in present[:1]:
                for other in {*group} - {*present}:
                    rows, columns = self.shapes[f"{path}.{other}.weight"]
                    yield f"{path}.{other}", a.new_zeros(len(a), columns), b.new_zeros(rows, len(a))


class FollowerAdapterReceiver(AdapterReceiver, FollowerReceiver):
    """The receiver of the other ranks of a tensor-parallel group, which takes part in the pushes of rank 0."""

    applies_adapters = True

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        super().receive(weights, version)
        self.has_base = True

    def receive_adapters(
        self, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Take part in gathering the adapters."""
        for _ in tensors:
            pass


def with_adapter(arguments: Callable[[Any], dict[str, Any]], job: Any) -> dict[str, Any]:
    """Arguments of a request, which name the adapter."""
    return arguments(job) | {"lora_path": NAME}


def make_receiver(service: Service, layers: AdaptedLayers | None, *args: Any, **keys: Any) -> SglangReceiver:
    """The receiver of rank 0, for adapters or for merged weights. Requests may then name the adapter."""
    if layers is None:
        return SglangReceiver(service, *args, **keys)
    from sglang.srt.lora.lora_registry import LoRARef

    reference, engine = LoRARef(lora_id=NAME, lora_name=NAME, lora_path=NAME), service.engine
    engine.loop.run_until_complete(engine.tokenizer_manager.lora_registry.register(reference))
    return SglangAdapterReceiver(service, *args, layers=layers, **keys)
