"""Mixture-of-experts (MoE) layers: routing that can be recorded and replayed, and the matmuls of the experts.

A router scores E experts for every token and sends it to k of them; the output is the sum of their outputs, weighted by
the softmax of the scores. The choice is discrete: a rounding difference between rollout and training can send a token
to another expert, which changes its log-prob by much more than rounding does. Router replay (Ma et al. 2025, arXiv
2510.11370) repeats recorded choices. The weights are still computed from the router's own scores, so its gradient
flows through the softmax.

N tokens, L layers with experts, E experts, k experts per token, H hidden size, I width of an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from verl.modeling.linear import compute_dtype

#: routers of transformers that are a softmax over all experts followed by a top-k -> whether the weights stay float32
_ROUTERS = {
    "Qwen3MoeTopKRouter": False,
    "Qwen2MoeTopKRouter": False,
    "OlmoeTopKRouter": False,
    "MixtralTopKRouter": True,
}
#: classes of experts with the parameters gate_up_proj (E, 2 I, H) and down_proj (E, H, I)
_EXPERTS = ("Qwen3MoeExperts", "Qwen2MoeExperts", "OlmoeExperts", "MixtralExperts")
#: attribute of a router whose forward method is replaced
_ROUTING = "_verl_routing"
#: no recorded choice: the one that the router computes is used
NOT_RECORDED = -1


class ExpertsFunction(Protocol):
    """Computes the weighted sum of the selected experts: x (..., H), selected and weights (..., k) -> (..., H).

    There are `plain_experts`, `fused_experts.fused_experts` and `expert_parallel.ExpertRanks`.
    """

    def __call__(
        self, module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(eq=False)
class Routing:
    """The routers of one model, their choices, and the choices that they replay."""

    routers: list[nn.Module]  # in the order of the layers
    # (N, L, k) recorded choices of the tokens of a forward pass, NOT_RECORDED where there are none; None: no choices
    # were recorded
    recorded: torch.Tensor | None = None
    replays: bool = True  # whether the recorded choices are repeated; otherwise they are only compared
    used: list[torch.Tensor] = field(default_factory=list)  # per layer (N, k), the choices of the last forward pass
    computed: list[torch.Tensor] = field(default_factory=list)  # per layer (N, k), the choices without replay
    # per layer (N,), of the router's distribution in nats, without gradient
    entropies: list[torch.Tensor] = field(default_factory=list)
    # if not None, the choices of every call of a router are appended, layer by layer
    log: list[torch.Tensor] | None = None

    @property
    def layers(self) -> int:
        return len(self.routers)

    @property
    def experts(self) -> int:
        return self.routers[0].num_experts

    @property
    def top_k(self) -> int:
        return self.routers[0].top_k

    def start(self, recorded: torch.Tensor | None) -> None:
        """Start a forward pass; recomputation in its backward pass replays the same choices.

        Args:
            recorded: (N, L, k) choices to replay or compare, if any.

        Raises:
            ValueError: the choices are not those of this model.
        """
        if recorded is not None:
            check_choices(tuple(recorded.shape[1:]), self.layers, self.top_k)
        self.recorded = recorded
        self.used, self.computed, self.entropies = ([torch.empty(0)] * self.layers for _ in range(3))

    def choices(self) -> torch.Tensor:
        """The choices of the last forward pass, (N, L, k)."""
        return torch.stack(self.used, 1)

    @contextmanager
    def logging(self) -> Iterator[list[torch.Tensor]]:
        """Context in which the choices of every call are appended to the list that it returns."""
        self.recorded, self.log = None, []
        try:
            yield self.log
        finally:
            self.log = None


def check_choices(shape: tuple[int, ...], layers: int, top_k: int) -> None:
    """Raise ValueError unless recorded choices (..., L, k) are those of a model."""
    if shape != (layers, top_k):
        raise ValueError(
            f"column 'routed_experts': expected {layers} layers with {top_k} experts per token, found {shape}: the "
            "rollout engine records another model"
        )


def install_routing(module: nn.Module) -> Routing | None:
    """Replace the routers and experts of a HuggingFace model by the functions of this module, in place.

    Returns:
        The routing of the model, the same object at every call; None if it has no router that is supported here.
    """
    routers = [child for child in module.modules() if type(child).__name__ in _ROUTERS]
    if not routers:
        return None
    if not hasattr(routers[0], _ROUTING):
        routing = Routing(routers)
        routing.start(None)
        for layer, router in enumerate(routers):
            setattr(router, _ROUTING, routing)
            router.forward = partial(_route, router, routing, layer)
        set_experts_function(module, plain_experts)
    return getattr(routers[0], _ROUTING)


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """The modules with the parameters of the experts, in the order of the layers."""
    # FSDP2 replaces a class by a subclass
    return [child for child in module.modules() if any(base.__name__ in _EXPERTS for base in type(child).__mro__)]


def set_experts_function(module: nn.Module, function: ExpertsFunction) -> None:
    """Let `function` compute all experts in a module, in place."""
    for experts in expert_modules(module):
        experts.forward = partial(function, experts)


# ---- routers --------------------------------------------------------------------------------------------------------


def _route(
    module: nn.Module, routing: Routing, layer: int, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (N, E), weights (N, k) and choices (N, k) of a router."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), module.weight)
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(torch.float32, logits.dtype))
    computed = probabilities.topk(module.top_k, -1).indices
    selected = computed
    if routing.recorded is not None and routing.replays:
        recorded = routing.recorded[:, layer].long()
        selected = torch.where(recorded == NOT_RECORDED, computed, recorded)
    weights = gate_weights(probabilities, selected, normalizes_weights(module))
    if routing.log is not None:
        routing.log.append(selected)
    else:
        routing.used[layer], routing.computed[layer] = selected, computed
        routing.entropies[layer] = torch.special.entr(probabilities.detach()).sum(-1)
    return logits, weights if keeps_float_weights(module) else weights.to(logits.dtype), selected


def keeps_float_weights(router: nn.Module) -> bool:
    """Whether the weights of a router stay float32 in 16 bits."""
    return _ROUTERS[type(router).__name__]


def normalizes_weights(router: nn.Module) -> bool:
    """Whether a router divides the weights of a token by their sum."""
    return keeps_float_weights(router) or router.norm_topk_prob


def gate_weights(probabilities: torch.Tensor, selected: torch.Tensor, normalized: bool) -> torch.Tensor:
    """The weights (N, k) of the selected experts: their probabilities, divided by their sum if `normalized`."""
    weights = probabilities.gather(-1, selected)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights


# ---- experts --------------------------------------------------------------------------------------------------------


def plain_experts(module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the selected experts by operators of torch; see `ExpertsFunction`."""
    order, counts = by_expert(selected, module.num_experts)
    outputs = expert_outputs(module, x.flatten(0, -2)[order // selected.shape[-1]], counts)
    return weighted_sum(outputs, order, weights, x.dtype)


def by_expert(selected: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the N k pairs of a token and an expert by expert.

    Returns:
        order: (N k,), index of each pair in selected.view(-1).
        counts: (E,) pairs of each expert.
    """
    flat = selected.reshape(-1)
    return flat.argsort(stable=True), count(flat, experts)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order` (S,)."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order), device=order.device)
    return result


def count(selected: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert occurs: (M,) -> (E,) int64. Does not synchronize with a GPU, unlike `bincount`."""
    return selected.new_zeros(experts).scatter_add_(0, selected, torch.ones_like(selected))


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


def fits_grouped_matmul(gate_up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's grouped matmul computes experts in a dtype: it needs rows of multiples of 16 bytes.

    gate_up: (e, 2 I, H); down: (e, H, I).
    """
    sizes = gate_up.shape[-1], down.shape[-1]
    return dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)


def expert_outputs(module: nn.Module, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Outputs of the experts: x (S, H), sorted by expert, and the rows of each -> (S, H)."""
    gate_up, down = module.gate_up_proj, module.down_proj
    dtype = compute_dtype(x, gate_up)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    if x.is_cuda and dtype == torch.bfloat16 and fits_grouped_matmul(gate_up, down, dtype):
        # one kernel for all experts
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(module.act_fn(gate) * up, down.transpose(1, 2), offs=ends)
    outputs = []
    # every expert takes part, those without tokens too: all ranks of FSDP need a gradient
    for rows, to_width, to_hidden in zip(x.split(counts.tolist()), gate_up.unbind(), down.unbind()):
        gate, up = F.linear(rows, to_width).chunk(2, -1)
        outputs.append(F.linear(module.act_fn(gate) * up, to_hidden))
    return torch.cat(outputs)


def weighted_sum(outputs: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum the k outputs of each token: outputs (N k, H), sorted as `by_expert`, and weights (..., k) -> (..., H)."""
    copies = outputs[inverse(order)].view(*weights.shape, outputs.shape[-1])
    return (copies * weights[..., None]).sum(-2).to(dtype)


# ---- statistics -----------------------------------------------------------------------------------------------------


class RoutingStatistics:
    """Sums over forward passes of a model, from which the metrics moe/* of an update are computed."""

    def __init__(self, routing: Routing):
        self.routing = routing
        self._sums: torch.Tensor | None = None  # on the device, so that the host does not wait for it

    @torch.no_grad()
    def add(self, valid: torch.Tensor | None = None) -> None:
        """Add the last forward pass. valid: (N,) bool, which tokens count; None: all."""
        routing = self.routing
        used, computed, recorded = routing.choices(), torch.stack(routing.computed, 1), routing.recorded
        if valid is not None:
            used, computed = used[valid], computed[valid]
            recorded = None if recorded is None else recorded[valid]
        load = torch.cat([count(layer.flatten(), routing.experts) for layer in used.unbind(1)])
        entropies = torch.stack(routing.entropies, 1)
        entropy = (entropies if valid is None else entropies[valid]).sum()
        tokens = torch.full_like(entropy, len(used))
        compared = changed = torch.zeros_like(entropy)
        if recorded is not None:
            is_recorded = (recorded != NOT_RECORDED).all(-1).all(-1)
            differs = (computed.sort(-1).values != recorded.sort(-1).values).any(-1).any(-1)
            compared, changed = is_recorded.sum(), (differs & is_recorded).sum()
        sums = torch.cat([load.double(), torch.stack([x.double() for x in (entropy, tokens, compared, changed)])])
        self._sums = sums if self._sums is None else self._sums + sums

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._sums.device

    def sums(self) -> list[float]:
        """All sums, to be added up over ranks."""
        return self._sums.tolist()

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """The metrics of the sums of all ranks; see `statistics_metrics`."""
        return statistics_metrics(sums, self.routing.layers)


def statistics_metrics(sums: list[float], layers: int) -> dict[str, float]:
    """The metrics of sums over forward passes.

    Args:
        sums: tokens of each expert, layer by layer; entropy of all tokens and layers; tokens; tokens with recorded
            choices; those of them that some router would send to other experts.
        layers: L.

    Returns:
        moe/max_load: tokens of the busiest expert of a layer over the mean of its experts, mean over layers.
        moe/unused_experts: share of the experts without a token, mean over layers.
        moe/router_entropy: entropy of the router's distribution in nats, mean over tokens and layers.
        moe/routing_mismatch: share of the tokens for which the router of training chooses other experts
            than those that were recorded, in any layer. Only with recorded choices.
    """
    *flat, entropy, tokens, compared, changed = sums
    load = torch.tensor(flat, dtype=torch.float64).view(layers, -1)
    metrics = {
        "moe/max_load": float((load.amax(1) / load.mean(1).clamp_min(1e-9)).mean()),
        "moe/unused_experts": float((load == 0).double().mean()),
        "moe/router_entropy": entropy / max(1.0, tokens * layers),
    }
    return metrics | ({"moe/routing_mismatch": changed / compared} if compared else {})
