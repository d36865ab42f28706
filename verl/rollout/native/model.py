"""Reads a HuggingFace decoder as a flat list of layer weights, for the native rollout engine.

`read_decoder(module)` returns a `Decoder`, which has only what the decode loops need. Its weights *are* the module's
parameters. Query, key and value projections are one matmul, and so are gate and up: their parameters are fused in place
once and become views of one tensor, so there is no second copy to update.

Some weights are copied once per generate call: norm weights that need arithmetic (1 + w, or one row per head) and, on a
CPU and up to TRANSPOSE_LIMIT, transposed matrices, which make a matmul of few rows a quarter faster. In float32 and
float64, these matrices are also `folded`, which saves small operations between matmuls: a norm's weight is multiplied
into the following matrix, the attention scale into the query projection, and dimensions that a rotary embedding rotates
together are adjacent, so that a rotation is one complex multiplication.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.modeling.fp8 import Fp8Linear, has_kernels, quantize_weights
from verl.modeling.moe import keeps_float_weights, normalizes_weights
from verl.modeling.vision import is_vision_config, language_model_of
from verl.rollout.native.decoder import (
    ACTIVATIONS,
    Decoder,
    Fp8Projection,
    Layer,
    Projection,
    Rope,
    padded_width,
    position_limit,
)
from verl.rollout.native.experts import Experts, is_mixture
from verl.rollout.native.vision import NativeVision, axis_of_frequencies
from verl.rollout.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama's."""

    fused: bool = False  # projections are stored as qkv_proj and gate_up_proj
    post_norms: bool = False  # norms after attention and MLP, too
    gemma: bool = False  # norms scale by 1 + w and embeddings by sqrt(hidden)
    qk_norm: bool = False  # a norm per head on queries and keys
    # which layers use sliding-window attention: "none", "all", or those of "layer_types" named sliding_attention
    window: str = "none"
    softcaps: bool = False  # config.attn_logit_softcapping applies
    rope_per_type: bool = False  # one set of rotary frequencies per layer type
    activation: str = "hidden_act"  # name of the config attribute with the MLP's activation


_GEMMA2 = Family(gemma=True, post_norms=True, softcaps=True, window="layer_types", activation="hidden_activation")
_GEMMA3 = replace(_GEMMA2, softcaps=False, qk_norm=True, rope_per_type=True)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(window="layer_types"),
    "Qwen3ForCausalLM": Family(window="layer_types", qk_norm=True),
    "Qwen3MoeForCausalLM": Family(window="all", qk_norm=True),
    "MixtralForCausalLM": Family(window="all"),
    "Qwen2VLForConditionalGeneration": Family(window="layer_types"),
    "Qwen2_5_VLForConditionalGeneration": Family(window="layer_types"),
    "Qwen3VLForConditionalGeneration": Family(qk_norm=True),
    "Phi3ForCausalLM": Family(window="all", fused=True),
    "GemmaForCausalLM": Family(gemma=True),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


SHARDED = "rollout.name=native needs unsharded parameters; {} is sharded: gather it before generating"
#: bytes of parameters up to which a CPU gets transposed copies of the matrices
TRANSPOSE_LIMIT = 1 << 30


#: dtypes in which matrices are folded: in 16 bits that would round once more, and there are no 16-bit complex numbers
_FOLDED = (torch.float32, torch.float64)
#: names of the projections that `_Reader` reads
_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "lm_head"),
)


def is_readable(name: str, settings: Mapping[str, Any], module: nn.Module | None = None) -> bool:
    """Whether `read_decoder` reads a model.

    Args:
        name: its architecture.
        settings: the config of its language model by key.
        module: None if it is not loaded yet.
    """
    family = FAMILIES.get(name)
    parts = () if module is None else module.named_modules()
    if any(type(part) not in (nn.Linear, Fp8Linear) for path, part in parts if path.rpartition(".")[2] in _PROJECTIONS):
        return False  # quantized by others, or wrapped by an adapter
    return (
        family is not None
        and settings[family.activation] in ACTIVATIONS
        and not settings.get("use_bidirectional_attention")
    )


def read_decoder(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    transpose_limit: int = TRANSPOSE_LIMIT,
    reuse: Decoder | None = None,
    tp: TensorParallel = ALONE,
    quantized: bool = True,
) -> Decoder:
    """Read `module` (see `is_readable`) as a `Decoder` over its parameters.

    Args:
        module: a HuggingFace model, unsharded, or with this rank's slices of the parameters (`native.slices`).
        dtype: None for the parameters' dtype, without a copy. Any other dtype copies the projections as they are now.
        reuse: an earlier result, whose memory is reused for copies.
        quantized: quantize the layers that compute in FP8; otherwise only the sizes of the result are valid.

    Raises:
        ValueError: an unsupported rotary variant, wrapped projections, sharded parameters.
    """
    config, trunk, family = module.config.get_text_config(), language_model_of(module), FAMILIES[type(module).__name__]
    head, head_dim = module.lm_head.weight, trunk.layers[0].self_attn.head_dim
    transposed = head.device.type == "cpu" and sum(p.nbytes for p in module.parameters()) <= transpose_limit
    dtype = head.dtype if dtype is None else dtype
    stream_dtype = torch.promote_types(head.dtype, dtype)
    is_fp8 = quantized and isinstance(trunk.layers[0].self_attn.o_proj, Fp8Linear)
    folded = transposed and not is_fp8 and dtype == stream_dtype and dtype in _FOLDED
    types = config.layer_types if family.window == "layer_types" else [None] * len(trunk.layers)
    rope_types = sorted(set(types)) if family.rope_per_type else [None]
    ropes = tuple(_rope(trunk.rotary_emb, config, kind) for kind in rope_types)
    pairs = _pairs(head_dim, 2 * len(ropes[0].inverse_frequencies)) if folded else None
    heads = config.num_attention_heads // tp.size, max(1, config.num_key_value_heads // tp.size)
    old = reuse.copies if reuse is not None else ()
    reader = _Reader(family, dtype, stream_dtype, transposed, *heads, pairs, old, tp, is_fp8)
    rope_of = {kind: rope_types.index(kind) if family.rope_per_type else 0 for kind in types}
    norm, factor = reader.norm_before(trunk.norm.weight)
    return Decoder(
        embedding=reader.wide(trunk.embed_tokens.weight),
        head=reader.projection(factor, lm_head=module.lm_head),
        norm=norm,
        layers=tuple(_layer(layer, config, reader, kind, rope_of[kind]) for layer, kind in zip(trunk.layers, types)),
        ropes=ropes,
        heads=reader.heads,
        kv_heads=reader.kv_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        scaling=1.0 if folded else trunk.layers[0].self_attn.scaling,
        activation=config.to_dict()[family.activation],
        # rounded as the model rounds it
        embedding_scale=float(torch.tensor(math.sqrt(config.hidden_size), dtype=stream_dtype)) if family.gemma else 1.0,
        attention_softcap=config.attn_logit_softcapping if family.softcaps else None,
        final_softcap=config.to_dict().get("final_logit_softcapping"),
        **dict(zip(("max_positions", "max_positions_reason"), position_limit(config))),
        copies=reader.copies,
        folded=folded,
        floor=torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), dtype=dtype, device=head.device),
        tp=tp,
        vision=NativeVision(module, dtype) if is_vision_config(module.config) else None,
    )


def _layer(layer: nn.Module, config, reader: "_Reader", kind: str | None, rope: int) -> Layer:
    family, attention, mlp = reader.family, layer.self_attn, layer.mlp
    after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
    if family.post_norms:
        after_attention, before_mlp = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        after_mlp = layer.post_feedforward_layernorm
    attention_norm, attention_factor = reader.norm_before(layer.input_layernorm.weight)
    experts, gate_up, down = None, None, None
    if is_mixture(mlp):
        mlp_norm, experts = reader.norm(before_mlp.weight), reader.experts(mlp)
    else:
        mlp_norm, mlp_factor = reader.norm_before(before_mlp.weight)
        gate_up, down = reader.mlp(mlp, mlp_factor)
    slides = family.window == "all" or kind == "sliding_attention"
    return Layer(
        qkv=reader.qkv(attention, attention_factor),
        out=reader.projection(o_proj=attention.o_proj),
        gate_up=gate_up,
        down=down,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        attention_post_norm=None if after_attention is None else reader.norm(after_attention.weight),
        mlp_post_norm=None if after_mlp is None else reader.norm(after_mlp.weight),
        qk_norm=reader.qk_norm(attention) if family.qk_norm else None,
        window=config.sliding_window if slides else None,
        rope=rope,
        experts=experts,
    )


@dataclass(eq=False)
class _Reader:
    """Reads parameters: projections in `dtype`, optionally copied as (in, out); all others in `stream_dtype`."""

    family: Family
    dtype: torch.dtype
    stream_dtype: torch.dtype
    transposed: bool
    heads: int
    kv_heads: int
    # (D,) order in which to read the dimensions of a query or key head; None if nothing is folded
    pairs: torch.Tensor | None
    old: Sequence[torch.Tensor]  # tensors of an earlier reading, whose memory is reused where shapes match
    tp: TensorParallel
    is_fp8: bool
    copies: list[torch.Tensor] = field(default_factory=list)

    def _copy(self, parts: list[torch.Tensor], dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
        """Concatenate parts (n_i, ...) into one new tensor (sum n_i, ...), optionally transposed."""
        joint = (parts[0] if len(parts) == 1 else torch.cat(parts)).detach()
        joint = joint.t() if transposed else joint
        at = len(self.copies)
        old = self.old[at] if at < len(self.old) else None
        if old is None or (old.shape, old.dtype, old.device) != (joint.shape, dtype, joint.device):
            shape = (*joint.shape[:-1], padded_width(joint.shape[-1])) if transposed else joint.shape
            old = torch.empty(shape, dtype=dtype, device=joint.device)[..., : joint.shape[-1]]
        self.copies.append(old.copy_(joint))
        return old

    def wide(self, parameter: torch.Tensor) -> torch.Tensor:
        same = parameter.dtype == self.stream_dtype
        return parameter.detach() if same else self._copy([parameter], self.stream_dtype)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of an RMS norm. Gemma's 1 + w is computed in float32: bfloat16 would lose a small w."""
        return self._copy([1 + weight.detach().float()], torch.float32) if self.family.gemma else self.wide(weight)

    def norm_before(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weight of a norm before a projection: (weight, None), or (None, factor to fold into the matrix)."""
        if self.pairs is None:
            return self.norm(weight), None
        factor = weight.detach().to(self.dtype)
        return None, (1 + factor if self.family.gemma else factor) * math.sqrt(len(factor))

    def qk_norm(self, attention: nn.Module) -> torch.Tensor:
        """Norm weights of all query and key heads, (HQ + HK, D)."""
        norms = [attention.q_norm] * self.heads + [attention.k_norm] * self.kv_heads
        rows = torch.stack([norm.weight.detach() for norm in norms])
        rows = 1 + rows.float() if self.family.gemma else rows.to(self.stream_dtype)
        if self.pairs is not None:
            rows = rows[:, self.pairs]
            rows[: self.heads] *= attention.scaling
        return self._copy([rows], rows.dtype)

    def qkv(self, attention: nn.Module, factor: torch.Tensor | None) -> Projection:
        """Queries, keys and values as one projection. factor: see `norm_before`."""
        if self.family.fused:
            projections = {"qkv_proj": attention.qkv_proj}
        else:
            projections = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
        if self.pairs is None:
            return self.projection(factor, **projections)
        heads, size = self.heads + self.kv_heads, len(self.pairs)
        paired = (torch.arange(heads)[:, None] * size + self.pairs).view(-1)
        order = torch.cat((paired, torch.arange(self.kv_heads * size) + heads * size))
        joint = self.projection(factor, order, **projections)
        if not self.family.qk_norm:  # otherwise the norm's weight includes the scale
            for part in filter(lambda tensor: tensor is not None, (joint.matrix, joint.bias)):
                part[..., : self.heads * size] *= attention.scaling
        return joint

    def projection(
        self, factor: torch.Tensor | None = None, order: torch.Tensor | None = None, **linears: nn.Module
    ) -> Projection:
        """Fuse projections of the same input: `linears` by name, in the order of their outputs.

        factor: (in,), multiplied into the matrix. order: permutation of the outputs.
        """
        # `_joint` may return the memory of the trainer's parameters
        assert self.transposed or (factor is None and order is None), "folding without a copy"
        layers = [_linear(name, linear) for name, linear in linears.items()]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if self.is_fp8 and isinstance(layers[0], Fp8Linear):
            return self._fp8(weights, biases)
        if order is None:
            bias = self._joint(biases) if biases else None
        else:
            weights = [torch.cat(weights).detach()[order]]
            bias = self._copy([torch.cat(biases).detach()[order]], self.dtype) if biases else None
        matrix = self._copy(weights, self.dtype, transposed=True) if self.transposed else self._joint(weights).t()
        if factor is not None:
            matrix *= factor[:, None]
        return Projection(matrix, bias)

    def _fp8(self, weights: list[nn.Parameter], biases: list[nn.Parameter]) -> Fp8Projection:
        emulated = not has_kernels(weights, self.dtype)
        codes, scales, _ = quantize_weights(weights, self.dtype, emulated)
        transposed = self.transposed and emulated
        matrix = self._copy([codes], codes.dtype, transposed)
        return Fp8Projection(
            matrix if transposed else matrix.t(),
            self._joint(biases) if biases else None,
            None if emulated else self._copy([scales], scales.dtype),
        )

    def mlp(self, mlp: nn.Module, factor: torch.Tensor | None) -> tuple[Projection, Projection]:
        """The projections of an MLP. factor: see `norm_before`."""
        if self.family.fused:
            gate_up = self.projection(factor, gate_up_proj=mlp.gate_up_proj)
        else:
            gate_up = self.projection(factor, gate_proj=mlp.gate_proj, up_proj=mlp.up_proj)
        return gate_up, self.projection(down_proj=mlp.down_proj)

    def experts(self, mlp: nn.Module) -> Experts:
        """The router and the experts of this rank. The norm before them is not folded."""
        router, experts = mlp.gate, mlp.experts
        gate_up, down = (self._plain(name, p) for name, p in experts.named_parameters())
        return Experts(
            router=Projection(self._plain("gate", router.weight).t()),
            gate_up=gate_up,
            down=down,
            first=self.tp.rank * len(gate_up) if self.tp.size > 1 else 0,
            top_k=router.top_k,
            normalized=normalizes_weights(router),
            keeps_float=keeps_float_weights(router),
        )

    def _plain(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter in `dtype`, without a copy where that is its dtype."""
        if isinstance(parameter, DTensor):
            raise ValueError(SHARDED.format(name))
        return parameter.detach() if parameter.dtype == self.dtype else self._copy([parameter], self.dtype)

    def _joint(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        if self.dtype == parameters[0].dtype:
            return fuse_parameters_in_place(parameters)
        return self._copy(parameters, self.dtype)


def _linear(name: str, linear: nn.Module) -> nn.Linear:
    if isinstance(linear.weight, DTensor):
        raise ValueError(SHARDED.format(name))
    return linear


def _pairs(size: int, rotated: int) -> torch.Tensor:
    """Permutation of dimensions 0 .. size - 1: the first `rotated` as 0, rotated / 2, 1, rotated / 2 + 1, ..."""
    at = torch.arange(size)
    at[:rotated] = at[:rotated].view(2, -1).t().reshape(-1)
    return at


def _rope(rotary: nn.Module, config, layer_type: str | None) -> Rope:
    """The rotary frequencies of a model or layer type."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = "original_" if parameters["rope_type"] == "longrope" else ""  # those up to `position_limit`
    frequencies = getattr(rotary, f"{prefix}{original}inv_freq")
    axes = axis_of_frequencies(parameters, len(frequencies))
    return Rope(frequencies, getattr(rotary, f"{prefix}attention_scaling"), axes)


def fuse_parameters_in_place(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the parameters (n_i, ...) as one tensor (sum n_i, ...) that shares their memory.

    Unless they are adjacent already, they are copied into one tensor and become views of it. The Parameter objects do
    not change, so optimizers and hooks keep working. If a parameter gets new memory later (`.to`, assigning .data), the
    next call fuses them again.
    """
    first = parameters[0].detach()
    rows = sum(p.shape[0] for p in parameters)
    if not _are_adjacent(parameters):
        # not an inference tensor, even if the caller is in inference mode: training continues with it
        with torch.inference_mode(False), torch.no_grad():
            block = torch.cat([p.detach() for p in parameters])
            at = 0
            for p in parameters:
                p.data = block[at : at + p.shape[0]]
                at += p.shape[0]
        first = block
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter starts in memory where the previous one ends."""
    if len(parameters) == 1:
        return parameters[0].is_contiguous()
    storage = parameters[0].untyped_storage().data_ptr()
    at = parameters[0].storage_offset()
    for p in parameters:
        if not p.is_contiguous() or p.untyped_storage().data_ptr() != storage or p.storage_offset() != at:
            return False
        at += p.numel()
    return True
