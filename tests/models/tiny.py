"""A tiny random model of every `model_type` that transformers has for causal language models.

The sizes come from the config class itself: every field of `SIZES` that the class has gets the value there, and the
kinds of layers of the defaults appear once each. `families.py` has what must differ.
"""

import copy
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY, HEADS = 96, 4

#: the tiny sizes by subject: (value, names of the fields)
_FIELDS: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (32, "hidden_size d_model n_embd embedding_dim emb_dim word_embed_proj_dim embedding_size attention_hidden_size"),
    (32, "input_embedding_size output_embedding_size lru_width"),
    (48, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim"),
    (48, "ffn_hidden_size feed_forward_size dff dim_ff d_inner n_inner"),
    (24, "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    (24, "shared_experts_intermediate_size moe_shared_expert_intermediate_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers num_blocks num_layers_per_stack"),
    (2, "decoder_layers encoder_layers num_decoder_layers num_encoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads index_n_heads"),
    (HEADS, "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (HEADS, "linear_num_heads linear_num_value_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups n_groups"),
    (8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim swa_head_dim dim_head d_head"),
    (8, "linear_head_dim linear_key_head_dim linear_value_head_dim attention_head_size kv_channels"),
    (8, "query_pre_attn_scalar hidden_size_per_layer_input"),
    (
        8,
        "kv_lora_rank q_lora_rank o_lora_rank hc_lowrank laurel_rank adapter_rank gated_norm_rank loop_gate_rank d_rel",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts router_hidden_size"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group num_expert_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers zero_expert_num"),
    (256, "max_position_embeddings n_positions max_seq_len n_ctx context_length index_topk"),
    (256, "max_target_positions max_source_positions original_max_position_embeddings"),
    (6, "sliding_window sliding_window_size window_size attention_window_size local_attention attention_chunk_size"),
    (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim"),
    (8, "mamba_headdim chunk_size mamba_chunk_size"),
    (64, "mamba_d_ssm"),
    (4, "mamba_dt_rank time_step_rank num_nextn_predict_layers rotary_dim"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
)
SIZES = {name: value for value, names in _FIELDS for name in names.split()}
#: fields with one entry per layer, in which every kind of the defaults appears
_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


@functools.cache
def _defaults(model_type: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(model_type).to_dict()


def _tiny_values(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, or of a config inside it, that `SIZES` and the kinds of its layers set."""
    values = {name: value for name, value in SIZES.items() if name in defaults}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        values["num_key_value_heads"] = HEADS  # latent attention has as many as queries
    layers = next((n for n in ("num_hidden_layers", "n_layer", "n_layers") if n in defaults), None)
    kinds = {name: list(dict.fromkeys(defaults[name])) for name in _KINDS if isinstance(defaults.get(name), list)}
    if kinds and layers is not None:
        count = max(2, *map(len, kinds.values()))
        values[layers] = count
        values |= {name: (each * count)[:count] for name, each in kinds.items()}
    return values


def tiny_config(model_type: str, differing: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a tiny model. differing: fields that are not those of `SIZES`; ... is the default of the class."""
    defaults = _defaults(model_type)
    inner = {name: part for name, part in defaults.items() if name in CONFIG_MAPPING[model_type].sub_configs and part}
    values = _tiny_values(defaults) | {name: part | _tiny_values(part) for name, part in inner.items()}
    for name, value in differing.items():
        values[name] = _without_defaults(values[name] | value) if name in inner else value
    return AutoConfig.for_model(model_type, **_without_defaults(values))


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not ...}


@torch.no_grad()
def randomize(module: torch.nn.Module) -> None:
    """Replace the parameters by values large enough for a wrong position, window or state to show."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1 and parameter.std() < 0.1:  # initialized with a small normal distribution
            parameter.copy_(noise * 0.2)
        else:  # a norm, a bias, a decay
            parameter.add_(noise * 0.1)
    for layer in module.modules():  # transformers may set the row of the padding token to 0 when it loads a model
        if isinstance(layer, torch.nn.Embedding) and layer.padding_idx is not None:
            layer.weight[layer.padding_idx] = 0.0


def tiny_model(config: PretrainedConfig) -> torch.nn.Module:
    """A random model in float32."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(module)
    return module


def save_config(module: torch.nn.Module, folder: Path) -> str:
    """Write the config.json of a saved model, and nothing else."""
    config = copy.deepcopy(module.config)
    config.save_pretrained(folder)
    return str(folder)
