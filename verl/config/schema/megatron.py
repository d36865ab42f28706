"""The `megatron` sections: the engine of `strategy=megatron`."""

from typing import Any, Literal

from verl.config.fields import Precision, Section, StrList, field, like, other_than, section

_STAGES = ("pipeline_model_parallel_size", other_than(1))


class MegatronTransformerConfig(Section):
    """`megatron.override_transformer_config`: activation recomputation, experts, layers of the pipeline stages."""

    recompute_granularity: Literal["full", "selective"] | None = field(
        None, "recompute whole layers or some modules in the backward pass; null: as enable_gradient_checkpointing says"
    )
    recompute_modules: StrList = field(
        ["core_attn"], "modules that selective recomputes", active_when=("recompute_granularity", "selective")
    )
    recompute_method: Literal["uniform", "block"] | None = field(
        None, "which layers full recomputes; null: uniform", active_when=("recompute_granularity", "full")
    )
    recompute_num_layers: int | None = field(
        None,
        "layers per recomputed unit (uniform) or stage (block)",
        active_when=("recompute_granularity", "full"),
        ge=1,
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = field(None, "dtype of the router; null: that of the model")
    moe_aux_loss_coeff: float = field(0.0, "coefficient of the load-balancing loss of the experts; 0: none", ge=0)
    moe_z_loss_coeff: float | None = field(None, "coefficient of the router's z-loss (ST-MoE); null: none", ge=0)
    num_layers_in_first_pipeline_stage: int | None = field(
        None, "layers of the first stage; null: as many as the others", ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = field(
        None, "layers of the last stage; null: as many as the others", ge=1
    )
    account_for_embedding_in_pipeline_split: bool = field(
        False, "count the embedding as a layer of the first stage", active_when=_STAGES
    )
    account_for_loss_in_pipeline_split: bool = field(
        False, "count the loss as a layer of the last stage", active_when=_STAGES
    )


class MegatronConfig(Section):
    """Precision and parallelism of one model trained with megatron-core (`strategy=megatron`)."""

    tensor_model_parallel_size: int = field(1, "ranks that share every layer", ge=1)
    pipeline_model_parallel_size: int = field(1, "pipeline stages", ge=1)
    virtual_pipeline_model_parallel_size: int | None = field(
        None, "chunks of layers per pipeline stage (interleaved schedule); null: one", ge=2
    )
    context_parallel_size: int = field(1, "ranks that share the tokens of the same sequences", ge=1)
    expert_model_parallel_size: int = field(1, "ranks that share the experts of a layer", ge=1)
    expert_tensor_parallel_size: int | None = field(
        None, "ranks that share every expert; null: tensor_model_parallel_size", ge=1
    )
    sequence_parallel: bool = field(True, "shard activations between layers over the tensor-parallel ranks")
    use_distributed_optimizer: bool = field(True, "shard the optimizer state over the data-parallel ranks")
    param_offload: bool = field(False, "keep the weights in host memory between phases")
    grad_offload: bool = field(False, "free the gradients between phases")
    optimizer_offload: bool = field(False, "keep the optimizer state in host memory between phases")
    seed: int = field(42, "seed of megatron-core's random state, which recomputation restores", ge=0, le=2**62)
    dtype: Precision = field("auto", "dtype of weights and computation; auto: fp32 on a CPU, bf16 on a GPU")
    override_transformer_config: MegatronTransformerConfig = section(
        MegatronTransformerConfig, "activation recomputation, experts, layers of the pipeline stages"
    )

    @property
    def ranks_with_same_rows(self) -> int:
        """The model-parallel size: how many ranks compute the same rows. World size / this = data-parallel size."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


def _of_actor(name: str) -> Any:
    return like(MegatronConfig, name, f"${{actor_rollout_ref.actor.megatron.{name}}}")


class RefMegatronConfig(MegatronConfig):
    """`actor_rollout_ref.ref.megatron`: by default the parallel sizes of the actor."""

    tensor_model_parallel_size: int = _of_actor("tensor_model_parallel_size")
    pipeline_model_parallel_size: int = _of_actor("pipeline_model_parallel_size")
    virtual_pipeline_model_parallel_size: int | None = _of_actor("virtual_pipeline_model_parallel_size")
    context_parallel_size: int = _of_actor("context_parallel_size")
    expert_model_parallel_size: int = _of_actor("expert_model_parallel_size")
    expert_tensor_parallel_size: int | None = _of_actor("expert_tensor_parallel_size")
    sequence_parallel: bool = _of_actor("sequence_parallel")
