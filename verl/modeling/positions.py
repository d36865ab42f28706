"""Positions of tokens in prompts with images and videos: one axis, or time, height and width (mRoPE).

Text has the same position on all axes. An image or video is a grid: its tokens are counted along each axis from the
position at which it begins, and the text after it continues after the largest of its positions (Qwen2-VL,
https://arxiv.org/abs/2409.12191, section 2.1). Qwen2.5-VL spaces the frames of a video by their time
(https://arxiv.org/abs/2502.13923). Qwen3-VL writes the time as text before each frame, so every frame is an image.

transformers 5 continues after the largest position of height and width instead, also if a video is longer than that;
earlier releases, vLLM and SGLang follow the rule of the papers, as this module does.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

#: model types with three axes -> whether each frame of a video is placed as an image, after its time as text
_MROPE = {"qwen2_vl": False, "qwen2_5_vl": False, "qwen3_vl": True, "qwen3_vl_moe": True}


def position_axes(config: Any) -> int:
    """Number of position axes of a model: 3 with mRoPE, otherwise 1.

    Args:
        config: the HuggingFace config of the whole model.

    Raises:
        ValueError: a model with mRoPE whose rule of positions is not known.
    """
    if config.model_type in _MROPE:
        return 3
    if "mrope_section" in (config.get_text_config().to_dict().get("rope_parameters") or {}):
        raise ValueError(
            f"{config.model_type}: multimodal positions of this model are not supported; supported are {list(_MROPE)} "
            "and models without mRoPE"
        )
    return 1


def multimodal_positions(
    config: Any, input_ids: torch.Tensor, inputs: Mapping[str, Any] | None, continued: int = 0
) -> torch.Tensor:
    """Positions of the tokens of one prompt.

    Args:
        config: the HuggingFace config of the whole model.
        input_ids: (L,) tokens without padding, with the placeholders of each image and video expanded.
        inputs: outputs of the processor for them: image_grid_thw and video_grid_thw (n, 3) in patches,
            second_per_grid_ts (n,) in seconds. None: text only; a placeholder token is then text.
        continued: number of tokens at the end of `input_ids` that are text, placeholder tokens included.

    Returns:
        (C, L) int64; C as in `position_axes`. A response token t after the prompt has the position
        `positions.max() + 1 + t` on all axes.

    Raises:
        ValueError: the placeholders do not match the grids.
    """
    axes = position_axes(config)
    if axes == 1 or not inputs:
        return torch.arange(input_ids.numel()).expand(axes, -1)
    segments: list[torch.Tensor] = []
    start = begin = 0  # the next position, and the token that has it
    for _, index, grid in placeholder_runs(config, input_ids[: input_ids.numel() - continued].tolist(), inputs):
        segments.append((torch.arange(index - begin) + start).expand(3, -1))
        segments.append(grid + start + index - begin)
        start, begin = int(segments[-1].max()) + 1, index + grid.shape[1]
    segments.append((torch.arange(input_ids.numel() - begin) + start).expand(3, -1))
    return torch.cat(segments, 1)


def placeholder_runs(
    config: Any, ids: Sequence[int], inputs: Mapping[str, Any]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The runs of placeholder tokens in a prompt, of a model with mRoPE: those of an image, a video or a frame.

    ids: tokens without padding.

    Yields:
        "image" or "video", the index of the first token, and the positions (3, tokens) relative to it.

    Raises:
        ValueError: the placeholders do not match the grids.
    """
    ids = list(ids)
    grids = _grids(config, inputs)
    tokens = {config.image_token_id: "image", config.video_token_id: "video"}
    begin = 0
    for index in range(len(ids)):
        if index < begin or ids[index] not in tokens:
            continue
        media = tokens[ids[index]]
        grid = next(grids[media], None)
        count = 0 if grid is None else grid.shape[1]
        if not count or ids[index : index + count] != [ids[index]] * count:
            run = sum(1 for _ in takewhile(ids[index].__eq__, ids[index:]))
            raise ValueError(
                f"expected {count} {media} tokens at token {index} of the prompt, from {media}_grid_thw, found "
                f"{run}: the placeholders must be expanded by the processor that made the grids"
            )
        yield media, index, grid
        begin = index + count
    if unused := [media for media, remaining in grids.items() if next(remaining, None) is not None]:
        raise ValueError(f"expected placeholder tokens for every {unused[0]} of {unused[0]}_grid_thw, found too few")


def batch_positions(
    config: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    inputs: Sequence[Mapping[str, Any] | None],
    continued: Sequence[int] | None = None,
) -> torch.Tensor:
    """Positions of a padded batch, whose rows are a left-padded prompt and a right-padded response.

    Args:
        config: as in `multimodal_positions`.
        input_ids, attention_mask: (B, P + T).
        width: T.
        inputs: for each row, the outputs of the processor for its prompt; None without images.
        continued: the same for each row, at the end of its prompt; None: 0.

    Returns:
        (B, C, P + T) int64; 0 in the padding before a prompt.
    """
    mask = attention_mask.bool()
    start = mask.shape[1] - width
    positions = torch.zeros(len(mask), position_axes(config), mask.shape[1], dtype=torch.long)
    counts = [0] * len(mask) if continued is None else continued
    for row, (ids, real, row_inputs, count) in enumerate(zip(input_ids, mask, inputs, counts)):
        prompt = multimodal_positions(config, ids[:start][real[:start]], row_inputs, count)
        positions[row, :, :start][:, real[:start]] = prompt
        positions[row, :, start:] = prompt.max() + real[start:].cumsum(0)
    return positions


def _grids(config: Any, inputs: Mapping[str, Any]) -> dict[str, Iterator[torch.Tensor]]:
    """For images and videos, the positions (3, tokens) of each one relative to its start."""
    merge = config.vision_config.spatial_merge_size
    separate_frames = _MROPE[config.model_type]
    second = config.vision_config.to_dict().get("tokens_per_second", 1)  # positions of one second; 1 if time is ignored
    seconds = inputs.get("second_per_grid_ts")

    def grids_of(media: str) -> Iterator[torch.Tensor]:
        thw = inputs.get(f"{media}_grid_thw")
        for index, (t, h, w) in enumerate([] if thw is None else torch.as_tensor(thw).tolist()):
            step = 1.0
            if media == "video" and not separate_frames:
                step = second * (1.0 if seconds is None else float(seconds[index]))
            frames = [1] * t if separate_frames else [t]
            for length in frames:
                yield _grid(length, h // merge, w // merge, step)

    return {kind: grids_of(kind) for kind in ("image", "video")}


def _grid(t: int, h: int, w: int, step: float) -> torch.Tensor:
    """Positions (3, t * h * w) of a grid that begins at 0, with `step` positions between frames."""
    time = (torch.arange(t) * step).long()
    axes = torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack(axes).flatten(1)
