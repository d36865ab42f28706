"""Does an update fit into the memory of a GPU: how long micro-batches may be, and whether activations must go.

What the layers keep for the backward pass is measured once, per token, by the tensors that autograd saves in two small
forward passes. From it and the memory that is free follow the tokens that fit: with all activations kept, or with those
of one layer at a time (activation checkpointing, Chen et al. 2016, arXiv 1604.06174), which costs a forward pass more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from verl.engines.micro_batch import ENOUGH_TOKENS
from verl.modeling.log_probs import CHUNK_ELEMENTS, KEPT_SHARE

#: the share of the free memory that is planned for: blocks of memory of many sizes leave gaps
SHARE = 0.8
#: what the layers use beside what they keep, as a multiple of what one layer keeps: gradients on their way
WORKING_LAYERS = 2
#: lengths of the two rows whose difference is what tokens cost, weights' copies and tables left out
_SHORT, _LONG = 128, 384


@dataclass(frozen=True)
class Kept:
    """Bytes per token that wait for the backward pass: of all activations, or of what checkpointing leaves of them."""

    plain: float
    checkpointed: float


@dataclass(frozen=True)
class Room:
    """Tokens of a micro-batch that fit with all activations kept, and with checkpointing."""

    plain: int
    checkpointed: int


def measure_kept(run: Callable[[int], object], module: nn.Module, vocab_size: int) -> Kept:
    """Bytes per token that the layers of `module` keep.

    run: does a forward pass over so many tokens, and gives what its backward pass would start from. The logits are not
    counted: `logits` decides about them.
    """
    layers = module.config.get_text_config().num_hidden_layers
    hidden = module.config.get_text_config().hidden_size
    per_token = (_saved_bytes(run, _LONG, vocab_size) - _saved_bytes(run, _SHORT, vocab_size)) / (_LONG - _SHORT)
    one_layer = per_token / layers
    # the sum of all branches; fused layers are given the last branch apart from it, in 16 bits
    inputs = layers * hidden * (torch.float32.itemsize + torch.bfloat16.itemsize)
    return Kept(per_token + WORKING_LAYERS * one_layer, inputs + (1 + WORKING_LAYERS) * one_layer)


def _saved_bytes(run: Callable[[int], object], tokens: int, vocab_size: int) -> int:
    """Of the memory behind all tensors that autograd saves, each block once."""
    blocks: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] != (vocab_size,):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        alive = run(tokens)  # while it is, no block is used twice
    del alive
    return sum(blocks.values())


def free_bytes(device: torch.device) -> int:
    """What torch could still take of a GPU's memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def update_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """What an update takes beside activations: the gradients, and Adam's moments where they are not there yet."""
    trained = sum(_local(p).numel() * p.dtype.itemsize for p in parameters if p.requires_grad)
    return trained if optimizer.state else 3 * trained


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def logits_bytes(vocab_size: int, width: int, device: torch.device) -> int:
    """What the last projection takes at most: logits that are kept, a chunk of them and its gradient.

    width: bytes of a number.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    kept = min(KEPT_SHARE * total, ENOUGH_TOKENS * vocab_size * width)
    chunk = min(CHUNK_ELEMENTS[device.type], ENOUGH_TOKENS * vocab_size)
    return int(kept + 3 * chunk * width)


def room(kept: Kept, free: int) -> Room:
    """The tokens that fit into `free` bytes."""
    usable = max(0, SHARE * free)
    return Room(int(usable / kept.plain), int(usable / kept.checkpointed))


def settle(
    tokens: int | None, longest: int, room: Room, checkpointing: bool | Literal["auto"]
) -> tuple[int | None, bool]:
    """(tokens of a micro-batch at most, whether activations are computed again).

    tokens: of the largest micro-batch where the user says how they are cut, else None; longest: of a row.
    """
    if checkpointing == "auto":
        # half a full micro-batch without checkpointing is as fast as a full one with it is slow
        checkpointing = room.plain < max(longest, tokens if tokens is not None else ENOUGH_TOKENS // 2)
    fits = room.checkpointed if checkpointing else room.plain
    return (tokens if tokens is not None else max(longest, min(ENOUGH_TOKENS, fits))), checkpointing
