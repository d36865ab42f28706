"""Router replay and routing statistics of a training engine with a mixture of experts."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from verl.engines.base import REPLAYS
from verl.modeling.moe import NOT_RECORDED, Routing, RoutingStatistics
from verl.modeling.packing import ModelInput
from verl.modeling.sequence_parallel import SequenceRanks
from verl.protocol import DataProto

#: the column (B, P + T, L, k) of recorded choices, and the name of the output that records them
ROUTED_EXPERTS = "routed_experts"


class Replays(Protocol):
    """The routers of a model, which repeat recorded choices if `replays` is set."""

    replays: bool


R = TypeVar("R", bound=Replays)


def set_replay(routing: Replays | None, batch: DataProto) -> tuple[str, ...]:
    """Prepare the routers for a batch. Returns the column to read, if the batch has it."""
    if ROUTED_EXPERTS not in batch:
        return ()
    check_routing(routing).replays = batch.meta_info.get(REPLAYS, True)
    return (ROUTED_EXPERTS,)


def check_routing(routing: R | None) -> R:
    """Raise ValueError if the model has no router whose choices can be recorded and replayed."""
    if routing is None:
        raise ValueError(
            "router replay needs a mixture of experts with softmax routers (Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral); "
            "this model has none: set actor.router_replay.mode=disabled"
        )
    return routing


def recorded_experts(routing: Routing, model_input: ModelInput) -> torch.Tensor:
    """The choices of the last forward pass: (b, P + T, L, k) int16, NOT_RECORDED at padding."""
    b, _ = model_input.shape
    packing, mask = model_input.packing, model_input.attention_mask
    # minus NOT_RECORDED, which becomes 0: each rank of a sequence has the choices of some tokens, and the sum has all
    choices = routing.choices()[: len(model_input.tokens)] - NOT_RECORDED
    if mask is not None:
        choices = choices * mask.view(-1, 1, 1)
    shifted = choices.new_zeros(b * model_input.width, *choices.shape[1:])
    shifted[model_input.tokens] = choices
    if packing is not None and packing.ranks is not None:
        shifted = packing.ranks.sum_of_shares(shifted)
    return (shifted + NOT_RECORDED).to(torch.int16).unflatten(0, (b, model_input.width))


def add_statistics(statistics: RoutingStatistics, model_input: ModelInput) -> None:
    """Add the last forward pass, without padding."""
    mask, real = model_input.attention_mask, len(model_input.tokens)
    if mask is not None:
        statistics.add(mask.flatten().bool())
    elif real < model_input.input_ids.numel():
        statistics.add(torch.arange(model_input.input_ids.numel(), device=model_input.tokens.device) < real)
    else:
        statistics.add()


def routing_metrics(
    statistics: RoutingStatistics,
    sequence_ranks: SequenceRanks | None,
    sum_over_ranks: Callable[[list[float]], list[float]],
) -> dict[str, float]:
    """The metrics moe/* of a mini-batch, over all ranks. Collective."""
    sums = statistics.sums()
    if sequence_ranks is not None:
        sums = sequence_ranks.sum_of_shares(torch.tensor(sums, device=statistics.device)).tolist()
    return statistics.metrics(sum_over_ranks(sums))
