"""A megatron-core GPT model whose forward pass returns the inputs of losses, at response tokens only.

The layers are megatron-core's "local" ones (without Transformer Engine), with the MLP and experts of the other engines.
Attention is the packed attention of the other engines, which applies the rotary embedding of transformers: sequences
need no padding, and context parallelism exchanges tokens for heads (Ulysses).
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.nn.functional import linear, pad

from verl.engines.base import Tensors
from verl.engines.megatron.experts import MixtureOfExperts
from verl.engines.megatron.routing import ChunkRouting
from verl.modeling.attention import packed_attention
from verl.modeling.linear import layer_functions
from verl.modeling.log_probs import ShardedStatistics, token_statistics
from verl.modeling.packing import ModelInput, Packing


@dataclass(frozen=True)
class PackedTokens:
    """Positions of the tokens of a micro-batch, for attention; passed as megatron-core's `packed_seq_params`."""

    packing: Packing
    # cos, sin: (n, D) rotary embedding of this rank's n tokens
    cos: torch.Tensor
    sin: torch.Tensor
    qkv_format: str = "packed"  # megatron-core squeezes the batch dimension of "thd"; this is not it


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with megatron-core's arguments; its gradient is summed over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, on this rank's heads (megatron-core's `core_attention`)."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any):
        super().__init__(config=config)
        windows = config.sliding_windows
        self.window = windows[layer_number - 1] if windows else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> torch.Tensor:
        """query (n, 1, H, D), key and value (n, 1, K, D) -> (n, 1, H * D)."""
        tokens, packing = packed_seq_params, packed_seq_params.packing
        rotate = layer_functions(query).Rotary.apply
        query, key = (rotate(x.squeeze(1), tokens.cos, tokens.sin) for x in (query, key))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value.squeeze(1).contiguous()))
        length, real = q.shape[2], packing.slots.numel()
        if packing.ranks is None and real < length:  # tokens that only make the number divisible
            q, k, v = (x[:, :, :real] for x in (q, k, v))
        out, _ = packed_attention(self, q, k, v, None, packing, sliding_window=self.window)
        out = out[0].flatten(1)
        if len(out) < length:  # `pad` by nothing would copy
            out = pad(out, (0, 0, 0, length - len(out)))
        return out[:, None]


class GatedMLP(MLP):
    """megatron-core's MLP with the fused SwiGLU of the other engines."""

    def __init__(self, config: TransformerConfig):
        first, second = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
        layers = MLPSubmodules(linear_fc1=first, linear_fc2=second)
        super().__init__(config, layers, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(n, 1, H) -> (n, 1, H), and no bias."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(layer_functions(gate_up).SwiGLU.apply(gate_up))


@dataclass
class DecoderConfig(TransformerConfig):
    """megatron-core's configuration, with the attention window of each layer."""

    sliding_windows: tuple[int | None, ...] = ()  # keys that a query of each layer attends to; empty: all


def layer_spec(config: DecoderConfig, is_sparse: bool) -> ModuleSpec:
    """megatron-core's local layer with packed attention, fused functions, and a norm for sequence parallelism."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layer.mlp = MixtureOfExperts if is_sparse else GatedMLP
    return spec


def decoder_spec(config: DecoderConfig, vp_stage: int | None) -> Any:
    """The layers of this stage and the final norm."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first, count = get_transformer_layer_offset(config, vp_stage), get_num_layers_to_build(config, vp_stage=vp_stage)
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [layer_spec(config, bool(is_sparse)) for is_sparse in sparse[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


class TokenGPT(GPTModel):
    """One pipeline stage (or one chunk of it, if stages are interleaved).

    Args:
        pre_process, post_process: whether it has the embedding, and the output layer.
        vp_stage: index of the chunk in the stage; None without interleaving.
    """

    def __init__(
        self,
        config: DecoderConfig,
        hf: Any,
        kind: str,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ):
        t = config.tensor_model_parallel_size
        self.vocab_entries = hf.vocab_size
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_spec(config, vp_stage),
            vocab_size=-(-hf.vocab_size // t) * t,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=kind == "causal_lm" and hf.tie_word_embeddings,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        self.kind = kind
        self.padding_id = hf.pad_token_id
        self.score = None
        if kind != "causal_lm" and post_process:
            del self.output_layer
            self.score = nn.Linear(hf.hidden_size, 1, dtype=config.params_dtype)
        architecture = importlib.import_module(f"transformers.models.{hf.model_type}.modeling_{hf.model_type}")
        name = type(hf).__name__.removesuffix("Config")
        self.rotary = getattr(architecture, f"{name}RotaryEmbedding")(hf)  # scaling included; it has no parameters
        self.routing: ChunkRouting | None = None  # set if the model has experts

    def forward(self, model_input: ModelInput, outputs: tuple[str, ...], temperature: float) -> torch.Tensor | Tensors:
        """Hidden states (n, 1, H) of a stage that is not the last; else each output, (b, T), float32."""
        embedded = self._embed(model_input.input_ids) if self.pre_process else None
        positions = model_input.position_ids
        with torch.no_grad():
            like = torch.empty(0, dtype=self.config.params_dtype, device=positions.device)
            cos, sin = (x[0] for x in self.rotary(like, positions))
        if self.routing is not None:
            self.routing.start(model_input)
        states = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=PackedTokens(model_input.packing, cos, sin),
        )
        if self.routing is not None:
            self.routing.finish(model_input)
        if not self.post_process:
            return states
        values_by_name = self._outputs(states, model_input, outputs, temperature)
        scattered = {name: model_input.scatter(values.float()) for name, values in values_by_name.items()}
        ranks = model_input.packing.ranks
        return scattered if ranks is None else {k: ranks.sum_of_shares(v) for k, v in scattered.items()}

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embedding of this rank's tokens. As in transformers, the row of the padding token gets no gradient."""
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        if self.padding_id is None:
            return embedded
        is_padding = (input_ids == self.padding_id).T[..., None]
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.config.tensor_model_parallel_size)[self.tp_group.rank()]
        return torch.where(is_padding, embedded.detach(), embedded)

    @property
    def local_entries(self) -> tuple[int, int]:
        """First and number of the vocabulary entries of this rank, without those that make the ranks divide it."""
        size, rank = self.config.tensor_model_parallel_size, self.tp_group.rank()
        first, last = VocabUtility.vocab_range_from_global_vocab_size(self.vocab_size, rank, size)
        return first, max(0, min(last, self.vocab_entries) - first)

    def _outputs(
        self, states: torch.Tensor, model_input: ModelInput, outputs: tuple[str, ...], temperature: float
    ) -> Tensors:
        """Each output at the selected states, (S,)."""
        is_value = self.kind != "causal_lm"
        if self.config.sequence_parallel:
            # ranks of the output layer have partial gradients, which are summed; those of a value head are whole
            states = tensor_parallel.gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=not is_value
            )
        elif not is_value:
            states = tensor_parallel.copy_to_tensor_model_parallel_region(states)
        states = states[:, 0][model_input.states]
        if is_value:
            if set(outputs) != {"values"}:
                raise ValueError(f"a critic outputs values, not {sorted(set(outputs) - {'values'})}")
            return {"values": self.score(states)[:, 0]}
        weight = self.shared_embedding_or_output_weight() if self.output_layer.weight is None else None
        weight = self.output_layer.weight if weight is None else weight
        if self.config.tensor_model_parallel_size == 1:
            head, sharded = (lambda chunk: linear(chunk, weight)), None
        else:
            first, entries = self.local_entries

            def head(chunk: torch.Tensor) -> torch.Tensor:
                return linear(chunk, weight)[:, :entries]

            def sharded(logits, targets, temperature, requested):
                return ShardedStatistics.apply(logits, targets, temperature, requested, first, self.tp_group)

        return token_statistics(
            states, model_input.targets, head, len(weight), outputs, temperature, sharded_statistics=sharded
        )
