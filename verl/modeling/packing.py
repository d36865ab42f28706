"""The input of a forward pass: sequences packed without padding, or padded.

In both cases the hidden states that predict a response token are *selected* into one list, so the last projection, the
log-probs and their gradients are computed for response tokens only.

Rows are scattered and gathered with gradients that are plain copies. The gradients of torch's own indexing accumulate,
because indices may repeat. Here they are known to be distinct.
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.functional import pad

from verl.modeling.huggingface import trunk_of
from verl.modeling.model_types import ATTENTION_LAYERS
from verl.modeling.sequence_parallel import SequenceRanks
from verl.modeling.shared_prefix import first_with_prompt, shared_prefix_layout
from verl.modeling.token_filter import TokenFilter, pack_kept, unpack_kept
from verl.modeling.vision import INDEX, PACKED, Media, VisionInput, is_vision_config, language_model_of

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")

#: parameters of the forward pass of a layer that reads earlier tokens: when it generates, it needs a cache of them
_CACHES = {"cache", "past_key_values", "past_key_value", "layer_past", "cache_params", "state", "use_cache"}


def padding_reason(module: nn.Module) -> str | None:
    """Why rows of a model are padded instead of packed; None if they are packed.

    Only attention knows the boundaries of packed rows (`attention.packed_attention`), so every layer that reads other
    tokens must be attention that runs through transformers' attention interface. That is decided from the modules:
    such a layer takes a cache. A kind of layer that is not known is padded.
    """
    if is_vision_config(module.config) and module.config.model_type not in PACKED:
        return "image tokens attend to each other in both directions, or are placed by the model"
    decoder = language_model_of(module) if is_vision_config(module.config) else trunk_of(module)
    others = set(getattr(decoder.config, "layer_types", None) or ()) - {*ATTENTION_LAYERS}
    if others:
        return f"it has layers of the types {', '.join(sorted(others))}"
    readers = [layer for layer in decoder.modules() if layer is not decoder and _reads_tokens(type(layer))]
    readers = [layer for layer in readers if not any(_reads_tokens(type(part)) for part in [*layer.modules()][1:])]
    state = [layer for layer in readers if not _calls_attention(layer, decoder.config)]
    state += [layer for layer in decoder.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    if state:
        return f"{', '.join(sorted({type(layer).__name__ for layer in state}))} cannot be told where a row ends"
    if not readers or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return f"{type(decoder).__name__} cannot be told the positions of tokens"
    return None


@functools.cache
def _reads_tokens(kind: type[nn.Module]) -> bool:
    return bool(_CACHES & set(inspect.signature(kind.forward).parameters))


def _calls_attention(layer: nn.Module, config: Any) -> bool:
    """Whether a layer runs through the attention interface of transformers, and passes on its sliding window."""
    code = inspect.unwrap(type(layer).forward).__code__
    keywords = {name for names in code.co_consts if isinstance(names, tuple) for name in names}
    window = getattr(config, "sliding_window", None) or 0
    has_window = 0 < window < (getattr(config, "max_position_embeddings", None) or window + 1)
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names and ("sliding_window" in keywords or not has_window)


@dataclass(frozen=True)
class Packing:
    """The layout of b packed sequences with N tokens, the longest of L tokens."""

    lengths: tuple[int, ...]  # tokens of each sequence
    cu_seqlens: torch.Tensor  # (b + 1,) int32, cumulative lengths
    slots: torch.Tensor  # (N,) index of each token in the right-padded layout (b * L)
    max_length: int  # L
    ranks: SequenceRanks | None = None  # the ranks that share the N tokens; None if this process computes all of them
    keys: "Keys | None" = None  # the keys that the sequences attend to, if they are more than their own tokens

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_lengths(cls, lengths: torch.Tensor) -> "Packing":
        known_lengths = tuple(lengths.tolist())
        longest = max(known_lengths)
        starts = pad(lengths.cumsum(0), (1, 0))
        rows = torch.arange(lengths.numel(), device=lengths.device)
        row = torch.repeat_interleave(rows, lengths, output_size=sum(known_lengths))
        within = torch.arange(row.numel(), device=lengths.device) - starts[row]
        return cls(known_lengths, starts.to(torch.int32), row * longest + within, longest)


@dataclass(frozen=True)
class Keys:
    """The M keys and values that sequences with a shared prefix attend to, taken from N tokens."""

    packing: Packing  # the sequences with their prompts
    # source, representative, offsets, uses: as in `shared_prefix.SharedPrefixLayout`
    source: torch.Tensor
    representative: torch.Tensor
    offsets: torch.Tensor
    uses: torch.Tensor


@dataclass(frozen=True)
class ModelInput:
    """The input of one forward pass, and the indices of its outputs."""

    input_ids: torch.Tensor  # (1, N) packed or (b, L) padded on the right, where L is the longest row
    position_ids: torch.Tensor  # the same, or with C axes in front: (C, 1, N) or (C, b, L)
    attention_mask: torch.Tensor | None  # (b, L), or None if packed
    packing: Packing | None  # layout of a packed input, or None
    states: torch.Tensor  # (S,) flat index of the hidden states that predict a response token
    targets: torch.Tensor  # (S,) the token that each of them predicts
    slots: torch.Tensor  # (S,) index of that token in (b * T)
    shape: tuple[int, int]  # (b, T)
    # (N,) or (b * L,) index of each token in (b * (P + T)), without those that sequence parallelism appends
    tokens: torch.Tensor
    width: int  # P + T
    # (N, layers, k) choices of the routers to replay (`modeling.moe`), or None
    routed_experts: torch.Tensor | None = None
    vision: VisionInput | None = None  # images of the prompts, if any
    # (S, K) further tokens whose log-probs are computed, or K for the K most probable ones; or None
    candidates: torch.Tensor | int | None = None
    # (S, K) the tokens that each state's distribution is over, or the filter that determines and records them
    # (`token_filter`); None: all
    kept: torch.Tensor | TokenFilter | None = None

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """(S, ...) values of the selected states -> (b, T, ...), 0 elsewhere."""
        return scatter_rows(values, self.slots, *self.shape)

    def outputs(self, values_by_name: Tensors) -> Tensors:
        """Values of the selected states -> (b, T), on every rank; kept_tokens (S, K) -> the columns of `pack_kept`."""
        ranks = self.packing.ranks if self.packing is not None else None

        def scatter(values: torch.Tensor) -> torch.Tensor:
            return self.scatter(values) if ranks is None else ranks.sum_of_shares(self.scatter(values))

        kept = values_by_name.pop("kept_tokens", None)
        as_they_are = (torch.float64, torch.int64)
        result = {k: scatter(v if v.dtype in as_they_are else v.float()) for k, v in values_by_name.items()}
        return result if kept is None else result | pack_kept(self, kept)

    def with_kept(self, rows: Tensors, token_filter: TokenFilter | None) -> "ModelInput":
        """A copy with `kept`: the columns kept_tokens and kept_counts of the rows, or else the filter."""
        if "kept_tokens" not in rows:
            return dataclasses.replace(self, kept=token_filter)
        return dataclasses.replace(self, kept=unpack_kept(rows["kept_tokens"], rows["kept_counts"], self.slots))

    def to(self, device: torch.device) -> "ModelInput":
        """A copy whose tensors are moved from the host to a device."""
        return to_device(self, device)

    def padded_to(self, multiple: int) -> "ModelInput":
        """A packed input with tokens appended until their number is divisible; they belong to no sequence."""
        fill = -self.input_ids.shape[1] % multiple
        if not fill:
            return self
        experts = self.routed_experts
        return dataclasses.replace(
            self,
            input_ids=pad(self.input_ids, (0, fill)),
            position_ids=pad(self.position_ids, (0, fill)),
            routed_experts=None if experts is None else pad(experts, (0, 0, 0, 0, 0, fill), value=-1),
        )

    def share_of(self, ranks: SequenceRanks) -> "ModelInput":
        """One rank's share of a packed input: a run of tokens (padded at the very end) and the states in it."""
        whole = self.padded_to(ranks.size)
        tokens, experts = whole.input_ids.shape[1] // ranks.size, whole.routed_experts
        start = ranks.rank * tokens
        span, is_local = slice(start, start + tokens), (self.states >= start) & (self.states < start + tokens)
        return dataclasses.replace(
            self,
            input_ids=whole.input_ids[:, span],
            position_ids=whole.position_ids[..., span],
            packing=dataclasses.replace(self.packing, ranks=ranks),
            states=self.states[is_local] - start,
            targets=self.targets[is_local],
            slots=self.slots[is_local],
            tokens=self.tokens[span],
            routed_experts=None if experts is None else experts[span],
            vision=None if self.vision is None else self.vision.share_of(start, tokens),
            candidates=self.candidates[is_local] if isinstance(self.candidates, torch.Tensor) else self.candidates,
            kept=self.kept[is_local] if isinstance(self.kept, torch.Tensor) else self.kept,
        )


def to_device(value: T, device: torch.device) -> T:
    """A host tensor, or an input with its tensors, on a device; copies of tensors to a GPU are asynchronous."""
    if isinstance(value, ModelInput | Packing | Keys):
        moved = {field.name: to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    if isinstance(value, VisionInput):
        return value.to(device)
    if not isinstance(value, torch.Tensor):
        return value
    if device.type != "cuda" or not value.numel():
        return value.to(device)
    return value.contiguous().pin_memory().to(device, non_blocking=True)  # an expanded tensor cannot be pinned


def row_lengths(attention_mask: torch.Tensor) -> list[int]:
    """Tokens of each row."""
    return attention_mask.sum(1).tolist()


def build_input(
    rows: Tensors, remove_padding: bool, shared_prefix: bool = False, media: Media | None = None
) -> ModelInput:
    """The model input of a micro-batch.

    Args:
        rows: the columns input_ids, attention_mask, position_ids and responses, and routed_experts for router replay.
            The tokens of a row are contiguous (left-padded prompt, right-padded response). candidate_ids (b, T, K)
            become the candidates.
        remove_padding: pack the rows.
        shared_prefix: compute the tokens of a prompt once for all rows that have it; for packed rows only.
        media: the images of the batch; the rows then have the column `vision.INDEX`.
    """
    attention = rows["attention_mask"].bool()
    width = rows["responses"].shape[1]
    responded = attention[:, -width:]
    b, total = attention.shape
    shape = (b, width)
    slots = responded.flatten().nonzero()[:, 0]
    targets = rows["responses"].flatten()[slots]
    row, t = slots // width, slots % width
    candidates = rows["candidate_ids"].flatten(0, 1)[slots] if "candidate_ids" in rows else None
    if not remove_padding:
        # nothing comes before the first token of a row: it would enter the state of a layer that has one
        lengths, longest = attention.sum(1), int(attention.sum(1).max())
        within = torch.arange(longest).expand(b, longest)
        order = (attention.int().argmax(1)[:, None] + within) % total
        states = row * longest + (lengths - responded.sum(1))[row] + t - 1
        tokens = (order + total * torch.arange(b)[:, None]).flatten()
        vision = None if media is None else media.input_of(rows, tokens)
        axes, positions = rows["position_ids"], within
        if axes.ndim == 3:
            positions = axes.transpose(0, 1).gather(2, order.expand(axes.shape[1], b, longest))
        mask = (within < lengths[:, None]).long()
        return ModelInput(
            *(rows["input_ids"].gather(1, order), positions, mask, None, states, targets, slots, shape),
            *_routed_experts(rows, tokens),
            vision,
            candidates,
        )
    first = first_with_prompt(attention, rows["input_ids"], width, rows.get(INDEX)) if shared_prefix else range(b)
    if len(set(first)) < b:
        packing, tokens, states = _pack_shared(attention, width, first, row, t)
    else:
        lengths = attention.sum(1)
        packing = Packing.from_lengths(lengths)
        tokens = attention.flatten().nonzero()[:, 0]
        prompt_lengths = lengths - responded.sum(1)
        states = packing.cu_seqlens.long()[row] + prompt_lengths[row] + t - 1
    ids, positions = rows["input_ids"].flatten()[tokens][None], rows["position_ids"]
    if positions.ndim == 2:
        positions = positions.flatten()[tokens][None]
    else:
        positions = positions.transpose(0, 1).flatten(1)[:, None, tokens]
    vision = None if media is None else media.input_of(rows, tokens)
    selected = states, targets, slots, shape, *_routed_experts(rows, tokens)
    return ModelInput(ids, positions, None, packing, *selected, vision, candidates)


def _routed_experts(rows: Tensors, tokens: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """`ModelInput.tokens`, `ModelInput.width` and `ModelInput.routed_experts`."""
    routed_experts = rows.get("routed_experts")
    return tokens, rows["input_ids"].shape[1], None if routed_experts is None else routed_experts.flatten(0, 1)[tokens]


def _pack_shared(
    attention: torch.Tensor, width: int, first: Sequence[int], row: torch.Tensor, t: torch.Tensor
) -> tuple[Packing, torch.Tensor, torch.Tensor]:
    """(packing, flat indices of the tokens, states that predict response token t of a row), with shared prefixes."""
    layout = shared_prefix_layout(attention, width, first)
    full = Packing.from_lengths(attention.sum(1)[layout.rows])
    keys = Keys(full, layout.source, layout.representative, layout.offsets, layout.uses)
    response_start = torch.where(layout.own_prompt, layout.end, layout.start)  # where the response of a row begins
    states = torch.where(t == 0, layout.end[row], response_start[row] + t) - 1
    return dataclasses.replace(Packing.from_lengths(layout.queries), keys=keys), layout.kept, states


# ---- rows of a tensor -----------------------------------------------------------------------------------------------


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.row = x.shape[1:]
        out = x.new_zeros(*shape, *ctx.row)  # returned itself: the output of a layer under FSDP2 must not be a view
        out.view(-1, *ctx.row).index_copy_(0, index, x)
        return out

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return g.reshape(-1, *ctx.row).index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """x (count, ...) -> (N, ...): the rows at `index` (N,), which are distinct."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return g.new_zeros(ctx.count, *g.shape[1:]).index_copy_(0, index, g), None


class _Repeat(torch.autograd.Function):
    """x (N, ...) -> (M, ...): row source[i] as row i. representative: (N,), for each row of x a row equal to it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, representative: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, representative)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, representative = ctx.saved_tensors
        duplicates = (representative[source] != torch.arange(len(source), device=source.device)).nonzero()[:, 0]
        gradient = g.index_select(0, representative).index_add_(0, source[duplicates], g.index_select(0, duplicates))
        return gradient, None, None


def scatter_rows(x: torch.Tensor, index: torch.Tensor, *shape: int) -> torch.Tensor:
    """x (N, ...) -> (*shape, ...): row i at index[i] of the flattened shape, 0 elsewhere. The indices are distinct."""
    return _Scatter.apply(x, index, shape)


gather_rows = _Gather.apply
repeat_rows = _Repeat.apply
