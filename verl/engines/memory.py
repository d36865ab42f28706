"""Memory of a training engine: offloading to the host, and the number of tokens that fit into GPU memory.

The bytes that the layers keep for the backward pass are measured once, per token, from the tensors that autograd saves
in two small forward passes. Together with the free memory they give the number of tokens that fit: with all
activations kept, or with activation checkpointing (Chen et al. 2016, arXiv 1604.06174), which keeps the activations of
one layer at a time and costs another forward pass.
"""

import logging
import mmap
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from verl.engines.optimizer import AdamW8bit
from verl.engines.token_budget import MAX_AUTO_TOKENS, WORKING_LAYERS, ActivationBytes, tower_activations
from verl.modeling.log_probs import CHUNK_ELEMENTS, KEPT_SHARE
from verl.modeling.vision import tower_of, tower_sizes

HOST = torch.device("cpu")
#: bytes from which a host copy has separate pages, and threads that allocate them
_LARGE, _THREADS = 2**21, 8
logger = logging.getLogger("verl.engines")

#: lengths of the two probe sequences; their difference removes what does not depend on the number of tokens
_SHORT, _LONG = 128, 384


# ---- offloading -----------------------------------------------------------------------------------------------------


class HostMemory:
    """Page-locked host memory for copies of the tensors of a GPU.

    The memory of a tensor that is back on the GPU is kept for the next one of its size. Copies run at the speed of the
    bus (55 GB/s), those into new memory of the allocator at 1.5 GB/s: the driver waits for each of its small pages.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by size
        self._used: dict[int, torch.Tensor] = {}  # by address
        self._locked: list[torch.Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def reserve(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate the memory for copies of those of the tensors that are on a GPU, unless it is there."""
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        counts = Counter(t.nbytes for t in local if t.is_cuda)
        sizes = [size for size, count in counts.items() for _ in range(count - len(self._free[size]))]
        with ThreadPoolExecutor(_THREADS) as threads:
            for memory in threads.map(_allocate, sizes):
                self._free[memory.nbytes].append(memory)
                if memory.is_pinned():
                    continue
                error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
                if error.value:
                    logger.warning("%d bytes cannot be page-locked (%s), so copies are slower", memory.nbytes, error)
                else:
                    self._locked.append(memory)

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on another device. The copy is asynchronous, in the current stream."""
        if isinstance(tensor, DTensor):
            local = self.move(tensor.to_local(), device)
            layout = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
            return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **layout)
        if tensor.is_cuda and device == HOST:
            return self._offload(tensor)
        return self._restore(tensor, device) if device.type == "cuda" and tensor.device == HOST else tensor.to(device)

    def wait(self) -> None:
        """Wait for the copies to the host."""
        if self._used:
            torch.cuda.synchronize()

    def _offload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reserve([tensor])
        memory = self._free[tensor.nbytes].pop()
        self._used[memory.data_ptr()] = memory
        strides = torch.empty_like(tensor, device="meta").stride()  # the order of its dimensions, without gaps
        return memory.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor, non_blocking=True)

    def _restore(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        tensor = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        memory = self._used.pop(host.data_ptr(), None)
        if memory is not None:  # later copies into it come after this one in the stream
            self._free[memory.nbytes].append(memory)
        return tensor


def _allocate(size: int) -> torch.Tensor:
    """Host memory (size,) uint8. If it is large, its pages are large and present, but not locked."""
    if size < _LARGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would share pages that a GPU writes
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _unlock(memories: list[torch.Tensor]) -> None:
    for memory in memories:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class OnDevice:
    """Reentrant context in which some state is on the device. Outside of it, the state is in host memory."""

    def __init__(self, move: Callable[[torch.device], object], device: torch.device):
        self._move = move
        self._device = device
        self._depth = 0
        move(HOST)

    def __enter__(self) -> None:
        if not self._depth:
            self._move(self._device)
        self._depth += 1

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._move(HOST)


def move_module(module: nn.Module, memory: HostMemory, device: torch.device) -> None:
    """Move parameters and buffers, in place."""
    if device == HOST:
        memory.reserve([*module.parameters(), *module.buffers()])
    module._apply(lambda tensor: memory.move(tensor, device))  # as `module.to`, which FSDP2 follows
    memory.wait()


def move_optimizer(optimizer: torch.optim.Optimizer, memory: HostMemory, device: torch.device) -> None:
    """Move the optimizer state. Step counts (scalars) stay where the optimizer created them."""
    if device == HOST:
        values = (value for state in optimizer.state.values() for value in state.values())
        memory.reserve([value for value in values if isinstance(value, torch.Tensor) and value.dim()])
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = memory.move(value, device)
    memory.wait()


# ---- tokens that fit ------------------------------------------------------------------------------------------------


def measure_activations(run: Callable[[int], object], module: nn.Module, vocab_size: int) -> ActivationBytes:
    """Bytes per token that the layers of `module` keep for the backward pass.

    Args:
        run: runs a forward pass over the given number of tokens and returns its outputs.
        vocab_size: tensors with this last dimension (logits) are not counted; `logits_bytes` estimates them.
    """
    layers = module.config.get_text_config().num_hidden_layers
    hidden = module.config.get_text_config().hidden_size
    per_token = saved_bytes_per_token(run, vocab_size)
    one_layer = per_token / layers
    # the residual stream; fused layers receive the last branch separately, in 16 bits
    inputs = layers * hidden * (torch.float32.itemsize + torch.bfloat16.itemsize)
    return ActivationBytes(per_token + WORKING_LAYERS * one_layer, inputs + (1 + WORKING_LAYERS) * one_layer)


def saved_bytes_per_token(run: Callable[[int], object], vocab_size: int) -> float:
    """Bytes per token that autograd saves in a forward pass; arguments as in `measure_activations`."""
    return (_saved_bytes(run, _LONG, vocab_size) - _saved_bytes(run, _SHORT, vocab_size)) / (_LONG - _SHORT)


def with_images(activations: ActivationBytes, module: nn.Module, itemsize: int) -> ActivationBytes:
    """`measure_activations` of a batch with images, with `itemsize` bytes per element: every token counts as one of an
    image.

    A tower with unknown sizes (`tower_sizes`) is not counted.
    """
    trained = [p for p in tower_of(module)[1].parameters() if p.requires_grad]
    sizes = tower_sizes(module.config)
    if not trained or sizes is None:  # a frozen tower keeps no activations
        return activations
    return activations.plus(tower_activations(*sizes, itemsize, max(itemsize, trained[0].dtype.itemsize)))


def _saved_bytes(run: Callable[[int], object], tokens: int, vocab_size: int) -> int:
    """Bytes of the storages behind all tensors that autograd saves, each storage counted once."""
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] != (vocab_size,):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        alive = run(tokens)  # keeps the graph, so that no address is reused
    del alive
    return sum(storages.values())


def free_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that torch can still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def update_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an update needs in addition to activations: gradients, and Adam's moments before the first step."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters if p.requires_grad)
    sizes = [(p.numel(), p.dtype.itemsize) for p in local]
    gradients = sum(count * size for count, size in sizes)
    is_8bit = isinstance(optimizer, AdamW8bit)
    return gradients + (0 if optimizer.state else 2 * (sum(n for n, _ in sizes) if is_8bit else gradients))


def logits_bytes(vocab_size: int, itemsize: int, device: torch.device) -> int:
    """Upper bound of the bytes that the output layer needs: saved logits, one chunk and its gradient.

    Args:
        itemsize: bytes per logit.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    saved = min(KEPT_SHARE * total, MAX_AUTO_TOKENS * vocab_size * itemsize)
    chunk = min(CHUNK_ELEMENTS[device.type], MAX_AUTO_TOKENS * vocab_size)
    return int(saved + 3 * chunk * itemsize)
