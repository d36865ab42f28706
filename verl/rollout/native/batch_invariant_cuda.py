"""Batch-invariant generation on a GPU: `cuda_decoder` with the trainer's forward pass."""

import torch
import triton
import triton.language as tl

from verl.modeling.batch_invariant import triton_kernels as batch_invariant_kernels
from verl.modeling.batch_invariant.attention import Scores, attend_rows
from verl.modeling.batch_invariant.model import BatchInvariantForward
from verl.rollout.native import triton_kernels
from verl.rollout.native.batch_invariant import in_batches, prompt_states
from verl.rollout.native.cuda_decoder import CudaDecoder, StaticBuffers, upload
from verl.rollout.native.decoder import Decoder
from verl.rollout.native.triton_kernels import BLOCK_SIZE
from verl.rollout.request import SamplingParams


@triton.jit
def _store(key, value, kv_cache, table, positions, live, width, D: tl.constexpr, HK: tl.constexpr, DP: tl.constexpr,
           BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Write key and value (b, HK, D) of live rows to kv_cache (., 2 HK, BLOCK_SIZE, D). Grid (b, HK)."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(live + b) == 0:
        return
    d, position = tl.arange(0, DP), tl.load(positions + b)
    block = tl.load(table + b * width + position // BLOCK_SIZE).to(tl.int64)
    at = kv_cache + ((block * 2 * HK + h) * BLOCK_SIZE + position % BLOCK_SIZE) * D + d
    tl.store(at, tl.load(key + (b * HK + h) * D + d, mask=d < D), mask=d < D)
    tl.store(at + HK * BLOCK_SIZE * D, tl.load(value + (b * HK + h) * D + d, mask=d < D), mask=d < D)


@triton.jit(do_not_specialize=["first", "slots"])
def _replace_log_probs(log_probs, before, state, out_log_probs, first, slots, STEP: tl.constexpr, OUT: tl.constexpr):
    """Overwrite the log-probs that the last step wrote with log_probs (b,). Rows whose step is still before (b,)
    did not sample and are skipped. Grid (b,)."""
    b = tl.program_id(0)
    step = tl.load(before + b)
    if tl.load(state + STEP * slots + first + b) != step:
        tl.store(out_log_probs + tl.load(state + OUT * slots + first + b) + step, tl.load(log_probs + b))


class BatchInvariantCudaDecoder(CudaDecoder):
    """A `CudaDecoder` that runs a `BatchInvariantForward`."""

    def __init__(self, decoder: Decoder, buffers: StaticBuffers, graphs: bool, forward: BatchInvariantForward):
        super().__init__(decoder, buffers, graphs)
        self.forward = forward

    def prefill(self, prompts: list[list[int]], blocks: list[list[int]]) -> torch.Tensor:
        """Prefill: write keys and values of `prompts` to their `blocks`. Returns logits (len(prompts), V)."""
        return in_batches(self._prefill, prompts, blocks)

    def _prefill(self, prompts: list[list[int]], blocks: list[list[int]]) -> torch.Tensor:
        lengths, device = tuple(map(len, prompts)), self.buffers.kv_cache.device
        targets = [(row[at // BLOCK_SIZE], at % BLOCK_SIZE) for row, n in zip(blocks, lengths) for at in range(n)]
        block, column = upload(list(zip(*targets)), torch.int64, device)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
            self.buffers.kv_cache[layer][block, :, column] = torch.cat((key, value), 1)
            return attend_rows(query, key, value, lengths, scores)

        return self.forward.logits(prompt_states(self.forward, prompts, attend, device))

    def _step(self, rows: int, params: SamplingParams | None) -> torch.Tensor:
        """Decode one token for `rows` rows; sample it unless params is None. Returns logits (rows, V)."""
        buffers, heads = self.buffers, self.decoder.kv_heads
        fields = (triton_kernels.TOKEN, triton_kernels.POSITION, triton_kernels.STATUS)
        tokens, positions, status = (buffers.state[i, :rows] for i in fields)
        live, table = (status == triton_kernels.LIVE).int(), buffers.table[:rows]
        tiles = batch_invariant_kernels.single_queries(positions, live)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
            kv_cache, size = buffers.kv_cache[layer], key.shape[-1]
            _store[(rows, heads)](
                key.contiguous(), value.contiguous(), kv_cache, table, positions, live, buffers.width, D=size, HK=heads,
                DP=triton.next_power_of_2(size), BLOCK_SIZE=BLOCK_SIZE, num_warps=1,
            )  # fmt: skip
            keys, values = kv_cache[:, :heads], kv_cache[:, heads:]
            return batch_invariant_kernels.attend_cached(query, keys, values, tiles, table, scores)

        logits = self.forward.logits(self.forward.states(tokens.long(), positions.long(), attend))
        if params is not None:
            self.sample(logits, 0, params)
        return logits

    def sample(self, logits: torch.Tensor, first: int, params: SamplingParams, capped: bool = True) -> None:
        """Like `CudaDecoder.sample`, but with the log-probs of training. The logits are already soft-capped."""
        buffers, slots = self.buffers, slice(first, first + len(logits))
        before = buffers.state[triton_kernels.STEP, slots].clone()
        super().sample(logits, first, params, capped=True)
        if params.filters:  # training computes the unfiltered distribution only
            return
        tokens = buffers.state[triton_kernels.TOKEN, slots].long()
        log_probs = self.forward.log_probs(logits, tokens, 1.0 if params.greedy else params.temperature)
        _replace_log_probs[(len(logits),)](
            log_probs, before, buffers.state, buffers.log_probs, first, buffers.slots,
            STEP=triton_kernels.STEP, OUT=triton_kernels.OUT, num_warps=1,
        )  # fmt: skip
