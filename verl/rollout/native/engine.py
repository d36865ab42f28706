"""The native rollout engine: generation on the training model's own parameters.

The rows are known in advance and nobody streams, so nothing here serves requests: distinct prompts are computed once
for all their samples, rows take the places of those that finished, and random numbers come by counter.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import psutil
import torch

from verl.rollout.base import Generation, RolloutEngine, RolloutStats, SamplingParams
from verl.rollout.native.batch_invariant import ExactCache, ExactDecoder, ModelForward
from verl.rollout.native.model import Decoder, Projection, check_supported, read_decoder
from verl.rollout.native.requests import Row, plan_rows
from verl.rollout.native.scheduler import SlotBatch
from verl.rollout.native.torch_decoder import PREFILL_TOKENS, SlotCache, TorchDecoder

if TYPE_CHECKING:
    from verl.rollout.native.cuda_decoder import Arena, CudaDecoder
    from verl.rollout.native.paged_scheduler import PagedBatch

#: rows at once where the caller sets no limit: more make a step slower by as much as they add
_MAX_ROWS = {"cpu": 512, "cuda": 2048}


class NativeRollout(RolloutEngine):
    """Generates with the parameters of a HuggingFace decoder (native_model.FAMILIES) where they are.

    module: whole (not sharded), on one device; its projections are laid out once so that joint products need no copy.
    dtype: None computes in the parameters' own. Another one keeps a copy of the weights in it, made anew by each call.
    max_rows: rows at once at most. cache_bytes: memory for keys and values; None is what the rows need, up to a quarter
    of the free memory of a CPU, or on a GPU nine tenths of what is free and memory_share of all there is. graphs: False
    launches every kernel of a step by itself, to look for an error. exact: generate by this forward pass of the module,
    so that log-probs are those that it gives to whole rows, bit for bit (native_exact); dtype is its own then.
    Raises ValueError for a module that it cannot run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        pad_token_id: int,
        dtype: torch.dtype | None = None,
        max_rows: int | None = None,
        cache_bytes: int | None = None,
        memory_share: float = 1.0,
        graphs: bool = True,
        exact: ModelForward | None = None,
    ):
        check_supported(module)
        self.module = module
        self.pad_token_id = pad_token_id
        self.dtype = dtype
        self.max_rows = max_rows if max_rows is not None else _MAX_ROWS.get(module.device.type, _MAX_ROWS["cpu"])
        self.cache_bytes = cache_bytes
        self.memory_share = memory_share
        self.graphs = graphs
        self.exact = exact
        self.stats = RolloutStats()
        self._decoder: Decoder | None = None
        self._cache: SlotCache | ExactCache | None = None
        self._on_gpu: CudaDecoder | None = None

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        sample_ids: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generation]:
        """As RolloutEngine.generate. limits: response tokens at most of each row, where params.max_tokens is not it.

        Raises ValueError for an empty prompt, a token outside the vocabulary, a row longer than the model's positions,
        a cache too small for one row, and logits that are not finite (it names the row).
        """
        start = time.perf_counter()
        self.stats = RolloutStats()
        decoder = self._decoder = self._read()
        rows = plan_rows(prompts, params, sample_ids, limits, decoder)
        if not rows:
            return []
        with torch.inference_mode(), nullcontext() if self.exact is None else self.exact.generating():
            try:
                batch = self._batch(rows, params, decoder)
                answers = batch.run()
            except ValueError:
                self.sleep()  # what broken weights left in the cache must not reach another row
                raise
        self.stats.tokens = sum(len(answer.token_ids) for answer in answers)
        self.stats.steps = batch.steps
        self.stats.seconds = time.perf_counter() - start
        return answers

    def _read(self) -> Decoder:
        if self.exact is None:
            return read_decoder(self.module, self.dtype, reuse=self._decoder)
        # the module itself computes: this says how many layers, heads and positions it has, and the cache's dtype
        decoder = read_decoder(self.module, turn_limit=0)
        sizes = decoder.hidden_size, decoder.vocab_size
        return dataclasses.replace(decoder, head=Projection(torch.empty(sizes, dtype=self.exact.dtype, device="meta")))

    def _batch(self, rows: list[Row], params: SamplingParams, decoder: Decoder) -> "SlotBatch | PagedBatch":
        if decoder.embedding.device.type == "cuda":
            return self._paged_batch(rows, params, decoder)
        cache = self._room(decoder, rows)
        if self.exact is not None:
            return SlotBatch(rows, params, ExactDecoder(decoder, cache, self.exact))
        longest = max(len(row.prompt) + row.limit for row in rows)
        return SlotBatch(rows, params, TorchDecoder(decoder, cache, longest))

    def _paged_batch(self, rows: list[Row], params: SamplingParams, decoder: Decoder) -> "PagedBatch":
        """On a GPU: pages for as many of `rows` at once as fit, and graphs, kept from call to call."""
        from verl.rollout.native import cuda_decoder, paged_scheduler  # need triton, which only torch for GPUs brings

        samples = paged_scheduler.group_rows(rows)
        slots = cuda_decoder.bucket_of(min(len(rows), self.max_rows, cuda_decoder.BUCKETS[-1]))
        one = paged_scheduler.pages_for_one(samples)
        wanted = min(paged_scheduler.pages_for(samples), one * slots)
        longest = max(len(row.prompt) + row.limit for row in rows)
        size = cuda_decoder.Size(slots, wanted, one, sum(row.limit for row in rows), longest)
        if self._on_gpu is None or not self._on_gpu.arena.fits(size):
            size = size.roomy()
            self._on_gpu = None  # freed before the new one is made
            page = cuda_decoder.page_bytes(decoder)
            budget = self.cache_bytes if self.cache_bytes is not None else self._gpu_budget(decoder, slots)
            if budget // page < one:
                raise ValueError(
                    f"the key/value cache has {max(0, budget):,} bytes, and one row of {longest} tokens needs "
                    f"{one * page:,}: allow more memory, or fewer tokens"
                )
            arena = cuda_decoder.Arena(decoder, size, min(size.pages, budget // page))
            self._on_gpu = self._gpu_decoder(decoder, arena)
        elif self._on_gpu.addresses != cuda_decoder.addresses(decoder):
            self._on_gpu = self._gpu_decoder(decoder, self._on_gpu.arena)
        rows_at_once = min(self.max_rows, slots)
        return paged_scheduler.PagedBatch(samples, params, self._on_gpu, rows_at_once)

    def _gpu_decoder(self, decoder: Decoder, arena: "Arena") -> "CudaDecoder":
        from verl.rollout.native import batch_invariant_cuda, cuda_decoder

        if self.exact is None:
            return cuda_decoder.CudaDecoder(decoder, arena, self.graphs)
        return batch_invariant_cuda.ExactCudaDecoder(decoder, arena, self.graphs, self.exact)

    def _gpu_budget(self, decoder: Decoder, slots: int) -> int:
        """Bytes that keys and values may take, less what prefill and logits need beside them."""
        device = decoder.embedding.device
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        wide = decoder.hidden_size + decoder.layers[0].gate_up.matrix.shape[1]
        work = 12 * slots * decoder.vocab_size + 8 * PREFILL_TOKENS * wide
        return int(min(0.9 * free, self.memory_share * total)) - work

    def _room(self, decoder: Decoder, rows: list[Row]) -> SlotCache | ExactCache:
        """A cache for as many of `rows` at once as fit."""
        token = decoder.cache_bytes_per_token()
        budget = self.cache_bytes if self.cache_bytes is not None else psutil.virtual_memory().available // 4
        least = max(row.length for row in rows)
        if budget < least * token:
            raise ValueError(
                f"the key/value cache has {budget:,} bytes, and one row of {least} tokens needs {least * token:,}: "
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
            self._cache = old = None  # freed before the new one is made
            self._cache = (SlotCache if self.exact is None else ExactCache)(decoder, slots, length)
        return self._cache

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights into the module. On the trainer's own module there is nothing to load."""
        present = dict(self.module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in present:
                    raise ValueError(f"weights of version {version}: {type(self.module).__name__} has no {name!r}")
                if present[name].shape != tensor.shape:
                    raise ValueError(
                        f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, "
                        f"expected {tuple(present[name].shape)}"
                    )
                if present[name].data_ptr() != tensor.data_ptr():
                    present[name].copy_(tensor)

    def sleep(self) -> None:
        """Give back the key/value cache, the graphs and every copy of a weight."""
        self._cache = self._decoder = self._on_gpu = None
        if self.exact is not None:
            self.exact.release()

    def wake(self) -> None:
        """Nothing: the cache is made by the next call that generates, for the rows it has."""
