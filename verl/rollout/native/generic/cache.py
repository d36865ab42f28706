"""What the layers of a model cache: keys and values of tokens in pages, and states of rows.

A page holds up to S tokens of one row: on a CPU all of them, on a GPU a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.cache_utils import LinearAttentionLayer as StateLayer

from verl.rollout.native.generic.attention import ForwardPass, HybridLayer, KeyValueLayer, PassCache

#: attributes of a `StateLayer`, each with tensors (b, ...) by index
STATES = ("conv_states", "recurrent_states")
#: (layer, attribute, index)
StateKey = tuple[int, str, int]


@dataclass(frozen=True)
class Layout:
    """What a model caches, as tensors on "meta".

    Attributes:
        layers: per layer, whether it has keys and values, and its number of states per attribute.
        keys, values: layer -> (HK, DK) and (HK, DV) of one token.
        states: of one row, without the dimension of rows.
        is_plain: whether modules pass to attention the keys and values that the cache returns, unchanged.
    """

    layers: tuple[tuple[bool, int], ...]
    keys: Mapping[int, torch.Tensor] = field(default_factory=dict)
    values: Mapping[int, torch.Tensor] = field(default_factory=dict)
    states: Mapping[StateKey, torch.Tensor] = field(default_factory=dict)
    is_plain: bool = True

    @classmethod
    def from_config(cls, config) -> "Layout":
        """The layers of a model. Without shapes."""
        layers = DynamicCache(config=config).layers
        return cls(
            tuple(
                (
                    isinstance(layer, CacheLayerMixin),
                    layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0,
                )
                for layer in layers
            )
        )

    @property
    def has_states(self) -> bool:
        return any(states for _, states in self.layers)

    @property
    def token_bytes(self) -> int:
        return sum(each.nbytes for tokens in (self.keys, self.values) for each in tokens.values())

    @property
    def row_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def cache(self, forward_pass: ForwardPass, states: Mapping[StateKey, torch.Tensor] | None = None) -> Cache:
        """The cache of a forward pass. states: those before it, (b, ...), which it updates in place."""
        layers = []
        for index, (has_keys, count) in enumerate(self.layers):
            if not count:
                layers.append(KeyValueLayer(index, forward_pass))
            else:
                layers.append(HybridLayer(index, forward_pass, count) if has_keys else StateLayer(count))
        for (index, attribute, number), state in (states or {}).items():
            layer = layers[index]
            layer.dtype, layer.device = state.dtype, state.device
            getattr(layer, attribute)[number] = state
            getattr(layer, f"is_{attribute}_initialized")[number] = layer.has_previous_state[number] = True
            if attribute == STATES[0]:
                layer.conv_kernel_size[number] = state.shape[-1]
        return PassCache(layers, forward_pass)

    def states_of(self, cache: Cache) -> dict[StateKey, torch.Tensor]:
        """The states (b, ...) after a forward pass."""
        return {
            (index, attribute, number): state
            for index, (_, count) in enumerate(self.layers)
            if count
            for attribute in STATES
            for number, state in getattr(cache.layers[index], attribute).items()
            if state is not None
        }


class Pages:
    """Keys and values by layer.

    Attributes:
        joint: (pages, HK, S, DK + DV).
        keys, values: views of it, (pages, HK, S, DK) and (pages, HK, S, DV).
    """

    def __init__(self, layout: Layout, pages: int, size: int, device: torch.device):
        self.joint, self.keys, self.values = {}, {}, {}
        self.size = size
        for layer, key in layout.keys.items():
            widths = key.shape[1], layout.values[layer].shape[1]
            # not uninitialized memory: masked columns have weight 0, and 0 * NaN would be NaN
            joint = torch.zeros(pages, len(key), size, sum(widths), dtype=key.dtype, device=device)
            self.joint[layer] = joint
            self.keys[layer], self.values[layer] = joint.split(widths, -1)

    def storing(
        self, lengths: Sequence[int], copies: Sequence[Sequence[Sequence[int]]], device: torch.device
    ) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        """A function that stores the tokens of prompts: layer, keys (N, HK, DK), values (N, HK, DV).

        Args:
            lengths: tokens of each prompt, N together.
            copies: for each prompt, the pages of every copy of it.
        """
        sources, pages, columns, start = [], [], [], 0
        for length, copies_of_prompt in zip(lengths, copies, strict=True):
            at = torch.arange(length)
            for copy in copies_of_prompt:
                sources.append(start + at)
                pages.append(torch.tensor(copy)[at // self.size])
                columns.append(at % self.size)
            start += length
        source, page, column = (torch.cat(each).to(device) for each in (sources, pages, columns))

        def store(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            joint = self.joint[layer]
            joint[page, :, column] = torch.cat((keys.to(joint.dtype), values.to(joint.dtype)), -1)[source]

        return store


class RowStates:
    """The states of `rows` rows."""

    def __init__(self, layout: Layout, rows: int, device: torch.device):
        self.tensors = {
            key: torch.zeros(rows, *state.shape, dtype=state.dtype, device=device)
            for key, state in layout.states.items()
        }

    def first(self, rows: int) -> dict[StateKey, torch.Tensor]:
        """Views of rows 0 .. rows - 1."""
        return {key: state[:rows] for key, state in self.tensors.items()}

    def fill(self, rows: Sequence[int], states: Sequence[Mapping[StateKey, torch.Tensor]]) -> None:
        """Set the states of rows: for each, those of one prompt."""
        if self.tensors:
            index = torch.tensor(rows, device=next(iter(self.tensors.values())).device)
            for key, state in self.tensors.items():
                state.index_copy_(0, index, torch.stack([each[key] for each in states]))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of rows to other rows."""
        for state in self.tensors.values():
            state[targets] = state[sources]
