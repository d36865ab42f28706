"""What an engine writes and reads: the same folder for one device and for many ranks, so that either loads the other's.

huggingface/    config, and the weights when one process holds them all (or `hf_model` asks for them)
lora_adapter/   the adapters, where these alone are trained
shards/         torch.distributed.checkpoint: optimizer state, and the weights when they are sharded
extra.pt        the learning-rate schedule
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.utils.shard_files import ShardPlanner, ShardReader


def save_shards(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write nested state; every rank its own shards. group: through which the ranks agree, None for the default.

    Raises OSError, on every rank, when one of them cannot write.
    """
    if not state:
        return
    try:
        with warnings.catch_warnings():  # torch remarks that without a process group it saves from this process alone
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(state, checkpoint_id=folder / "shards", process_group=group, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:  # a BaseException, which would pass by handlers of errors
        causes = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
        raise OSError(f"{folder / 'shards'} could not be written: {causes}") from error


def host_copy(state: Any) -> Any:
    """Nested state with every tensor copied to host memory, shards as shards: what is trained on may change then."""
    if isinstance(state, dict):
        return {name: host_copy(value) for name, value in state.items()}
    if isinstance(state, DTensor):
        local = state.to_local().to("cpu", copy=True)
        layout = {"shape": state.shape, "stride": state.stride(), "run_check": False}
        return DTensor.from_local(local, state.device_mesh, state.placements, **layout)
    return state.to("cpu", copy=True) if isinstance(state, torch.Tensor) else state


class BackgroundWriter:
    """Writes in a thread of its own, one thing at a time. The interpreter does not end before it is done."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write, after the one before."""
        self.wait()
        self._write = self._threads.submit(write)

    def is_done(self) -> bool:
        """Whether nothing is being written any more; `wait` tells whether it went well."""
        return self._write is None or self._write.done()

    def wait(self) -> None:
        """Wait for the write under way. Raises its error, once."""
        try:
            if self._write is not None:
                self._write.result()
        finally:
            self._write = None


def load_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fill nested state in place. Raises ValueError when the folder has other contents."""
    if not (folder / "shards").is_dir():
        raise ValueError(f"the checkpoint has no shards (looked at {folder / 'shards'}): was it saved without them?")
    reader = ShardReader(folder / "shards")
    try:
        reader.read_metadata()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=reader, planner=ShardPlanner(), no_dist=not dist.is_initialized())
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder / 'shards'}: the file .metadata cannot be read: {error}") from error
    except (RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise ValueError(f"{folder} holds another model, or lacks what load_contents names: {error}") from error


def model_state(model: nn.Module) -> dict[str, Any]:
    """The weights by name, sharded as they are."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters, so that it does not depend on how they are sharded."""
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state from the shards of a folder."""
    state = {"optimizer": optimizer_state(model, optimizer)}
    load_shards(folder, state)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def load_model(folder: Path, model: nn.Module, module: nn.Module) -> None:
    """Restore weights: from `huggingface/` when they are there, from the shards otherwise.

    model: what shards are named after; module: the HuggingFace module in it.
    """
    if list((folder / "huggingface").glob("*.safetensors")):
        load_weights(module, folder / "huggingface")
        return
    state = {"model": model_state(model)}
    load_shards(folder, state)  # in place: the tensors of the state are the parameters


def save_description(module: nn.Module, folder: Path) -> None:
    """What a HuggingFace folder of the model holds beside its weights: its config, and how it ends its answers."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def load_weights(module: nn.Module, folder: Path) -> None:
    """Copy the safetensors of a HuggingFace folder into `module`, every parameter exactly once."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"the checkpoint has no weights: no *.safetensors in {folder}")
    present = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in module.named_buffers()}
    saved: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            saved |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    there = {id(present[name]) for name in saved if name in present}
    missing = [name for name, p in present.items() if id(p) not in there]
    unknown = sorted(set(saved) - set(present) - buffers)
    shapes = [name for name, shape in saved.items() if name in present and tuple(present[name].shape) != shape]
    if missing or unknown or shapes:
        raise ValueError(
            f"{folder} holds another model than {type(module).__name__} here: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, of other shape {shapes[:3]}"
        )
    with torch.no_grad():
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name in present:
                        copy_into(present[name], tensors.get_tensor(name))


def copy_into(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a parameter, sharded or not."""
    if isinstance(parameter, DTensor):
        full = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
