"""The checkpoint of an engine. The folder layout does not depend on the number of ranks, so any run can load it.

huggingface/    config, and the weights if one process holds them all or `hf_model` is in save_contents
lora_adapter/   the adapters of a LoRA run
shards/         torch.distributed.checkpoint: optimizer state, and the weights if they are sharded
extra.pt        the learning-rate schedule
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import serialization
from torch.utils._pytree import tree_leaves, tree_map_only

from verl.checkpoints.manifest import DELETE
from verl.checkpoints.safetensors_files import SafetensorsFiles
from verl.checkpoints.shard_files import ShardPlanner, ShardReader, unpickling_fault
from verl.engines.memory import HOST, HostMemory
from verl.engines.optimizer import AdamW8bit
from verl.modeling.huggingface import load_pretrained

#: magnitude beyond which a weight has diverged; those of pretrained models are below 1e3
LARGEST_WEIGHT = 1e6
#: threads of a rank that copy and write, and elements of a shard from which one more file is written
WRITERS, FILE_ELEMENTS = 8, 2**26


class ShardWriter:
    """Writes nested state; every rank writes its own shards.

    The constructor plans the write and `finish` collects the results; both are collective calls. `write` does not
    communicate, so it can run in a background thread during training.

    Args:
        state: nested dictionary of tensors, or another form that `planner` supports.
        planner: selects the values that this rank writes; default: torch's.

    Raises:
        OSError: on every rank, if one of them cannot start the write.
    """

    def __init__(self, folder: Path, state: dict[str, Any], planner: dcp.SavePlanner | None = None) -> None:
        self._folder = folder
        self._ranks = _DistWrapper(None, dist.is_initialized(), 0)
        self._files = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # several threads: no shared stream
        self._planner = planner or dcp.DefaultSavePlanner()
        self._metadata: Metadata | None = None  # on the first rank
        with self._raise_os_error():
            self._plan = self._ranks.reduce_scatter("plan", lambda: self._plan_local(state), self._plan_all)

    def _plan_local(self, state: dict[str, Any]) -> dcp.SavePlan:
        first = self._ranks.is_coordinator
        self._planner.set_up_planner(state, self._files.storage_meta(), first)
        self._files.set_up_storage_writer(first)
        return self._files.prepare_local_plan(self._planner.create_local_plan())

    def _plan_all(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._files.prepare_global_plan(plans)

    def write(self) -> list[WriteResult]:
        """Write the shards of this rank, in several files at once. Returns the input of `finish`.

        Raises file system errors. The manifest of a checkpoint has its checksums, so the records have none.
        """
        plan = self._planner.finish_plan(self._plan)
        items = sorted(plan.items, key=_elements, reverse=True)
        files = min(WRITERS, 1 + sum(map(_elements, items)) // FILE_ELEMENTS)
        prefixes = [plan.storage_data.prefix + (f"{i}_" if i else "") for i in range(files)]
        parts = [
            replace(plan, items=items[i::files], storage_data=replace(plan.storage_data, prefix=prefix))
            for i, prefix in enumerate(prefixes)
        ]
        with serialization.config.patch("save.compute_crc32", False), ThreadPoolExecutor(files) as threads:
            written = list(threads.map(lambda part: self._files.write_data(part, self._planner).wait(), parts))
        return [result for results in written for result in results]

    def finish(self, written: Callable[[], list[WriteResult]]) -> None:
        """Write the metadata of all shards. All ranks call it.

        Args:
            written: returns the result of this rank's `write`, or raises its error.

        Raises:
            OSError: on every rank, if one of them failed to write.
        """
        with self._raise_os_error():
            self._ranks.all_reduce("write", written, lambda results: self._files.finish(self._metadata, results))

    @contextmanager
    def _raise_os_error(self) -> Iterator[None]:
        try:
            yield
        except dcp.api.CheckpointException as error:  # a BaseException, which `except Exception` misses
            errors = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
            raise OSError(f"{self._folder} could not be written: {errors}") from error


def _elements(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else item.tensor_data.chunk.sizes.numel()


def host_copy(state: Any) -> Any:
    """Copy all tensors of nested state to host memory, so that training can continue. Sharded tensors stay sharded."""
    memory = HostMemory()
    memory.reserve(value.detach() for value in tree_leaves(state) if isinstance(value, torch.Tensor))

    def copy(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone() if value.device == HOST else memory.move(value.detach(), HOST)

    copied = tree_map_only(torch.Tensor, copy, state)
    memory.wait()
    return copied


def on_host(state: Any) -> Any:
    """Copy a full tensor to host memory. Shards are written from their device."""
    return state.cpu() if isinstance(state, torch.Tensor) else state


def persistent_buffers(module: nn.Module, keep: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """The buffers that are part of a saved model, each passed through `keep`."""
    saved = module.state_dict().keys()
    return {name: keep(buffer) for name, buffer in module.named_buffers() if name in saved}


class CheckpointWriter:
    """Writes one checkpoint at a time, optionally in a background thread.

    `start` and `finish` are collective calls. The interpreter does not exit during a write.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._shards: ShardWriter | None = None
        self._write: Future[list[WriteResult]] | None = None

    def start(
        self,
        folder: Path,
        shards: dict[str, Any],
        write_files: Callable[[], None],
        background: bool,
        planner: dcp.SavePlanner | None = None,
    ) -> None:
        """Write the shards and then the rest. The previous write must be finished.

        Args:
            shards: nested state for `folder / "shards"`; may be empty.
            background: return immediately; `finish` waits for the write. The state must not change until then.

        Raises:
            OSError: the checkpoint cannot be written; raised on every rank if shards cannot be written.
        """
        self._shards = ShardWriter(folder / "shards", shards, planner) if shards else None
        if background:
            self._write = self._threads.submit(self._run, self._shards, write_files)
            return
        self._write = Future()
        try:
            self._write.set_result(self._run(self._shards, write_files))
        except Exception as error:
            self._write.set_exception(error)
        self.finish()

    @staticmethod
    def _run(shards: ShardWriter | None, write_files: Callable[[], None]) -> list[WriteResult]:
        written = shards.write() if shards is not None else []
        write_files()
        return written

    def is_done(self) -> bool:
        """Whether the write of this rank has ended. `finish` raises its error, if any."""
        return self._write is None or self._write.done()

    def finish(self) -> None:
        """Wait for the running write and complete it. Raises its error once."""
        if self._write is None:
            return
        wait([self._write])
        write, shards, self._write, self._shards = self._write, self._shards, None, None
        if shards is None:
            write.result()
        else:
            shards.finish(write.result)


def open_shards(folder: Path) -> ShardReader:
    """The reader of the shards of a checkpoint. Raises ValueError if there are none, or .metadata cannot be read."""
    shards = folder / "shards"
    if not shards.is_dir():
        raise ValueError(f"the checkpoint has no shards (expected {shards}): was it saved without them?")
    reader = ShardReader(shards)
    try:
        reader.read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{shards}: the file .metadata cannot be read: {error}") from error
    return reader


def load_shards(folder: Path, state: dict[str, Any], planner: dcp.LoadPlanner | None = None) -> None:
    """Load nested state, or another form that `planner` supports, in place.

    Raises:
        ValueError: the contents of the folder differ.
    """
    reader = open_shards(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            planner = planner or ShardPlanner()
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
    except (RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        failures = getattr(error, "failures", {})  # a CheckpointException has rank -> (error, stack)
        first = next((failed for failed, _ in failures.values()), error)
        raise ValueError(
            f"{folder} contains a different model, is damaged, or lacks some of load_contents: "
            f"{unpickling_fault(first)}"
        ) from error


def model_state(model: nn.Module) -> dict[str, Any]:
    """The weights by name, with their sharding."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer state by parameter name, independent of the sharding."""
    _fill_state(optimizer)
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the state of parameters that never had a gradient, if others have a state.

    An example is a vision tower in a run that has seen no image. A checkpoint has the state of every trained parameter.
    """
    like, state = next(((p, state) for p, state in optimizer.state.items() if state), (None, {}))
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    for parameter in (p for p in trained if state and not optimizer.state.get(p)):
        if isinstance(optimizer, AdamW8bit):
            optimizer.initialize(parameter)
            continue
        for key, value in state.items():
            is_moment = value.shape == like.shape and key != "step"
            initial = torch.zeros_like(parameter, dtype=value.dtype) if is_moment else torch.zeros_like(value)
            optimizer.state[parameter][key] = initial.detach()


def trained_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The trained parameters by name, and their optimizer state as `name (state)`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            tensors[name] = parameter.detach()
            state = optimizer.state.get(parameter, {})
            floats = {key: value for key, value in state.items() if value.is_floating_point()}  # no 8-bit codes
            tensors |= {f"{name} ({key})": value for key, value in floats.items() if key != "step"}
    return tensors


def largest_plausible(name: str) -> float:
    """The magnitude beyond which a tensor of `trained_state` is broken: finite for optimizer state, 1e6 for weights."""
    return torch.finfo(torch.float32).max if name.endswith(")") else LARGEST_WEIGHT


def are_broken(tensors: Mapping[str, torch.Tensor]) -> list[bool]:
    """Whether each tensor contains NaN or a magnitude beyond `largest_plausible`.

    There is one synchronization if no norm is above 1e6.
    """
    values = [t if t.numel() else t.new_zeros(1) for t in tensors.values()]
    # No value is above the Euclidean norm, which is computed faster than the largest magnitude. It can overflow.
    norms = torch.stack([n if n.dtype == torch.float32 else n.float() for n in torch._foreach_norm(values)])
    if bool((norms <= LARGEST_WEIGHT).all()):  # the smaller of both limits
        return [False] * len(values)
    limits = [largest_plausible(name) for name in tensors]
    return [
        not norm <= limit and not value.abs().max().item() <= limit
        for norm, limit, value in zip(norms.tolist(), limits, values, strict=True)
    ]


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer state from the shards of a folder."""
    state = {"optimizer": optimizer_state(model, optimizer)}
    load_shards(folder, state)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def load_model(folder: Path, model: nn.Module, module: nn.Module) -> None:
    """Restore weights from `huggingface/` if it contains them, otherwise from the shards.

    Args:
        model: the module with the parameter names of the shards.
        module: the HuggingFace module inside of it.
    """
    if list((folder / "huggingface").glob("*.safetensors")):
        load_weights(module, folder / "huggingface")
        return
    state = {"model": model_state(model)}
    load_shards(folder, state)  # in place: the tensors of the state are the parameters


def load_extra(folder: Path) -> Any:
    """The contents of `extra.pt`. Raises ValueError if the checkpoint was saved without it."""
    path = folder / "extra.pt"
    if not path.is_file():
        raise ValueError(f"the checkpoint has no extra.pt (expected {path}): was it saved without it (save_contents)?")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is damaged, or was not written by this library (only tensors and plain values are read): "
            f"{unpickling_fault(error)}: {DELETE}"
        ) from error


def save_description(module: nn.Module, folder: Path) -> None:
    """Write the config and generation config of a HuggingFace folder, without weights."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def load_weights(module: nn.Module, folder: Path) -> None:
    """Load the safetensors of a HuggingFace folder into `module`. Every parameter must occur exactly once.

    The files may have the names and the layout in which the family is published, such as one tensor per expert.
    """
    files = SafetensorsFiles(folder)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers()}
    saved = files.shapes()
    loaded = {id(parameters[name]) for name in saved if name in parameters}
    if any(id(p) not in loaded for p in parameters.values()) or set(saved) - set(parameters) - buffers:
        _load_published(module, folder)
        return
    shapes = [name for name, shape in saved.items() if name in parameters and tuple(parameters[name].shape) != shape]
    if shapes:
        raise _different_model(module, folder, f"mismatched shapes {shapes[:3]}")
    with torch.no_grad():
        for name in saved.keys() & parameters.keys():
            copy_into(parameters[name], files.read(name))


@torch.no_grad()
def _load_published(module: nn.Module, folder: Path) -> None:
    """`load_weights` of files in the published format, which transformers converts to that of the module."""
    try:
        saved, _ = load_pretrained(type(module), str(folder), module.config, module.dtype)
    except ValueError as error:
        raise _different_model(module, folder, str(error)) from error
    source = dict(saved.named_parameters()) | dict(saved.named_buffers())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        copy_into(tensor, source.pop(name).detach())


def _different_model(module: nn.Module, folder: Path, difference: str) -> ValueError:
    return ValueError(
        f"{folder} contains a different model than this {type(module).__name__}: {difference}. Use the model that the "
        "run started with, or start a fresh run (a new trainer.experiment_name or trainer.default_local_dir)"
    )


def copy_into(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a parameter, sharded or not."""
    if isinstance(parameter, DTensor):
        full = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
