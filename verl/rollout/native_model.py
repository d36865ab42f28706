"""A HuggingFace decoder read as a flat list of layer weights, for the native rollout engine.

`read_decoder(module)` returns a `Decoder`: what the decode loops need and nothing else. Its weights *are* the module's
parameters. Query, key and value projections (and gate and up) are computed by one product each; for that the
parameters are laid next to each other in memory once, as views of one tensor, so that there is no second copy and
nothing to refresh.

Made anew on every reading, which is once per generate call: norm vectors whose weight needs arithmetic (1 + w, or one
row per head); and on a CPU, up to TURN_LIMIT, turned copies of the matrices, with which a product of few rows takes a
quarter less time. In those the dimensions that a rotary embedding turns together can be neighbours (`Decoder.paired`):
then a rotation is one product of complex numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., H) over its root mean square, times weight (H,): in float32 where the weight is wider than x."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


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


#: bytes of parameters up to which a CPU gets copies of the matrices that lie as products read them
TURN_LIMIT = 1 << 30


def unaliased(width: int) -> int:
    """A row length, in elements, of at least `width` at which the rows of a matrix do not compete for cache lines.

    Rows at a distance of a power of two share few of them: a product with such a matrix took up to 1.7 times as long.
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
    window: keys that a query sees, itself among them, or None. rope: index into Decoder.ropes.
    """

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
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

    def table(self, length: int, dtype: torch.dtype, paired: bool = False) -> RopeTable:
        """cos and signed sin, each (length, R): y = x * cos + swap_halves(x) * sin.

        paired: cos + i sin (length, R / 2), a factor of numbers whose parts are neighbours.
        """
        positions = torch.arange(length, device=self.inverse_frequencies.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies.float()
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        if paired:
            return (torch.complex(cos.to(dtype), sin.to(dtype)),)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass(frozen=True)
class Decoder:
    """A decoder: embedding (V, H), layers, the last norm (H,), head H -> V, and the constants that its maths needs.

    scaling: factor on the attention scores. attention_softcap, final_softcap: c * tanh(x / c), or None.
    max_positions: prompt plus response at most; max_positions_reason says what sets it. copies: the weights that are no
    parameters, in the order of reading. paired: in queries and keys, dimensions 2 i and 2 i + 1 of the first R are
    turned together, where the model has i and i + R / 2.
    """

    embedding: torch.Tensor
    head: Projection
    norm: torch.Tensor
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
    paired: bool

    @property
    def vocab_size(self) -> int:
        return self.head.matrix.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one row takes."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.embedding.element_size()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) int64 -> (..., H)."""
        x = F.embedding(ids, self.embedding)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(B, H) after the last layer -> (B, V) float32."""
        logits = self.head(rms_norm(states, self.norm, self.eps)).float()
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
    turn_limit: int = TURN_LIMIT,
    reuse: "Decoder | None" = None,
) -> Decoder:
    """Read `module` (one of FAMILIES) as a Decoder on its own parameters.

    dtype: None computes in the parameters' dtype on the parameters themselves. Another one makes a copy of them in it,
    which is as old as this call. turn_limit: as TURN_LIMIT. reuse: an older reading; what is no parameter is made in
    its memory. Raises ValueError for an architecture, activation or rotary variant it does not know,
    for wrapped projections (adapters, quantisation) and for sharded parameters.
    """
    family, config, trunk = check_supported(module), module.config, module.base_model
    head_dim = trunk.layers[0].self_attn.head_dim
    head = module.lm_head.weight
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    turned = head.device.type == "cpu" and size <= turn_limit
    dtype = head.dtype if dtype is None else dtype
    paired = turned and dtype in (torch.float32, torch.float64)  # there are no complex numbers of 16 bits to use
    activation = config.to_dict()[family.activation]
    if activation not in ACTIVATIONS:
        raise ValueError(f"rollout.name=native: activation {activation!r} is unknown; known: {sorted(ACTIVATIONS)}")
    types = config.layer_types if family.window == "layer_types" else [None] * len(trunk.layers)
    rope_types = sorted(set(types)) if family.rope_per_type else [None]
    ropes, limits = zip(*(_rope(trunk.rotary_emb, config, kind) for kind in rope_types))
    max_positions, reason = min(limits)
    pairs = _pairs(head_dim, 2 * len(ropes[0].inverse_frequencies)).to(head.device) if paired else None
    reader = _Reader(family, dtype, turned, pairs, reuse.copies if reuse is not None else ())
    rope_of = {kind: i for i, kind in enumerate(rope_types)} if family.rope_per_type else dict.fromkeys(types, 0)
    return Decoder(
        embedding=reader.tensor(trunk.embed_tokens.weight),
        head=reader.projection(lm_head=module.lm_head),
        norm=reader.norm(trunk.norm.weight),
        layers=tuple(_layer(layer, config, reader, kind, rope_of[kind]) for layer, kind in zip(trunk.layers, types)),
        ropes=ropes,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        scaling=trunk.layers[0].self_attn.scaling,
        activation=activation,
        # rounded as the model rounds it
        embedding_scale=float(torch.tensor(math.sqrt(config.hidden_size), dtype=reader.dtype)) if family.gemma else 1.0,
        attention_softcap=config.attn_logit_softcapping if family.softcaps else None,
        final_softcap=config.to_dict().get("final_logit_softcapping"),
        max_positions=max_positions,
        max_positions_reason=reason,
        copies=reader.copies,
        paired=paired,
    )


def _layer(layer: nn.Module, config, reader: "_Reader", kind: str | None, rope: int) -> Layer:
    family, attention, mlp = reader.family, layer.self_attn, layer.mlp
    if family.fused:
        projections = {"qkv_proj": attention.qkv_proj}
        gate_up = reader.projection(gate_up_proj=mlp.gate_up_proj)
    else:
        projections = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
        gate_up = reader.projection(gate_proj=mlp.gate_proj, up_proj=mlp.up_proj)
    after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
    if family.post_norms:
        after_attention, before_mlp = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        after_mlp = layer.post_feedforward_layernorm
    qk_norm = None
    if family.qk_norm:
        per_head = [attention.q_norm] * config.num_attention_heads + [attention.k_norm] * config.num_key_value_heads
        qk_norm = reader.head_norms([norm.weight for norm in per_head])
    slides = family.window == "all" or kind == "sliding_attention"
    return Layer(
        qkv=reader.projection(reader.order(config.num_attention_heads, config.num_key_value_heads), **projections),
        out=reader.projection(o_proj=attention.o_proj),
        gate_up=gate_up,
        down=reader.projection(down_proj=mlp.down_proj),
        attention_norm=reader.norm(layer.input_layernorm.weight),
        mlp_norm=reader.norm(before_mlp.weight),
        attention_post_norm=None if after_attention is None else reader.norm(after_attention.weight),
        mlp_post_norm=None if after_mlp is None else reader.norm(after_mlp.weight),
        qk_norm=qk_norm,
        window=config.sliding_window if slides else None,
        rope=rope,
    )


class _Reader:
    """How parameters are read: in a dtype, and turned to (in, out) copies or not.

    pairs: the dimensions of a query or key head (D,) in the order to read them, or None. old: tensors of an older
    reading; copies are made in their memory, in the order of reading, where they fit.
    """

    def __init__(
        self,
        family: Family,
        dtype: torch.dtype,
        turned: bool,
        pairs: torch.Tensor | None,
        old: Sequence[torch.Tensor],
    ):
        self.family = family
        self.dtype = dtype
        self.turned = turned
        self.pairs = pairs
        self.old = list(old)
        self.copies: list[torch.Tensor] = []

    def _copy(self, parts: list[torch.Tensor], dtype: torch.dtype, turned: bool = False) -> torch.Tensor:
        """The parts (n_i, ...) as one new tensor (sum n_i, ...), or turned."""
        joint = (parts[0] if len(parts) == 1 else torch.cat(parts)).detach()
        joint = joint.t() if turned else joint
        at = len(self.copies)
        old = self.old[at] if at < len(self.old) else None
        if old is None or (old.shape, old.dtype, old.device) != (joint.shape, dtype, joint.device):
            shape = (*joint.shape[:-1], unaliased(joint.shape[-1])) if turned else joint.shape
            old = torch.empty(shape, dtype=dtype, device=joint.device)[..., : joint.shape[-1]]
        self.copies.append(old.copy_(joint))
        return old

    def tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach() if parameter.dtype == self.dtype else self._copy([parameter], self.dtype)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The factor of an RMS norm. Gemma's 1 + w is formed in float32: bfloat16 would lose a small w."""
        return self._copy([1 + weight.detach().float()], torch.float32) if self.family.gemma else self.tensor(weight)

    def head_norms(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """One factor (D,) per head -> (heads, D)."""
        rows = torch.stack([weight.detach() for weight in weights])
        rows = rows if self.pairs is None else rows[:, self.pairs]
        return self._copy([1 + rows.float()], torch.float32) if self.family.gemma else self._copy([rows], self.dtype)

    def order(self, heads: int, kv_heads: int) -> torch.Tensor | None:
        """The outputs of a joint projection to queries, keys and values, in the order to read them."""
        if self.pairs is None:
            return None
        size, device = len(self.pairs), self.pairs.device
        turned = torch.arange(heads + kv_heads, device=device)[:, None] * size + self.pairs
        return torch.cat((turned.view(-1), torch.arange(kv_heads * size, device=device) + turned.numel()))

    def projection(self, order: torch.Tensor | None = None, **linears: nn.Module) -> Projection:
        """Several projections of one input as one, its outputs in another order where one is given."""
        found = [_linear(name, linear) for name, linear in linears.items()]
        weights, biases = [f.weight for f in found], [f.bias for f in found if f.bias is not None]
        if order is not None:
            bias = self._copy([torch.cat(biases).detach()[order]], self.dtype) if biases else None
            return Projection(self._copy([torch.cat(weights).detach()[order]], self.dtype, turned=True), bias)
        matrix = self._copy(weights, self.dtype, turned=True) if self.turned else self._joint(weights).t()
        return Projection(matrix, self._joint(biases) if biases else None)

    def _joint(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        if self.dtype == parameters[0].dtype:
            return lay_together(parameters)
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


def lay_together(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The parameters, (n_i, ...), as one tensor (sum n_i, ...) on shared memory.

    Where they are not neighbours already, they are copied into one block and become views of it: the Parameter objects,
    and with them optimizers and hooks, stay. Whatever gives a parameter new memory later (`.to`, assigning .data) is
    found and mended by the next call.
    """
    first = parameters[0].detach()
    rows = sum(p.shape[0] for p in parameters)
    if not _neighbours(parameters):
        # an ordinary tensor even when the caller is in inference mode: training goes on with it
        with torch.inference_mode(False), torch.no_grad():
            block = torch.cat([p.detach() for p in parameters])
            at = 0
            for p in parameters:
                p.data = block[at : at + p.shape[0]]
                at += p.shape[0]
        first = block
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _neighbours(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends."""
    if len(parameters) == 1:
        return parameters[0].is_contiguous()
    storage = parameters[0].untyped_storage().data_ptr()
    at = parameters[0].storage_offset()
    for p in parameters:
        if not p.is_contiguous() or p.untyped_storage().data_ptr() != storage or p.storage_offset() != at:
            return False
        at += p.numel()
    return True


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
