"""Traits of rollout engines: what settings, checks and the planner must know of an engine without importing it.

A built-in engine is a folder beside this file with `traits.py`, which holds `TRAITS`, and `factory.py`, which holds
`make_<name>`. A custom engine passes its traits to `register_rollout_engine`. This module imports neither torch nor an
engine.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verl.utils.packages import Package


@dataclass(frozen=True)
class EngineTraits:
    """The traits of a rollout engine.

    The traits that are None by default say whether settings apply: None is not declared, so that no setting is reported
    as without effect.
    """

    name: str = ""  # the value of `rollout.name`
    package: Package | None = None  # the package that it needs
    cuda_graphs: bool | None = None  # decoding uses CUDA graphs (`enforce_eager`)
    own_dtype: bool | None = None  # it computes in `rollout.dtype` instead of the dtype of the trainer's module
    # it frees its KV cache during the update, and bounds it (`free_cache_engine`, `gpu_memory_utilization`)
    sleeps: bool | None = None
    # it batches tokens by settings (`max_num_batched_tokens`, `max_model_len`, `enable_chunked_prefill`,
    # `enable_prefix_caching`)
    own_scheduler: bool | None = None
    tensor_parallel: bool = True  # several ranks can generate together (`tensor_model_parallel_size`)
    batch_invariant: bool = False  # it supports `rollout.deterministic`
    fp8: bool = False  # it generates with the layers of `model.quantization=fp8`
    shares_weights: bool = False  # it can generate with the trainer's module
    own_memory_share: bool = False  # it reserves `gpu_memory_utilization` of the device when it wakes up
    own_process: bool = False  # rank 0 starts the processes of the other ranks of a tensor-parallel group
    # a tensor-parallel group may be the ranks of a sharded training engine, in their order
    joins_training_groups: bool = False
    records_routing: bool | None = None  # it reports the experts that it chooses (`enable_rollout_routing_replay`)
    speculates: bool = False  # it verifies drafts (`speculative.method`)
    # the model types with images whose log-probs have been compared with those of training; (): it generates from text
    # only; None: the engine itself rejects a model that it does not support
    images: tuple[str, ...] | None = None
    # "module:function" that raises ValueError for a model, called with the names of its architectures, its config by
    # key, the tensor-parallel size and `rollout.deterministic`
    check_model: str = ""

    @property
    def is_external(self) -> bool:
        """Whether it is an engine of another library, which takes arguments (`engine_kwargs`)."""
        return self.package is not None

    def missing_package(self) -> str | None:
        """The error message if the package is not installed."""
        return None if self.package is None else self.package.missing(self.name, "native")


@functools.cache
def built_in_engines() -> Mapping[str, EngineTraits]:
    """Name -> traits of the engines of this package."""
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/traits.py"))
    declared = [importlib.import_module(f"verl.rollout.{name}.traits").TRAITS for name in folders]
    return {traits.name: traits for traits in declared}


_CUSTOM: dict[str, EngineTraits] = {}


def declare_traits(name: str, traits: EngineTraits) -> None:
    """Declare the traits of a custom engine."""
    _CUSTOM[name] = replace(traits, name=name)


def engine_traits(name: str) -> EngineTraits:
    """The traits of an engine; of one that has not declared any, the defaults."""
    return built_in_engines().get(name) or _CUSTOM.get(name) or EngineTraits(name)


def check_speculation(name: str, method: str | None) -> None:
    """Raise ValueError if an engine does not verify the drafts of `rollout.speculative.method`."""
    if method is not None and not engine_traits(name).speculates:
        raise ValueError(f"{method!r}, but rollout.name={name} verifies no drafts: use rollout.name=native, or null")


def engine_with(trait: str) -> Callable[[str], bool]:
    """A condition of `active_when`: the engine has the trait, or does not declare whether it has."""
    return lambda name: getattr(engine_traits(name), trait) is not False
