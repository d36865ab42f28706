"""The bytes that real collectives move, beside the formulas of HybridFlow (arXiv 2409.19256, table 2)."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch

from tests.hybrid_groups import HybridGroups
from tests.rollout.test_reshard import Source, sync_of, together
from tests.rollout.test_reshard_groups import holds, needs
from verl.utils.shards import Box, Chunk, Shard
from verl.weight_sync import SlicedWeights, SyncReport
from verl.weight_sync.reshard.plan import Stored
from verl.weight_sync.reshard.sync import Peers


class Grid(SlicedWeights):
    """Stores the generation shard of layers that are split by rows, of one rank of `HybridGroups`."""

    def __init__(self, groups: HybridGroups, rank: int, layers: int, shape: tuple[int, int]):
        box = needs(groups, rank)
        rows = shape[0] // groups.tp
        mine = Box(box.left * rows, box.right * rows, 0, shape[1])
        self.tensors = {f"{i}": torch.zeros(mine.rows, shape[1]) for i in range(layers)}
        self._layout = {
            name: Stored(shape, mine.rows, mine.columns, (Chunk(mine),), torch.float32) for name in self.tensors
        }

    def slice_layout(self):
        return self._layout

    def open_slices(self, version):
        return nullcontext(self.tensors)


class Trained(Source):
    """The training shard of one rank of `HybridGroups`."""

    def __init__(self, groups: HybridGroups, rank: int, layers: int, shape: tuple[int, int]):
        box, self.shape, self.names = holds(groups, rank), shape, [str(i) for i in range(layers)]
        rows, stages = shape[0] // groups.tp, layers // groups.pp
        own = Box(box.left * rows, box.right * rows, 0, shape[1])
        self._layout = [Shard(f"{i}", shape, own) for i in range(box.top * stages, box.bottom * stages)]

    def rollout_weights(self, dtype):
        return ((name, self.full(name)) for name in self.names)

    def shards(self):
        for shard in self._layout:
            yield self.full(shard.name)[shard.box.top : shard.box.bottom]

    def full(self, name: str) -> torch.Tensor:
        return torch.arange(self.shape[0] * self.shape[1]).view(self.shape) * float(int(name) + 1)


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 2), (1, 4, 2, 1, 2), (2, 2, 1, 1, 1), (2, 4, 1, 1, 2), (1, 8, 1, 1, 1)])
def test_real_collectives_move_the_bytes_of_the_paper(sizes, strided, monkeypatch):
    groups, layers, shape = HybridGroups(*sizes, strided=strided), 4, (16, 8)
    model_bytes, exchange = layers * 16 * 8 * 4, Peers.start_exchange
    counted = [0] * groups.world_size

    def counting(peers, received, sent, counts, lengths):
        assert (len(received), len(sent)) == (sum(counts), sum(lengths))
        counted[peers.rank] += len(received)
        return exchange(peers, received, sent, counts, lengths)

    monkeypatch.setattr(Peers, "start_exchange", counting)
    receivers = [Grid(groups, rank, layers, shape) for rank in range(groups.world_size)]

    def act(rank: int, group) -> SyncReport:
        return sync_of(receivers[rank], group, 700).push(Trained(groups, rank, layers, shape), 1)

    reports = together(groups.world_size, act)
    for rank, (report, receiver) in enumerate(zip(reports, receivers)):
        own = holds(groups, rank).intersect(needs(groups, rank))
        share = Fraction(needs(groups, rank).numel - (own.numel if own else 0), groups.pp * groups.tp)
        assert counted[rank] == report.bytes == model_bytes * share
        for name, tensor in receiver.tensors.items():
            stored = receiver.slice_layout()[name].chunks[0].box
            assert torch.equal(tensor, Trained(groups, rank, layers, shape).full(name)[stored.top : stored.bottom])
    worst = Fraction(max(counted), model_bytes)
    if strided:
        assert worst == Fraction(min(counted), model_bytes) == groups.communication
    else:  # the formula is that of gathering the whole model
        assert worst <= groups.communication
