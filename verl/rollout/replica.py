"""A rollout on a copy of weights that are sharded elsewhere: filled before each use, freed after it."""

from collections.abc import Iterable, Sequence

import torch

from verl.rollout.base import Generation, RolloutEngine, RolloutStats, SamplingParams


class ReplicaRollout(RolloutEngine):
    """Another engine on a module of its own, whose parameters exist between `wake` and `sleep` only.

    `load_weights` must fill them after each `wake`; `generate` refuses to run on weights that were not.
    """

    copies_weights = True

    def __init__(self, inner: RolloutEngine, module: torch.nn.Module):
        self.inner = inner
        self.module = module
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.filled = False
        self.sleep()

    @property
    def stats(self) -> RolloutStats:
        return self.inner.stats

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, sample_ids: Sequence[int] | None = None
    ) -> list[Generation]:
        if not self.filled:
            raise ValueError("the replica has no weights: call wake() and load_weights() first")
        return self.inner.generate(prompts, params, sample_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every parameter in; raises ValueError when one is missing or has no place here."""
        missing = set(self.shapes)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in missing:
                    raise ValueError(f"weights of version {version}: {name!r} is unknown here, or came twice")
                missing.remove(name)
                self.module.get_parameter(name).copy_(tensor)
        if missing:
            raise ValueError(f"weights of version {version} lack {sorted(missing)[:3]}")
        self.filled = True

    def sleep(self) -> None:
        """Free the parameters, and what the engine keeps."""
        self.inner.sleep()
        self.filled = False
        for name in self.shapes:
            parameter = self.module.get_parameter(name)
            parameter.data = parameter.data.new_empty(0)

    def wake(self) -> None:
        """Make room for the parameters."""
        for name, shape in self.shapes.items():
            parameter = self.module.get_parameter(name)
            parameter.data = parameter.data.new_empty(shape)
        self.inner.wake()
