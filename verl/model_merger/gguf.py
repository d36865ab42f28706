"""Writes a Hugging Face model as a GGUF file, the format of llama.cpp and Ollama. Needs the package `gguf`.

Tensors are collected in a temporary file (TMPDIR), not in memory. Vectors (norms, biases) stay in float32, as llama.cpp
expects.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.checkpoints.atomic import atomic_write
from verl.checkpoints.safetensors_files import SafetensorsFiles
from verl.registry import did_you_mean
from verl.utils.paths import read_json

#: model_type of transformers -> architecture of llama.cpp
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_FILE_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_SUFFIX = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # % digits of a number
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
    config = AutoConfig.from_pretrained(model)
    _check_supported(config)
    quantization, file_type = _FILE_TYPES[type_name]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"model-{type_name}.gguf"
    with atomic_write(path) as draft:
        writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]], use_temp_file=True)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_config(writer, config)
        eos = _add_tokenizer(writer, model, config.vocab_size, pre_tokenizer)
        _add_tensors(writer, SafetensorsFiles(model), config, quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
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
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("a model with sliding-window attention cannot be exported: its window would be ignored")
    rope, is_llama = _rope(config), config.model_type == "llama"
    if rope["rope_type"] not in ("default", "linear", *(["llama3"] if is_llama else [])):
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
        raise ValueError(f"{path.name}: expected a byte-level BPE tokenizer, as of GPT-2, Llama 3, Qwen or SmolLM")
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(vocabulary) >= vocab_size:
        raise ValueError(f"{path.name} has the token {max(vocabulary)}, and the model only {vocab_size} embeddings")
    types = [gguf.TokenType.NORMAL if number in vocabulary else gguf.TokenType.UNUSED for number in range(vocab_size)]
    for number, token in tokenizer.added_tokens_decoder.items():
        types[number] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer or _pre_tokenizer_name(stored.get("pre_tokenizer") or {}))
    writer.add_token_list([vocabulary.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types(types)
    special, ids = gguf.SpecialVocab(model, load_merges=True), tokenizer("a")["input_ids"]
    # llama.cpp's defaults depend on the pre-tokenizer
    special.add_special_token = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    special.add_to_gguf(writer, quiet=True)
    return tokenizer.eos_token


def _pre_tokenizer_name(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenizer. Raises ValueError if there is none."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
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
            f"tokenizer.json: its pre_tokenizer {rule} has no known name in llama.cpp, which would split text "
            "differently: set the name with --pre-tokenizer"
        )
    return _PRE_TOKENIZERS[tuple(rule)]


# ---- tensors --------------------------------------------------------------------------------------------------------


def _add_tensors(
    writer: gguf.GGUFWriter, weights: SafetensorsFiles, config: Any, quantization: gguf.GGMLQuantizationType
) -> None:
    architecture = _ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    block = gguf.GGML_QUANT_SIZES[quantization][0]
    for name in weights.names():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, tensor = names.get_name(name, try_suffixes=(".weight", ".bias")), weights.read(name).float()
        if target is None:
            raise ValueError(f"the tensor {name} of {config.model_type} has no name in GGUF")
        layer = name.split(".")[-2]
        if layer in heads and architecture == gguf.MODEL_ARCH.LLAMA:
            # llama.cpp rotates the neighbours (0, 1), transformers (0, head_dim / 2)
            halves = tensor.view(heads[layer], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        is_matrix = tensor.dim() > 1 and tensor.shape[-1] % block == 0
        kind = quantization if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    if _rope(config)["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        divisors = 1 / (_rope(config)["rope_theta"] ** exponents * scaled)
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
