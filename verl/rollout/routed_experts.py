"""The experts that a rollout engine has chosen for the tokens of a sequence: arrays (tokens, layers, k) int16, from the
first prompt token on.

The last token of a response is never an input of the model, so it has no choices. Router replay lets training make the
same choices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

#: the key that turns `Completion.routed_experts` on, in messages
RECORDING_KEY = "rollout.enable_rollout_routing_replay=true"
#: the router of training decides; `verl.modeling.moe.NOT_RECORDED`, whose module takes long to import
NOT_RECORDED = -1


def check_records(config: Any, name: str, supported: bool) -> None:
    """Raise ValueError if the `rollout` section asks for choices that the engine of this name does not report."""
    if getattr(config, "enable_rollout_routing_replay", False) and not supported:
        raise ValueError(
            f"{RECORDING_KEY}: the rollout engine {name!r} does not report the experts that it chooses: use "
            "rollout.name=native or hf, or actor.router_replay.mode=R2, which records in training"
        )


def extended(known: np.ndarray | None, found: np.ndarray | None, length: int) -> np.ndarray | None:
    """The choices of a sequence after another request that continued it.

    Args:
        known: of the first tokens, as they were chosen when these tokens were computed first; kept.
        found: of all tokens, with those that were computed again.
        length: tokens of the sequence before the request; choices for tokens that were cut off are dropped.
    """
    if known is None or found is None:
        return found
    known = known[:length]
    return np.concatenate([known, found[len(known) :]])


def routed_experts_column(
    experts: Sequence[np.ndarray | None], prompt_lengths: Sequence[int], prompt_width: int, response_width: int
) -> torch.Tensor:
    """The column routed_experts (B, P + T, layers, k) int16, NOT_RECORDED at padding and at the last tokens.

    Args:
        experts: of each sample, from the first prompt token on.
        prompt_lengths: tokens of each prompt, which are padded on the left.
        prompt_width, response_width: P and T.

    Raises:
        ValueError: a sample without choices, or of another number of layers or experts.
    """
    shapes = {None if found is None else found.shape[1:] for found in experts}
    if None in shapes or len(shapes) > 1:
        raise ValueError(
            f"rollout.enable_rollout_routing_replay: expected the experts of every sample, found {shapes}: "
            "the rollout engine or the agent loop does not pass Completion.routed_experts on"
        )
    column = torch.full((len(experts), prompt_width + response_width, *shapes.pop()), NOT_RECORDED, dtype=torch.int16)
    for row, found, length in zip(column, experts, prompt_lengths):
        own = row[prompt_width - length :]
        count = min(len(found), len(own))
        own[:count] = torch.from_numpy(found[:count].astype(np.int16))
    return column
