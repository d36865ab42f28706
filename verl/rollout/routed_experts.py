"""The experts that a rollout engine has chosen for the tokens of a sequence: arrays (tokens, layers, k) int16, from the
first prompt token on.

The last token of a response is never an input of the model, so it has no choices. Router replay lets training make the
same choices.
"""

import re
from collections.abc import Iterable, Sequence
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
            "rollout.name=native, or actor.router_replay.mode=R2, which records in training"
        )


def layers_with_experts(name: str, parameters: Iterable[str]) -> list[int]:
    """Indices of the layers that have choices, for an engine that reports an entry for every layer.

    Args:
        name: of the engine.
        parameters: HuggingFace names of the model's parameters.

    Raises:
        ValueError: there are none.
    """
    layers = {int(match[1]) for each in parameters if (match := re.search(r"\.layers\.(\d+)\..*\.experts\.", each))}
    if not layers:
        raise ValueError(f"{RECORDING_KEY}: rollout.name={name}: the model is not a mixture of experts: use false")
    return sorted(layers)


def cut(choices: np.ndarray, tokens: int) -> np.ndarray:
    """The choices of the first tokens, as int16.

    Args:
        choices: (tokens, layers, k), possibly with those of tokens that were cut off.
        tokens: of the sequence without the last one.

    Raises:
        ValueError: tokens without choices.
    """
    if len(choices) < tokens:
        raise ValueError(
            f"{RECORDING_KEY}: expected the experts of {tokens} tokens, found those of {len(choices)}: this version of "
            "the rollout engine does not report all of them"
        )
    return choices[:tokens].astype(np.int16)


def extended(known: np.ndarray | None, choices: np.ndarray | None, length: int) -> np.ndarray | None:
    """The choices of a sequence after another request that continued it.

    Args:
        known: of the first tokens, as they were chosen when these tokens were computed first; kept.
        choices: of all tokens, with those that were computed again.
        length: tokens of the sequence before the request; choices for tokens that were cut off are dropped.
    """
    if known is None or choices is None:
        return choices
    known = known[:length]
    return np.concatenate([known, choices[len(known) :]])


def routed_experts_column(
    experts: Sequence[np.ndarray | None], prompt_lengths: Sequence[int], prompt_width: int, response_width: int
) -> torch.Tensor:
    """The column routed_experts (B, P + T, layers, k) int16, NOT_RECORDED at padding and at the last tokens.

    Args:
        experts: of each sample, from the first prompt token on.
        prompt_lengths: tokens of each prompt, which are padded on the left.

    Raises:
        ValueError: a sample without choices, or of another number of layers or experts.
    """
    shapes = {None if choices is None else choices.shape[1:] for choices in experts}
    if None in shapes or len(shapes) > 1:
        raise ValueError(
            f"rollout.enable_rollout_routing_replay: expected the experts of every sample, found {shapes}: "
            "the rollout engine or the agent loop does not pass Completion.routed_experts on"
        )
    column = torch.full((len(experts), prompt_width + response_width, *shapes.pop()), NOT_RECORDED, dtype=torch.int16)
    for row, choices, length in zip(column, experts, prompt_lengths):
        target = row[prompt_width - length :]
        count = min(len(choices), len(target))
        target[:count] = torch.from_numpy(choices[:count].astype(np.int16))
    return column
