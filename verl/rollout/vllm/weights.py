"""Loads the trainer's weights into vLLM's model, and verifies them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.rollout.engine_copy import EngineReceiver
from verl.rollout.expert_names import ExpertNames
from verl.rollout.vllm.experts import expert_layers, unpacked
from verl.weight_sync.base import check_parameters
from verl.weight_sync.checksums import sum_of_bits, wrap

if TYPE_CHECKING:
    from verl.rollout.vllm.engine import VllmRollout

log = logging.getLogger(__name__)

_PROBED_ROWS = 256
#: largest error of a probed layer, relative to the norms of its row and its input
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-4, torch.bfloat16: 2e-3}


class VllmReceiver(EngineReceiver):
    """Receives weights by HuggingFace name into the model of a `VllmRollout`.

    vLLM's loaders skip names that they do not know, and may leave copies of a weight as they were. So a push is
    verified: names and shapes are those of the HuggingFace model; the bits of every parameter of vLLM add up to those
    that were sent (over the ranks of a tensor-parallel group); and the head and the first layer compute with them.

    Args:
        engine: the rollout engine.
        shapes: returns HuggingFace name -> shape of every parameter.
        filled: whether the model has its weights.
    """

    def __init__(self, engine: "VllmRollout", shapes: Callable[[], dict[str, torch.Size]], filled: bool):
        super().__init__(shapes, filled)
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
    def _updating(self, version: int, idle: bool = False, is_last: bool = True) -> Iterator[nn.Module]:
        """Context of a push, between two steps. Yields vLLM's model. Nothing is generated if it raises.

        Args:
            version: weight version.
            idle: no request may be running.
            is_last: whether the engine may generate after it.
        """
        with self._engine.stepper.between_steps("a weight push", idle) as running:
            self.filled = False
            self._engine.memory.wake_weights()
            try:
                yield engine_model(self._engine.llm)
            finally:
                self._engine.llm.reset_prefix_cache(reset_running_requests=bool(running))
                if self._engine.reads_images:
                    self._engine.llm.llm_engine.reset_encoder_cache()
            for job in running:
                job.spans.append((len(job.token_ids), version))
            self.filled = is_last

    def release(self) -> None:
        """See `WeightReceiver.release`. With sleep mode, all memory of the engine is freed."""
        with self._engine.stepper.between_steps("release()", idle=True):
            self.filled = False
            self._engine.memory.drop()


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Load all parameters by vLLM's loaders, and verify them. Raises ValueError for stale ones."""
    with unpacked(expert_layers(model), version):
        sums = SentBits(model)
        unfused = sums.names.experts.unfused
        stream = (item for name, tensor in weights for item in unfused(name, sums.add(name, tensor.detach())))
        model.load_weights(stream)
        for _ in stream:  # a loader may stop early
            pass
        sums.verify(version)
    check_layers(model, version)


def engine_model(llm: Any) -> nn.Module:
    """vLLM's model in this process."""
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    return model


# ---- verification ---------------------------------------------------------------------------------------------------


class ParameterNames:
    """Names of the parameters of vLLM's model for those of HuggingFace. vLLM fuses some, such as q, k and v.

    Layers with adapters have the names of those without.
    """

    def __init__(self, model: nn.Module):
        self.parameters = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
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


class SentBits:
    """Sums of the bits of the tensors that were sent, per parameter of vLLM's model.

    Sums do not depend on the order of the elements, so a fused parameter has the sum of its parts.
    """

    def __init__(self, model: nn.Module):
        self.names = ParameterNames(model)
        self._model = model
        self._parameters = self.names.parameters
        self._parts: dict[str, list[tuple[int, torch.Tensor]]] = {}  # elements and sum

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor. Returns it in the dtype and on the device of the parameter that it is loaded into."""
        target = self.names.target(name)
        if target is None:
            raise ValueError(f"rollout.name=vllm: vLLM's model has no parameter for {name!r}: it is not supported")
        parameter = self._parameters[target]
        tensor = tensor.to(parameter.device, parameter.dtype)
        parts = self._parts.setdefault(target, [])
        parts += [(part.numel(), sum_of_bits(part)) for part in self._parts_of(target, tensor)]
        return tensor

    def _parts_of(self, target: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors whose copies are counted together. A model such as Phi3 has q, k and v in one parameter: k and v
        may be on more ranks than q."""
        layer = self._model.get_submodule(target.rpartition(".")[0])
        if getattr(layer, "num_kv_head_replicas", 1) == 1:
            return [tensor]
        q, k = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size
        v = layer.total_num_kv_heads * layer.v_head_size
        return tensor.split([q, k, v]) if len(tensor) == q + k + v else [tensor]

    def verify(self, version: int) -> None:
        """Raise ValueError unless every parameter of the model has the bits that were sent. Collective over the
        tensor-parallel group."""
        names = sorted(self._parameters)
        if unset := [name for name in names if name not in self._parts]:
            raise ValueError(f"weights of version {version}: vLLM's parameters {unset[:3]} were not loaded")
        own = torch.stack([sum_of_bits(self._parameters[name]) for name in names]).cpu()
        total, ranks = sum_over_group(own)
        for index, name in enumerate(names):
            if not self._matches(name, own[index], total[index], ranks):
                raise ValueError(
                    f"weights of version {version}: vLLM's parameter {name} does not have the weights that were sent: "
                    "the rollout engine would generate with stale weights"
                )

    def _matches(self, name: str, own: torch.Tensor, total: torch.Tensor, ranks: int) -> bool:
        """Whether the bits are those that were sent. Sharded: the ranks together have all bits. Replicated: each has
        them. With fewer key/value heads than ranks, several ranks have the same head."""
        parts = self._parts[name]
        sums = [int(part) for _, part in parts]
        if wrap(sum(sums)) in (int(own), int(total)):
            return True
        others = sum(numel for numel, _ in parts[1:])
        if ranks == 1 or not others:
            return False
        copies, rest = divmod(ranks * self._parameters[name].numel() - parts[0][0], others)
        return rest == 0 and wrap(sums[0] + copies * sum(sums[1:])) == int(total)


def sum_over_group(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum over the tensor-parallel group, and its size. Collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    total = values.clone()
    if group.world_size > 1:
        torch.distributed.all_reduce(total, group=group.cpu_group)
    return total, group.world_size


def check_layers(model: nn.Module, version: int) -> None:
    """Raise ValueError if the head or a linear layer of the first block computes with other weights than its parameter.

    Some of vLLM's kernels compute with a packed copy of a weight, which a push may leave as it was. The first push
    shows it, because it replaces random weights.
    """
    errors: dict[str, torch.Tensor] = {}  # relative to the tolerance
    for name, layer in model.named_modules():
        is_probed = ".layers.0." in f".{name}" or name.endswith(("lm_head", "embed_tokens"))
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        if not is_probed or method is None or weight is None or weight.dim() != 2:
            continue
        # in [-1, 1], without random numbers
        x = torch.cos(torch.arange(weight.shape[1], device=weight.device)).to(weight.dtype)[None]
        rows = torch.linspace(0, len(weight) - 1, _PROBED_ROWS, device=weight.device).long()
        found = method.apply(layer, x, bias=None)[0, rows].float()
        expected = weight[rows].float() @ x[0].float()
        scale = weight[rows].float().norm(dim=1) * x.float().norm()
        error = ((found - expected).abs() / scale.clamp_min(1e-12)).max()
        errors[name] = error / _PROBE_TOLERANCE[weight.dtype]
    if not errors:
        return
    for name, error in zip(errors, torch.stack([*errors.values()]).tolist()):  # one synchronization with the device
        if not error < 1:
            raise ValueError(
                f"weights of version {version}: vLLM's layer {name} does not compute with the weights that were sent "
                f"(an error of {error:.2g} times the tolerance): the rollout engine would generate with stale weights"
            )
