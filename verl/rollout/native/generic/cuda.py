"""Decoding on a GPU: pages are the blocks of the paged KV cache, and a step of the modules is a CUDA graph."""

import logging
from collections.abc import Mapping, Sequence

import torch
import triton

from verl.rollout.native import triton_kernels
from verl.rollout.native.cuda_decoder import MAX_SPLITS, TARGET_PROGRAMS, GraphDecoder, StaticBuffers
from verl.rollout.native.generic import kernels
from verl.rollout.native.generic.attention import ForwardPass, attention
from verl.rollout.native.generic.cache import Pages, RowStates, StateKey
from verl.rollout.native.generic.layers import has_latents, latent_query, values_of_latents
from verl.rollout.native.generic.model import ModuleDecoder, Store
from verl.rollout.native.triton_kernels import BLOCK_SIZE
from verl.rollout.request import SamplingParams

log = logging.getLogger(__name__)
#: query heads of one attention program
_HEADS = 16


class ModuleBuffers(StaticBuffers):
    """Preallocated memory of generation, with pages and states instead of one KV cache."""

    def _allocate_cache(self, decoder: ModuleDecoder, blocks: int) -> None:
        device, keys = decoder.embedding.device, decoder.layout.keys.values()
        self.pages = Pages(decoder.layout, blocks, BLOCK_SIZE, device)
        self.states = RowStates(decoder.layout, self.slots, device)
        self.kv_cache = list(self.pages.joint.values())
        # one counter per attention program of a row
        programs = max((len(key) * decoder.max_heads for key in keys), default=1)
        self.arrived = torch.zeros(self.slots * programs, dtype=torch.int32, device=device)


class PagedPass(ForwardPass):
    """Decoding steps of slots 0 .. rows - 1. Everything that it reads is in static buffers."""

    def __init__(
        self, decoder: ModuleDecoder, buffers: ModuleBuffers, rows: int, states: Mapping[StateKey, torch.Tensor]
    ):
        self.buffers, self.rows = buffers, rows
        self.layout = decoder.layout
        self.width = buffers.width * BLOCK_SIZE
        self.cache = decoder.layout.cache(self, states)
        self.positions = buffers.state[triton_kernels.POSITION, :rows].long()
        self.precision = "ieee" if decoder.dtype == torch.float32 else "tf32"
        self.layers: dict[int, int] = {}  # id of the keys that a layer has written -> the layer
        self.written: list[torch.Tensor] = []  # keeps these ids in use

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.write`."""
        buffers, joint = self.buffers, self.buffers.pages.joint[layer]
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        heads, sizes = keys.shape[1], (keys.shape[-1], values.shape[-1])
        kernels.store_token[(self.rows, heads)](
            keys, values, joint, buffers.table, buffers.state, buffers.slots, buffers.width, keys.stride(0),
            keys.stride(1), values.stride(0), values.stride(1), HK=heads, S=BLOCK_SIZE, DK=sizes[0], DV=sizes[1],
            DP=triton.next_power_of_2(max(sizes)), num_warps=1,
        )  # fmt: skip
        if not self.layout.is_plain:  # the modules change the keys and values of all tokens
            whole = joint[buffers.table[: self.rows].long()].transpose(1, 2).flatten(2, 3)
            keys, values = whole.split(sizes, -1)
        self.layers[id(keys)] = layer
        self.written.append(keys)
        return keys, values

    def expand(self, module, latents, rotated) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardPass.expand`. Keys and values stay latent."""
        return (latents, rotated) if self.layout.is_plain else super().expand(module, latents, rotated)

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """See `ForwardPass.query_positions`."""
        return self.positions[:, None]

    def attend(self, module, query, key, value, mask, scores) -> torch.Tensor:
        """See `ForwardPass.attend`."""
        if not self.layout.is_plain:
            if mask is None:
                columns = torch.arange(self.width, device=query.device)
                mask = (columns <= self.positions[:, None])[:, None, None]
            return attention(query.to(key.dtype), key, value, mask, scores).transpose(1, 2)
        layer = self.layers.get(id(key), getattr(module, "layer_idx", None))
        sizes = self.layout.keys[layer].shape[1], self.layout.values[layer].shape[1]
        if not has_latents(module):
            return self._attend(layer, query[:, :, 0], *sizes, sizes[0], mask, scores)[:, None]
        attended = self._attend(layer, latent_query(module, query)[:, :, 0], sum(sizes), sizes[0], 0, mask, scores)
        return values_of_latents(module, attended[:, :, None]).transpose(1, 2)

    def _attend(self, layer, query, key_size, value_size, first, mask, scores) -> torch.Tensor:
        """query (B, HQ, DK) -> (B, HQ, DV). first: column of the pages in which values begin."""
        buffers, joint, sinks = self.buffers, self.buffers.pages.joint[layer], scores.sinks
        query = query.to(joint.dtype).contiguous()
        (rows, heads, _), kv_heads = query.shape, joint.shape[1]
        group = heads // kv_heads
        tiles = triton.cdiv(group, _HEADS)
        programs = rows * kv_heads * tiles
        splits = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // programs), buffers.width)
        padded, main = triton.next_power_of_2(value_size), 1 << (key_size.bit_length() - 1)
        padded, main = max(16, padded), max(16, main)
        out = query.new_empty(rows, heads, value_size)
        shape = (programs, splits, _HEADS, padded + 2) if splits > 1 else (1,)
        partial = torch.empty(shape, dtype=torch.float32, device=query.device)
        mask = mask if mask is None else mask.view(len(mask), -1)
        kernels.attend[(rows, kv_heads * tiles, splits)](
            query, joint, buffers.table, buffers.state, query if mask is None else mask.view(torch.uint8),
            query if sinks is None else sinks, out, partial, buffers.arrived, scores.scaling, scores.softcap or 1.0,
            buffers.slots, buffers.width, splits, 0 if mask is None else mask.stride(0), HQ=heads, HK=kv_heads,
            GP=_HEADS, TILES=tiles, S=BLOCK_SIZE, N=BLOCK_SIZE if key_size + value_size <= 256 else 32,
            ROW=joint.shape[-1], DK=key_size, DA=main, DR=max(16, triton.next_power_of_2(key_size - main)), FIRST=first,
            DV=value_size, DP=padded, SOFTCAP=scores.softcap is not None, MASK=mask is not None,
            SINKS=sinks is not None, WINDOW=0 if mask is None else scores.window or 0, SPLIT=splits > 1,
            SP=triton.next_power_of_2(splits), PRECISION=self.precision, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out


class ModuleCudaDecoder(GraphDecoder):
    """Like `cuda_decoder.CudaDecoder`, but runs the modules of a model."""

    decoder: ModuleDecoder
    buffers: ModuleBuffers

    def __init__(self, decoder: ModuleDecoder, buffers: ModuleBuffers, graphs: bool = True):
        super().__init__(decoder, buffers, graphs)
        self.prompt_states: list[dict[StateKey, torch.Tensor]] = []

    def prefill(self, prompts: list[list[int]], blocks: list[list[int]]) -> torch.Tensor:
        """Prefill: write keys and values of `prompts` to their `blocks`. Returns logits (len(prompts), V) float32."""

        def storing(indices: list[int]) -> Store:
            lengths = [len(prompts[i]) for i in indices]
            return self.buffers.pages.storing(lengths, [[blocks[i]] for i in indices], self.device)

        logits, self.prompt_states, self.prompt_experts = self.decoder.prefill(prompts, storing)
        return logits

    def fill_states(self, first: int, states: Sequence[Mapping[StateKey, torch.Tensor]]) -> None:
        """Set the states of slots `first` and following."""
        self.buffers.states.fill(range(first, first + len(states)), states)

    def move_states(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of slots to other slots."""
        self.buffers.states.move(sources, targets)

    def collect_experts(self) -> torch.Tensor:
        """The choices of the routers in the last step, (B, layers, k) int16."""
        return self.decoder.routed_experts

    def _warm_up(self, rows: int, params: SamplingParams | None) -> None:
        # a step changes the states of all slots
        states = RowStates(self.decoder.layout, rows, self.device).first(rows)
        self._run(rows, params, states)

    def _captures(self, key: tuple, rows: int, params: SamplingParams | None) -> bool:
        try:
            return super()._captures(key, rows, params)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation that waits for the GPU
            name, self.use_graphs = type(self.decoder.module).__name__, False
            log.warning("rollout.name=native decodes %s without CUDA graphs, which is slower: %s", name, error)
            return False

    def _step(self, rows: int, params: SamplingParams | None) -> torch.Tensor:
        """Decode one token for `rows` rows; sample it unless params is None. Returns logits (rows, V)."""
        return self._run(rows, params, self.buffers.states.first(rows))

    def _run(self, rows: int, params: SamplingParams | None, states: Mapping[StateKey, torch.Tensor]) -> torch.Tensor:
        step_pass = PagedPass(self.decoder, self.buffers, rows, states)
        tokens = self.buffers.state[triton_kernels.TOKEN, :rows, None].long()
        logits = self.decoder.forward(tokens, step_pass.positions[:, None], step_pass).contiguous()
        if self.records:
            self._store_experts(rows)
        if params is not None:
            self.sample(logits, 0, params)
        return logits
