"""Tiny random vision-language models with their tokenizer and processor, made by code.

The processors work without torchvision: images by the PIL image processors of transformers, videos by `video_patches`.
"""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "gemma3")
VOCABULARY = 272  # 256 bytes and the special tokens, rounded up
PATCH, MERGE = 4, 2  # pixels of a patch; patches of a token, along each side
GEMMA_TOKENS = 4  # tokens of each image of the Gemma 3 model

_QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
#: what stands for one image in a text, before the processor expands it
PLACEHOLDER = {**dict.fromkeys(QWEN, "<|vision_start|><|image_pad|><|vision_end|>"), "gemma3": "<start_of_image>"}

_IMAGE = (
    "{% if p.type == 'image' or 'image' in p %}IMAGE"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}" + _IMAGE + "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with the special tokens and a chat template of the family."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special: Any = list(_QWEN_TOKENS) if family in QWEN else {"im_start_token": "<|im_start|>"} | _GEMMA_TOKENS
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=special
    )
    made.chat_template = _TEMPLATE.replace("IMAGE", PLACEHOLDER[family])
    return made


def make_config(family: str, head_dim: int = 8, patch: int = PATCH) -> PretrainedConfig:
    """A tiny model with the tokens of `tokenizer`. vLLM needs head_dim=32."""
    ids, hidden = tokenizer(family), 4 * head_dim
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": ids.eos_token_id,
        "pad_token_id": ids.pad_token_id,
    }
    if family == "gemma3":
        return _gemma_config(text, ids)
    sections = [head_dim // 4, head_dim // 8, head_dim // 8]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    vision = {"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
    tokens = {
        f"{name}_token_id": ids.convert_tokens_to_ids(f"<|{symbol}|>")
        for name, symbol in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    if family != "qwen3_vl":
        del text["head_dim"]  # Qwen2 has none: hidden_size / heads
    if family == "qwen2_vl":
        return Qwen2VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "embed_dim": 16, "hidden_size": hidden, "mlp_ratio": 2, "in_chans": 3},
            **tokens,
        )
    vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)
    rope["mrope_interleaved"] = True
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)


def _gemma_config(text: dict[str, Any], ids: Any) -> PretrainedConfig:
    return Gemma3Config(
        text_config={**text, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
        | {"query_pre_attn_scalar": text["head_dim"]},
        vision_config={
            "model_type": "siglip_vision_model",
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 16, "patch_size": PATCH},
        },
        mm_tokens_per_image=GEMMA_TOKENS,
        boi_token_index=ids.convert_tokens_to_ids(_GEMMA_TOKENS["boi_token"]),
        eoi_token_index=ids.convert_tokens_to_ids(_GEMMA_TOKENS["eoi_token"]),
        image_token_index=ids.convert_tokens_to_ids(_GEMMA_TOKENS["image_token"]),
        eos_token_id=ids.eos_token_id,
    )


def image_processor(family: str, patch: int = PATCH) -> Any:
    """The image processor of `make_config`'s model. Images of the Qwen models may have up to 64 patches."""
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": patch * patch * 4, "longest_edge": patch * patch * 64},
    )


def save_vl_model(
    family: str, folder: Path, weights: bool = True, head_dim: int = 8, patch: int = PATCH, **keys: Any
) -> str:
    """Save a random model with weights large enough for a wrong position or pixel to show. keys: of its config."""
    tokenizer(family).save_pretrained(folder)
    image_processor(family, patch).save_pretrained(folder)
    if family == "gemma3":
        processor(family).save_pretrained(folder)
    torch.manual_seed(0)
    config = make_config(family, head_dim, patch)
    config.update(keys)
    if weights:
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0, 0.2)
                if p.ndim == 1 and name.endswith("weight"):
                    p.add_(1.0)
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "é 1<|im_end|>" + PLACEHOLDER[family]
    assert loaded.encode(text) == tokenizer(family).encode(text), "transformers replaced the tokenizer"
    return str(folder)


class TinyProcessor:
    """What a processor of Qwen-VL does, for one text: expands placeholders and turns images into patches."""

    def __init__(self, family: str, patch: int = PATCH):
        self.family, self.patch = family, patch
        self.tokenizer, self.image_processor = tokenizer(family), image_processor(family, patch)

    def __call__(self, text: str, images: Sequence[Image.Image] = (), videos: Sequence[torch.Tensor] = ()) -> dict:
        """Tensors of one text: input_ids (1, L), pixel_values, image_grid_thw, ...; videos (T, H, W, 3) uint8."""
        found: dict[str, torch.Tensor] = {}
        if images:
            found |= dict(self.image_processor(list(images), return_tensors="pt"))
            text = _expand(text, "<|image_pad|>", (found["image_grid_thw"].prod(1) // MERGE**2).tolist())
        if videos:
            patches, grids = zip(*(video_patches(frames, self.patch) for frames in videos))
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
            if self.family == "qwen3_vl":
                for t, h, w in grids:
                    run = "<|vision_start|>" + "<|video_pad|>\0" * (h * w // MERGE**2) + "<|vision_end|>"
                    frames = "".join(f"<{i:.1f} seconds>{run}" for i in range(t))
                    text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", frames, 1)
                text = text.replace("\0", "")
            else:
                text = _expand(text, "<|video_pad|>", (found["video_grid_thw"].prod(1) // MERGE**2).tolist())
                if self.family == "qwen2_5_vl":
                    found["second_per_grid_ts"] = torch.ones(len(videos))
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, **found}


@functools.cache
def processor(family: str, patch: int = PATCH) -> Any:
    """A processor: `processor(family)(text=..., images=[...])` gives the tensors of one text."""
    if family != "gemma3":
        return TinyProcessor(family, patch)
    made = Gemma3Processor(image_processor(family), tokenizer(family), image_seq_length=GEMMA_TOKENS)

    def call(text: str, images: Sequence[Image.Image] = (), videos: Sequence[torch.Tensor] = ()) -> dict:
        found = made(text=[text], images=[list(images)] if images else None, return_tensors="pt")
        return {name: values for name, values in found.items() if name not in ("attention_mask", "num_crops")}

    call.save_pretrained = made.save_pretrained
    return call


def random_image(seed: int = 0, width: int = 16, height: int = 24) -> Image.Image:
    """A random image."""
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def video(seed: int = 0, frames: int = 4, width: int = 24, height: int = 8) -> torch.Tensor:
    """A random video (T, H, W, 3) uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (frames, height, width, 3), generator=generator, dtype=torch.uint8)


def video_patches(frames: torch.Tensor, patch: int = PATCH) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Patches (n, 3 * 2 * patch**2) of a video, and its grid (t, h, w) in patches."""
    t, h, w = frames.shape[0] // 2, frames.shape[1] // patch, frames.shape[2] // patch
    values = frames.float().div(127.5).sub(1).permute(0, 3, 1, 2)
    values = values.reshape(t, 2, 3, h // MERGE, MERGE, patch, w // MERGE, MERGE, patch)
    return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w)


def _expand(text: str, token: str, counts: Sequence[int]) -> str:
    """Replace the i-th `token` by counts[i] of them."""
    parts = text.split(token)
    assert len(parts) == len(counts) + 1, f"{len(parts) - 1} placeholders of {len(counts)}"
    return parts[0] + "".join(token * n + rest for n, rest in zip(counts, parts[1:]))


def save_llava(folder: Path) -> None:
    """Save a tiny LLaVA, a model that has no code of its own here: an image is 32 x 32 pixels, 16 tokens."""
    from transformers import CLIPVisionConfig, LlavaConfig, Qwen2Config
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    reader = copy.deepcopy(tokenizer("qwen2_vl"))
    reader.add_special_tokens({"additional_special_tokens": ["<image>"]})
    reader.chat_template = _TEMPLATE.replace("IMAGE", "<image>")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_key_value_heads=2, eos_token_id=258, **heads
    )
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, image_size=32, patch_size=8, **heads)
    image = reader.convert_tokens_to_ids("<image>")
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=image, image_seq_length=16)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    further = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(images, reader, patch_size=8, chat_template=reader.chat_template, **further).save_pretrained(folder)
