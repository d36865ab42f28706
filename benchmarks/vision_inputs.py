"""Work with images for `engines.py`: models of the shape of Qwen2.5-VL with random weights, and prompts with one image.

Nothing is downloaded. Without torchvision, `native` and `hf` read images by Pillow; vLLM needs torchvision.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_step import Work

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig


@dataclass(frozen=True)
class VisionWork(Work):
    """A step with one image per prompt. `prompt` is the limit: the tokens of the image, and `text` digits.

    Attributes:
        tower: layers, hidden size, MLP size and heads of the vision tower.
        image: width and height in pixels.
        settings: further overrides.
    """

    tower: tuple[int, int, int, int] = (0, 0, 0, 0)
    image: tuple[int, int] = (0, 0)
    text: int = 16
    settings: tuple[str, ...] = (
        "actor_rollout_ref.actor.old_log_prob_pass=always",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )


VISION_SUITES = {
    # Qwen2.5-VL-3B: an image of 640 x 480 is 391 tokens
    "gpu-vl": VisionWork(
        *(2048, 11008, 36, 16, 2, 151936, True),
        **{"prompts": 8, "samples": 8, "prompt": 448, "new": 128, "tower": (32, 1280, 3420, 16), "image": (640, 480)},
    ),
    "cpu-vl": VisionWork(
        *(128, 256, 2, 4, 2, 560, True),
        **{"prompts": 4, "samples": 4, "prompt": 64, "new": 16, "tower": (2, 64, 128, 2), "image": (168, 112)},
    ),
}
_END, _FILL = "<|im_end|>", "<|endoftext|>"
_SPECIAL = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", _END, _FILL)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_inputs(work: VisionWork, folder: Path, rows: int) -> None:
    """A model, its tokenizer and its processor in folder/model; prompts with an image each in folder/prompts.jsonl."""
    ids = _save_tokenizer(work, folder / "model")
    _save_model(work, ids, folder / "model")
    from PIL import Image

    generator, (width, height) = random.Random(1), work.image
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for row in range(rows):
            small = Image.frombytes("RGB", (16, 12), generator.randbytes(16 * 12 * 3))
            small.resize((width, height)).save(folder / f"{row}.png")
            prompt = "<image>" + "".join(generator.choices("0123456789", k=work.text))
            file.write(json.dumps({"prompt": prompt, "images": [f"{row}.png"], "answer": "even"}) + "\n")


def _save_tokenizer(work: VisionWork, folder: Path) -> dict[str, int]:
    """Save a tokenizer of bytes, and the settings of the processor. Returns the ids of its special tokens."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    # without merges a text is one token per byte; the tokens w0, w1, ... appear only in responses
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(work.vocabulary - len(alphabet) - len(_SPECIAL))]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *words, *_SPECIAL])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token=_END, pad_token=_FILL, extra_special_tokens=list(_SPECIAL[:5])
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 1280 * 28 * 28},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return {token: vocabulary[token] for token in _SPECIAL}


def vision_model_config(work: VisionWork, ids: dict[str, int]) -> "Qwen2_5_VLConfig":
    """The config of a model of this shape. ids: those of the special tokens."""
    from transformers import Qwen2_5_VLConfig

    depth, hidden, mlp, heads = work.tower
    eighth = work.hidden // work.heads // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [eighth, eighth * 3 // 2, eighth * 3 // 2]}
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": work.hidden,
            "intermediate_size": work.mlp,
            "num_hidden_layers": work.layers,
            "num_attention_heads": work.heads,
            "num_key_value_heads": work.kv_heads,
            "vocab_size": work.vocabulary,
            "tie_word_embeddings": work.tied,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": ids[_END],
            "pad_token_id": ids[_FILL],
        },
        vision_config={
            **{"depth": depth, "hidden_size": hidden, "intermediate_size": mlp, "num_heads": heads},
            **{"out_hidden_size": work.hidden, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **{"window_size": 112, "tokens_per_second": 2},
            "fullatt_block_indexes": [i for i in range(depth) if i % 8 == 7] or [depth - 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=work.tied,
    )


def _save_model(work: VisionWork, ids: dict[str, int], folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForImageTextToText.from_config(
            vision_model_config(work, ids), dtype=torch.bfloat16 if gpu else torch.float32
        )
    model.save_pretrained(folder)
