"""Names of the weights of experts in the engines of other libraries.

transformers has the weights of all experts of a layer in two parameters, `experts.gate_up_proj` (E, 2 I, H) and
`experts.down_proj` (E, H, I), and so have vLLM and SGLang: `w13_weight` and `w2_weight`, or the slices of a rank. In
between, their loaders read the names of checkpoints, one tensor per expert and projection.
"""

from collections.abc import Collection, Iterator

import torch

#: parameters of transformers -> the parameter of the engine, and the projections in checkpoints: of Mixtral, of others
_FUSED = {
    "gate_up_proj": ("w13_weight", ("w1", "w3"), ("gate_proj", "up_proj")),
    "down_proj": ("w2_weight", ("w2",), ("down_proj",)),
}
_MIXTRAL = ".block_sparse_moe."


class ExpertNames:
    """Names of the parameters of a mixture of experts, for one model of an engine; others are kept.

    Args:
        parameters: names of the engine's parameters.
    """

    def __init__(self, parameters: Collection[str]):
        self._parameters = parameters
        self._is_mixtral = any(_MIXTRAL in name for name in parameters)

    def renamed(self, name: str) -> str:
        """The name with the modules of a checkpoint."""
        return name.replace(".mlp.", _MIXTRAL) if self._is_mixtral else name

    def target(self, name: str) -> str | None:
        """The engine's parameter for the weights of all experts of a layer; None for another parameter."""
        path, kind = self._split(name)
        candidates = (f"{path}.{inner}{_FUSED[kind][0]}" for inner in ("routed_experts.", "")) if kind else ()
        return next((each for each in candidates if each in self._parameters), None)

    def unfused(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint: one per expert and projection, or the tensor itself."""
        path, kind = self._split(name)
        if not kind:
            yield self.renamed(name), tensor
            return
        projections = _FUSED[kind][1 if self._is_mixtral else 2]
        for index, expert in enumerate(tensor):
            for projection, chunk in zip(projections, expert.chunk(len(projections))):
                yield f"{path}.{index}.{projection}.weight", chunk

    def _split(self, name: str) -> tuple[str, str]:
        """(path of the experts, key of `_FUSED`); the key is empty for another parameter."""
        path, _, kind = self.renamed(name).rpartition(".")
        return (path, kind) if path.endswith(".experts") and kind in _FUSED else (path, "")
