"""The native rollout engine: generation on the training model's own parameters.

Each distinct prompt is prefilled once for all its samples, waiting rows are admitted as soon as others finish, and
random numbers are counter-based, so that a response depends on its request only. `continuous` runs the requests of
`generate` and of `generate_one`.
"""

import dataclasses
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import psutil
import torch

from verl.modeling.moe import install_routing
from verl.modeling.vision import is_vision_config
from verl.rollout.base import RolloutEngine, RolloutStats
from verl.rollout.native.continuous import ContinuousBatch
from verl.rollout.native.decoder import Decoder, Projection
from verl.rollout.native.generic.cache import Layout
from verl.rollout.native.generic.support import check_modules
from verl.rollout.native.kv_cache import BatchInvariantCache, SlotCache
from verl.rollout.native.model import is_readable, read_decoder
from verl.rollout.native.scheduler import Row, SlotScheduler
from verl.rollout.native.speculation import KEY as SPECULATION
from verl.rollout.native.speculation import PromptLookup
from verl.rollout.native.torch_decoder import PREFILL_TOKENS, PositionDecoder, TorchDecoder
from verl.rollout.request import Completion, Request, SamplingParams
from verl.rollout.routed_experts import RECORDING_KEY
from verl.rollout.sampling import SAMPLING_KEYS
from verl.rollout.tensor_parallel import ALONE, TensorParallel, on_every_rank

if TYPE_CHECKING:
    from verl.modeling.batch_invariant.model import BatchInvariantForward
    from verl.rollout.native.batch_invariant import BatchInvariantDecoder
    from verl.rollout.native.cuda_decoder import GraphDecoder, Size, StaticBuffers
    from verl.rollout.native.generic.model import ModuleDecoder
    from verl.rollout.native.generic.slots import ModuleCache, ModuleSlotDecoder
    from verl.rollout.native.paged_scheduler import PagedScheduler
    from verl.weight_sync import ModuleReceiver

log = logging.getLogger(__name__)

#: default limit of concurrent rows: beyond it, throughput does not increase
_MAX_ROWS = {"cpu": 512, "cuda": 2048}
#: methods of the engine that rank 0 runs on every rank; the others are methods of its decoder
_OPERATIONS = ("read", "_slot_decoder", "_new_cache", "_prepare_paged")


class NativeRollout(RolloutEngine):
    """Generates with the parameters of a HuggingFace model, without copying them.

    An architecture that `read_decoder` reads has fused layers. Others run their own modules (`native.generic`).

    Args:
        module: unsharded, on one device. Its projections are fused in place once, so that a fused matmul needs no copy.
        dtype: None for the parameters' dtype. Any other dtype needs a copy of the weights, which each call updates.
        max_rows: max concurrent rows.
        cache_bytes: memory of the KV cache. None: what the rows need, up to a quarter of the free host memory, or on a
            GPU up to 90 % of the free and `memory_share` of the total memory.
        memory_share: see cache_bytes.
        max_length: longest sequence, in tokens, that `generate_one` allocates for; longer ones wait until the batch is
            done.
        max_response: longest response that `generate_one` allocates for on a GPU, as `max_length`; 0: half of it.
        graphs: False disables CUDA graphs, for debugging.
        forward: the module's batch-invariant forward pass. Log-probs are then bitwise equal to those of training, and
            `dtype` is ignored.
        weights: receiver of the module's weights, if they are not shared with the trainer.
        tp: the ranks that hold the model, each with its slices (`native.slices`).
        records: report the experts that the routers choose (`Completion.routed_experts`).
        lookup: verify drafts (speculative decoding).

    Raises:
        ValueError: the module is not supported, has no experts to record, or cannot verify drafts.
    """

    sampling_keys = SAMPLING_KEYS | {"top_logprobs", "prompt_logprobs"}
    supports_tensor_parallel = True
    records_routing = True

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        max_rows: int | None = None,
        cache_bytes: int | None = None,
        memory_share: float = 1.0,
        max_length: int = 0,
        max_response: int = 0,
        graphs: bool = True,
        forward: "BatchInvariantForward | None" = None,
        weights: "ModuleReceiver | None" = None,
        tp: TensorParallel = ALONE,
        records: bool = False,
        lookup: PromptLookup | None = None,
    ):
        name = type(module).__name__
        self.is_fused = is_readable(name, module.config.get_text_config().to_dict(), module)
        if not self.is_fused:
            check_modules(type(module), module.config)
            log.info("rollout.name=native runs the modules of transformers: %s has no fused layers", name)
            if forward is not None:
                raise ValueError(f"rollout.deterministic is not supported for {name}: set it to false")
        if records and install_routing(module) is None:
            raise ValueError(f"{RECORDING_KEY}: {type(module).__name__} is not a mixture of experts: use false")
        self.module = module
        self.dtype = dtype
        self.max_rows = max_rows if max_rows is not None else _MAX_ROWS.get(module.device.type, _MAX_ROWS["cpu"])
        self.cache_bytes = cache_bytes
        self.memory_share = memory_share
        self.max_length = max_length
        self.max_response = max_response
        self.graphs = graphs
        self.forward = forward
        self.weights = weights
        self.tp = tp
        if tp.size > 1:  # the module has slices of the parameters
            self.sampling_keys -= {"prompt_logprobs"}
        self.records = records
        self.lookup = lookup
        #: positions behind the last token, to which drafts are written
        self.overhang = 0 if lookup is None else lookup.tokens
        if lookup is not None and (reason := self._no_speculation()) is not None:
            raise ValueError(f"{SPECULATION}={lookup.METHOD} is not supported {reason}: set it to null")
        self.stats = RolloutStats()
        #: guards the start of work: `generate` and `generate_one` share one cache, so only one of them runs at a time
        self.lock = threading.RLock()
        self._batch = ContinuousBatch(self)
        #: the module as it was last read
        self.decoder: Decoder | ModuleDecoder | None = None
        self._cache: SlotCache | BatchInvariantCache | ModuleCache | None = None
        self._cuda_decoder: GraphDecoder | None = None
        self._torch_decoder: TorchDecoder | BatchInvariantDecoder | ModuleSlotDecoder | None = None

    def _no_speculation(self) -> str | None:
        """Why drafts cannot be verified; None if they can."""
        if self.forward is not None:
            return "with rollout.deterministic"
        if self.tp.size > 1:
            return "with rollout.tensor_model_parallel_size above 1"
        if is_vision_config(self.module.config):
            return "for models with images"
        if not self.is_fused and Layout.from_config(self.module.config).has_states:
            return f"for {type(self.module).__name__}, whose layers have states that cannot be taken back"
        return None

    # ---- generating ---------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`. Only requests that agree in all but max_tokens, seed and stop share a batch.

        Raises:
            ValueError: an invalid request (see `check_request`), a cache too small for one row, non-finite logits (the
                message names the row), weights that were not received, or other requests are running.
        """
        return self._batch.generate(requests)

    async def generate_one(self, request: Request) -> Completion:
        """See `RolloutEngine.generate_one`. Continuous batching: requests are admitted between decode steps."""
        return await self._batch.generate_one(request)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Also ends a `generate` that runs in another thread."""
        self._batch.abort(request_ids)

    def session(self) -> AbstractContextManager[None]:
        """Context in which the weights do not change."""
        if not self.is_fused:
            return self.decoder.generating()
        return nullcontext() if self.forward is None else self.forward.generating()

    @on_every_rank
    def read(self) -> "Decoder | ModuleDecoder":
        """Read the module as a decoder. Raises ValueError if it has no weights."""
        if self.weights is not None:
            self.weights.check_filled()
        if not self.is_fused:
            from verl.rollout.native.generic.model import ModuleDecoder

            if self.decoder is None:
                self.decoder = ModuleDecoder(self.module, self.dtype, self.records)
            else:
                self.decoder.update()
            return self.decoder
        if self.forward is None:
            self.decoder = read_decoder(self.module, self.dtype, reuse=self.decoder, tp=self.tp)
            return self.decoder
        # the module itself computes; only the sizes and the dtype of the cache are needed
        decoder = read_decoder(self.module, transpose_limit=0, quantized=False)
        sizes = decoder.hidden_size, decoder.vocab_size
        head = Projection(torch.empty(sizes, dtype=self.forward.dtype, device="meta"))
        self.decoder = dataclasses.replace(decoder, head=head)
        return self.decoder

    # ---- tensor parallelism: rank 0 runs everything above, and the others the operations of `on_every_rank` --------

    @contextmanager
    def leading(self) -> Iterator[None]:
        """See `RolloutEngine.leading`."""
        try:
            yield
        finally:
            if self.tp.size > 1 and not self.tp.has_failed:
                self.tp.send(None)

    def follow(self) -> None:
        """See `RolloutEngine.follow`. Raises a ValueError of rank 0's operations at the end, as rank 0 does."""
        failed = None
        with torch.inference_mode():
            while (command := self.tp.receive()) is not None:
                name, args = command
                target = self if name in _OPERATIONS else self._cuda_decoder or self._torch_decoder
                try:
                    getattr(target, name)(*args)
                except ValueError as error:  # an invalid setting, which rank 0 has found too: it handles the error
                    failed = error
        if failed is not None:
            raise failed

    # ---- one batch ----------------------------------------------------------------------------------------------

    def start(self, params: SamplingParams, rows: list[Row], is_open: bool) -> "SlotScheduler | PagedScheduler":
        """A scheduler with `rows`. is_open: more rows may be added (`extend`)."""
        if params.prompt_logprobs is not None and self.tp.size > 1:
            raise ValueError("prompt_logprobs needs the whole model on one device: set tensor_model_parallel_size=1")
        if self.module.device.type == "cuda":
            return self._start_paged(params, rows, is_open)
        slots, width = self._slot_cache(rows).slots, max(row.limit for row in rows)
        lines = slots if is_open else len(rows)
        decoder = self._slot_decoder(self._longest(rows))
        scheduler = SlotScheduler(params, decoder, min(slots, lines), lines, width, self.lookup)
        scheduler.add(rows)
        return scheduler

    def extend(self, scheduler: "SlotScheduler | PagedScheduler", rows: list[Row]) -> bool:
        """Add rows to a running scheduler. Returns False if they do not fit before it is done."""
        if self.module.device.type == "cuda":
            return scheduler.extend(rows)
        if not self._extend_slot_cache(rows, scheduler.active + len(scheduler.waiting) + len(rows)):
            return False
        decoder, longest, width = scheduler.decoder, self._longest(rows), max(row.limit for row in rows)
        if decoder is not self._torch_decoder or longest > decoder.table_length:
            decoder = self._slot_decoder(max(longest, decoder.table_length))
        if decoder is not scheduler.decoder or width > scheduler.width:
            scheduler.resize(decoder, self._cache.slots, width)
        scheduler.add(rows)
        return True

    # ---- on a CPU: slots ----------------------------------------------------------------------------------------

    @on_every_rank
    def _slot_decoder(self, positions: int) -> "TorchDecoder | BatchInvariantDecoder | ModuleSlotDecoder":
        """A decoder over the cache, for sequences of up to `positions` tokens."""
        decoder_class = TorchDecoder if self.lookup is None else PositionDecoder
        if not self.is_fused:
            from verl.rollout.native.generic.slots import ModuleSlotDecoder

            self._torch_decoder = ModuleSlotDecoder(self.decoder, self._cache)
        elif self.forward is not None:
            from verl.rollout.native.batch_invariant import BatchInvariantDecoder

            self._torch_decoder = BatchInvariantDecoder(self.decoder, self._cache, self.forward)
        else:
            self._torch_decoder = decoder_class(self.decoder, self._cache, positions, self.records)
        return self._torch_decoder

    def _cache_budget(self) -> int:
        return self.cache_bytes if self.cache_bytes is not None else psutil.virtual_memory().available // 4

    @on_every_rank
    def _new_cache(self, slots: int, length: int, keep: bool) -> None:
        """Allocate a cache. keep: with the rows of the old one; otherwise that is freed first."""
        old, self._cache = (self._cache, None) if keep else (None, None)
        self._torch_decoder = None  # it refers to the old cache
        self._cache = self._cache_class()(self.decoder, slots, length)
        if keep:
            self._cache.copy_from(old)

    def _longest(self, rows: Sequence[Row]) -> int:
        """Positions of the longest sequence: prompt, response and drafts."""
        return max(row.reach for row in rows) + self.overhang

    def _cache_class(self) -> "type[SlotCache | BatchInvariantCache | ModuleCache]":
        if not self.is_fused:
            from verl.rollout.native.generic.slots import ModuleCache

            return ModuleCache
        return SlotCache if self.forward is None and self.lookup is None else BatchInvariantCache

    def _row_bytes(self, length: int) -> int:
        """Bytes of the cache of one row of `length` tokens."""
        return length * self.decoder.cache_bytes_per_token() + self.decoder.cache_bytes_per_row

    def _slot_cache(self, rows: list[Row]) -> "SlotCache | BatchInvariantCache | ModuleCache":
        """A cache for as many concurrent rows as fit."""
        decoder, budget = self.decoder, self._cache_budget()
        least = max(row.length for row in rows) + self.overhang
        if budget < self._row_bytes(least):
            raise ValueError(
                f"the KV cache has {budget:,} bytes, but one row of {least} tokens needs {self._row_bytes(least):,}: "
                "increase the memory of the cache or decrease the sequence length"
            )
        # columns for rows that start together; 1.5 times as many if others follow
        length = max(len(row.prompt) for row in rows) + max(row.limit for row in rows) - 1 + self.overhang
        slots = min(len(rows), self.max_rows)
        if slots < len(rows) or slots * self._row_bytes(length) > budget:
            length += length // 2
        slots = max(1, min(slots, budget // max(1, self._row_bytes(length))))
        if token := decoder.cache_bytes_per_token():
            length = min(length, (budget // slots - decoder.cache_bytes_per_row) // token)
        old, device = self._cache, decoder.embedding.device
        fits = old is not None and old.slots >= slots and old.length >= length
        if not fits or old.device != device or old.dtype != decoder.dtype:
            del old  # freed before the new one is allocated
            self._new_cache(slots, length, False)
        return self._cache

    def _extend_slot_cache(self, rows: list[Row], concurrent: int) -> bool:
        """Enlarge the cache for `concurrent` rows, `rows` among them. Returns False if one of them does not fit."""
        cache, longest, concurrent = self._cache, self._longest(rows), min(self.max_rows, concurrent)
        length = cache.length if cache.length >= longest else max(longest, cache.length + cache.length // 2)
        slots = cache.slots if cache.slots >= concurrent else min(self.max_rows, max(concurrent, 2 * cache.slots))
        row, budget = self._row_bytes(length), self._cache_budget()
        slots = max(cache.slots, min(slots, budget // max(1, row)))
        if length > cache.length and slots * row > budget:
            return False
        if (slots, length) != (cache.slots, cache.length):
            self._new_cache(slots, length, True)
        return True

    # ---- on a GPU: blocks ---------------------------------------------------------------------------------------

    def _start_paged(self, params: SamplingParams, rows: list[Row], is_open: bool) -> "PagedScheduler":
        """A scheduler with blocks for as many concurrent rows as fit. Cache and graphs are kept between calls."""
        from verl.rollout.native import cuda_decoder, paged_scheduler  # need Triton

        samples, longest, width = paged_scheduler.group_rows(rows), self._longest(rows), max(row.limit for row in rows)
        max_rows = self.max_rows if is_open else min(len(rows), self.max_rows)
        slots = cuda_decoder.bucket_of(min(max_rows, cuda_decoder.BUCKETS[-1]))
        if state := self.decoder.cache_bytes_per_row:  # up to a quarter of the memory, and as much while capturing
            total = int(self.memory_share * torch.cuda.mem_get_info(self.module.device)[1])
            slots = min(slots, max((b for b in cuda_decoder.BUCKETS if 4 * b * state <= total), default=1))
        row_blocks, lines = paged_scheduler.blocks_for_one(samples), len(rows)
        blocks = min(paged_scheduler.blocks_for(samples), row_blocks * slots)
        if is_open:
            longest = max(longest, min(self.max_length, self.decoder.max_positions))
            width = max(width, self.max_response or longest // 2)
            row_blocks = max(row_blocks, paged_scheduler.blocks_for_length(longest))
            blocks, lines = row_blocks * slots, slots
        self._prepare_paged(cuda_decoder.Size(slots, blocks, row_blocks, lines * width, longest))
        if is_open:
            lines = len(self._cuda_decoder.buffers.tokens) // width
        scheduler = paged_scheduler.PagedScheduler(params, self._cuda_decoder, min(self.max_rows, slots), lines, width)
        scheduler.add(samples)
        return scheduler

    @on_every_rank
    def _prepare_paged(self, size: "Size") -> None:
        """Allocate buffers of this size unless there are such, and capture graphs again if the weights have moved."""
        from verl.rollout.native import cuda_decoder

        decoder = self.decoder
        fits = self._cuda_decoder is not None and self._cuda_decoder.buffers.fits(size)
        if not self.tp.smallest(fits):
            row_blocks, longest, size = size.width, size.positions, size.with_headroom()
            self._cuda_decoder = None  # freed before the new one is allocated
            block = max(1, cuda_decoder.BLOCK_SIZE * decoder.cache_bytes_per_token())
            budget = self.cache_bytes if self.cache_bytes is not None else self._gpu_budget(decoder, size.slots)
            if self.records:
                budget -= 2 * size.responses * math.prod(decoder.routed_experts_shape)
            budget = self.tp.smallest(budget)
            if budget // block < row_blocks:
                raise ValueError(
                    f"the KV cache has {max(0, budget):,} bytes, but one row of {longest} tokens needs "
                    f"{row_blocks * block:,}: increase the memory of the cache or decrease the sequence length"
                )
            self._cuda_decoder = self._gpu_decoder(decoder, size, min(size.blocks, budget // block))
        elif not self.tp.smallest(self._cuda_decoder.addresses == cuda_decoder.addresses(decoder)):
            buffers = self._cuda_decoder.buffers
            self._cuda_decoder = self._gpu_decoder(decoder, buffers.size, buffers.blocks, buffers)

    def _gpu_decoder(
        self,
        decoder: "Decoder | ModuleDecoder",
        size: "Size",
        blocks: int,
        buffers: "StaticBuffers | None" = None,
    ) -> "GraphDecoder":
        """A decoder over `buffers`, or new ones."""
        from verl.rollout.native import batch_invariant_cuda, cuda_decoder

        if not self.is_fused:
            from verl.rollout.native.generic import cuda

            buffers = buffers or cuda.ModuleBuffers(decoder, size, blocks, self.records)
            made = cuda.ModuleCudaDecoder(decoder, buffers, self.graphs)
        else:
            buffers = buffers or cuda_decoder.StaticBuffers(decoder, size, blocks, self.records)
            if self.forward is not None:
                return batch_invariant_cuda.BatchInvariantCudaDecoder(decoder, buffers, self.graphs, self.forward)
            made = cuda_decoder.CudaDecoder(decoder, buffers, self.graphs)
        if self.lookup is not None:
            from verl.rollout.native.verifier import Verifier

            made.verifier = Verifier(made, self.lookup)
        return made

    def _gpu_budget(self, decoder: Decoder, slots: int) -> int:
        """Bytes available for the KV cache, after the working memory of prefill and logits."""
        device = decoder.embedding.device
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        wide = decoder.hidden_size + decoder.mlp_width
        work = 12 * slots * (1 + self.overhang) * decoder.vocab_size + 8 * PREFILL_TOKENS * wide
        work += 2 * slots * decoder.cache_bytes_per_row
        return int(min(0.9 * free, self.memory_share * total)) - work

    # ---- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache, the graphs and all copies of weights. Raises ValueError while requests are running."""
        with self.lock:
            if self._batch.is_busy():
                raise ValueError("sleep() was called while requests are running: wait for them or abort them")
            self.free()

    def free(self) -> None:
        """`sleep`, also while requests are running; they cannot continue."""
        self.decoder = self._cache = self._cuda_decoder = self._torch_decoder = None
        if self.forward is not None:
            self.forward.release()

    def receiver(self) -> "ModuleReceiver | None":
        return self.weights
