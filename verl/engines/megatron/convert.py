"""HuggingFace configs as megatron-core configs. Architectures that would be computed differently are refused."""

import logging
from typing import Any

import torch
from torch.nn.functional import silu

from verl.config import schema
from verl.engines.megatron.layout import ARCHITECTURES, expert_size, head_size, sparse_layers
from verl.engines.megatron.model import DecoderConfig
from verl.engines.megatron.runtime import ParallelRanks

#: modules that selective recomputation supports; others need Transformer Engine
_RECOMPUTED = {"core_attn", "mlp", "moe"}

logger = logging.getLogger("verl.engines")


def check_supported(hf: Any, path: str) -> None:
    """Raise ValueError for an architecture, or a variant of it, that is not supported."""
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(
            f"strategy=megatron: expected a model of {', '.join(ARCHITECTURES)}, found {hf.model_type!r} at {path!r}: "
            "use strategy=fsdp"
        )
    values = hf.to_dict()
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ValueError(f"strategy=megatron: {path!r} has {name}=true, which is not supported: use strategy=fsdp")
    if values.get("router_jitter_noise"):
        raise ValueError(f"strategy=megatron: {path!r} has router_jitter_noise, which is not supported: set it to 0")
    if hf.hidden_act != "silu":
        raise ValueError(f"strategy=megatron: expected hidden_act 'silu', found {hf.hidden_act!r} at {path!r}")


def check_sizes(hf: Any, megatron: schema.MegatronConfig) -> None:
    """Raise ValueError if the parallel sizes do not divide the model."""
    t, p, c = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    sparse = sparse_layers(hf)
    dense = () if all(sparse) else ("intermediate_size",)
    for name in ("num_attention_heads", "num_key_value_heads", *dense):
        if getattr(hf, name) % t:
            raise ValueError(f"megatron.tensor_model_parallel_size {t} does not divide {name} {getattr(hf, name)}")
    if hf.num_attention_heads // t % c:
        raise ValueError(
            f"megatron.context_parallel_size {c} does not divide the {hf.num_attention_heads // t} heads of a rank"
        )
    _check_experts(hf, megatron, any(sparse))
    section = megatron.override_transformer_config
    ends = [section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage]
    given = [count for count in ends if count is not None]
    virtual = megatron.virtual_pipeline_model_parallel_size or 1
    if given and (virtual > 1 or p <= len(given)):
        raise ValueError(
            "megatron: num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need more pipeline "
            f"stages than they set, and no virtual_pipeline_model_parallel_size; found {p} stages"
        )
    chunks, layers = (p - len(given)) * virtual, hf.num_hidden_layers - sum(given)
    if layers <= 0 or layers % chunks:
        raise ValueError(f"megatron: {chunks} pipeline chunks do not divide the {layers} layers")


def _check_experts(hf: Any, megatron: schema.MegatronConfig, is_sparse: bool) -> None:
    """Raise ValueError if the sizes of expert parallelism do not divide the model."""
    e, t = megatron.expert_model_parallel_size, megatron.tensor_model_parallel_size
    if not is_sparse:
        if e > 1:
            logger.warning("megatron.expert_model_parallel_size=%d has no effect: the model has no experts", e)
        return
    if hf.num_local_experts % e:
        raise ValueError(f"megatron.expert_model_parallel_size {e} does not divide the {hf.num_local_experts} experts")
    inner = megatron.expert_tensor_parallel_size or t
    if expert_size(hf) % inner:
        raise ValueError(f"megatron: {inner} expert-tensor-parallel ranks do not divide the size {expert_size(hf)}")
    if t > 1 and not megatron.sequence_parallel:
        raise ValueError(
            "megatron.sequence_parallel=false is not supported for a model with experts and "
            "tensor_model_parallel_size > 1: remove it"
        )


def decoder_config(
    hf: Any, megatron: schema.MegatronConfig, ranks: ParallelRanks, dtype: torch.dtype, recompute: bool
) -> DecoderConfig:
    """The configuration of megatron-core for a model, after the checks above.

    Args:
        hf: the HuggingFace config.
        megatron: the `megatron` section.
        ranks: the position of this rank.
        dtype: of parameters and computation.
        recompute: recompute all activations, if the section does not say how.
    """
    interleaved = megatron.virtual_pipeline_model_parallel_size is not None
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
        num_layers_in_first_pipeline_stage=megatron.override_transformer_config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.override_transformer_config.num_layers_in_last_pipeline_stage,
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
        "moe_layer_freq": [int(each) for each in sparse],
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
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _recompute(section: schema.MegatronTransformerConfig, everything: bool) -> dict[str, Any]:
    """The keys of activation recomputation."""
    if section.recompute_granularity is None:
        if not everything:
            return {}
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if section.recompute_granularity == "selective":
        if unknown := set(section.recompute_modules) - _RECOMPUTED:
            raise ValueError(
                f"megatron.override_transformer_config.recompute_modules: expected some of {sorted(_RECOMPUTED)}, "
                f"found {sorted(unknown)}"
            )
        return {"recompute_granularity": "selective", "recompute_modules": list(section.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": section.recompute_method or "uniform",
        "recompute_num_layers": section.recompute_num_layers or 1,
    }
