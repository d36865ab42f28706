"""Traits of training engines: what settings, checks and the planner must know of a `strategy` without importing it.

A built-in engine is listed here, or is a folder beside this file with `traits.py`, which holds `TRAITS`.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verl.utils.packages import Package


@dataclass(frozen=True)
class TrainTraits:
    """The traits of a training engine."""

    name: str  # the value of `strategy`
    factory: str = ""  # "module:function" of a spec that makes the engine
    package: Package | None = None  # the package that it needs
    # ranks compute with slices of the model (tensor, pipeline, expert), by the settings of the section `megatron`;
    # False: weights are sharded and gathered layer by layer, by those of the FSDP section. None: not declared, so that
    # no setting is reported as without effect.
    model_parallel: bool | None = None
    router_replay: bool = False  # it replays the choices of the routers of a mixture of experts
    candidates: bool = True  # it computes the log-probs of several tokens per position (`engines.base.NUM_CANDIDATES`)
    # it computes log-probs over the tokens that the filters of sampling keep (`TrainEngine.infer`)
    token_filters: bool = False
    check_device: str = ""  # "module:function" that raises ValueError if the engine does not run on a device

    def missing_package(self) -> str | None:
        """The error message if the package is not installed."""
        return None if self.package is None else self.package.missing(self.name, "fsdp")


_TORCH = TrainTraits(
    "fsdp", "verl.engines.torch_engine:make_torch_engine", model_parallel=False, router_replay=True, token_filters=True
)
_SHARDED = [replace(_TORCH, name=name) for name in ("fsdp", "fsdp2")]


@functools.cache
def built_in_strategies() -> Mapping[str, TrainTraits]:
    """Name -> traits of the training engines of this package."""
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/traits.py"))
    declared = [importlib.import_module(f"verl.engines.{name}.traits").TRAITS for name in folders]
    return {traits.name: traits for traits in (*_SHARDED, *declared)}


def strategy_traits(name: str) -> TrainTraits:
    """The traits of a training engine; of a custom one, the defaults."""
    return built_in_strategies().get(name) or TrainTraits(name)


def strategy_with(trait: str, value: bool = True) -> Callable[[str], bool]:
    """A condition of `active_when`: the engine has the trait, or does not declare whether it has."""
    return lambda name: getattr(strategy_traits(name), trait) in (value, None)
