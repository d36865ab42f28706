"""Images and videos of a prompt for SGLang.

SGLang's own processors would make tensors, tokens and positions from images and text again. Instead it gets those
that training computes with: the tensors of the model's processor, the tokens of the prompt, and its positions. So both
see the same pixels, whatever the settings of the processor.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from verl.modeling.positions import multimodal_positions, placeholder_runs
from verl.rollout.request import Request

#: values of a patch of 14 x 14 pixels of two frames. SGLang's Qwen2.5-VL takes tensors of another width for features
_QWEN2_5_PATCH = 1176
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True, eq=False)
class Item:
    """One image or video.

    Attributes:
        kind: "image" or "video".
        pixels: (patches, width), of the model's processor.
        grid: (1, 3) in patches.
        spans: first and last token of each run of its placeholders; of each frame, if frames are separate.
        digest: 64 bits of pixels and grid. SGLang keeps features and prefixes by it; its own hash leaves out the grid,
            so that two empty images of other sides would be the same.
    """

    kind: str
    pixels: torch.Tensor
    grid: torch.Tensor
    spans: list[tuple[int, int]]
    digest: int


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The images and videos of a prompt.

    Attributes:
        items: in order of their placeholders.
        positions: (3, L) of its tokens, and of the response tokens that are sent with it. One more if it ends with an
            image: when SGLang computes a request again, it counts on from the last position.
        offset: what is added to the index of a response token in its sequence, to get its position.
    """

    items: list[Item]
    positions: torch.Tensor
    offset: int


def check_model(hf_config: Any) -> None:
    """Raise ValueError if SGLang would not read the images of this model, or could not start.

    hf_config: HuggingFace config of the model.
    """
    if find_spec("torchvision") is None:
        raise ValueError(
            "rollout.name=sglang: SGLang starts models with images with torchvision, which is not installed: pip "
            "install torchvision (a build for the installed torch), or use rollout.name=native"
        )
    vision = hf_config.vision_config
    if hf_config.model_type == "qwen2_5_vl":
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if width != _QWEN2_5_PATCH:
            raise ValueError(
                f"rollout.name=sglang: expected patches of {_QWEN2_5_PATCH} values (14 x 14 pixels) in a model of "
                f"qwen2_5_vl, found {width}: SGLang would take the pixels for features; use rollout.name=native"
            )


def published_names(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by the names of SGLang's parameters, which are those of the first published models with images; other
    names are kept."""
    for name, tensor in weights:
        for ours, theirs in (("model.visual.", "visual."), ("model.language_model.", "model.")):
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        yield name, tensor


class MediaReader:
    """Makes the images of prompts. Digests are computed once for all samples of a prompt, which share its tensors.

    Args:
        config: HuggingFace config of the model.
    """

    def __init__(self, config: Any):
        self.config = config
        self._digests: Any = WeakIdKeyDictionary()  # tensor of pixels -> the digest of each image

    def check(self, name: str, request: Request) -> None:
        """Raise ValueError for images or videos that SGLang does not compute as training does.

        name: what error messages call the request.
        """
        if not request.has_images:
            return
        if not request.multi_modal_inputs:
            raise ValueError(
                f"{name}: expected the column multi_modal_inputs (tensors of the model's processor), found images "
                "without it: let the dataset run the processor (docs/vlm.md)"
            )
        if self.config.model_type == "qwen2_5_vl" and "pixel_values_videos" in request.multi_modal_inputs:
            raise ValueError(
                f"{name}: expected images, found videos: in SGLang's Qwen2.5-VL the frames of a video attend to each "
                "other, in training each to itself; use rollout.name=native, hf or vllm"
            )

    def read(
        self, prompt_ids: Sequence[int], inputs: Mapping[str, Any], sampled: int = 0, continued: int = 0
    ) -> PromptMedia:
        """The images of a prompt.

        Args:
            prompt_ids: with the placeholders of each image expanded.
            inputs: the tensors of the model's processor.
            sampled: response tokens that are sent with the prompt.
            continued: see `Request`.

        Raises:
            ValueError: the placeholders do not match the grids.
        """
        runs = defaultdict(list)
        for kind, start, grid in placeholder_runs(self.config, prompt_ids[: len(prompt_ids) - continued], inputs):
            runs[kind].append((start, start + grid.shape[1] - 1))
        items = [item for kind, spans in runs.items() for item in self._items(kind, spans, inputs)]
        positions = multimodal_positions(self.config, torch.tensor(prompt_ids), inputs, continued)
        following = int(positions.max()) + 1
        further = max(sampled, int((positions[:, -1] < following - 1).any()))
        positions = torch.cat([positions, (torch.arange(further) + following).expand(3, -1)], 1)
        return PromptMedia(sorted(items, key=lambda item: item.spans), positions, following - len(prompt_ids))

    def _items(self, kind: str, spans: list[tuple[int, int]], inputs: Mapping[str, Any]) -> list[Item]:
        pixels, grids = inputs[_PIXELS[kind]], torch.as_tensor(inputs[f"{kind}_grid_thw"])
        each = pixels.split(grids.prod(-1).tolist())
        digests = self._digests.get(pixels)
        if digests is None:
            digests = self._digests[pixels] = [_digest(*pair) for pair in zip(each, grids)]
        frames = 1 if len(spans) == len(grids) else None
        items, begin = [], 0
        for patches, grid, digest in zip(each, grids, digests):
            end = begin + (frames or int(grid[0]))
            items.append(Item(kind, patches, grid[None], spans[begin:end], digest))
            begin = end
        return items


def _digest(pixels: torch.Tensor, grid: torch.Tensor) -> int:
    made = hashlib.blake2b(str(grid.tolist()).encode(), digest_size=8)
    made.update(pixels.contiguous().view(torch.uint8).numpy())
    return int.from_bytes(made.digest(), "big")


def take_processed(engine: Any, config: Any) -> None:
    """Let an `sglang.Engine` take `PromptMedia` as image_data, instead of images that it would process itself.

    config: HuggingFace config of the model.
    """
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalInputFormat,
        MultimodalProcessorOutput,
    )

    def item_of(item: Item) -> Any:
        made = MultimodalDataItem(
            modality=Modality[item.kind.upper()],
            hash=item.digest,
            offsets=item.spans,
            format=MultimodalInputFormat.PROCESSOR_OUTPUT,
            feature=item.pixels,
            model_specific_data={f"{item.kind}_grid_thw": item.grid},
        )
        made.set_pad_value()
        return made

    async def process(image_data: list[PromptMedia], input_text: list[int], *args: Any, **keys: Any) -> Any:
        (media,) = image_data
        items = [item_of(item) for item in media.items]
        return MultimodalProcessorOutput(
            input_ids=input_text,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(input_text, items),
            mm_items=items,
            im_start_id=config.vision_start_token_id,
            im_end_id=config.vision_end_token_id,
            im_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            mrope_positions=media.positions,
            mrope_position_delta=torch.tensor([[media.offset]]),
        )

    engine.tokenizer_manager.mm_processor.process_mm_data_async = process


# ---- in the scheduler -----------------------------------------------------------------------------------------------


def forget_features() -> None:
    """Drop the features of images that SGLang keeps by their contents: a push changes the weights that made them."""
    modules = [sys.modules.get(f"sglang.srt.managers.{name}") for name in ("mm_schedule", "mm_utils")]
    owner = next((module for module in modules if module is not None), None)
    if owner is not None and owner.embedding_cache is not None:
        owner.embedding_cache.clear()
