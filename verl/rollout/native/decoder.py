"""The decoder of the native engine: projections, layers and constants, without module classes."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from verl.modeling.fp8 import Quantized, matmul, quantize_rows
from verl.rollout.tensor_parallel import ALONE, TensorParallel

if TYPE_CHECKING:
    from verl.rollout.native.experts import Experts

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """RMS norm of x (..., H) with weight (H,), computed in the wider dtype. dtype: of the result; None: x.dtype."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype if dtype is None else dtype)


def addmm_loses_precision(x: torch.Tensor) -> bool:
    """Whether `addmm` has a larger error than a matmul followed by an addition, for operands like x.

    In float32 and float64, BLAS on a CPU starts its sums at the tensor that is added, so every term is rounded to the
    precision of that tensor. Elements of the residual stream can be 1e4 times as large as what a layer adds: the error
    is then 20 to 40 times as large with one to three rows, which MKL multiplies row by row, and twice with more. In 16
    bits the sums are in float32, and a GPU adds the tensor to completed sums: there, `addmm` rounds once less.
    """
    return x.device.type == "cpu" and x.dtype.itemsize >= 4


def padded_width(width: int) -> int:
    """Pad a row length, in elements, so that the rows of a matrix do not compete for cache lines.

    With a power-of-two stride, rows map to few cache sets, and a matmul took up to 1.7 times as long.
    """
    return width if width % 256 else width + 48


@dataclass(frozen=True)
class Projection:
    """A linear layer: matrix (in, out), bias (out,) or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, in) -> (N, out)."""
        if self.bias is None:
            return torch.mm(x, self.matrix)
        if addmm_loses_precision(x):
            return torch.mm(x, self.matrix).add_(self.bias)
        return torch.addmm(self.bias, x, self.matrix)


@dataclass(frozen=True)
class Fp8Projection(Projection):
    """A linear layer in FP8: `matrix` has the codes of `modeling.fp8`; without `scales`, their values."""

    scales: torch.Tensor | None = None

    @property
    def weight(self) -> Quantized:
        """(out, in)."""
        return Quantized(self.matrix.t(), self.scales)

    def __call__(self, x: torch.Tensor | Quantized) -> torch.Tensor:
        """x: (N, in) -> (N, out)."""
        return matmul(self.quantized(x), self.weight, self.bias)

    def quantized(self, x: torch.Tensor | Quantized) -> Quantized:
        """The inputs (N, in) in FP8."""
        return x if isinstance(x, Quantized) else quantize_rows(x, emulated=self.scales is None)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. D head size, HQ query heads, HK key/value heads, H hidden size, I MLP size.

    Attributes:
        qkv, out, gate_up, down: H -> (HQ + 2 HK) D, HQ D -> H, H -> 2 I, and I -> H. The last two: None with experts.
        attention_norm, mlp_norm: (H,), before attention and MLP; None if folded: the following matrix contains the
            weight times sqrt(H) (`Decoder.folded`).
        attention_post_norm, mlp_post_norm: (H,), after attention and MLP, or None.
        qk_norm: (HQ + HK, D) or None.
        window: size of the attention window, the query itself included; None for full attention.
        rope: index into Decoder.ropes.
        experts: instead of gate_up and down; None for an MLP.
    """

    qkv: Projection
    out: Projection
    gate_up: Projection | None
    down: Projection | None
    attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    qk_norm: torch.Tensor | None
    window: int | None
    rope: int
    experts: "Experts | None" = None


RopeTable = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.

    Attributes:
        inverse_frequencies: (R / 2,), for the first R dimensions of a head.
        scale: of cos and sin.
        axes: (R / 2,) position axis of each frequency, or None if a position is one number.
    """

    inverse_frequencies: torch.Tensor
    scale: float
    axes: torch.Tensor | None = None

    def table(self, length: int, dtype: torch.dtype, folded: bool = False) -> RopeTable:
        """cos and signed sin, each (length, R): y = x * cos + swap_halves(x) * sin.

        folded: cos + i sin, (length, R / 2), for pairs of adjacent dimensions.
        """
        positions = torch.arange(length, device=self.inverse_frequencies.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies.float()
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        if folded:
            return (torch.complex(cos.to(dtype), sin.to(dtype)),)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@dataclass(frozen=True)
class Decoder:
    """A decoder: embedding (V, H), layers, final norm (H,), head H -> V, and constants.

    Matmuls, keys and values have `dtype`. The residual stream, norms and rotary tables have `stream_dtype`, which is
    wider if the parameters are, as in training under autocast: rounding elsewhere would cause a training-inference
    mismatch.

    Attributes:
        scaling: factor on the attention scores.
        attention_softcap, final_softcap: c in c * tanh(x / c), or None.
        max_positions: max length of prompt plus response; max_positions_reason names the cause of the limit.
        copies: the weights that are not parameters, in the order of reading.
        folded: dimensions 2 i and 2 i + 1 of the first R of queries and keys are rotated together, instead of i and
            i + R / 2; queries are already scaled (`scaling` is 1); norms before projections have no weight.
        floor: sqrt(H eps), used by folded norms.
        tp: the ranks that hold the model. With more than one, `heads` and `kv_heads` are this rank's, `embedding` and
            `head` have V / size tokens, and the sums of `out` and `down` are completed by an all-reduce.
        vision: `vision.NativeVision` of a vision-language model.
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
    tp: TensorParallel = ALONE
    vision: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.head.matrix.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        return self.head.matrix.shape[1] * self.tp.size

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def experts(self) -> list["Experts"]:
        """The experts of the layers that have them, in order."""
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def routed_experts_shape(self) -> tuple[int, int]:
        """Layers with experts, and experts per token."""
        return len(self.experts), self.experts[0].top_k

    @property
    def mlp_width(self) -> int:
        """Widest intermediate result of an MLP per token."""
        experts = [e.top_k * e.gate_up.shape[1] for e in self.experts]
        return max([layer.gate_up.matrix.shape[1] for layer in self.layers if layer.gate_up is not None] + experts)

    @property
    def cache_bytes_per_row(self) -> int:
        """Bytes of a row beside its tokens."""
        return 0

    def cache_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) int64 -> (..., H)."""
        if self.tp.size == 1:
            x = F.embedding(ids, self.embedding)
        else:  # every token is in the slice of one rank
            rows = ids - self.tp.rank * len(self.embedding)
            elsewhere = (rows < 0) | (rows >= len(self.embedding))
            x = F.embedding(rows.masked_fill(elsewhere, 0), self.embedding)
            x = self.tp.all_reduce(x.masked_fill_(elsewhere[..., None], 0))
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return x

    def normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """`rms_norm` before a projection. Without a weight (folded): x (N, H) / sqrt(sum of squares + H eps)."""
        if weight is not None:
            return rms_norm(x, weight, self.eps, self.dtype)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(size, self.floor, out=size)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The head: normed (B, H) -> (B, V)."""
        return self.tp.all_gather(self.head(states))

    def reduced(self, projection: Projection, x: torch.Tensor) -> torch.Tensor:
        """A projection whose inputs are split over the ranks (`Layer.out`, `Layer.down`): (N, in) -> (N, H)."""
        return self.tp.all_reduce(projection(x))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Final norm and head: (B, H) -> (B, V) float32."""
        logits = self.project(self.normed(states, self.norm)).float()
        if self.final_softcap is not None:
            logits.div_(self.final_softcap).tanh_().mul_(self.final_softcap)
        return logits


#: positions of a model without a limit
_NO_LIMIT = (sys.maxsize, "no limit")


def position_limit(config: Any) -> tuple[int, str]:
    """The max length of a sequence, and the reason. Raises ValueError for an unsupported rotary variant."""
    positions = config.to_dict().get("max_position_embeddings")
    limits = [_NO_LIMIT if positions is None else (positions, "the model's max_position_embeddings")]
    for parameters in _ropes(getattr(config, "rope_parameters", None) or {}):
        if "dynamic" in parameters["rope_type"]:
            raise ValueError(
                f"rollout.name=native: rotary variant {parameters['rope_type']!r} changes the frequencies as a "
                "sequence grows, which would invalidate cached keys; use rollout.name=hf"
            )
        if parameters["rope_type"] == "longrope":
            # above this length the frequencies of all positions change, also those of cached keys
            reason = "longrope's original_max_position_embeddings; for longer sequences use rollout.name=hf"
            limits.append((parameters["original_max_position_embeddings"], reason))
    return min(limits)


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of a model, which may have one set per layer type."""
    if "rope_type" in parameters:
        yield parameters
        return
    for each in parameters.values():
        if isinstance(each, Mapping):
            yield from _ropes(each)
