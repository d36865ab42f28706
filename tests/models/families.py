"""What differs between families: the one table of `tests/models`.

A row is a `model_type` of transformers, or a variant of one that names it (`model_type`). Its values are the fields
that differ from `tiny.SIZES` and from the defaults of the class; a string is the reason why there is no tiny model.
"""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Row = dict[str, Any] | str

_DECODER = {"is_decoder": True}
_SLIDING, _FULL, _LINEAR, _HYBRID = "sliding_attention", "full_attention", "linear_attention", "hybrid"
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {"indexer_budget": 256, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1}
_INDEXER |= {"indexer_head_dim": 8}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_VISION |= {"num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8}

_DIFFERING: dict[str, Row] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), _DECODER
    ),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"), _DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _DECODER),
    "blt": "groups bytes into patches by the entropy of another model",
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL],
        "rope_parameters": dict.fromkeys((_SLIDING, _FULL), _ROPE),
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.0}},
    "gemma4": {"text_config": {"per_layer_config": ...}, "vision_config": _VISION},
    "gemma4_unified": {
        "text_config": {"per_layer_config": ...},
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 64},
    },
    "dots3_note": "the layers of its vision tower have settings by index",
    "dots3_note_text": "the sizes of its layers are set one by one, 150 MB",
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": "its vision tower needs timm",
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}
    | {"layer_types": [_SLIDING, _FULL, _SLIDING]},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [_SLIDING, _FULL] * 2}
    | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "intermediate_size": [48] * 4},
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a drafter that reads the states of its Gemma 4"),
    **dict.fromkeys(("got_ocr2", "phi4_multimodal"), "convolutions of fixed width, 10 MB"),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", _FULL, "conv"]},
    "mamba2": {"num_heads": 8},
    "mellum": {"num_mtp_layers": None, "num_nextn_predict_layers": ...},
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), "a decoder of audio codes, conditioned on the states of an encoder"
    ),
    "phi3": {"tie_word_embeddings": True, "rope_parameters": _PARTIAL},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": _DECODER | {"attn_layers": ["local", "local"], "axial_pos_embds": False},
    "roc_bert": _DECODER
    | {"shape_vocab_size": 8, "shape_embed_dim": 8, "pronunciation_vocab_size": 8, "pronunciation_embed_dim": 8},
    "smollm3": {"no_rope_layer_interval": 2},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": [_LINEAR, _LINEAR, _HYBRID, _LINEAR, _HYBRID]}
    | {"attention_hidden_size": ...},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, _HYBRID] * 2, "n_mamba_heads": 8}
    | {"attention_hidden_size": ...},
    "zaya": {"num_experts_per_tok": 1},
}
#: variants of a family that are computed in another way
_VARIANTS: dict[str, Row] = {
    "deepseek_v3-queries": {"model_type": "deepseek_v3", "q_lora_rank": None},
    "falcon-grouped": {"model_type": "falcon", "new_decoder_architecture": True},
    "gemma4_text-shared": {"model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"layer_types": [_SLIDING, _FULL] * 2},
    "gpt_neox-sequential": {"model_type": "gpt_neox", "use_parallel_residual": False},
    "granitemoehybrid-dense": {"model_type": "granitemoehybrid", "num_local_experts": 0}
    | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "logits_scaling": 8.0},
    "qwen3_moe-dense": {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "layer_types": [_SLIDING, _FULL]},
}

FAMILIES: dict[str, Row] = {name: _DIFFERING.get(name, {}) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | _VARIANTS
