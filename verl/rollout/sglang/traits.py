"""Traits of the engine `sglang`."""

from verl.rollout.traits import EngineTraits
from verl.utils.packages import Package

PACKAGE = Package(
    "SGLang",
    "sglang",
    ("sglang",),
    probe="from sglang import Engine",
    tested=("0.5.15", "0.5.23"),
    minimum="0.5.15",
    extra="sglang",
    own_torch=True,
)

TRAITS = EngineTraits(
    "sglang",
    PACKAGE,
    cuda_graphs=True,
    own_dtype=True,
    sleeps=True,
    own_scheduler=True,
    own_memory_share=True,
    own_process=True,
    images=(),
)
