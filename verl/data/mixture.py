"""Several datasets as one, for mixing with weights (`data.train_weights`)."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from verl.utils.data_names import source_name

logger = logging.getLogger("verl.data")


class Mixture(Dataset):
    """The items of several datasets, one dataset after the other.

    Items keep the keys that all datasets have, so that a batch can hold items of each. The others are dropped, which is
    logged once.

    Args:
        datasets: the datasets.
        files: the entry of `data.train_files` of each.

    Attributes:
        names: the name of each dataset in metrics: its data source, or the entry if two have the same.
    """

    def __init__(self, datasets: Sequence[Dataset], files: Sequence[str]):
        self.datasets, self.data_files = list(datasets), [str(file) for file in files]
        names = [source_name(file) for file in self.data_files]
        twice = Counter(names)
        self.names = [name if twice[name] == 1 else file for name, file in zip(names, self.data_files)]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"data.train_weights: the same file twice: {', '.join(self.data_files)}; add the weights")
        self.sizes = [len(dataset) for dataset in self.datasets]
        self._ends = list(accumulate(self.sizes))
        keys = [dict.fromkeys(dataset[0]) for dataset in self.datasets]
        self._keys = [key for key in keys[0] if all(key in others for others in keys)]
        dropped = sorted({key for others in keys for key in others} - {*self._keys})
        if dropped:
            logger.info("columns dropped, because some of the files lack them: %s", ", ".join(dropped))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        number = next(i for i, end in enumerate(self._ends) if item < end)
        row = self.datasets[number][item - self._ends[number] + self.sizes[number]]
        return {key: row[key] for key in self._keys}


def datasets_of(dataset: Any) -> list[Any]:
    """The datasets of a mixture; a list of `dataset` itself if it is no mixture."""
    return dataset.datasets if isinstance(dataset, Mixture) else [dataset]
