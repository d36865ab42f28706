"""What SGLang's tensor-parallel ranks receive is compared with what was sent, on stand-ins for its model."""

import pytest
import torch
from torch import nn

from tests.rollout.sglang_push import push
from verl.rollout.sglang import loader

HEADS, HEAD, HIDDEN = 4, 2, 8


class Rank(nn.Module):
    """The slice of one rank: heads of q, k and v in one parameter, columns of o, the vocabulary with padding, a norm.

    Args:
        rank, size: of the group.
        kv_heads: of the whole model; with fewer than ranks, several have the same.
        skips: a name that the loader ignores.
    """

    def __init__(self, rank: int, size: int, kv_heads: int = HEADS, skips: str = ""):
        super().__init__()
        self.rank, self.size, self.kv_heads, self.skips = rank, size, kv_heads, skips
        self.q, self.kv = HEADS // size * HEAD, max(kv_heads // size, 1) * HEAD
        sizes = {"qkv_proj": (self.q + 2 * self.kv, HIDDEN), "o_proj": (HIDDEN, self.q), "norm": (HIDDEN,)}
        self.layers = nn.ModuleList([nn.ParameterDict({n: torch.zeros(shape) for n, shape in sizes.items()})])
        self.embed = nn.Parameter(torch.zeros(12 // size, HIDDEN))

    @torch.no_grad()
    def load_weights(self, named):
        layer, kv_rank = self.layers[0], self.rank * self.kv_heads // self.size
        rows = {"q_proj": (0, self.q, self.rank), "k_proj": (self.q, self.kv, kv_rank)}
        if self.kv_heads >= self.size:
            rows["k_proj"] = (self.q, self.kv, self.rank)
        rows["v_proj"] = (self.q + self.kv, self.kv, rows["k_proj"][2])
        for name, tensor in named:
            module = name.split(".")[2] if name.startswith("layers") else name
            if name == self.skips:
                continue
            if module in rows:
                start, size, at = rows[module]
                layer["qkv_proj"][start : start + size] = tensor[at * size : (at + 1) * size]
            elif module == "o_proj":
                layer["o_proj"].copy_(tensor[:, self.rank * self.q : (self.rank + 1) * self.q])
            elif module == "norm":
                layer["norm"].copy_(tensor)
            elif module == "embed":
                own = tensor[self.rank * len(self.embed) : (self.rank + 1) * len(self.embed)]
                self.embed[: len(own)] = own


def weights(kv_heads: int = HEADS) -> dict[str, torch.Tensor]:
    """Names as in HuggingFace's files, except that a `ParameterDict` adds no `.weight`."""
    torch.manual_seed(0)
    rows = {"q_proj.weight": HEADS * HEAD, "k_proj.weight": kv_heads * HEAD, "v_proj.weight": kv_heads * HEAD}
    sent = {f"layers.0.{name}": torch.randn(size, HIDDEN) for name, size in rows.items()}
    sent |= {"layers.0.o_proj": torch.randn(HIDDEN, HEADS * HEAD), "layers.0.norm": torch.randn(HIDDEN)}
    return sent | {"embed": torch.randn(11, HIDDEN)}


def test_an_error_of_the_loader_is_raised_in_the_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"SGLang's rank 0 cannot load the weights: RuntimeError: The size of tensor"):
        push([Rank(0, 1)], weights() | {"layers.0.norm": torch.zeros(3)}, tmp_path)
    with pytest.raises(ValueError, match="SGLang's rank 1 did not load the weights"):
        (tmp_path / "outcome-0").write_text('{"error": ""}')
        loader.check_outcomes(tmp_path / "outcome", 2)


def test_bits_that_change_on_their_way_to_one_rank_are_found_there(tmp_path):
    sent = weights()
    name = "layers.0.o_proj"
    received = {**sent, name: sent[name].clone()}
    received[name].view(torch.int32)[3, 5] ^= 1
    ranks = [Rank(rank, 2) for rank in range(2)]
    message = r"expected the bits that were sent, found others in 1 of 6 tensors, first "
    with pytest.raises(ValueError, match=rf"SGLang's rank 1 cannot load .*: {message}\['{name}'\]"):
        push(ranks, sent, tmp_path, received)
    assert not ranks[1].embed.any() and ranks[0].embed.any()  # nothing of the bucket was loaded
    with pytest.raises(ValueError, match=rf"{message}\['embed'\]"):
        push(ranks, sent, tmp_path, {other: sent[other] for other in sent if other != "embed"})
