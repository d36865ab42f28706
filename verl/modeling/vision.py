"""Images and videos in the forward pass of a vision-language model.

The vision tower computes each distinct image of a micro-batch once, however many rows have it. Its features replace
the embeddings of the placeholder tokens of the prompt; a placeholder that the policy sampled is text. Models whose
language model is causal over image tokens run packed sequences in this way (`PACKED`). Others get the tensors of their
processor row by row, with padding, and place the features themselves; they do not get the placeholders that are
text (`TextTokens`).
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.modeling.huggingface import trunk_of
from verl.modeling.positions import batch_positions, position_axes

Tensors = dict[str, torch.Tensor]

#: model types whose features are placed here -> attribute of the vision tower
PACKED = {"qwen2_vl": "visual", "qwen2_5_vl": "visual", "qwen3_vl": "visual", "qwen3_vl_moe": "visual"}
#: model types in which the tokens of an image attend to each other in both directions
BIDIRECTIONAL = ("gemma3",)
#: names of vision towers; the projection of a tower to the language model is not part of it
_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
#: column of a micro-batch: which of `Media.inputs` a row has, -1 for none
INDEX = "multi_modal_index"
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def is_vision_config(config: Any) -> bool:
    """Whether a HuggingFace config describes a model with images."""
    return "vision_config" in type(config).sub_configs


def sub_configs(config: Any) -> dict[str, Any]:
    """The configs of the parts of a model, such as text_config and vision_config, by name."""
    configs = {name: getattr(config, name) for name in config.sub_configs}
    return {name: part for name, part in configs.items() if part is not None}


def attention_of(config: Any) -> dict[str, str]:
    """The attention implementation of a model and of its parts, as `set_attn_implementation` takes it."""
    configs = {"": config} | sub_configs(config)
    attention = {name: part._attn_implementation for name, part in configs.items()}
    return {name: implementation for name, implementation in attention.items() if implementation is not None}


def tower_of(module: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the vision tower. Raises ValueError if the model has none with a known name."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] in _TOWERS:
            return name, child
    raise ValueError(f"{type(module).__name__}: no vision tower found; expected a module called one of {_TOWERS}")


def tower_sizes(config: Any) -> tuple[int, int, int, int] | None:
    """Layers, hidden size and MLP size of the vision tower, and patches of an image token.

    config: of the model. None if its vision_config has other keys than known ones.
    """
    sizes = config.vision_config.to_dict()
    layers, hidden = sizes.get("depth") or sizes.get("num_hidden_layers"), sizes.get("embed_dim")
    hidden = hidden or sizes.get("hidden_size")
    mlp = sizes.get("intermediate_size") or (hidden or 0) * sizes.get("mlp_ratio", 0)
    patches = sizes.get("spatial_merge_size", 0) ** 2
    if not patches and sizes.get("image_size") and sizes.get("patch_size"):
        patches = (sizes["image_size"] // sizes["patch_size"]) ** 2
        patches = -(-patches // getattr(config, "mm_tokens_per_image", patches))
    return (layers, hidden, int(mlp), patches) if layers and hidden and mlp and patches else None


def language_model_of(module: nn.Module) -> nn.Module:
    """The decoder inside a vision-language model; the decoder itself for a text model."""
    trunk = trunk_of(module)
    return dict(trunk.named_children()).get("language_model", trunk)


def outside_language_model(module: nn.Module) -> list[str]:
    """Names of the linear layers that are not in the language model, without its head."""
    inside = {id(layer) for layer in language_model_of(module).modules()}
    return [
        name
        for name, layer in module.base_model.named_modules(prefix=module.base_model_prefix)
        if isinstance(layer, nn.Linear) and id(layer) not in inside
    ]


# ---- the images of a batch ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VisionInput:
    """The images and videos of one forward pass."""

    tensors: Tensors  # the processor's tensors, of each distinct input once, or row by row for a model not in `PACKED`
    slots: torch.Tensor  # (V,) flat index of the placeholder tokens in input_ids, ascending
    source: torch.Tensor  # (V,) row of the features that replaces each; images come before videos
    text: "TextTokens | None" = None  # placeholder tokens that are text, for a model not in `PACKED`

    def to(self, device: torch.device) -> "VisionInput":
        """A copy on a device."""
        tensors = {name: values.to(device, non_blocking=True) for name, values in self.tensors.items()}
        text = None if self.text is None else self.text.to(device)
        return VisionInput(tensors, self.slots.to(device), self.source.to(device), text)

    def share_of(self, start: int, tokens: int) -> "VisionInput":
        """The placeholders among `tokens` tokens from `start` on; the tensors are those of all."""
        is_local = (self.slots >= start) & (self.slots < start + tokens)
        return VisionInput(self.tensors, self.slots[is_local] - start, self.source[is_local])


class Media:
    """The processed images and videos of a batch.

    Args:
        config: the HuggingFace config of the model.
        rows: for each row the tensors of its processor, or None. Rows with the same object have the same images.

    Attributes:
        inputs: the distinct inputs.
        index: (B,) which of them a row has, -1 for none.
    """

    def __init__(self, config: Any, rows: Sequence[Mapping[str, Any] | None]):
        self.config = config
        if not is_vision_config(config):
            raise ValueError(
                f"expected prompts without images, found multi_modal_inputs in the batch: {config.model_type} is a "
                "text model. Use a vision-language model, or data without images"
            )
        distinct = {id(row): row for row in rows if row}
        self.inputs: list[Mapping[str, Any]] = list(distinct.values())
        numbers = {key: number for number, key in enumerate(distinct)}
        self.index = torch.tensor([numbers.get(id(row), -1) for row in rows])

    def positions(self, columns: Tensors) -> torch.Tensor:
        """The column position_ids, computed for a model with mRoPE if the column has one axis."""
        positions = columns["position_ids"]
        if positions.ndim == 3 or position_axes(self.config) == 1:
            return positions
        rows = [self.inputs[i] if i >= 0 else None for i in self.index.tolist()]
        width = columns["responses"].shape[1]
        return batch_positions(self.config, columns["input_ids"], columns["attention_mask"], width, rows)

    def input_of(
        self, rows: Tensors, kept: torch.Tensor | None = None, placed: bool | None = None
    ) -> VisionInput | None:
        """The images of a micro-batch; None without.

        Args:
            rows: input_ids, attention_mask, responses and `INDEX` of its rows.
            kept: (N,) flat index of each token that is computed, also of padding; None: all.
            placed: whether the caller places the features; None: if the model type is in `PACKED`.

        Raises:
            ValueError: a row whose placeholder tokens do not match its images.
        """
        index = rows[INDEX]
        if bool((index < 0).all()):
            return None
        if not (self.config.model_type in PACKED if placed is None else placed):
            return self._row_by_row(rows, kept)
        used = sorted({i for i in index.tolist() if i >= 0})
        local = torch.zeros(len(self.inputs), dtype=torch.long)
        local[used] = torch.arange(len(used))
        ids, mask = rows["input_ids"], rows["attention_mask"].bool()
        prompt = torch.arange(ids.shape[1]) < ids.shape[1] - rows["responses"].shape[1]
        candidates = (mask & prompt & (index >= 0)[:, None]).flatten()
        ids = ids.flatten()
        tokens = torch.arange(len(ids)) if kept is None else kept
        slots, sources, offset = [], [], 0
        for media in _PIXELS:
            if self._token(media) is None:
                continue
            counts = torch.tensor([self._features(i, media) for i in used])
            starts = counts.cumsum(0) - counts + offset
            offset += int(counts.sum())
            is_token = candidates & (ids == self._token(media))
            placeholders = is_token[tokens].nonzero()[:, 0]
            row, counts_per_row = torch.unique_consecutive(tokens[placeholders] // mask.shape[1], return_counts=True)
            inputs_of_rows = local[index[row]]
            in_rows, per_row = is_token.view_as(mask).sum(1), torch.where(index >= 0, counts[local[index]], 0)
            self._check(media, row, counts_per_row, counts[inputs_of_rows], in_rows, per_row)
            before = counts_per_row.cumsum(0) - counts_per_row
            rank = torch.arange(len(placeholders)) - before.repeat_interleave(counts_per_row)
            slots.append(placeholders)
            sources.append(starts[inputs_of_rows].repeat_interleave(counts_per_row) + rank)
        slot, source = torch.cat(slots), torch.cat(sources)
        order = slot.argsort()
        names = [name for media, pixels in _PIXELS.items() for name in (pixels, f"{media}_grid_thw")]
        return VisionInput(_joined([self.inputs[i] for i in used], names), slot[order], source[order])

    def _token(self, media: str) -> int | None:
        """The token of images (or videos); None if the model reads none."""
        return getattr(self.config, f"{media}_token_id", None)

    def _features(self, index: int, media: str) -> int:
        """Number of tokens of the images (or videos) of an input."""
        if self.config.model_type in BIDIRECTIONAL:
            return len(self.inputs[index][_PIXELS[media]]) * self.config.mm_tokens_per_image
        grid = self.inputs[index].get(f"{media}_grid_thw")
        merge = self.config.vision_config.spatial_merge_size
        return 0 if grid is None else int(torch.as_tensor(grid).prod(-1).sum()) // merge**2

    @staticmethod
    def _check(media, row, counted, expected, in_rows, per_row) -> None:
        """Raise ValueError if a row has not as many placeholder tokens as its images have features."""
        wrong = [(int(row[i]), int(expected[i]), int(counted[i])) for i in (counted != expected).nonzero()[:, 0]]
        wrong += [(int(i), int(per_row[i]), int(in_rows[i])) for i in (in_rows != per_row).nonzero()[:, 0]]
        if wrong:
            i, needed, actual = wrong[0]
            raise ValueError(
                f"row {i} of a micro-batch: expected {needed} {media} tokens in the prompt for its {_PIXELS[media]}, "
                f"found {actual}: the prompt was truncated, or its placeholders were not expanded by the processor"
            )

    def _row_by_row(self, rows: Tensors, kept: torch.Tensor) -> VisionInput:
        ids, index = rows["input_ids"], rows[INDEX]
        text = torch.where(index < 0, ids.shape[1], rows["responses"].shape[1])
        nothing = torch.zeros(0, dtype=torch.long)
        text_tokens = TextTokens.find(self.config, ids, text)
        text_tokens = TextTokens(*(x.flatten()[kept].view(len(ids), -1) for x in (text_tokens.ids, text_tokens.tokens)))
        return VisionInput(self.by_row(index.tolist()), nothing, nothing, text_tokens)

    def by_row(self, index: Sequence[int]) -> Tensors:
        """The tensors of rows, concatenated in their order. index: the inputs of each row, -1 for none."""
        selected = [self.inputs[i] for i in index if i >= 0]
        return _joined(selected, list(dict.fromkeys(name for inputs in selected for name in inputs)))


def _joined(inputs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Tensors:
    """The tensors of several inputs, concatenated."""
    columns = {name: [entry[name] for entry in inputs if isinstance(entry.get(name), torch.Tensor)] for name in names}
    return {name: torch.cat(values) for name, values in columns.items() if values}


# ---- the forward pass -----------------------------------------------------------------------------------------------


class _Touch(torch.autograd.Function):
    """Returns x; the gradient of `others`, which it does not depend on, is 0 rather than none."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, *touched: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*touched)
        return x.clone()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g, *(torch.zeros_like(touched) for touched in ctx.saved_tensors)


@dataclass(frozen=True)
class TextTokens:
    """Placeholder tokens that are text, such as sampled ones, for a model that reads every placeholder as an image.

    The model gets `ids`, without these tokens, so that it places no image there. A hook replaces the input of its
    embedding layer, so that they are embedded as text.
    """

    ids: torch.Tensor  # (b, L) int64, 0 at these tokens
    tokens: torch.Tensor  # (b, L) int64, the original token at these tokens and -1 elsewhere

    @classmethod
    def find(cls, config: Any, ids: torch.Tensor, text: torch.Tensor) -> "TextTokens":
        """Find them in a batch.

        Args:
            config: the HuggingFace config of the whole model.
            ids: (b, L) int64.
            text: (b,) number of tokens at the end of each row that are text.
        """
        fields = config.to_dict()
        token_ids = [fields.get(f"{kind}_token_{key}") for kind in _PIXELS for key in ("id", "index")]
        tokens = torch.tensor([token for token in token_ids if token is not None], device=ids.device)
        is_text = torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - text.to(ids.device)[:, None]
        is_text &= torch.isin(ids, tokens)
        return cls(ids.masked_fill(is_text, 0), ids.masked_fill(~is_text, -1))

    def to(self, device: torch.device) -> "TextTokens":
        """A copy on a device."""
        return TextTokens(self.ids.to(device), self.tokens.to(device))

    @contextlib.contextmanager
    def embedded(self, module: nn.Module) -> Iterator[None]:
        """A context in which the embedding layer embeds `tokens` if it gets `ids`, known by their shape (b, L)."""

        def replace(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            if arguments[0].shape != self.ids.shape:
                return None
            return (torch.where(self.tokens < 0, arguments[0], self.tokens),)

        handle = module.get_input_embeddings().register_forward_pre_hook(replace)
        try:
            yield
        finally:
            handle.remove()


class VisionForward:
    """Hidden states of a vision-language model.

    Args:
        module: the model, with a language-model or value head.
        always: run the vision tower in every forward pass, also without images. Ranks that shard the tower gather its
            layers collectively, so a rank without images in a micro-batch must take part.
    """

    def __init__(self, module: nn.Module, always: bool = False):
        self.config, self.trunk, self.always = module.config, trunk_of(module), always
        self.inserts_features = self.config.model_type in PACKED
        self.parameters = inspect.signature(self.trunk.forward).parameters

    @functools.cached_property
    def tower(self) -> nn.Module:
        return tower_of(self.trunk)[1]

    def __call__(self, model_input: Any, extra: Mapping[str, Any]) -> torch.Tensor:
        """Last hidden states (b, L, H) of a `packing.ModelInput`. extra: arguments of the attention."""
        run = self._packed if self.inserts_features else self._row_by_row
        return run(model_input, {"use_cache": False, **extra})

    def features(self, tensors: Tensors) -> list[torch.Tensor]:
        """Features (V, H) of images, then videos, as `VisionInput.source` counts them; further ones for deepstack."""
        if not self.inserts_features:
            pixels = tensors["pixel_values"].to(self.trunk.dtype)
            output = self.trunk.get_image_features(pixel_values=pixels, return_dict=True)
            return [output.pooler_output.flatten(0, -2)]
        pixels = [tensors[name] for name in _PIXELS.values() if name in tensors]
        grids = [tensors[f"{media}_grid_thw"] for media, name in _PIXELS.items() if name in tensors]
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.tower.parameters())
        with torch.set_grad_enabled(trained):  # a frozen tower keeps no activations
            output = self.tower(torch.cat(pixels).to(self.tower.dtype), grid_thw=torch.cat(grids), return_dict=True)
        return [output.pooler_output, *dict(output).get("deepstack_features", ())]

    # ---- models in PACKED

    def _packed(self, model_input: Any, extra: dict[str, Any]) -> torch.Tensor:
        embeds = self.trunk.get_input_embeddings()(model_input.input_ids)
        vision = model_input.vision
        if vision is None and self.always:
            vision = self._no_image(embeds.device)
        if vision is not None:
            embeds, features = insert_features(embeds, self.features(vision.tensors), vision)
            extra |= features
        return self.trunk.language_model(
            inputs_embeds=embeds,
            attention_mask=model_input.attention_mask,
            position_ids=model_input.position_ids,
            **extra,
        ).last_hidden_state

    def _no_image(self, device: torch.device) -> VisionInput:
        """One black image of the size of a token, which no token of the input shows."""
        vision = self.config.vision_config
        merge, patch = vision.spatial_merge_size, vision.patch_size
        width = vision.in_channels * vision.temporal_patch_size * patch**2
        pixels = torch.zeros(merge**2, width, device=device)
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        grid = torch.tensor([[1, merge, merge]], device=device)
        return VisionInput({"pixel_values": pixels, "image_grid_thw": grid}, nothing, nothing)

    # ---- other models

    def _row_by_row(self, model_input: Any, extra: dict[str, Any]) -> torch.Tensor:
        ids, vision = model_input.input_ids, model_input.vision
        image_ids = torch.zeros_like(ids) if vision is None else vision.text.ids  # without placeholders that are text
        arguments: dict[str, Any] = {"input_ids": ids}
        if vision is not None:
            arguments["input_ids"] = image_ids
            arguments |= {name: values for name, values in vision.tensors.items() if name in self.parameters}
            arguments["pixel_values"] = arguments["pixel_values"].to(self.trunk.dtype)
        elif self.always:
            size = self.config.vision_config.image_size
            pixels = torch.zeros(1, 3, size, size, device=ids.device, dtype=self.trunk.dtype)
            features = self.trunk.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
            arguments = {"inputs_embeds": _Touch.apply(self.trunk.get_input_embeddings()(ids), features)}
        if "token_type_ids" in self.parameters:
            arguments["token_type_ids"] = (image_ids == self.config.image_token_id).long()
        with vision.text.embedded(self.trunk) if vision is not None else contextlib.nullcontext():
            return self.trunk(
                attention_mask=model_input.attention_mask, position_ids=model_input.position_ids, **arguments, **extra
            ).last_hidden_state


def insert_features(
    embeds: torch.Tensor, features: Sequence[torch.Tensor], vision: VisionInput
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Replace the embeddings (b, L, H) of placeholder tokens by features, as `VisionForward.features` returns them.

    Returns:
        The embeddings, and the arguments of a language model that reads deepstack features.
    """
    if not vision.slots.numel():
        return _Touch.apply(embeds, *features), {}
    first, *deep = (tensor[vision.source].to(embeds.dtype) for tensor in features)
    placed = embeds.flatten(0, 1).index_copy(0, vision.slots, first).view_as(embeds)
    if not deep:
        return placed, {}
    mask = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
    mask.view(-1)[vision.slots] = True
    return placed, {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
