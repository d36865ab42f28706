"""Availability of megatron-core, and its process groups."""

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl.config import schema
from verl.engines.base import EngineSpec, TrainEngine
from verl.engines.megatron.checks import parallel_sizes
from verl.engines.megatron.traits import PACKAGE, TESTED, TRAITS
from verl.engines.parallel import init_process_group, timeout_of
from verl.registry import load_object

#: device types that megatron-core runs on; tests on a CPU add theirs after replacing what needs CUDA
DEVICE_TYPES = {"cuda"}


def make_megatron(spec: EngineSpec) -> TrainEngine:
    """Factory of the strategy "megatron"."""
    check_installed()
    return load_object("verl.engines.megatron.engine", "MegatronEngine")(spec)  # at use: imports megatron-core


def check_installed() -> None:
    """Raise ValueError if megatron-core is missing or of another minor release than the tested one."""
    if (missing := TRAITS.missing_package()) is not None:
        raise ValueError(missing)
    installed = importlib.metadata.version("megatron-core")
    if installed.split(".")[:2] != TESTED.split(".")[:2]:
        raise ValueError(
            f"strategy=megatron: expected megatron-core {TESTED}, found {installed}: {PACKAGE.how_to_install}"
        )


def check_device(device: torch.device) -> None:
    """Raise ValueError if megatron-core is not installed, or does not run on the device."""
    check_installed()
    if device.type not in DEVICE_TYPES:
        raise ValueError(
            f"strategy=megatron needs a GPU, found {device}: use strategy=fsdp; to plan only, verl plan --gpus N"
        )


@dataclass(frozen=True)
class ParallelRanks:
    """The position of this rank in the tensor (t), context (c), pipeline (p) and data (d) dimensions.

    The experts of a layer have dimensions of their own: expert tensor (et), expert (e), and data (ed) for the rest.
    """

    t: int
    t_size: int
    c: int
    c_size: int
    p: int
    p_size: int
    d: int
    d_size: int
    et: int
    et_size: int
    e: int
    e_size: int
    ed: int
    groups: Any  # megatron-core's module `parallel_state`

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes the files that no other rank has."""
        return self.p == 0 and self.t == 0 and self.c == 0 and self.d == 0

    @property
    def replicas(self) -> tuple[int, int]:
        """The replica of the dense layers, and that of the experts, which this rank has a shard of."""
        return self.d * self.c_size + self.c, self.ed

    def last_stage(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.groups.get_pipeline_model_parallel_group())[-1]


def join_groups(spec: EngineSpec, megatron: schema.MegatronConfig) -> ParallelRanks:
    """Create the process groups of megatron-core, or check that those of another engine have the same sizes.

    Raises:
        ValueError: the sizes do not divide the ranks, or an engine of this process has others.
    """
    from megatron.core import parallel_state, tensor_parallel

    sizes, experts = parallel_sizes(megatron, spec.world_size)
    if spec.world_size == 1 and not dist.is_initialized():  # megatron-core needs a group of one rank, too
        backend = "cpu:gloo,cuda:nccl" if spec.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    init_process_group(spec.device, spec.timeout)
    virtual = megatron.virtual_pipeline_model_parallel_size
    if not parallel_state.model_parallel_is_initialized():
        minutes = max(1, int(timeout_of(dist.group.WORLD).total_seconds() // 60))
        parallel_state.initialize_model_parallel(
            **sizes,
            **experts,
            virtual_pipeline_model_parallel_size=virtual,
            distributed_timeout_minutes=minutes,
            create_gloo_process_groups=False,
        )
    current = {
        name: getattr(parallel_state, f"get_{name.removesuffix('_size')}_world_size")() for name in sizes | experts
    }
    if current != sizes | experts:
        raise ValueError(
            f"megatron: all engines of a process need the same parallel sizes, found {current} and {sizes | experts}"
        )
    # recomputation saves and restores this state; weights are read from files, not initialized
    tensor_parallel.model_parallel_cuda_manual_seed(megatron.seed)
    return ParallelRanks(
        t=parallel_state.get_tensor_model_parallel_rank(),
        t_size=sizes["tensor_model_parallel_size"],
        c=parallel_state.get_context_parallel_rank(),
        c_size=sizes["context_parallel_size"],
        p=parallel_state.get_pipeline_model_parallel_rank(),
        p_size=sizes["pipeline_model_parallel_size"],
        d=parallel_state.get_data_parallel_rank(),
        d_size=parallel_state.get_data_parallel_world_size(),
        et=parallel_state.get_expert_tensor_parallel_rank(),
        et_size=experts["expert_tensor_parallel_size"],
        e=parallel_state.get_expert_model_parallel_rank(),
        e_size=experts["expert_model_parallel_size"],
        ed=parallel_state.get_expert_data_parallel_rank(),
        groups=parallel_state,
    )
