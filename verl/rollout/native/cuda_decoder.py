"""The decoder of the native engine on a GPU: paged KV cache, one CUDA graph per batch size.

Everything that a graph reads or writes is in `StaticBuffers`, whose addresses do not change. The weights are the
parameters themselves; if their addresses change, the graphs are captured again.
"""

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton

from verl.modeling import fp8_triton
from verl.modeling.fp8 import Quantized
from verl.rollout.native import triton_kernels
from verl.rollout.native.decoder import Decoder, Fp8Projection, Layer, Projection, RopeTable
from verl.rollout.native.experts import Experts
from verl.rollout.native.torch_decoder import Layers
from verl.rollout.native.triton_kernels import BLOCK_SIZE
from verl.rollout.native.vision import PromptImages
from verl.rollout.request import SamplingParams
from verl.rollout.sampling import choose, top_log_probs
from verl.rollout.tensor_parallel import on_every_rank

if TYPE_CHECKING:
    from verl.rollout.native.verifier import Verifier

#: batch sizes with a CUDA graph; a step is padded to the next larger one
BUCKETS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192),
    *range(256, 513, 64),
    *range(640, 1025, 128),
    1280,
    1536,
    1792,
    2048,
)
#: steps that are launched before their status is read
CHUNK = 8
#: the keys of a row are split over several attention programs below this number of programs
TARGET_PROGRAMS = 512
MAX_SPLITS = 32
#: split-K factor of a matmul with few rows
_K_SPLITS = 4


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


def attention_launch(rows: int, head_dim: int) -> dict[str, int]:
    """Launch options of the attention kernel, tuned on an H200 with benchmarks/attention.py. ROUND: blocks per load."""
    return {"num_warps": 4 if rows < 512 or head_dim > 64 else 2, "num_stages": 2, "ROUND": 1}


@dataclass(frozen=True)
class Size:
    """Buffer sizes that a generate call needs.

    Attributes:
        slots: max concurrent rows.
        blocks: blocks of the KV cache.
        width: max blocks of a row.
        responses: max tokens of all responses together.
        positions: length of the rotary tables."""

    slots: int
    blocks: int
    width: int
    responses: int
    positions: int

    def with_headroom(self) -> "Size":
        """Round up by at most an eighth, so that a call with a few more tokens fits too."""

        def up(n: int) -> int:
            grain = 1 << max(0, n.bit_length() - 4)
            return -(-n // grain) * grain

        return Size(self.slots, up(self.blocks), up(self.width), up(self.responses), up(self.positions))


class StaticBuffers:
    """Preallocated memory of generation: KV cache, state of the rows, responses. Graphs hold its addresses.

    Args:
        decoder: sets shapes and dtypes.
        size: what the calls need.
        blocks: KV-cache blocks to allocate; fewer than `size.blocks` if memory is short.
        records: also the choices of the routers for every response token.
    """

    def __init__(self, decoder: Decoder, size: Size, blocks: int, records: bool = False):
        self.size = size
        slots, width = self.slots, self.width = size.slots, size.width
        device = decoder.embedding.device
        self.blocks = blocks
        self._allocate_cache(decoder, blocks)
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.state = torch.zeros(triton_kernels.FIELDS, slots, dtype=torch.int32, device=device)
        self.sample_ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(CHUNK, slots, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(size.responses, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(size.responses, dtype=torch.float32, device=device)
        #: of `top_log_probs`, outside of the graphs: set by the scheduler
        self.top = self.log_probs[:0]
        # the last row takes what rows that are not live write
        shape = (size.responses + 1, *decoder.routed_experts_shape) if records else (0,)
        self.routed_experts = torch.zeros(shape, dtype=torch.int16, device=device)
        self.is_stop = torch.zeros(decoder.vocab_size, dtype=torch.int8, device=device)
        self.vocab_blocks = triton.cdiv(decoder.vocab_size, triton_kernels.VOCABULARY_BLOCK)
        self.parts = torch.zeros(slots, self.vocab_blocks, 3, dtype=torch.float32, device=device)

    def _allocate_cache(self, decoder: Decoder, blocks: int) -> None:
        device = decoder.embedding.device
        shape = (len(decoder.layers), blocks, 2 * decoder.kv_heads, BLOCK_SIZE, decoder.head_dim)
        self.kv_cache = torch.empty(shape, dtype=decoder.dtype, device=device)
        self.arrived = torch.zeros(self.slots, decoder.kv_heads, dtype=torch.int32, device=device)
        self.tables = [rope.table(self.size.positions, decoder.stream_dtype) for rope in decoder.ropes]

    def widened(self, rows_per_slot: int) -> "StaticBuffers":
        """Buffers of as many rows per slot, with the same KV cache and responses."""
        wide, slots = copy.copy(self), self.slots * rows_per_slot
        wide.slots = slots
        for name in ("table", "parts", "arrived"):
            old = getattr(self, name)
            setattr(wide, name, old.new_zeros(len(old) * rows_per_slot, *old.shape[1:]))
        wide.state, wide.uniforms = self.state.new_zeros(len(self.state), slots), self.uniforms.new_zeros(1, slots)
        return wide

    def fits(self, size: Size) -> bool:
        return all(available >= required for available, required in zip(astuple(self.size), astuple(size)))


class GraphDecoder:
    """Runs decoding steps over `StaticBuffers` as CUDA graphs, and samples. A subclass computes prompts and a step.

    Args:
        decoder: what is run.
        buffers: everything that a graph reads or writes.
        graphs: False runs steps eagerly.
    """

    def __init__(self, decoder: Decoder, buffers: StaticBuffers, graphs: bool = True):
        self.decoder = decoder
        self.buffers = buffers
        self.device = decoder.embedding.device
        self.records = len(buffers.routed_experts) > 0
        self.prompt_experts: list[torch.Tensor] = []  # of the last prefill: per prompt (tokens, layers, k)
        self.prompt_states: list = []  # of the last prefill, if the layers have states
        self.tp = decoder.tp
        self.use_graphs = graphs
        #: verifies drafts, with speculative decoding
        self.verifier: Verifier | None = None
        self.addresses = addresses(decoder)
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}
        self.pool: tuple[int, int] | None = None

    @on_every_rank
    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copy blocks of the KV cache."""
        sources, targets = self._upload([source, target])
        for layer in self.buffers.kv_cache:
            layer.index_copy_(0, targets, layer[sources])

    def _upload(self, values: list) -> torch.Tensor:
        return upload(values, torch.int64, self.device)

    @on_every_rank
    def steps(self, count: int, rows: int, params: SamplingParams) -> None:
        """Launch `count` decode steps for slots 0 .. rows - 1."""
        self.tp.broadcast(self.buffers.table)
        # top-k, top-p, min-p and top_logprobs use torch operations that are not captured in a graph
        inside = not params.filters and not params.top_logprobs
        key = (rows, params.greedy, params.temperature if inside else None, inside)
        if not self.use_graphs or not self._captures(key, rows, params if inside else None):
            for _ in range(count):
                self.sample(self._step(rows, None), 0, params)
            return
        graph, logits = self.graphs[key]
        for _ in range(count):
            graph.replay()
            if not inside:
                self.sample(logits, 0, params)

    def _captures(self, key: tuple, rows: int, params: SamplingParams | None) -> bool:
        """Whether there is a graph of a step; it is captured at its first use."""
        if key not in self.graphs:
            self.graphs[key] = self._capture(rows, params)
        return True

    def _capture(self, rows: int, params: SamplingParams | None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor | None]:
        """Capture one decode step. Returns its logits too if it does not sample (params is None)."""
        status = self.buffers.state[triton_kernels.STATUS]
        saved = status.clone()
        status.zero_()
        self._warm_up(rows, params)  # compiles the kernels; changes no row, since none is live
        status.copy_(saved)
        graph, stream, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), _capture_stream()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        side.wait_stream(stream)
        # not `with torch.cuda.graph`: it empties torch's memory cache, which costs more than the capture
        with torch.cuda.stream(side), _collector_off():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                logits = self._step(rows, params)
            finally:  # a stream that is left capturing would make every later CUDA call of the process fail
                graph.capture_end()
        stream.wait_stream(side)
        # if the graph samples, later graphs may reuse the memory of its logits
        return graph, logits if params is None else None

    def fill_states(self, first: int, states: Sequence) -> None:
        """Set the states of slots `first` and following, if the layers have any."""

    def move_states(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of slots to other slots, if the layers have any."""

    def _warm_up(self, rows: int, params: SamplingParams | None) -> None:
        self._step(rows, params)

    def _step(self, rows: int, params: SamplingParams | None) -> torch.Tensor:
        """Decode one token for `rows` rows; sample it unless params is None. Returns logits (rows, V)."""
        raise NotImplementedError

    def collect_experts(self) -> torch.Tensor:
        """The choices of the routers in the last step, (B, layers, k) int16."""
        raise NotImplementedError

    def _outputs(self, first: int, rows: int, shift: int = 0) -> torch.Tensor:
        """Where the next tokens of slots `first` and following are stored, plus `shift`: (rows,). Not live: the end."""
        fields = (triton_kernels.OUT, triton_kernels.STEP, triton_kernels.STATUS)
        out, step, status = (self.buffers.state[i, first : first + rows].long() for i in fields)
        return torch.where(status == triton_kernels.LIVE, out + step + shift, self.buffers.size.responses)

    def _store_experts(self, rows: int) -> None:
        """Write the choices of the routers for the input tokens of a step next to these tokens."""
        self.buffers.routed_experts.index_copy_(0, self._outputs(0, rows, -1), self.collect_experts())

    # ---- sampling -----------------------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, first: int, params: SamplingParams, capped: bool = False) -> None:
        """Sample a token for slots first .. first + n - 1 from logits (n, V) and store it.

        capped: the logits are already soft-capped.
        """
        if not self.tp.leads:
            return
        softcap = None if capped else self.decoder.final_softcap
        buffers, rows = self.buffers, len(logits)
        responses = (buffers.state, buffers.tokens, buffers.log_probs, buffers.is_stop, first, buffers.slots)
        if params.filters or params.top_logprobs:
            logits = logits.float() if softcap is None else softcap * torch.tanh(logits.float() / softcap)
            state, uniforms = buffers.state[:, first : first + rows], buffers.uniforms[:, first : first + rows]
            line = (state[triton_kernels.STEP] - state[triton_kernels.START]).clamp_(0, CHUNK - 1)
            sampled = choose(logits, params, uniforms.gather(0, line[None].long())[0])
            if params.top_logprobs:
                buffers.top.index_copy_(0, self._outputs(first, rows), top_log_probs(logits, params))
            triton_kernels.store_tokens[(rows,)](*sampled, *responses, num_warps=1)
            return
        scale = 1.0 if params.greedy else 1 / params.temperature
        common = {"BLOCK": triton_kernels.VOCABULARY_BLOCK, "NB": buffers.vocab_blocks, "SOFTCAP": softcap is not None}
        common["GREEDY"] = params.greedy
        sizes = (scale, softcap or 1.0, self.decoder.vocab_size)
        triton_kernels.scan_vocabulary[(rows, buffers.vocab_blocks)](
            logits, buffers.state, buffers.parts, first, buffers.slots, *sizes, **common, num_warps=8
        )
        triton_kernels.draw_token[(rows,)](
            logits, buffers.parts, buffers.uniforms, *responses, *sizes, **common,
            NBP=triton.next_power_of_2(buffers.vocab_blocks), num_warps=8,
        )  # fmt: skip


class CudaDecoder(GraphDecoder, Layers):
    """Runs a `Decoder` over `StaticBuffers`: prefill in plain torch, decode steps as CUDA graphs if `graphs` is set."""

    def __init__(self, decoder: Decoder, buffers: StaticBuffers, graphs: bool = True):
        Layers.__init__(self, decoder, 0, records=len(buffers.routed_experts) > 0)
        GraphDecoder.__init__(self, decoder, buffers, graphs)
        self.tables = buffers.tables
        self.processors = torch.cuda.get_device_properties(decoder.embedding.device).multi_processor_count
        # float32 models compute float32 matmuls without TF32
        self.precision = "ieee" if decoder.dtype == torch.float32 else "tf32"

    # ---- prompts ------------------------------------------------------------------------------------------------

    @on_every_rank
    def prefill(
        self,
        prompts: list[list[int]],
        blocks: list[list[int]],
        images: Sequence[PromptImages | None] | None = None,
    ) -> torch.Tensor:
        """Prefill: write keys and values of `prompts` to their `blocks`. Returns logits (len(prompts), V) float32."""
        cache, copy_indices = self.buffers.kv_cache, {}

        def store(layer: int, indices: list[int], stored: torch.Tensor) -> None:
            count, width, heads, size = stored.shape
            used = triton.cdiv(width, BLOCK_SIZE)
            if layer == 0:
                flat = [(i * used + at, block) for i, c in enumerate(indices) for at, block in enumerate(blocks[c])]
                copy_indices["source"], copy_indices["target"] = self._upload([list(x) for x in zip(*flat)])
            whole = torch.nn.functional.pad(stored, (0, 0, 0, 0, 0, used * BLOCK_SIZE - width))
            whole = whole.reshape(count * used, BLOCK_SIZE, heads, size).transpose(1, 2)
            cache[layer].index_copy_(0, copy_indices["target"], whole[copy_indices["source"]])

        return self.prompts(prompts, store, images)

    def _rotate(self, layer: Layer, qkv: torch.Tensor, table: RopeTable) -> None:
        cos, sin = table
        heads, size, rotated = qkv.shape[1], qkv.shape[2], self.decoder.heads + self.decoder.kv_heads
        norm = layer.qk_norm if layer.qk_norm is not None else cos
        triton_kernels.rotate[(len(qkv),)](
            qkv, cos, sin, norm, self.decoder.eps, HEADS=heads, HQK=rotated, HP=triton.next_power_of_2(rotated), D=size,
            DP=triton.next_power_of_2(size), R=cos.shape[-1], NORM=layer.qk_norm is not None, num_warps=4,
        )  # fmt: skip

    def _finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y = self.decoder.reduced(layer.out, attended)
        h = self._add_norm(x, y, layer.attention_post_norm, layer.mlp_norm, layer.gate_up)
        if layer.experts is not None:
            y = self._mixture(layer, h)
        else:
            y = self.decoder.reduced(layer.down, self._gate(layer.gate_up(h), layer.down))
        self._add_norm(x, y, layer.mlp_post_norm, layer.mlp_norm, None)
        return x

    # ---- steps --------------------------------------------------------------------------------------------------

    def _step(self, rows: int, params: SamplingParams | None) -> torch.Tensor:
        """Decode one token for `rows` rows; sample it unless params is None. Returns logits (rows, V)."""
        decoder, buffers = self.decoder, self.buffers
        self.tp.broadcast(buffers.state)  # the tokens that rank 0 has sampled
        x = decoder.embed(buffers.state[triton_kernels.TOKEN, :rows]).contiguous()
        h = self._add_norm(x, None, None, decoder.layers[0].attention_norm, decoder.layers[0].qkv)
        after = [(layer.attention_norm, layer.qkv) for layer in decoder.layers[1:]] + [(decoder.norm, decoder.head)]
        for layer, kv_cache, (next_norm, next_projection) in zip(decoder.layers, buffers.kv_cache, after):
            attended = self._paged_attention(layer, layer.qkv(h), kv_cache)
            is_fp8 = isinstance(layer.out, Fp8Projection)
            y = self._split_matmul(layer.out, attended) if is_fp8 else decoder.reduced(layer.out, attended)
            h = self._add_norm(x, y, layer.attention_post_norm, layer.mlp_norm, layer.gate_up)
            if layer.experts is not None:
                y = self._mixture(layer, h, static=True)
            else:
                y = self._split_matmul(layer.down, self._gate(layer.gate_up(h), layer.down))
            h = self._add_norm(x, y, layer.mlp_post_norm, next_norm, next_projection)
        if self.records:
            self._store_experts(rows)
        logits = decoder.project(h)
        if params is not None:
            self.sample(logits, 0, params)
        return logits

    def _paged_attention(
        self, layer: Layer, qkv: torch.Tensor, kv_cache: torch.Tensor, attends: bool = True
    ) -> torch.Tensor:
        """Rotary embedding, KV-cache write and attention: qkv (B, (HQ + 2 HK) D) -> (B, HQ D). Without attention: the
        rotated queries."""
        decoder, buffers, rows = self.decoder, self.buffers, len(qkv)
        heads, kv_heads, size = decoder.heads, decoder.kv_heads, decoder.head_dim
        group = heads // kv_heads
        shape = {"HQ": heads, "HK": kv_heads, "G": group, "GP": max(16, triton.next_power_of_2(group))}
        shape |= {"D": size, "DP": max(16, triton.next_power_of_2(size))}
        splits = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // (rows * kv_heads)), buffers.width) if attends else 1
        out = qkv.new_empty(rows, heads * size)
        chunks = (rows, kv_heads, splits, shape["GP"], shape["DP"] + 2) if splits > 1 else (1,)
        partial = torch.empty(chunks, dtype=torch.float32, device=qkv.device)
        cos, sin = self.tables[layer.rope]
        norm = layer.qk_norm if layer.qk_norm is not None else cos
        softcap = decoder.attention_softcap
        common = (decoder.scaling, decoder.eps, softcap or 1.0, buffers.slots, buffers.width, splits)
        options = {"SOFTCAP": softcap is not None, "SPLIT": splits > 1, "SP": triton.next_power_of_2(splits)}
        options |= {"BLOCK_SIZE": BLOCK_SIZE, "PRECISION": self.precision}
        options["WINDOW"] = (layer.window or 0) if attends else -1
        triton_kernels.attend[(rows, kv_heads, splits)](
            qkv, kv_cache, buffers.table, buffers.state, cos, sin, norm, out, partial, buffers.arrived, *common,
            **shape, **options, R=cos.shape[1], NORM=layer.qk_norm is not None, **attention_launch(rows, size),
        )  # fmt: skip
        return out

    def _split_matmul(self, projection: Projection, x: torch.Tensor | Quantized) -> torch.Tensor:
        """Project x (N, in). If a single GEMM would leave SMs idle, use split-K and return partial sums
        (parts, N, out) float32; otherwise return (N, out). `add_norm` adds the partial sums up, which saves cuBLAS's
        separate reduction kernel."""
        if isinstance(projection, Fp8Projection):
            x = projection.quantized(x)
            if x.scales is None or x.rows > fp8_triton.FEW_SPLIT_ROWS or projection.bias is not None:
                return projection(x)
            return fp8_triton.matmul_few_rows(*x, *projection.weight[:2], splits=fp8_triton.SPLITS)
        rows, (width, outputs) = len(x), projection.matrix.shape
        tiles = triton.cdiv(rows, 64) * triton.cdiv(outputs, 64)
        narrow = x.dtype in (torch.bfloat16, torch.float16) and projection.bias is None
        if not narrow or width % (64 * _K_SPLITS) or 2 * tiles > self.processors or self.tp.size > 1:
            return self.decoder.reduced(projection, x)
        y, matrix = x.unflatten(1, (_K_SPLITS, -1)).transpose(0, 1), projection.matrix.unflatten(0, (_K_SPLITS, -1))
        return torch.bmm(y, matrix, out_dtype=torch.float32)

    def _inputs(self, rows: int, width: int, projection: Projection | None) -> tuple[torch.Tensor | Quantized, dict]:
        """Memory for the inputs (rows, width) of a projection, in FP8 if it reads them so, and the arguments with which
        a kernel writes them."""
        device = self.decoder.embedding.device
        if isinstance(projection, Fp8Projection) and projection.scales is not None:
            inputs = Quantized(*fp8_triton.empty_rows(rows, width, device), rows)
            return inputs, {"out": inputs.codes, "scales": inputs.scales, "padded": len(inputs.codes), "FP8": True}
        out = torch.empty(rows, width, dtype=self.decoder.dtype, device=device)
        return out, {"out": out, "scales": out, "padded": 0, "FP8": False}

    def _add_norm(self, x, y, post_norm, weight, projection: Projection | None) -> torch.Tensor | Quantized:
        """x += y (or its post norm). x: (N, H); y: (N, H) or its partial sums. Returns the norm of x (N, H), as the
        projection reads it."""
        width = x.shape[1]
        block = triton.next_power_of_2(width)
        h, into = self._inputs(len(x), width, projection)
        triton_kernels.add_norm[(len(x),)](
            x, x if y is None else y, weight if post_norm is None else post_norm, weight, eps=self.decoder.eps, H=width,
            BLOCK=block, PARTS=0 if y is None else y.numel() // x.numel(), POST=post_norm is not None,
            DTYPE=getattr(triton.language, str(self.decoder.dtype).removeprefix("torch.")), **into,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
        return h

    def _gate(self, gate_up: torch.Tensor, projection: Projection) -> torch.Tensor | Quantized:
        """Gated activation: (N, 2 I) -> (N, I), as the projection reads it."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        y, into = self._inputs(rows, width, projection)
        grid = (rows, triton.cdiv(width, 1024))
        triton_kernels.gate[grid](gate_up, I=width, BLOCK=1024, ACTIVATION=self.decoder.activation, **into, num_warps=4)
        return y


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from running. It may free the CUDA graphs of an engine that is no longer used, and
    CUDA does not permit that while a stream of the same thread is capturing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _capture_stream() -> torch.cuda.Stream:
    """The stream of all captures. One stream, because cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream()


def addresses(decoder: Decoder) -> tuple[int, ...]:
    """Addresses of the weights, which captured graphs contain."""
    if not isinstance(decoder, Decoder):
        return decoder.addresses()
    pointers: list[int] = []

    def visit(value) -> None:
        if isinstance(value, torch.Tensor):
            pointers.append(value.data_ptr())
        elif isinstance(value, Layer | Projection | Experts):
            for field in fields(value):
                visit(vars(value)[field.name])

    for value in (decoder.embedding, decoder.head, decoder.norm, *decoder.layers):
        visit(value)
    return tuple(pointers)


def upload(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy values to the device asynchronously."""
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
