"""Traits of the training engine `megatron`."""

from verl.engines.traits import TrainTraits
from verl.utils.packages import Package

TESTED = "0.16.1"

PACKAGE = Package(
    "megatron-core",
    "megatron.core",
    ("megatron-core",),
    probe="from megatron.core import parallel_state",
    tested=(TESTED,),
    extra="megatron",
    on_cpu="bash scripts/setup_megatron_cpu.sh .venv-megatron",
)

TRAITS = TrainTraits(
    "megatron",
    "verl.engines.megatron.runtime:make_megatron",
    PACKAGE,
    model_parallel=True,
    router_replay=True,
    candidates=False,
    check_device="verl.engines.megatron.runtime:check_device",
)
