"""Tensors saved in boxes and read in others, in one process."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl.checkpoints.shard_files import Boxes, BoxLoadPlanner, BoxSavePlanner, Region

FULL = torch.arange(24.0).view(4, 6)


def boxes(*places: tuple[slice, slice]) -> list:
    """Copies of parts of FULL."""
    found = []
    for rows, columns in places:
        values = FULL[rows, columns].clone()
        found.append((Region("w", (rows.start, columns.start), tuple(values.shape), (4, 6)), values))
    return found


def run(function, state: Boxes, **how) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        function(state, no_dist=True, **how)


@pytest.fixture
def folder(tmp_path):
    state = {
        "w": boxes((slice(0, 1), slice(0, 6)), (slice(1, 4), slice(0, 2)), (slice(1, 4), slice(2, 6))),
        "b": [(Region("b", (0,), (3,), (3,)), torch.tensor([7.0, 8, 9])), (Region("b", (3,), (0,), (3,)), FULL[0, :0])],
    }
    run(dcp.save, state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=BoxSavePlanner())
    return tmp_path


def test_any_boxes_are_read(folder):
    places = (slice(0, 4), slice(1, 3)), (slice(2, 4), slice(3, 6)), (slice(0, 2), slice(3, 6))
    wanted = {"w": boxes(*places), "b": [(Region("b", (1,), (2,), (3,)), torch.zeros(2))]}
    for _, values in wanted["w"]:
        values.fill_(-1)
    run(dcp.load, wanted, storage_reader=dcp.FileSystemReader(folder), planner=BoxLoadPlanner())
    for (region, values), place in zip(wanted["w"], places):
        assert torch.equal(values, FULL[place]) and FULL[region.slices].shape == values.shape
    assert wanted["b"][0][1].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("key", "full", "message"),
    [("w", (6, 4), r"w: expected the shape \[6, 4\], found \[4, 6\]"), ("v", (4, 6), "v: expected .* found nothing")],
)
def test_other_tensors_are_refused(key, full, message, folder):
    wanted = {key: [(Region(key, (0, 0), full, full), torch.zeros(full))]}
    with pytest.raises((ValueError, dcp.CheckpointException), match=message):
        run(dcp.load, wanted, storage_reader=dcp.FileSystemReader(folder), planner=BoxLoadPlanner())
