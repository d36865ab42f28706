"""A HuggingFace decoder read as a flat list of layer weights, for the native rollout engine.

`read_decoder(module)` returns a `Decoder`: what the decode loops need and nothing else. Its weights *are* the module's
parameters. Query, key and value projections (and gate and up) are one matmul each; for that the parameters are fused in
place once, as views of one tensor, so that there is no second copy and nothing to refresh.

Made anew on every reading, which is once per generate call: norm vectors whose weight needs arithmetic (1 + w, or one
row per head); and on a CPU, up to TRANSPOSE_LIMIT, transposed copies of the matrices, with which a matmul of few rows
takes a quarter less time. Those of float32 and float64 are `folded` as well, which spares small operations between the
matmuls: the weight of a norm is multiplied into the matrix after it, the scale of attention into the query projection,
and dimensions that a rotary embedding rotates together are adjacent, so a rotation is one complex multiplication.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from verl.rollout.native.fused_parameters import fuse_parameters_in_place

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x (..., H) over its root mean square, times weight (H,), computed in the wider dtype. dtype: None is x's."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype if dtype is None else dtype)


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama's.

    fused: projections are stored as qkv_proj and gate_up_proj. post_norms: norms on what attention and MLP give, too.
    gemma: norms scale by 1 + w and embeddings by sqrt(hidden). qk_norm: a norm per head on queries and keys.
    window: "none", "all" layers or "layer_types" (those named sliding_attention) attend to config.sliding_window keys.
    softcaps: config.attn_logit_softcapping holds. rope_per_type: one set of rotary frequencies per layer type.
    activation: the config's name of the MLP's activation.
    """

    fused: bool = False
    post_norms: bool = False
    gemma: bool = False
    qk_norm: bool = False
    window: str = "none"
    softcaps: bool = False
    rope_per_type: bool = False
    activation: str = "hidden_act"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(window="layer_types"),
    "Qwen3ForCausalLM": Family(window="layer_types", qk_norm=True),
    "Phi3ForCausalLM": Family(window="all", fused=True),
    "GemmaForCausalLM": Family(gemma=True),
    "Gemma2ForCausalLM": Family(
        gemma=True, post_norms=True, softcaps=True, window="layer_types", activation="hidden_activation"
    ),
    "Gemma3ForCausalLM": Family(
        gemma=True,
        post_norms=True,
        qk_norm=True,
        window="layer_types",
        rope_per_type=True,
        activation="hidden_activation",
    ),
}


#: bytes of parameters up to which a CPU gets transposed copies of the matrices
TRANSPOSE_LIMIT = 1 << 30


def padded_width(width: int) -> int:
    """A row length, in elements, of at least `width` at which the rows of a matrix do not compete for cache lines.

    Rows at a distance of a power of two share few of them: a matmul with such a matrix took up to 1.7 times as long.
    """
    return width if width % 256 else width + 48


@dataclass(frozen=True)
class Projection:
    """A linear map: matrix (in, out), bias (out,) or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, in) -> (N, out)."""
        return torch.mm(x, self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. D head size, HQ query heads, HK key/value heads, H hidden size, I MLP size.

    qkv: H -> (HQ + 2 HK) D. out: HQ D -> H. gate_up: H -> 2 I. down: I -> H. attention_norm, mlp_norm: (H,), before.
    attention_post_norm, mlp_post_norm: (H,) after, or None. qk_norm: (HQ + HK, D) or None.
    A norm before is None where the matrix after it holds its weight times sqrt(H) (`Decoder.folded`).
    window: keys that a query sees, itself among them, or None. rope: index into Decoder.ropes.
    """

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    qk_norm: torch.Tensor | None
    window: int | None
    rope: int


RopeTable = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rope:
    """inverse_frequencies (R / 2,), for the first R dimensions of a head; scale: a factor on cos and sin."""

    inverse_frequencies: torch.Tensor
    scale: float

    def table(self, length: int, dtype: torch.dtype, folded: bool = False) -> RopeTable:
        """cos and signed sin, each (length, R): y = x * cos + swap_halves(x) * sin.

        folded: cos + i sin (length, R / 2), which multiplies numbers whose parts are adjacent.
        """
        positions = torch.arange(length, device=self.inverse_frequencies.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies.float()
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        if folded:
            return (torch.complex(cos.to(dtype), sin.to(dtype)),)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass(frozen=True)
class Decoder:
    """A decoder: embedding (V, H), layers, the last norm (H,), head H -> V, and the constants that its maths needs.

    scaling: factor on the attention scores. attention_softcap, final_softcap: c * tanh(x / c), or None.
    max_positions: prompt plus response at most; max_positions_reason says what sets it. copies: the weights that are
    not parameters, in the order of reading.

    folded: in queries and keys, dimensions 2 i and 2 i + 1 of the first R are rotated together, where the model has i
    and i + R / 2; queries come scaled (`scaling` is 1); norms before projections have no weight; floor is sqrt(H eps).

    Matmuls, keys and values have `dtype`; the residual stream, norms and rotary tables have `stream_dtype`, which is
    wider where the parameters are: so does training under autocast, and rounding at other points than there would be
    a training-inference mismatch.
    """

    embedding: torch.Tensor
    head: Projection
    norm: torch.Tensor | None
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    activation: str
    embedding_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    max_positions: int
    max_positions_reason: str
    copies: list[torch.Tensor]
    folded: bool
    floor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.head.matrix.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        return self.head.matrix.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one row takes."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) int64 -> (..., H)."""
        x = F.embedding(ids, self.embedding)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return x

    def normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """`rms_norm` before a projection. Without a weight, x (N, H) over the root of its sum of squares + H eps."""
        if weight is not None:
            return rms_norm(x, weight, self.eps, self.dtype)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(size, self.floor, out=size)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(B, H) after the last layer -> (B, V) float32."""
        logits = self.head(self.normed(states, self.norm)).float()
        if self.final_softcap is not None:
            logits.div_(self.final_softcap).tanh_().mul_(self.final_softcap)
        return logits


def family_of(name: str) -> Family:
    """The family of an architecture. Raises ValueError that names what the native engine cannot run and who can."""
    if name not in FAMILIES:
        raise ValueError(
            f"rollout.name=native generates with {', '.join(sorted(FAMILIES))}; found {name}. "
            "Use rollout.name=hf (every model that transformers runs)"
        )
    return FAMILIES[name]


def check_supported(module: nn.Module) -> Family:
    """The family of `module`. Raises ValueError as `family_of`, and for what no family generates token by token."""
    name = type(module).__name__
    family = family_of(name)
    if module.config.to_dict().get("use_bidirectional_attention"):
        raise ValueError(
            f"rollout.name=native: {name} with use_bidirectional_attention does not generate token by token"
        )
    return family


def read_decoder(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    transpose_limit: int = TRANSPOSE_LIMIT,
    reuse: "Decoder | None" = None,
) -> Decoder:
    """Read `module` (one of FAMILIES) as a Decoder on its own parameters.

    dtype: None computes in the parameters' dtype on the parameters themselves. Another one makes a copy of the
    projections in it, which is as old as this call. transpose_limit: as TRANSPOSE_LIMIT. reuse: an older reading; what
    is not a parameter is written to its memory. Raises ValueError for an architecture, activation or rotary variant
    that is not supported, for wrapped projections (adapters, quantisation) and for sharded parameters.
    """
    family, config, trunk = check_supported(module), module.config, module.base_model
    head_dim = trunk.layers[0].self_attn.head_dim
    head = module.lm_head.weight
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    transposed = head.device.type == "cpu" and size <= transpose_limit
    dtype = head.dtype if dtype is None else dtype
    stream_dtype = torch.promote_types(head.dtype, dtype)
    # what has 16 bits would be rounded once more, and there are no complex numbers of 16 bits to use
    folded = transposed and dtype == stream_dtype and dtype in (torch.float32, torch.float64)
    known = config.to_dict()
    activation = known[family.activation]
    if activation not in ACTIVATIONS:
        raise ValueError(f"rollout.name=native: activation {activation!r} is unknown; known: {sorted(ACTIVATIONS)}")
    types = config.layer_types if family.window == "layer_types" else [None] * len(trunk.layers)
    rope_types = sorted(set(types)) if family.rope_per_type else [None]
    ropes, limits = zip(*(_rope(trunk.rotary_emb, config, kind) for kind in rope_types))
    max_positions, reason = min(limits)
    pairs = _pairs(head_dim, 2 * len(ropes[0].inverse_frequencies)) if folded else None
    reader = _Reader(family, dtype, stream_dtype, transposed, pairs, reuse.copies if reuse is not None else ())
    rope_of = {kind: i for i, kind in enumerate(rope_types)} if family.rope_per_type else dict.fromkeys(types, 0)
    last_norm, last_factor = reader.norm_before(trunk.norm.weight)
    return Decoder(
        embedding=reader.wide(trunk.embed_tokens.weight),
        head=reader.projection(last_factor, lm_head=module.lm_head),
        norm=last_norm,
        layers=tuple(_layer(layer, config, reader, kind, rope_of[kind]) for layer, kind in zip(trunk.layers, types)),
        ropes=ropes,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        scaling=1.0 if folded else trunk.layers[0].self_attn.scaling,
        activation=activation,
        # rounded as the model rounds it
        embedding_scale=float(torch.tensor(math.sqrt(config.hidden_size), dtype=stream_dtype)) if family.gemma else 1.0,
        attention_softcap=config.attn_logit_softcapping if family.softcaps else None,
        final_softcap=known.get("final_logit_softcapping"),
        max_positions=max_positions,
        max_positions_reason=reason,
        copies=reader.copies,
        folded=folded,
        floor=torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), dtype=dtype, device=head.device),
    )


def _layer(layer: nn.Module, config, reader: "_Reader", kind: str | None, rope: int) -> Layer:
    family, attention, mlp = reader.family, layer.self_attn, layer.mlp
    after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
    if family.post_norms:
        after_attention, before_mlp = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        after_mlp = layer.post_feedforward_layernorm
    attention_norm, attention_factor = reader.norm_before(layer.input_layernorm.weight)
    mlp_norm, mlp_factor = reader.norm_before(before_mlp.weight)
    if family.fused:
        gate_up = reader.projection(mlp_factor, gate_up_proj=mlp.gate_up_proj)
    else:
        gate_up = reader.projection(mlp_factor, gate_proj=mlp.gate_proj, up_proj=mlp.up_proj)
    slides = family.window == "all" or kind == "sliding_attention"
    return Layer(
        qkv=reader.qkv(attention, config, attention_factor),
        out=reader.projection(o_proj=attention.o_proj),
        gate_up=gate_up,
        down=reader.projection(down_proj=mlp.down_proj),
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        attention_post_norm=None if after_attention is None else reader.norm(after_attention.weight),
        mlp_post_norm=None if after_mlp is None else reader.norm(after_mlp.weight),
        qk_norm=reader.qk_norm(attention, config) if family.qk_norm else None,
        window=config.sliding_window if slides else None,
        rope=rope,
    )


class _Reader:
    """How parameters are read: projections in a dtype, copied transposed (in, out) or not, all others in stream_dtype.

    pairs: the dimensions of a query or key head (D,) in the order to read them; None where nothing is folded. old:
    tensors of an older reading; copies are made in their memory, in the order of reading, where they fit.
    """

    def __init__(
        self,
        family: Family,
        dtype: torch.dtype,
        stream_dtype: torch.dtype,
        transposed: bool,
        pairs: torch.Tensor | None,
        old: Sequence[torch.Tensor],
    ):
        self.family = family
        self.dtype = dtype
        self.stream_dtype = stream_dtype
        self.transposed = transposed
        self.pairs = pairs
        self.old = list(old)
        self.copies: list[torch.Tensor] = []

    def _copy(self, parts: list[torch.Tensor], dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
        """The parts (n_i, ...) as one new tensor (sum n_i, ...), or transposed."""
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
        """The factor of an RMS norm. Gemma's 1 + w is formed in float32: bfloat16 would lose a small w."""
        return self._copy([1 + weight.detach().float()], torch.float32) if self.family.gemma else self.wide(weight)

    def norm_before(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The factor of an RMS norm before a projection, and what the projection's matrix takes of it: one is None."""
        if self.pairs is None:
            return self.norm(weight), None
        factor = weight.detach().to(self.dtype)
        return None, (1 + factor if self.family.gemma else factor) * math.sqrt(len(factor))

    def qk_norm(self, attention: nn.Module, config) -> torch.Tensor:
        """One factor (D,) per query and key head -> (HQ + HK, D)."""
        norms = [attention.q_norm] * config.num_attention_heads + [attention.k_norm] * config.num_key_value_heads
        rows = torch.stack([norm.weight.detach() for norm in norms])
        rows = 1 + rows.float() if self.family.gemma else rows.to(self.stream_dtype)
        if self.pairs is not None:
            rows = rows[:, self.pairs]
            rows[: config.num_attention_heads] *= attention.scaling
        return self._copy([rows], rows.dtype)

    def qkv(self, attention: nn.Module, config, factor: torch.Tensor | None) -> Projection:
        """Queries, keys and values as one projection of what `factor` (see norm_before) belongs to."""
        if self.family.fused:
            projections = {"qkv_proj": attention.qkv_proj}
        else:
            projections = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
        if self.pairs is None:
            return self.projection(factor, **projections)
        heads, size = config.num_attention_heads + config.num_key_value_heads, len(self.pairs)
        paired = (torch.arange(heads)[:, None] * size + self.pairs).view(-1)
        order = torch.cat((paired, torch.arange(config.num_key_value_heads * size) + heads * size))
        joint = self.projection(factor, order, **projections)
        if not self.family.qk_norm:  # else the norm sets the length of a query
            for part in filter(lambda tensor: tensor is not None, (joint.matrix, joint.bias)):
                part[..., : config.num_attention_heads * size] *= attention.scaling
        return joint

    def projection(
        self, factor: torch.Tensor | None = None, order: torch.Tensor | None = None, **linears: nn.Module
    ) -> Projection:
        """Several projections of one input as one.

        factor: (in,), to be multiplied into the matrix. order: of the outputs, another one.
        """
        found = [_linear(name, linear) for name, linear in linears.items()]
        weights, biases = [f.weight for f in found], [f.bias for f in found if f.bias is not None]
        if order is not None:
            weights = [torch.cat(weights).detach()[order]]
            bias = self._copy([torch.cat(biases).detach()[order]], self.dtype) if biases else None
        else:
            bias = self._joint(biases) if biases else None
        matrix = self._copy(weights, self.dtype, transposed=True) if self.transposed else self._joint(weights).t()
        if factor is not None:
            matrix *= factor[:, None]
        return Projection(matrix, bias)

    def _joint(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        if self.dtype == parameters[0].dtype:
            return fuse_parameters_in_place(parameters)
        return self._copy(parameters, self.dtype)


def _linear(name: str, linear: nn.Module) -> nn.Linear:
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"rollout.name=native reads plain linear layers; {name} is a {type(linear).__name__}. "
            "Merge adapters and do not quantise, or use rollout.name=hf"
        )
    if isinstance(linear.weight, DTensor):
        raise ValueError(f"rollout.name=native needs whole parameters; {name} is sharded: gather it before generating")
    return linear


def _pairs(size: int, rotated: int) -> torch.Tensor:
    """Dimensions 0 .. size - 1, of which the first `rotated` come as 0, rotated / 2, 1, rotated / 2 + 1, ..."""
    at = torch.arange(size)
    at[:rotated] = at[:rotated].view(2, -1).t().reshape(-1)
    return at


def _rope(rotary: nn.Module, config, layer_type: str | None) -> tuple[Rope, tuple[int, str]]:
    """The rotary frequencies of a model (of a layer type), and the length up to which they hold, with the reason."""
    limit = (config.max_position_embeddings, "the model's max_position_embeddings")
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    if "dynamic" in kind:
        raise ValueError(
            f"rollout.name=native: rotary variant {kind!r} gives a token other frequencies as its sequence grows, "
            "which keys in a cache cannot follow; use rollout.name=hf"
        )
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(rotary, f"{prefix}inv_freq")
    if kind == "longrope":
        # above this length every position would change its frequencies, those of cached keys too
        original = parameters["original_max_position_embeddings"]
        limit = min(limit, (original, "longrope's original_max_position_embeddings: longer needs rollout.name=hf"))
        frequencies = getattr(rotary, f"{prefix}original_inv_freq")
    return Rope(frequencies, getattr(rotary, f"{prefix}attention_scaling")), limit
