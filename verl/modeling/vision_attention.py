"""Attention of a vision tower, registered with transformers as "verl_vision_flash".

Patches of all images are one sequence, and attention must not cross images, or windows of an image. transformers calls
its default once per image and window, in every layer: thousands of small kernels. Here it is one call of torch's
variable-length kernel on a GPU in 16 bits, and otherwise one call per length. transformers passes the lengths to
implementations with "flash" in their names.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl.modeling.attention import WIDEST_HEAD, varlen_attn
from verl.modeling.vision import PACKED

NAME = "verl_vision_flash"


@torch.compiler.disable  # as `packed_attention`
def vision_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention in both directions inside each segment. query, key, value (1, H, N, D) -> (1, N, H, D).

    Args:
        cu_seq_lens_q: (segments + 1,) where segments start.
        max_length_q: the longest of them.
    """
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    is_16_bit = value.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and is_16_bit and q.shape[-1] <= WIDEST_HEAD:
        starts = cu_seq_lens_q.to(torch.int32)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = varlen_attn(
            q, k, v, starts, starts, int(max_length_q), int(max_length_q), scale=scaling, window_size=(-1, -1)
        )
        return out.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff()
    outputs, order = [], []
    for length in lengths.unique().tolist():
        first = cu_seq_lens_q[:-1][lengths == length]
        positions = (first[:, None] + torch.arange(length, device=first.device)).flatten()
        grouped = (x[positions].unflatten(0, (len(first), length)).transpose(1, 2) for x in (q, k, v))
        outputs.append(scaled_dot_product_attention(*grouped, scale=scaling).transpose(1, 2).flatten(0, 1))
        order.append(positions)
    return torch.cat(outputs)[torch.cat(order).argsort()].unsqueeze(0), None


def use_vision_attention(module: nn.Module) -> nn.Module:
    """Use `vision_attention` in the tower of a model in `vision.PACKED`, in place. Other models stay as they are."""
    if module.config.model_type in PACKED:  # after construction, which looks for a package of this name
        module.set_attn_implementation({"vision_config": NAME})
    return module


AttentionInterface.register(NAME, vision_attention)
