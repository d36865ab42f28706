"""The order in which training reads the items of a dataset.

ResumableSampler   endless batches of row numbers, with exact resume
MixtureSampler     the same from several datasets, with weights
PromptSource       either as a source of `DataProto` batches: the first operator of a flow
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.mixture import Mixture
from verl.dataflow import Stateful
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.data.prefetch import Item
    from verl.data.samplers import CustomOrder


def check_batch_size(batch_size: int, rows: int) -> None:
    """Raise ValueError if a batch has more prompts than there are rows."""
    if batch_size > rows:
        raise ValueError(
            f"data.train_batch_size is {batch_size:,} prompts, but the training data has {rows:,} rows: set "
            f"data.train_batch_size={rows} or less, or add data"
        )


class _Sampler:
    """Endless batches, of which `step` have been drawn.

    Attributes:
        epoch: the epoch of the next batch.
        step_in_epoch: the position of the next batch in its epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool):
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.step = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # dataset -> (pass, its order)

    steps_per_epoch = property(lambda self: self.num_rows // self.batch_size)
    epoch = property(lambda self: self.step // self.steps_per_epoch)
    step_in_epoch = property(lambda self: self.step % self.steps_per_epoch)

    def update(self, batch: DataProto) -> None:
        """The order does not depend on the steps."""

    def _order(self, dataset: int, number: int, rows: int, *key: int) -> np.ndarray:
        """The order of pass `number` over a dataset, which depends only on `key`; that of the last pass is kept."""
        if self._orders.get(dataset, (-1,))[0] != number:
            order = np.random.default_rng(key).permutation(rows) if self.shuffle else np.arange(rows)
            self._orders[dataset] = number, order
        return self._orders[dataset][1]


class ResumableSampler(_Sampler):
    """Endless batches of row numbers, shuffled in every epoch.

    The order of an epoch depends only on (seed, epoch). Rows that do not fill the last batch of an epoch are dropped;
    with `shuffle` these are different rows in each epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        if batch_size < 1:
            raise ValueError(f"batch size: expected int >= 1, found {batch_size}")
        check_batch_size(batch_size, num_rows)
        if seed < 0:
            raise ValueError(f"seed: expected int >= 0, found {seed}")
        super().__init__(num_rows, batch_size, seed, shuffle)

    def describe(self, unit: str = "prompts") -> str:
        """Text such as "7,473 prompts: 29 steps of 256 per epoch, last 49 prompts dropped"."""
        dropped = self.num_rows % self.batch_size
        unit_dropped = unit.removesuffix("s") if dropped == 1 else unit
        steps = f"{self.num_rows:,} {unit}: {self.steps_per_epoch:,} steps of {self.batch_size:,} per epoch"
        return f"{steps}, last {dropped:,} {unit_dropped} dropped" if dropped else steps

    def next_items(self) -> list[tuple[int, int]]:
        """(epoch, row number) of every prompt of the next batch; advances by one step."""
        epoch, start = self.epoch, self.step_in_epoch * self.batch_size
        order = self._order(0, epoch, self.num_rows, self.seed, epoch)
        self.step += 1
        return [(epoch, row) for row in order[start : start + self.batch_size].tolist()]

    def shares(self) -> dict[str, float]:
        """No shares of sources: there is one dataset."""
        return {}

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("num_rows", "batch_size", "seed", "shuffle")}

    def state_dict(self) -> dict[str, Any]:
        """The position, and everything that the order depends on."""
        return {**self._identity(), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position. Raises ValueError if the order of the rows differs from the saved one."""
        check_identity(state, self._identity(), ("epoch", "step_in_epoch"))
        if state["epoch"] < 0 or not 0 <= state["step_in_epoch"] < self.steps_per_epoch:
            raise ValueError(
                f"data position: epoch {state['epoch']}, step {state['step_in_epoch']} is not a position in "
                f"{self.steps_per_epoch} steps per epoch"
            )
        self.step = state["epoch"] * self.steps_per_epoch + state["step_in_epoch"]


class MixtureSampler(_Sampler):
    """Endless batches from several datasets with weights.

    Prompt n of the run comes from the dataset that is furthest behind its share: the one with the largest
    weight * (n + 1) - (prompts taken so far), the first of equals. After any number of prompts, the counts therefore
    differ from the weights by less than one prompt per dataset. Each dataset is read in its own order and repeated when
    it ends, with another order in each pass. An epoch has as many steps as all rows fill.

    Args:
        names: the name of each dataset.
        sizes: the number of rows of each dataset.
        weights: the weight of each dataset, in any unit.
        batch_size: prompts per batch.
        seed: the orders depend on it.
        shuffle: False reads every dataset from its first row to its last.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ):
        check_batch_size(batch_size, sum(sizes))
        super().__init__(sum(sizes), batch_size, seed, shuffle)
        self.names, self.sizes = list(names), list(sizes)
        self.weights = [float(weight) for weight in weights]
        ratios = [Fraction(str(weight)) for weight in self.weights]
        self._weights = [weight / sum(ratios) for weight in ratios]
        self._first = np.cumsum([0, *self.sizes]).tolist()
        self.taken = [0] * len(self.sizes)
        self._last = [0] * len(self.sizes)  # prompts of each dataset in the last batch

    def describe(self, unit: str = "prompts") -> str:
        """Text such as "8,473 prompts: 0.7 gsm8k (7,473), 0.3 own (1,000); 33 steps of 256 per epoch"."""
        parts = [
            f"{float(weight):.3g} {name} ({size:,})"
            for weight, name, size in zip(self._weights, self.names, self.sizes)
        ]
        total = f"{self.num_rows:,} {unit}"
        return f"{total}: {', '.join(parts)}; {self.steps_per_epoch:,} steps of {self.batch_size:,} per epoch"

    def next_items(self) -> list[tuple[int, int]]:
        """(pass over its dataset, item number) of every prompt of the next batch; advances by one step.

        Item numbers count the rows of all datasets, one dataset after the other.
        """
        before, items = list(self.taken), []
        for _ in range(self.batch_size):
            count = sum(self.taken) + 1
            behind = [weight * count - taken for weight, taken in zip(self._weights, self.taken)]
            dataset = behind.index(max(behind))
            number, position = divmod(self.taken[dataset], self.sizes[dataset])
            order = self._order(dataset, number, self.sizes[dataset], self.seed, dataset, number)
            items.append((number, self._first[dataset] + int(order[position])))
            self.taken[dataset] += 1
        self._last = [after - start for after, start in zip(self.taken, before)]
        self.step += 1
        return items

    def shares(self) -> dict[str, float]:
        """The share of each dataset in the last batch."""
        return {name: count / self.batch_size for name, count in zip(self.names, self._last)}

    def _identity(self) -> dict[str, Any]:
        return {
            "sources": self.names,
            "sizes": self.sizes,
            "weights": self.weights,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position in every dataset, and everything that the order depends on."""
        return {**self._identity(), "step": self.step, "taken": list(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position. Raises ValueError if the order of the prompts differs from the saved one."""
        check_identity(state, self._identity(), ("step", "taken"))
        taken = list(state["taken"])
        if len(taken) != len(self.sizes) or sum(taken) != state["step"] * self.batch_size or min(taken) < 0:
            raise ValueError(
                f"data position: {taken} prompts taken is not a position of {len(self.sizes)} datasets after step "
                f"{state['step']} with {self.batch_size} prompts per step"
            )
        self.step, self.taken = state["step"], taken


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any], position: Sequence[str]) -> None:
    """Raise ValueError unless a saved data position belongs to the order that `identity` describes.

    Args:
        state: the saved state.
        identity: everything that the order depends on.
        position: the other keys of the state.
    """
    expected = {*identity, *position}
    if set(state) != expected:
        raise ValueError(f"data position: expected the keys {sorted(expected)}, found {sorted(state)}")
    for name, current in identity.items():
        if state[name] != current:
            raise ValueError(
                f"cannot resume the data position: {name} is {current!r}, but {state[name]!r} in the checkpoint, so "
                f"rows would be repeated or skipped. Restore the old value, or start a new run"
            )


class PromptSource(Stateful):
    """A source of batches for a flow: each call returns the next `DataProto` of `batch_size` prompts, endlessly.

    Each sample gets the `uid` "<epoch>:<row>", which is unique in the run and the same in every run. With weights, the
    epoch is the pass over the dataset of the row, and the batch reports `data/share/<dataset>`.
    `epoch`, `step_in_epoch`, `steps_per_epoch`, `describe`, `state_dict` and `load_state_dict` are those of
    the sampler.

    Args:
        dataset: any object with `len()` and `dataset[i] -> dict`.
        batch_size: prompts per batch.
        seed: the order depends on it.
        shuffle: whether the rows are shuffled.
        weights: of the datasets of a `Mixture`; None: the dataset is one.
        sampler: decides the order instead of seed, shuffle and weights.
        collate: a list of such dicts -> DataProto.
        workers: threads that prepare the next batches; 0: batches are read when they are asked for.
        batches_ahead: how many batches they prepare.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        sampler: "CustomOrder | None" = None,
        collate: Callable[[list[dict[str, Any]]], DataProto],
        workers: int = 0,
        batches_ahead: int = 1,
    ):
        self.dataset, self.collate = dataset, collate
        self._prefetcher = None
        if workers:
            from verl.data.prefetch import Prefetcher

            self._prefetcher = Prefetcher(self._row, collate, workers, batches_ahead)
        self.sampler: ResumableSampler | MixtureSampler | CustomOrder
        if sampler is not None:
            self.sampler = sampler
        elif weights:
            if not isinstance(dataset, Mixture):
                raise ValueError(
                    "data.train_weights mixes the files of data.train_files, but the dataset was given as an object: "
                    "remove data.train_weights"
                )
            if len(dataset.datasets) != len(weights):
                raise ValueError(f"data.train_weights: expected {len(dataset.datasets)} weights, found {len(weights)}")
            sources = dataset.names, dataset.sizes, weights
            self.sampler = MixtureSampler(*sources, batch_size, seed=seed, shuffle=shuffle)
        else:
            self.sampler = ResumableSampler(len(dataset), batch_size, seed=seed, shuffle=shuffle)

    def _row(self, item: "Item") -> dict[str, Any]:
        epoch, row = item
        return {**self.dataset[row], "uid": f"{epoch}:{row}"}

    def _following(self) -> "Iterator[list[Item]]":
        """The items of the next batches. The position does not change."""
        return iter(copy.deepcopy(self.sampler).next_items, None)

    def __call__(self) -> DataProto:
        items = self.sampler.next_items()
        if self._prefetcher is None:
            batch = self.collate([self._row(item) for item in items])
        else:
            batch = self._prefetcher.take(items, self._following)
        shares = {f"data/share/{name}": share for name, share in self.sampler.shares().items()}
        if shares:
            batch.meta_info["metrics"] = batch.meta_info.get("metrics", {}) | shares
        return batch

    def update(self, batch: DataProto) -> None:
        """Receive the batch of a finished step, on which the order of a curriculum sampler depends."""
        self.sampler.update(batch)

    def close(self) -> None:
        """End the threads that read ahead. A further call starts new ones."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    @property
    def seconds_ahead(self) -> float:
        """Seconds that threads have spent on the last batch; 0 without threads."""
        return 0.0 if self._prefetcher is None else self._prefetcher.seconds

    epoch = property(attrgetter("sampler.epoch"))
    step_in_epoch = property(attrgetter("sampler.step_in_epoch"))
    steps_per_epoch = property(attrgetter("sampler.steps_per_epoch"))

    def describe(self, unit: str = "prompts") -> str:
        reading = f"; {self._prefetcher.describe()}" if self._prefetcher is not None else ""
        return self.sampler.describe(unit) + reading

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
