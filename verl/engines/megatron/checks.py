"""Models and settings that `strategy=megatron` does not support. Needs no megatron-core, so a run is checked first."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from verl.config import schema
from verl.engines.megatron.layout import ARCHITECTURES, expert_size, sparse_layers

#: keys of a `megatron` section for expert parallelism
_EXPERT_KEYS = ("expert_model_parallel_size", "expert_tensor_parallel_size")

logger = logging.getLogger("verl.engines")


def parallel_sizes(megatron: schema.MegatronConfig, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Parallel sizes, and those of experts. Raises ValueError if they do not divide the ranks."""
    sizes = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
    }
    experts = {
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size or sizes["tensor_model_parallel_size"],
    }
    expert_sizes = experts | {"pipeline_model_parallel_size": sizes["pipeline_model_parallel_size"]}
    for group in (sizes, expert_sizes):
        if ranks % math.prod(group.values()):
            raise ValueError(
                f"megatron: {' x '.join(f'{name} {size}' for name, size in group.items())} = "
                f"{math.prod(group.values())} does not divide the {ranks} ranks"
            )
    return sizes, experts


def check_architecture(hf: Any, path: str) -> None:
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
    if any(sparse_layers(hf)) and hf.num_experts_per_tok == 1 and getattr(hf, "norm_topk_prob", True):
        raise ValueError(
            f"strategy=megatron: {path!r} has num_experts_per_tok=1, which is not supported: use strategy=fsdp"
        )
    if hf.hidden_act != "silu":
        raise ValueError(f"strategy=megatron: expected hidden_act 'silu', found {hf.hidden_act!r} at {path!r}")


def check_sizes(hf: Any, megatron: schema.MegatronConfig) -> None:
    """Raise ValueError if the parallel sizes do not divide the model."""
    t, p = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    c = megatron.context_parallel_size
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
    set_counts = [count for count in end_stages(hf.num_hidden_layers, megatron) if count is not None]
    virtual = megatron.virtual_pipeline_model_parallel_size or 1
    if set_counts and (virtual > 1 or p <= len(set_counts)):
        raise ValueError(
            "megatron: num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need more pipeline "
            f"stages than they set, and no virtual_pipeline_model_parallel_size; found {p} stages"
        )
    chunks, layers = (p - len(set_counts)) * virtual, hf.num_hidden_layers - sum(set_counts)
    if layers <= 0 or layers % chunks:
        raise ValueError(f"megatron: {chunks} pipeline chunks do not divide the {layers} layers")


def end_stages(num_layers: int, megatron: schema.MegatronConfig) -> tuple[int | None, int | None]:
    """Layers of the first and of the last pipeline stage; None: as many as the others.

    With `account_for_embedding_in_pipeline_split` the first stage has one layer less than the others, and with
    `account_for_loss_in_pipeline_split` the last one.

    Raises:
        ValueError: layers, embedding and loss do not divide over the stages, or a number of layers is set as well.
    """
    section, p = megatron.override_transformer_config, megatron.pipeline_model_parallel_size
    first, last = section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage
    counts_as_layer = {
        "embedding": section.account_for_embedding_in_pipeline_split,
        "loss": section.account_for_loss_in_pipeline_split,
    }
    names = " and ".join(name for name, counts in counts_as_layer.items() if counts)
    if not names or p == 1:
        return first, last
    numbers = "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    if first is not None or last is not None:
        raise ValueError(f"megatron: account_for_*_in_pipeline_split sets {numbers}: remove it, or these")
    units = num_layers + sum(counts_as_layer.values())
    if units % p or megatron.virtual_pipeline_model_parallel_size:
        raise ValueError(
            f"megatron: account_for_*_in_pipeline_split: {num_layers} layers with {names} as layers are {units}, "
            f"expected a multiple of the {p} pipeline stages and no virtual_pipeline_model_parallel_size: set "
            f"{numbers} instead"
        )
    if units == p:
        raise ValueError(
            f"megatron: account_for_*_in_pipeline_split: of {num_layers} layers, the stage of the {names.split()[-1]} "
            f"would have none: use fewer than {p} pipeline stages"
        )
    if p == sum(counts_as_layer.values()):  # two equal stages
        return None, None
    layers = units // p - 1
    return (layers if counts_as_layer["embedding"] else None), (layers if counts_as_layer["loss"] else None)


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


def check_keys(hf: Any, megatron: schema.MegatronConfig, name: str) -> None:
    """Raise ValueError for keys of experts in the `megatron` section called `name`, if the model has none.

    Reference and critic have the parallel sizes of the actor, which may have experts.
    """
    if any(sparse_layers(hf)):
        return
    override = megatron.override_transformer_config.model_dump()
    keys = {f"override_transformer_config.{key}": value for key, value in override.items() if key.startswith("moe_")}
    if not isinstance(megatron, schema.RefMegatronConfig):
        keys |= {key: getattr(megatron, key) for key in _EXPERT_KEYS}
    for key, value in keys.items():
        if value not in (None, 0, 1):
            raise ValueError(f"{name}.{key}={value}, but {hf.model_type} models have no experts: remove it")


def refuse_images(columns: Mapping[str, Any]) -> None:
    """Raise ValueError if rows have images."""
    if any(row is not None for row in columns.get("multi_modal_inputs", ())):
        raise ValueError(
            "strategy=megatron does not support images, found multi_modal_inputs in the batch: set strategy=fsdp2"
        )
