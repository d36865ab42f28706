"""HuggingFace configs as megatron-core configs, after the checks of `verl.engines.megatron.checks`."""

from typing import Any

import torch
from torch.nn.functional import silu

from verl.config import schema
from verl.config.public.aliases import RECOMPUTED_MODULES
from verl.engines.megatron.checks import end_stages
from verl.engines.megatron.layout import ARCHITECTURES, expert_size, head_size, sparse_layers
from verl.engines.megatron.model import DecoderConfig
from verl.engines.megatron.runtime import ParallelRanks


def decoder_config(
    hf: Any, megatron: schema.MegatronConfig, ranks: ParallelRanks, dtype: torch.dtype, recompute: bool
) -> DecoderConfig:
    """The configuration of megatron-core for a model, after the checks above.

    Args:
        dtype: dtype of parameters and computation.
        recompute: recompute all activations, if the section does not say how.
    """
    interleaved = megatron.virtual_pipeline_model_parallel_size is not None
    first, last = end_stages(hf.num_hidden_layers, megatron)
    return DecoderConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_size(hf),
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=ARCHITECTURES[hf.model_type],
        qk_layernorm=hf.model_type.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sliding_windows=_windows(hf),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=ranks.t_size,
        pipeline_model_parallel_size=ranks.p_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=ranks.c_size,
        sequence_parallel=megatron.sequence_parallel and ranks.t_size > 1,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        # weights are read from files
        perform_initialization=False,
        use_cpu_initialization=True,
        # packed micro-batches have different lengths; those of the interleaved schedule are padded to the longest
        variable_seq_lengths=not interleaved,
        # batched sends to the next and the previous stage cannot be told apart if they are the same rank
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        moe_token_dispatcher_type="alltoall",  # required with variable lengths, also of models without experts
        # gradients are summed over ranks and micro-batches: an objective returns shares of the loss
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **_experts(hf, megatron, ranks),
        **_recompute(megatron.override_transformer_config, recompute),
    )


def _experts(hf: Any, megatron: schema.MegatronConfig, ranks: ParallelRanks) -> dict[str, Any]:
    """The keys of a model with experts. The coefficients of auxiliary losses are set for each update."""
    sparse = sparse_layers(hf)
    if not any(sparse):
        return {}
    return {
        "num_moe_experts": hf.num_local_experts,
        "moe_ffn_hidden_size": expert_size(hf),
        "moe_layer_freq": [int(is_sparse) for is_sparse in sparse],
        "moe_router_topk": hf.num_experts_per_tok,
        # the probabilities of the chosen experts: of all experts, or, as a softmax over the chosen, summing to 1
        "moe_router_pre_softmax": hf.model_type == "qwen3_moe" and not hf.norm_topk_prob,
        "moe_router_dtype": megatron.override_transformer_config.moe_router_dtype,
        "moe_router_load_balancing_type": "aux_loss",
        "expert_model_parallel_size": ranks.e_size,
        "expert_tensor_parallel_size": ranks.et_size,
    }


def _windows(hf: Any) -> tuple[int | None, ...]:
    """Attention window of each layer; empty if there is none."""
    window = hf.to_dict().get("sliding_window")
    if not window:
        return ()
    types = hf.to_dict().get("layer_types") or ["sliding_attention"] * hf.num_hidden_layers
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _recompute(section: schema.MegatronTransformerConfig, everything: bool) -> dict[str, Any]:
    if section.recompute_granularity is None:
        if not everything:
            return {}
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if section.recompute_granularity == "selective":
        if unknown := set(section.recompute_modules) - RECOMPUTED_MODULES:
            raise ValueError(
                "megatron.override_transformer_config.recompute_modules: expected some of "
                f"{sorted(RECOMPUTED_MODULES)}, found {sorted(unknown)}"
            )
        return {"recompute_granularity": "selective", "recompute_modules": list(section.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": section.recompute_method or "uniform",
        "recompute_num_layers": section.recompute_num_layers or 1,
    }
