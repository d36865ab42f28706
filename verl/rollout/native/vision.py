"""Prompts with images in the native engine: embeddings, positions and attention of a prefill.

The vision tower of the module computes the images of a prompt once for all its samples. After the prompt all axes of a
position are equal, so a decode step is that of text, with positions shifted by the offset of the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from verl.modeling.casting import autocast_dtype
from verl.modeling.positions import multimodal_positions
from verl.modeling.vision import BIDIRECTIONAL, INDEX, Media, VisionForward, insert_features
from verl.rollout.native.decoder import RopeTable
from verl.rollout.request import Request


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt."""

    inputs: Mapping[str, Any]  # tensors of the model's processor
    positions: torch.Tensor  # (C, L) of the prompt, on one axis or three
    continued: int = 0  # number of tokens of earlier turns at the end of the prompt, which are text

    @property
    def offset(self) -> int:
        """What is added to the index of a response token in its sequence, to get its position."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]


@dataclass(frozen=True)
class PrefillImages:
    """The images of one prefill of `count` prompts, right-padded to `width` tokens."""

    embeds: torch.Tensor  # (count * width, H), with features in place of placeholders
    mask: torch.Tensor | None  # (count * width,) the placeholders, if `deepstack` is not empty
    # features (V, H) that are added to the states of the placeholders after each of the first layers
    deepstack: tuple[torch.Tensor, ...]
    positions: torch.Tensor  # (3, count * width)
    # (count, width) the image of each token, 0 for text, if the tokens of an image attend to each other in both
    # directions
    blocks: torch.Tensor | None = None

    def added(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """States x (count * width, H) after a layer, with its deepstack features."""
        if layer < len(self.deepstack):
            x[self.mask] += self.deepstack[layer].to(x.dtype)
        return x


class NativeVision:
    """The vision tower of a module.

    Args:
        module: a vision-language model.
        dtype: of its computation, as in training.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self.config, self.dtype = module.config, dtype
        self.forward = VisionForward(module)
        # samples of a prompt share an entry, which is freed with the last of them, also in a continuous batch
        self._known: WeakValueDictionary[tuple, PromptImages] = WeakValueDictionary()

    def images_of(self, prompt: Sequence[int], request: Request) -> PromptImages | None:
        """The images of a request; None without. Raises ValueError if they do not match the placeholders."""
        inputs, continued = request.multi_modal_inputs, request.continued
        if not inputs:
            return None
        key = (tuple(prompt), id(inputs), continued)
        images = self._known.get(key)
        if images is None:
            positions = multimodal_positions(self.config, torch.tensor(prompt), inputs, continued)
            images = self._known[key] = PromptImages(inputs, positions, continued)
        return images

    def prefill(
        self, embeds: torch.Tensor, prompts: Sequence[list[int]], images: Sequence[PromptImages | None]
    ) -> PrefillImages | None:
        """The images of a prefill; None without.

        Args:
            embeds: (count * width, H) embeddings of the right-padded prompts.
            prompts: `count` prompts.
            images: those of each.
        """
        if not any(image is not None for image in images):
            return None
        count, width = len(prompts), len(embeds) // len(prompts)
        media = Media(self.config, [None if image is None else image.inputs for image in images])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        prefixes = [prompt[: len(prompt) - (image.continued if image else 0)] for prompt, image in zip(prompts, images)]
        rows = {  # without the tokens of earlier turns: a placeholder token among them is text
            "input_ids": torch.tensor([prompt + [-1] * (width - len(prompt)) for prompt in prefixes]),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "responses": torch.zeros(count, 0, dtype=torch.long),
            INDEX: media.index,
        }
        vision = media.input_of(rows, placed=True).to(embeds.device)
        dtype = autocast_dtype(next(self.forward.tower.parameters()).dtype, self.dtype)
        with torch.autocast(embeds.device.type, dtype, enabled=dtype is not None):
            features = self.forward.features(vision.tensors)
        placed, more = insert_features(embeds[None], features, vision)
        positions = torch.arange(width).expand(count, 3, width).clone()
        for row, image in enumerate(images):
            if image is not None:
                positions[row, :, : image.positions.shape[1]] = image.positions
        mask = more["visual_pos_masks"][0] if more else None
        deepstack = tuple(more.get("deepstack_visual_embeds", ()))
        positions = positions.transpose(0, 1).flatten(1).to(embeds.device)
        blocks = None
        if self.config.model_type in BIDIRECTIONAL:
            blocks = _runs(vision.slots, count, width)
        return PrefillImages(placed[0], mask, deepstack, positions, blocks)


def _runs(slots: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """(count, width) number of the run of adjacent placeholders that a token is in, from 1 on; 0 for other tokens.

    slots: (V,) flat index of the placeholders, ascending.
    """
    runs = torch.zeros(count * width, dtype=torch.long, device=slots.device)
    starts = torch.ones_like(slots)
    starts[1:] = (slots.diff() != 1) | (slots[1:] % width == 0)
    runs[slots] = starts.cumsum(0)
    return runs.view(count, width)


def axis_of_frequencies(parameters: Mapping[str, Any], count: int) -> torch.Tensor | None:
    """(count,) position axis of each rotary frequency; None without mRoPE.

    Qwen2-VL has one block of frequencies per axis, Qwen3-VL interleaves them: T H W T H W ... T T.
    """
    sections = parameters.get("mrope_section")
    if sections is None:
        return None
    if not parameters.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(count, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotary_rows(table: RopeTable, axes: torch.Tensor | None, positions: torch.Tensor) -> RopeTable:
    """The rows of a rotary table for tokens of prompts with images.

    Args:
        table: tensors (length, R) or (length, R / 2), as `Rope.table` returns them.
        axes: as `axis_of_frequencies`.
        positions: (3, N); equal on all axes if `axes` is None.

    Returns:
        Tensors (N, R) or (N, R / 2).
    """
    if axes is None:
        return tuple(t[positions[0]] for t in table)
    index = positions[axes.to(positions.device)].t().contiguous()  # kernels read the result row by row
    return tuple(t.gather(0, index if t.shape[1] == len(axes) else torch.cat((index, index), 1)) for t in table)
