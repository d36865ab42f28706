"""Write a tiny random Qwen2-VL model, its tokenizer and its image processor to a folder.

python examples/quickstart/make_tiny_vl_model.py --out data/tiny-vl

An image token stands for 8 x 8 pixels. The model has about 0.2 million parameters.
"""

import argparse
import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PATCH, MERGE = 4, 2  # pixels of a patch; patches of a token, along each side
TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of Qwen2-VL."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(TOKENS),
    )
    fast.chat_template = TEMPLATE
    return fast


def make_config(ids: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    """The config of a model for these tokens."""
    text = {
        "vocab_size": -(-len(ids) // 16) * 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": ids.eos_token_id,
        "pad_token_id": ids.pad_token_id,
        "initializer_range": 0.06,
    }
    vision = {
        **{"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
        **{"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "initializer_range": 0.06},
    }
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    start, end, image, video = (ids.convert_tokens_to_ids(f"<|{name}|>") for name in names)
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )


def tiny_vl_model(folder: Path, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its image processor. Returns the folder."""
    ids = tokenizer()
    ids.save_pretrained(folder)
    area = PATCH * PATCH * MERGE * MERGE
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": area, "longest_edge": 256 * area},
    ).save_pretrained(folder)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(make_config(ids))
    model.generation_config = GenerationConfig(eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id)
    model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(tiny_vl_model(args.out, args.seed))


if __name__ == "__main__":
    main()
