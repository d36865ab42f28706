"""Micro-batches of a number of rows, and more of them where another rank has more."""

import pytest

from verl import engines
from verl.engines.micro_batch import split_to


def test_names_of_the_package_are_loaded_at_first_use():
    assert (engines.MetricSums.__module__, engines.TrainEngine.__module__) == (
        "verl.engines.metrics",
        "verl.engines.base",
    )
    with pytest.raises(AttributeError, match="TrainEngin"):
        _ = engines.TrainEngin


def test_the_largest_micro_batches_are_halved():
    assert split_to([[0, 1, 2, 3], [4]], 2) == [[0, 1, 2, 3], [4]]
    assert split_to([[0, 1, 2, 3], [4]], 3) == [[0, 1], [2, 3], [4]]
    assert split_to([[0, 1, 2], [3, 4]], 5) == [[0], [1], [2], [3], [4]]
    with pytest.raises(ValueError, match="5 rows cannot be split into 6 micro-batches"):
        split_to([[0, 1, 2], [3, 4]], 6)
