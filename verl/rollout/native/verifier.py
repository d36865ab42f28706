"""Speculative decoding on a GPU: every slot is k + 1 rows of a step, at consecutive positions of one sequence."""

from collections.abc import Sequence

import torch
import triton

from verl.rollout.native import triton_kernels
from verl.rollout.native.cuda_decoder import (
    CHUNK,
    MAX_SPLITS,
    TARGET_PROGRAMS,
    CudaDecoder,
    GraphDecoder,
    StaticBuffers,
    upload,
)
from verl.rollout.native.decoder import Layer
from verl.rollout.native.speculation import PromptLookup, accepted_drafts
from verl.rollout.native.triton_kernels import BLOCK_SIZE
from verl.rollout.request import SamplingParams
from verl.rollout.sampling import uniform

#: queries of one attention program
_QUERIES = 64


class _RowsDecoder(CudaDecoder):
    """Decodes several rows of each slot, whose attention reads the keys of the slot once."""

    rows_per_slot = 1

    def _paged_attention(
        self, layer: Layer, qkv: torch.Tensor, kv_cache: torch.Tensor, attends: bool = True
    ) -> torch.Tensor:
        # all keys are written before a row attends to those of another one
        query = super()._paged_attention(layer, qkv, kv_cache, attends=False)
        options = {"scaling": self.decoder.scaling, "softcap": self.decoder.attention_softcap}
        options |= {"window": layer.window or 0, "precision": self.precision}
        heads = self.decoder.kv_heads, self.decoder.heads
        return attend_slots(query, kv_cache, self.buffers, self.rows_per_slot, *heads, **options)


def attend_slots(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    buffers: StaticBuffers,
    queries: int,
    kv_heads: int,
    heads: int,
    *,
    scaling: float,
    softcap: float | None,
    window: int,
    precision: str,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of `queries` rows of each slot: rotated queries (B, HQ D) -> (B, HQ D).

    splits: of the keys of a slot; None: enough to fill the GPU.
    """
    group, slots, size = heads // kv_heads, len(query) // queries, query.shape[1] // heads
    tile, padded = (max(16, triton.next_power_of_2(n)) for n in (queries * group, size))
    tile = min(tile, _QUERIES)
    programs = kv_heads * triton.cdiv(queries * group, tile)
    splits = splits or min(MAX_SPLITS, max(1, TARGET_PROGRAMS // (slots * programs)), buffers.width)
    shape = (slots * programs, splits, tile, padded + 2) if splits > 1 else (1,)
    out, partial = torch.empty_like(query), torch.empty(shape, dtype=torch.float32, device=query.device)
    triton_kernels.attend_slots[(slots, programs, splits)](
        query, kv_cache, buffers.table, buffers.state, out, partial, buffers.arrived, scaling, softcap or 1.0,
        buffers.slots, buffers.width, splits, Q=queries, HQ=heads, HK=kv_heads, G=group, GP=tile,
        TILES=programs // kv_heads, D=size, DP=padded, SOFTCAP=softcap is not None, WINDOW=window, SPLIT=splits > 1,
        BLOCK_SIZE=BLOCK_SIZE, SP=triton.next_power_of_2(splits), PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


class Verifier(GraphDecoder):
    """Steps that verify drafts, over the buffers of another decoder. Drafts are found on the device, in the graph.

    Attributes:
        sequences: (slots, L) prompts and responses.
        counts: (2,) drafts, and how many of them were accepted.
    """

    def __init__(self, plain: GraphDecoder, lookup: PromptLookup):
        super().__init__(plain.decoder, plain.buffers, plain.use_graphs)
        self.plain, self.lookup, self.width = plain, lookup, lookup.tokens + 1
        #: decodes the rows of all slots
        rows_class = _RowsDecoder if type(plain) is CudaDecoder else type(plain)
        self.rows = rows_class(plain.decoder, plain.buffers.widened(self.width), False)
        self.rows.rows_per_slot = self.width
        buffers, device = plain.buffers, self.device
        length = buffers.size.positions + self.width
        self.sequences = torch.zeros(buffers.slots, length, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(buffers.slots, lookup.tokens, dtype=torch.int32, device=device)
        self.is_live = torch.zeros(buffers.slots, self.width, dtype=torch.bool, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    # ---- the sequences ------------------------------------------------------------------------------------------

    def fill(self, first: int, prompts: Sequence[list[int]]) -> None:
        """Set the prompts of slots `first` and following."""
        width = max(map(len, prompts))
        padded = upload([prompt + [0] * (width - len(prompt)) for prompt in prompts], torch.int32, self.device)
        self.sequences[first : first + len(prompts), :width] = padded

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the sequences of slots to other slots."""
        self.sequences.index_copy_(0, targets, self.sequences[sources])

    def hindsight(self, rows: int) -> torch.Tensor:
        """Read the tokens of the last plain steps, and find the mean of `PromptLookup.hindsight` over live rows, ()."""
        position, step, out, status = (
            self.buffers.state[field, :rows].long()
            for field in (triton_kernels.POSITION, triton_kernels.STEP, triton_kernels.OUT, triton_kernels.STATUS)
        )
        back = torch.arange(-CHUNK - 1, 0, device=self.device)
        steps, at = step[:, None] + back, (position[:, None] + 1 + back).clamp_min(0)
        sampled = self.buffers.tokens[(out[:, None] + steps).clamp_min(0)]
        sequences = self.sequences[:rows]
        sequences.scatter_(1, at, torch.where(steps >= 0, sampled, sequences.gather(1, at)))
        is_live = status == triton_kernels.LIVE
        accepted = self.lookup.hindsight(sequences, position + 1)
        return (accepted * is_live).sum() / is_live.sum().clamp_min(1)

    # ---- a step -------------------------------------------------------------------------------------------------

    def _captures(self, key: tuple, rows: int, params: SamplingParams | None) -> bool:
        # a plain step shows whether the modules of a model can be captured
        return self.plain._captures(key, rows, params) and super()._captures(key, rows, params)

    def _step(self, rows: int, params: SamplingParams | None) -> torch.Tensor:
        """Decode `rows` slots; sample and accept unless params is None. Returns logits (rows (k + 1), V)."""
        self._find_drafts(rows)
        logits = self.rows._step(rows * self.width, params)
        if params is not None:
            self._accept(rows)
        return logits

    def _find_drafts(self, rows: int) -> None:
        """Write the rows of a step: the last token of each slot, then its drafts. Others are not live."""
        buffers, target = self.buffers, self.rows.buffers
        token, position, step, _, limit, out, status, offset = buffers.state[:, :rows, None]
        drafts, exist = self.lookup.propose(self.sequences[:rows], position[:, 0].long() + 1)
        at = torch.arange(self.width, dtype=torch.int32, device=self.device)
        steps = step + at
        is_live = (status == triton_kernels.LIVE) & ((at == 0) | exist[:, None]) & (steps < limit)
        self.drafts[:rows], self.is_live[:rows] = drafts, is_live
        tokens = torch.cat((token, drafts), 1)
        statuses = torch.where(is_live, triton_kernels.LIVE, triton_kernels.DONE)
        fields = (tokens, position + at * is_live, steps, steps, limit, out, statuses, offset)
        count = rows * self.width
        target.state[:, :count] = torch.stack([field.int().expand(rows, self.width) for field in fields]).flatten(1)
        target.table[:count] = buffers.table[:rows, None].expand(-1, self.width, -1).flatten(0, 1)
        uniforms = uniform(buffers.seeds[:rows, None], buffers.sample_ids[:rows, None], steps)
        target.uniforms[0, :count] = uniforms.flatten()

    def _accept(self, rows: int) -> None:
        """Advance each live slot behind its last accepted draft."""
        buffers, count = self.buffers, rows * self.width
        state = self.rows.buffers.state[:, :count].unflatten(1, (rows, self.width))
        sampled, goes_on = state[triton_kernels.TOKEN], state[triton_kernels.STATUS] == triton_kernels.LIVE
        is_live, old = self.is_live[:rows], buffers.state[:, :rows]
        accepted = accepted_drafts(sampled[:, :-1], self.drafts[:rows], goes_on[:, :-1] & is_live[:, 1:])
        at = (old[triton_kernels.POSITION, :, None] + 1).long() + torch.arange(self.width, device=self.device)
        self.sequences[:rows].scatter_(1, at, sampled)
        self.counts += torch.stack((is_live[:, 1:].sum(), accepted.sum()))
        last = state.gather(2, accepted.expand(len(state), -1)[..., None])[..., 0]
        old.copy_(torch.where(is_live[:, 0], last, old))

    def sample(self, logits: torch.Tensor, first: int, params: SamplingParams, capped: bool = False) -> None:
        """Sample from the logits of `_step` and accept."""
        self.rows.buffers.top = self.buffers.top
        self.rows.sample(logits, first, params, capped)
        self._accept(len(logits) // self.width)
