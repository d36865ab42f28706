"""Traits of the engine `hf`."""

from verl.rollout.traits import EngineTraits

TRAITS = EngineTraits(
    "hf",
    cuda_graphs=False,
    own_dtype=False,
    sleeps=False,
    own_scheduler=False,
    tensor_parallel=False,
    shares_weights=True,
    records_routing=False,
)
