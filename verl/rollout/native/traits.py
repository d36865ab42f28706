"""Traits of the engine `native`."""

from verl.rollout.traits import EngineTraits

TRAITS = EngineTraits(
    "native",
    cuda_graphs=True,
    own_dtype=True,
    sleeps=True,
    own_scheduler=False,
    batch_invariant=True,
    fp8=True,
    shares_weights=True,
    joins_training_groups=True,
    speculates=True,
    check_model="verl.rollout.native.factory:check_model",
)
