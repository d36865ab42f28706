"""Writes a Hugging Face model as a GGUF file, the format of llama.cpp and Ollama. Needs the package `gguf`.

One tensor is in memory at a time. Vectors (norms, biases) stay in float32, as llama.cpp expects.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.checkpoints.atomic import atomic_write
from verl.model_merger.sources import SafetensorsFolder
from verl.registry import did_you_mean
from verl.utils.paths import read_json

#: model_type of transformers -> architecture of llama.cpp
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_FILE_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_SUFFIX = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # % digits of a number
)
#: how tokenizer.json splits text before BPE -> llama.cpp's name (tokenizer.ggml.pre)
_PRE_TOKENIZERS = {
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _SUFFIX % "{1,3}",): "llama-bpe",
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _SUFFIX % "",): "qwen2",
    ("digits", "gpt2"): "smollm",
    ("gpt2",): "gpt-2",
}


def export_gguf(model: Path, out: Path, type_name: str = "f16", pre_tokenizer: str | None = None) -> Path:
    """Write `out/model-TYPE.gguf` and `out/Modelfile`.

    Args:
        model: Folder of a Hugging Face model with safetensors weights and a byte-level BPE tokenizer.
        type_name: Type of the matrices: "f32", "f16", "bf16" or "q8_0" (8 bits, blocks of 32 with a float16 scale).
        pre_tokenizer: llama.cpp's name of the rule that splits text before BPE; None: found by its pattern.

    Returns:
        The GGUF file.

    Raises:
        ValueError: The architecture, its position encoding, the tokenizer or the type is not supported.
    """
    if type_name not in _FILE_TYPES:
        raise ValueError(f"--type {type_name}: {did_you_mean(type_name, _FILE_TYPES)}")
    config, weights = AutoConfig.from_pretrained(model), SafetensorsFolder(model)
    _check_supported(config)
    architecture = _ARCHITECTURES[config.model_type]
    quantization, file_type = _FILE_TYPES[type_name]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"model-{type_name}.gguf"
    with atomic_write(path) as draft:
        writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[architecture])
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_config(writer, config)
        eos = _add_tokenizer(writer, model, config.vocab_size, pre_tokenizer)
        names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        _write_tensors(writer, list(_tensors(weights, config, names)), quantization)
        writer.close()
    lines = [f"FROM ./{path.name}", f"PARAMETER num_ctx {min(config.max_position_embeddings, 8192)}"]
    lines += [f"PARAMETER stop {json.dumps(eos, ensure_ascii=False)}"] if eos else []
    with atomic_write(out / "Modelfile") as draft:
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ---- metadata -------------------------------------------------------------------------------------------------------


def _rope(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", **(config.rope_parameters or {})}


def _check_supported(config: Any) -> None:
    """Raise ValueError for a model that llama.cpp would compute differently."""
    if config.model_type not in _ARCHITECTURES:
        names = ", ".join(_ARCHITECTURES)
        raise ValueError(f"model_type {config.model_type!r} cannot be exported: expected one of {names}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and config.sliding_window
    ):
        raise ValueError("a model with sliding-window attention cannot be exported: its window would be ignored")
    rope, has_factors = _rope(config), _ARCHITECTURES[config.model_type] == gguf.MODEL_ARCH.LLAMA
    if rope["rope_type"] not in (("default", "linear", "llama3") if has_factors else ("default", "linear")):
        raise ValueError(f"rope_type {rope['rope_type']!r} of {config.model_type} cannot be exported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("a model with partial_rotary_factor cannot be exported")


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = _rope(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, vocab_size: int, pre_tokenizer: str | None) -> str | None:
    """Write tokens, merges, special tokens and the chat template. Returns the token that ends a response."""
    path = model / "tokenizer.json"
    stored = read_json(path) if path.is_file() else {"model": {}}
    if stored["model"].get("type") != "BPE" or stored["model"].get("byte_fallback"):
        raise ValueError(f"{path}: expected a byte-level BPE tokenizer, as of GPT-2, Llama 3, Qwen or SmolLM")
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(vocabulary) >= vocab_size:
        raise ValueError(f"{path} has the token {max(vocabulary)}, and the model only {vocab_size} embeddings")
    types, added = [], tokenizer.added_tokens_decoder
    for number in range(vocab_size):
        if number not in vocabulary:
            types.append(gguf.TokenType.UNUSED)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer or _pre_tokenizer_name(stored.get("pre_tokenizer"), path))
    writer.add_token_list([vocabulary.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types(types)
    gguf.SpecialVocab(model, load_merges=True).add_to_gguf(writer, quiet=True)
    return tokenizer.eos_token


def _pre_tokenizer_name(pre_tokenizer: dict[str, Any] | None, path: Path) -> str:
    """llama.cpp's name of a pre-tokenizer. Raises ValueError if there is none."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    rule = []
    for step in steps:
        if step.get("type") == "Split":
            rule.append(step["pattern"].get("Regex", ""))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            rule.append("digits")
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            rule.append("gpt2")
        elif step.get("type") != "ByteLevel":
            rule.append(str(step))
    if tuple(rule) not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: its pre_tokenizer {rule} has no known name in llama.cpp, which would split text differently: "
            "set the name with --pre-tokenizer"
        )
    return _PRE_TOKENIZERS[tuple(rule)]


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensors(weights: SafetensorsFolder, config: Any, names: gguf.TensorNameMap) -> Iterator[tuple[str, Any]]:
    """(name in GGUF, shape and function that reads the tensor)."""
    is_llama = _ARCHITECTURES[config.model_type] == gguf.MODEL_ARCH.LLAMA
    for name, shape in weights.shapes().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"the tensor {name} of {config.model_type} has no name in GGUF")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(name.split(".")[-2]) if is_llama else None

        def read(name: str = name, count: int | None = count) -> np.ndarray:
            tensor = weights.read(name).float()
            return (_interleaved(tensor, count) if count else tensor).numpy()

        yield target, (shape, read)
    if _rope(config)["rope_type"] == "llama3":  # divisors of the frequencies
        inverse = [ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]]
        size = 2 * len(inverse[0])
        inverse.append(1.0 / _rope(config)["rope_theta"] ** (torch.arange(0, size, 2) / size))
        yield "rope_freqs.weight", (tuple(inverse[0].shape), lambda: (inverse[1] / inverse[0]).numpy())


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection in llama.cpp's order: it rotates neighbours (0, 1), transformers (0, head_dim / 2)."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: list[tuple[str, Any]], quantization: gguf.GGMLQuantizationType
) -> None:
    """Write the header and all tensors, one after the other."""
    kinds = []
    for name, (shape, _) in tensors:
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        kind = quantization if len(shape) > 1 and shape[-1] % block == 0 else gguf.GGMLQuantizationType.F32
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape)) // block * size
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), count, raw_dtype=kind)
        kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (_, (_, read)), kind in zip(tensors, kinds):
        writer.write_tensor_data(gguf.quantize(read(), kind))
