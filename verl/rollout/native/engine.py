"""The native rollout engine: generation on the training model's own parameters.

Distinct prompts are computed once for all their samples, waiting rows are admitted as soon as others finish, and random
numbers come by counter, so that a response depends on its own request alone. `generate` runs a whole batch;
`generate_one` serves many coroutines from one batch (see `continuous`).
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import psutil
import torch

from verl.rollout.base import Completion, Request, RolloutEngine, RolloutStats, SamplingParams
from verl.rollout.native.batch_invariant import BatchInvariantDecoder, ModelForward
from verl.rollout.native.continuous import ContinuousBatch
from verl.rollout.native.kv_cache import BatchInvariantCache, SlotCache
from verl.rollout.native.model import Decoder, Projection, check_supported, read_decoder
from verl.rollout.native.requests import Row, admission_order, batches_of
from verl.rollout.native.scheduler import SlotScheduler
from verl.rollout.native.torch_decoder import PREFILL_TOKENS, TorchDecoder
from verl.rollout.weight_sync import ModuleReceiver

if TYPE_CHECKING:
    from verl.rollout.native.cuda_decoder import CudaDecoder, StaticBuffers
    from verl.rollout.native.paged_scheduler import PagedScheduler

#: rows at once where the caller sets no limit: more make a step slower by as much as they add
_MAX_ROWS = {"cpu": 512, "cuda": 2048}


class NativeRollout(RolloutEngine):
    """Generates with the parameters of a HuggingFace decoder (native.model.FAMILIES) where they are.

    Args:
        module: unsharded, on one device; its projections are fused in place once, so that a joint matmul needs no copy.
        dtype: None computes in the parameters' dtype. Another one keeps a copy of the weights in it, made anew by each
            call.
        max_rows: most rows at once.
        cache_bytes: memory for the KV cache; None is what the rows need, up to a quarter of the free memory of a CPU,
            or on a GPU nine tenths of what is free and memory_share of all there is.
        memory_share: see cache_bytes.
        max_length: tokens of the longest sequence that `generate_one` prepares for; longer ones wait until the batch is
            done.
        graphs: False launches every kernel of a step by itself, to look for an error.
        forward: generate by this batch-invariant forward pass of the module, so that log-probs are those that it gives
            to whole sequences, bit for bit; dtype is its own then.
        weights: the receiver of the module's weights, where they are not the trainer's own.

    Raises:
        ValueError: the module is not supported.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        max_rows: int | None = None,
        cache_bytes: int | None = None,
        memory_share: float = 1.0,
        max_length: int = 0,
        graphs: bool = True,
        forward: ModelForward | None = None,
        weights: ModuleReceiver | None = None,
    ):
        check_supported(module)
        self.module = module
        self.dtype = dtype
        self.max_rows = max_rows if max_rows is not None else _MAX_ROWS.get(module.device.type, _MAX_ROWS["cpu"])
        self.cache_bytes = cache_bytes
        self.memory_share = memory_share
        self.max_length = max_length
        self.graphs = graphs
        self.forward = forward
        self.weights = weights
        self.stats = RolloutStats()
        self._continuous = ContinuousBatch(self)
        self._scheduler: SlotScheduler | PagedScheduler | None = None
        self._requests: Sequence[Request] = ()
        self._decoder: Decoder | None = None
        self._cache: SlotCache | BatchInvariantCache | None = None
        self._cuda_decoder: CudaDecoder | None = None

    # ---- generating ---------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """As RolloutEngine.generate. Requests that differ in more than max_tokens, seed and stop are separate batches.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, a sequence longer than the model's positions, a
                cache too small for one row, logits that are not finite (it names the row), weights that were not
                received, or requests of `generate_one` under way.
        """
        if self._continuous.is_busy:
            raise ValueError("generate() was called while requests of generate_one() are under way: wait for them")
        start = time.perf_counter()
        self.stats = RolloutStats()
        completions: list[Completion | None] = [None] * len(requests)
        if not requests:
            return []
        decoder = self.read()
        rows = [Row.of(index, request, decoder) for index, request in enumerate(requests)]
        self._requests = requests
        with torch.inference_mode(), self.session():
            try:
                for params, members in batches_of(requests):
                    scheduler = self._scheduler = self._start(params, admission_order([rows[i] for i in members]))
                    for row, completion in scheduler.run():
                        completions[row.index] = completion
                    self.stats.steps += scheduler.steps
            except ValueError:
                self.sleep()  # what broken weights left in the cache must not reach another row
                raise
            finally:
                self._scheduler, self._requests = None, ()
        self.stats.tokens = sum(len(completion.token_ids) for completion in completions)
        self.stats.seconds = time.perf_counter() - start
        return completions

    async def generate_one(self, request: Request) -> Completion:
        """As RolloutEngine.generate_one: continuously batched, requests are admitted between decode steps."""
        return await self._continuous.submit(request)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As RolloutEngine.abort. A `generate` under way (in another thread) ends too."""
        self._continuous.abort(request_ids)
        if self._scheduler is not None:
            chosen = {i for i, r in enumerate(self._requests) if request_ids is None or r.request_id in request_ids}
            self._scheduler.abort_requests.append(lambda row: row.index in chosen)

    def session(self) -> AbstractContextManager[None]:
        """A phase in which weights do not change."""
        return nullcontext() if self.forward is None else self.forward.generating()

    def read(self) -> Decoder:
        """The module as a Decoder, read anew. Raises ValueError where it has no weights."""
        if self.weights is not None:
            self.weights.check_filled()
        if self.forward is None:
            self._decoder = read_decoder(self.module, self.dtype, reuse=self._decoder)
            return self._decoder
        # the module itself computes: this says how many layers, heads and positions it has, and the cache's dtype
        decoder = read_decoder(self.module, transpose_limit=0)
        sizes = decoder.hidden_size, decoder.vocab_size
        head = Projection(torch.empty(sizes, dtype=self.forward.dtype, device="meta"))
        self._decoder = dataclasses.replace(decoder, head=head)
        return self._decoder

    # ---- one batch ----------------------------------------------------------------------------------------------

    def _start(self, params: SamplingParams, rows: list[Row]) -> "SlotScheduler | PagedScheduler":
        """A scheduler that has all of `rows`."""
        if self.module.device.type == "cuda":
            return self._start_paged(params, rows)
        width, slots = max(row.limit for row in rows), min(self._slot_cache(rows).slots, len(rows))
        scheduler = SlotScheduler(params, self._slot_decoder(rows), slots, len(rows), width)
        scheduler.add(rows)
        return scheduler

    def start_continuous(self, params: SamplingParams, rows: list[Row]) -> "SlotScheduler | PagedScheduler":
        """A scheduler that has `rows`, and to which others can be added."""
        if self.module.device.type == "cuda":
            return self._start_paged(params, rows, continuous=True)
        slots = self._slot_cache(rows).slots
        scheduler = SlotScheduler(params, self._slot_decoder(rows), slots, slots, max(row.limit for row in rows))
        scheduler.add(rows)
        return scheduler

    def extend_continuous(self, scheduler: "SlotScheduler | PagedScheduler", rows: list[Row]) -> bool:
        """Add rows to a scheduler that is at work; False where they do not fit until it is done."""
        if self.module.device.type == "cuda":
            from verl.rollout.native import paged_scheduler

            samples = paged_scheduler.group_rows(rows)
            buffers, longest = self._cuda_decoder.buffers, max(len(row.prompt) + row.limit for row in rows)
            most = min(buffers.width, buffers.kv_cache.shape[1])
            fits = paged_scheduler.blocks_for_one(samples) <= most and longest <= buffers.size.positions
            fits &= max(row.limit for row in rows) <= scheduler.line_width
            if fits:
                scheduler.add(samples)
            return fits
        decoder = self._larger_slot_decoder(scheduler, rows)
        if decoder is None:
            return False
        width = max(row.limit for row in rows)
        if decoder is not scheduler.decoder or width > scheduler.width:
            scheduler.resize(decoder, self._cache.slots, width)
        scheduler.add(rows)
        return True

    # ---- on a CPU: slots ----------------------------------------------------------------------------------------

    def _slot_decoder(self, rows: list[Row]) -> TorchDecoder | BatchInvariantDecoder:
        if self.forward is not None:
            return BatchInvariantDecoder(self._decoder, self._cache, self.forward)
        return TorchDecoder(self._decoder, self._cache, max(len(row.prompt) + row.limit for row in rows))

    def _cache_budget(self) -> int:
        return self.cache_bytes if self.cache_bytes is not None else psutil.virtual_memory().available // 4

    def _new_cache(self, slots: int, length: int) -> SlotCache | BatchInvariantCache:
        return (SlotCache if self.forward is None else BatchInvariantCache)(self._decoder, slots, length)

    def _slot_cache(self, rows: list[Row]) -> SlotCache | BatchInvariantCache:
        """A cache for as many of `rows` at once as fit."""
        decoder = self._decoder
        token, budget = decoder.cache_bytes_per_token(), self._cache_budget()
        least = max(row.length for row in rows)
        if budget < least * token:
            raise ValueError(
                f"the KV cache has {budget:,} bytes, and one row of {least} tokens needs {least * token:,}: "
                "allow more memory, or fewer tokens"
            )
        # columns for all that rows which begin together write; half as many more where others follow them
        length = max(len(row.prompt) for row in rows) + max(row.limit for row in rows) - 1
        slots = min(len(rows), self.max_rows)
        if slots < len(rows) or slots * length * token > budget:
            length += length // 2
        slots = max(1, min(slots, budget // (length * token)))
        length = min(length, budget // (slots * token))
        old = self._cache
        like = decoder.embedding
        fits = old is not None and old.slots >= slots and old.length >= length
        if not fits or old.keys.device != like.device or old.keys.dtype != decoder.dtype:
            self._cache = old = None  # freed before the new one is allocated
            self._cache = self._new_cache(slots, length)
        return self._cache

    def _larger_slot_decoder(
        self, scheduler: SlotScheduler, rows: list[Row]
    ) -> TorchDecoder | BatchInvariantDecoder | None:
        """The scheduler's decoder, with a larger cache and longer tables if `rows` need them; None: no memory."""
        cache, decoder = self._cache, scheduler.decoder
        longest = max(len(row.prompt) + row.limit for row in rows)
        wanted = min(self.max_rows, scheduler.active + len(scheduler.waiting) + len(rows))
        length = cache.length if cache.length >= longest else max(longest, cache.length + cache.length // 2)
        slots = cache.slots if cache.slots >= wanted else min(self.max_rows, max(wanted, 2 * cache.slots))
        token, budget = self._decoder.cache_bytes_per_token(), self._cache_budget()
        slots = max(cache.slots, min(slots, budget // (length * token)))
        if length > cache.length and slots * length * token > budget:
            return None
        if (slots, length) == (cache.slots, cache.length) and longest <= decoder.table_length:
            return decoder
        if (slots, length) != (cache.slots, cache.length):
            self._cache = self._new_cache(slots, length)
            self._cache.copy_from(cache)
        if self.forward is not None:
            return BatchInvariantDecoder(self._decoder, self._cache, self.forward)
        return TorchDecoder(self._decoder, self._cache, max(longest, decoder.table_length))

    # ---- on a GPU: blocks ---------------------------------------------------------------------------------------

    def _start_paged(self, params: SamplingParams, rows: list[Row], continuous: bool = False) -> "PagedScheduler":
        """A scheduler with blocks for as many concurrent rows as fit. Cache and graphs are kept between calls."""
        from verl.rollout.native import cuda_decoder, paged_scheduler  # need triton, which only torch for GPUs brings

        decoder, samples = self._decoder, paged_scheduler.group_rows(rows)
        most = self.max_rows if continuous else min(len(rows), self.max_rows)
        slots = cuda_decoder.bucket_of(min(most, cuda_decoder.BUCKETS[-1]))
        one = paged_scheduler.blocks_for_one(samples)
        longest = max(len(row.prompt) + row.limit for row in rows)
        wanted, responses, line = min(paged_scheduler.blocks_for(samples), one * slots), sum(r.limit for r in rows), 0
        if continuous:
            longest = min(max(longest, self.max_length), decoder.max_positions)
            one = max(one, paged_scheduler.blocks_for_length(longest))
            line = max(max(row.limit for row in rows), longest // 2)
            wanted, responses = one * slots, line * slots
        size = cuda_decoder.Size(slots, wanted, one, responses, longest)
        if self._cuda_decoder is None or not self._cuda_decoder.buffers.fits(size):
            size = size.with_headroom()
            self._cuda_decoder = None  # freed before the new one is made
            block = cuda_decoder.block_bytes(decoder)
            budget = self.cache_bytes if self.cache_bytes is not None else self._gpu_budget(decoder, slots)
            if budget // block < one:
                raise ValueError(
                    f"the KV cache has {max(0, budget):,} bytes, and one row of {longest} tokens needs "
                    f"{one * block:,}: allow more memory, or fewer tokens"
                )
            buffers = cuda_decoder.StaticBuffers(decoder, size, min(size.blocks, budget // block))
            self._cuda_decoder = self._gpu_decoder(decoder, buffers)
        elif self._cuda_decoder.addresses != cuda_decoder.addresses(decoder):
            self._cuda_decoder = self._gpu_decoder(decoder, self._cuda_decoder.buffers)
        scheduler = paged_scheduler.PagedScheduler(params, self._cuda_decoder, min(self.max_rows, slots), line)
        scheduler.add(samples)
        return scheduler

    def _gpu_decoder(self, decoder: Decoder, buffers: "StaticBuffers") -> "CudaDecoder":
        from verl.rollout.native import batch_invariant_cuda, cuda_decoder

        if self.forward is None:
            return cuda_decoder.CudaDecoder(decoder, buffers, self.graphs)
        return batch_invariant_cuda.BatchInvariantCudaDecoder(decoder, buffers, self.graphs, self.forward)

    def _gpu_budget(self, decoder: Decoder, slots: int) -> int:
        """Bytes that keys and values may take, less what prefill and logits need beside them."""
        device = decoder.embedding.device
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        wide = decoder.hidden_size + decoder.layers[0].gate_up.matrix.shape[1]
        work = 12 * slots * decoder.vocab_size + 8 * PREFILL_TOKENS * wide
        return int(min(0.9 * free, self.memory_share * total)) - work

    # ---- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache, the graphs and every copy of a weight."""
        self._cache = self._decoder = self._cuda_decoder = None
        if self.forward is not None:
            self.forward.release()

    def receiver(self) -> ModuleReceiver | None:
        return self.weights
