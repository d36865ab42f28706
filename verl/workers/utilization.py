"""Model FLOPs utilization (MFU) of updates: the share of a GPU's peak rate that the model's own operations use.

Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B. FLOPs: matmuls with the weights, causal attention, and the
logits of the response tokens; three times the forward pass for an update, twice with LoRA, whose base weights get no
gradient. Recomputed activations, vision towers and adapters do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.config import schema
from verl.modeling.huggingface import read_config
from verl.planner.devices import known_gpu
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto


def forward_flops(shape: ModelShape, lengths: Sequence[int], outputs: int, value_head: bool = False) -> float:
    """FLOPs of a forward pass.

    Args:
        lengths: tokens of each row.
        outputs: positions at which logits are computed.
        value_head: one output instead of logits.
    """
    head = shape.hidden if value_head else shape.embedding
    attention = 4 * shape.q_size * shape.layers * sum(length * (length + 1) / 2 for length in lengths)
    return 2 * (sum(lengths) * shape.matrices() + outputs * head) + attention


@dataclass(frozen=True)
class Utilization:
    """The shape of a model and the peak rate of its ranks."""

    shape: ModelShape
    peak: float  # FLOP/s in 16 bits of all ranks that share a row
    passes: int  # FLOPs of an update, as a multiple of those of a forward pass
    value_head: bool  # whether the model has one output instead of logits

    @classmethod
    def find(
        cls, model: schema.ModelConfig, kind: str, device: torch.device, ranks: int, dtype: str
    ) -> "Utilization | None":
        """The utilization of a model; None if its shape or the peak rate of the device is unknown, or in float32. kind:
        as in `EngineSpec`. ranks: those that share a row. dtype: of the computation."""
        if device.type != "cuda" or dtype in ("fp32", "float32"):
            return None
        gpu = known_gpu(torch.cuda.get_device_name(device))
        try:
            config = read_config(model.path, model.override_config, model.trust_remote_code)
            shape = ModelShape.from_config(config.get_text_config().to_dict())
        except ValueError:
            return None
        if gpu is None:
            return None
        return cls(shape, gpu.peak * ranks, 2 if model.has_adapters else 3, kind == "value")

    def mfu(self, batch: DataProto, seconds: float) -> float:
        """The MFU of one pass over a batch (attention_mask, responses) in this time."""
        lengths = batch.column("attention_mask").sum(-1).tolist()
        outputs = int(batch.column("response_mask").count_nonzero())
        flops = self.passes * forward_flops(self.shape, lengths, outputs, self.value_head)
        return flops / (seconds * self.peak)
