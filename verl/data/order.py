"""The order in which training reads the items of a dataset.

ResumableSampler   endless batches of row numbers, with exact resume
WeightedOrder      the same from several files, with weights
CustomOrder        the same from a custom sampler
PromptSource       each of them as a source of `DataProto` batches: the first operator of a flow

A custom sampler (`data.sampler`) is a torch sampler in the form of public verl that decides which rows come next:

    class Hardest(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config): ...
        def __iter__(self): ...                # row numbers of one epoch; read batch by batch
        def __len__(self): ...
        def update(self, batch: DataProto): ...  # after each step, with the batch of that step

A run resumes by reading the same number of rows again. A sampler whose order depends on `update` needs `state_dict` and
`load_state_dict`, of what the order of the next epoch depends on; the position in an epoch is not part of it.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from verl.dataflow import Stateful
from verl.protocol import DataProto
from verl.tracking.formatting import counted

if TYPE_CHECKING:
    from verl.data.prefetch import Item


def check_batch_size(batch_size: int, rows: int) -> None:
    """Raise ValueError if a batch has more prompts than there are rows."""
    if batch_size > rows:
        raise ValueError(
            f"data.train_batch_size is {batch_size:,} prompts, but the training data has {rows:,} rows: set "
            f"data.train_batch_size={rows} or less, or add data"
        )


class ResumableSampler:
    """Endless batches of row numbers, shuffled in every epoch; `step` batches have been drawn.

    The order of an epoch depends only on (seed, epoch). Rows that do not fill the last batch of an epoch are dropped;
    with `shuffle` these are different rows in each epoch.

    Attributes:
        epoch: the epoch of the next batch.
        step_in_epoch: the position of the next batch in its epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        if batch_size < 1:
            raise ValueError(f"batch size: expected int >= 1, found {batch_size}")
        check_batch_size(batch_size, num_rows)
        if seed < 0:
            raise ValueError(f"seed: expected int >= 0, found {seed}")
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.step = 0
        self._order: tuple[int, np.ndarray] | None = None  # the last epoch and its order

    steps_per_epoch = property(lambda self: self.num_rows // self.batch_size)
    epoch = property(lambda self: self.step // self.steps_per_epoch)
    step_in_epoch = property(lambda self: self.step % self.steps_per_epoch)

    def describe(self, unit: str = "prompts") -> str:
        """Text such as "7,473 prompts: 29 steps of 256 per epoch, last 49 prompts dropped"."""
        dropped = self.num_rows % self.batch_size
        last = f", last {counted(dropped, unit.removesuffix('s'))} dropped" if dropped else ""
        return f"{self.num_rows:,} {unit}: {self._steps()}{last}"

    def _steps(self) -> str:
        return f"{counted(self.steps_per_epoch, 'step')} of {self.batch_size:,} per epoch"

    def next_items(self) -> list[tuple[int, int]]:
        """(epoch, row number) of every prompt of the next batch; advances by one step."""
        epoch, start = self.epoch, self.step_in_epoch * self.batch_size
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            self._order = epoch, random.permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)
        self.step += 1
        return [(epoch, row) for row in self._order[1][start : start + self.batch_size].tolist()]

    def update(self, batch: DataProto) -> None:
        """The order does not depend on the steps."""

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


class WeightedOrder(ResumableSampler):
    """Endless batches of row numbers from several files, each with its share of the prompts (`data.train_weights`).

    The next prompt comes from the file that is furthest behind its share, the first of equals: after N prompts, a file
    with the share w has had less than w * N + 1. A file that ends is repeated in another order. An epoch has as many
    prompts as all files together, with repeated ones in place of those that the weights leave out.

    Args:
        files: name -> the numbers of its rows.
        weights: of each file, in any unit.
    """

    def __init__(
        self, files: Mapping[str, np.ndarray], weights: Sequence[float], batch_size: int, *, seed: int, shuffle: bool
    ):
        super().__init__(sum(map(len, files.values())), batch_size, seed=seed, shuffle=shuffle)
        self.files, self.weights, self.taken = files, list(weights), [0] * len(files)
        ratios = [Fraction(str(weight)) for weight in weights]
        self.shares = [weight / sum(ratios) for weight in ratios]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # file -> the number of its last pass and its order

    def describe(self, unit: str = "prompts") -> str:
        files = zip(self.shares, self.files.items())
        mixed = ", ".join(f"{float(share):.1%} {name} ({len(rows):,})" for share, (name, rows) in files)
        return f"{self.num_rows:,} {unit}, {mixed}: {self._steps()}"

    def next_items(self) -> list[tuple[int, int]]:
        """(pass over its file, row number) of every prompt of the next batch; advances by one step."""
        items, rows = [], list(self.files.values())
        for count in range(self.step * self.batch_size + 1, (self.step + 1) * self.batch_size + 1):
            behind = [share * count - taken for share, taken in zip(self.shares, self.taken)]
            file = behind.index(max(behind))
            number, position = divmod(self.taken[file], len(rows[file]))
            if self._orders.get(file, (-1,))[0] != number:
                random = np.random.default_rng((self.seed, file, number))
                self._orders[file] = number, random.permutation(rows[file]) if self.shuffle else rows[file]
            items.append((number, int(self._orders[file][1][position])))
            self.taken[file] += 1
        self.step += 1
        return items

    def _identity(self) -> dict[str, Any]:
        sizes = [len(rows) for rows in self.files.values()]
        return super()._identity() | {"rows_per_file": sizes, "weights": self.weights}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"taken": list(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        taken = list(state.get("taken", ()))
        super().load_state_dict({key: value for key, value in state.items() if key != "taken"})
        if len(taken) != len(self.files) or min(taken) < 0 or sum(taken) != self.step * self.batch_size:
            raise ValueError(
                f"data position: {taken} prompts of {len(self.files)} files are not those of {self.step} steps"
            )
        self.taken = taken


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


class AbstractSampler(Sampler[int], ABC):
    """A sampler that is made from the dataset and the section `data`."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any): ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each finished step."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Receive the batch of a step, with its scores and advantages."""


class CustomOrder(ResumableSampler):
    """Endless batches of row numbers from a custom sampler, which is iterated again in each epoch."""

    def __init__(self, sampler: Sampler[int], rows: int, batch_size: int):
        super().__init__(len(sampler), batch_size)
        self.sampler, self.rows = sampler, rows
        self._iterator: Iterator[int] = iter(())
        self._start: Any = None  # the sampler's state at the start of the epoch
        self._last: tuple[int, list[int]] = (-1, [])  # step and rows, for a step that is undone

    def next_items(self) -> list[tuple[int, int]]:
        epoch = self.epoch
        if self._last[0] != self.step:
            if self.step_in_epoch == 0:
                self._start, self._iterator = self._state(), iter(self.sampler)
            self._last = self.step, [int(row) for row in itertools.islice(self._iterator, self.batch_size)]
        drawn = self._last[1]
        if len(drawn) < self.batch_size or not all(0 <= row < self.rows for row in drawn):
            raise ValueError(
                f"data.sampler: {type(self.sampler).__name__}: expected {self.batch_size} row numbers below "
                f"{self.rows} for step {self.step_in_epoch} of an epoch of {self.num_rows} rows, found {drawn}"
            )
        self.step += 1
        return [(epoch, row) for row in drawn]

    def update(self, batch: DataProto) -> None:
        if isinstance(self.sampler, AbstractCurriculumSampler):
            self.sampler.update(batch)

    def _identity(self) -> dict[str, Any]:
        kind = type(self.sampler).__qualname__
        return {"sampler": kind, "rows": self.rows, "num_rows": self.num_rows, "batch_size": self.batch_size}

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "step": self.step, "start": self._start, "state": self._state()}

    def _state(self) -> Any:
        save = getattr(self.sampler, "state_dict", None)
        return copy.deepcopy(save()) if save else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume. ValueError: the order is another one, or depends on steps that cannot be repeated."""
        check_identity(state, self._identity(), ("step", "start", "state"))
        if state["step"] in (self.step, self._last[0]):  # the step of the last batch is undone
            self.step = state["step"]
        elif state["state"] is not None:
            self.step, self._start, self._last = state["step"], state["start"], (-1, [])
            if self.step_in_epoch:
                self.sampler.load_state_dict(self._start)
                self._iterator = itertools.islice(iter(self.sampler), self.step_in_epoch * self.batch_size, None)
                self._iterator = itertools.chain([next(self._iterator)], self._iterator)  # in this state
            self.sampler.load_state_dict(state["state"])
        elif isinstance(self.sampler, AbstractCurriculumSampler):
            raise ValueError(
                f"data.sampler: {type(self.sampler).__name__} cannot be resumed after step {state['step']}, since its "
                "order depends on the steps: give it state_dict() and load_state_dict(), or set "
                "trainer.resume_mode=disable"
            )
        else:
            self.step, self._last = 0, (-1, [])
            while self.step < state["step"]:
                self.next_items()


class PromptSource(Stateful):
    """A source of batches for a flow: each call returns the next `DataProto` of `batch_size` prompts, endlessly.

    Each sample gets the `uid` "<epoch>:<row>", which is unique in the run and the same in every run.
    `epoch`, `step_in_epoch`, `steps_per_epoch`, `describe`, `state_dict` and `load_state_dict` are those of
    the sampler.

    Args:
        dataset: any object with `len()` and `dataset[i] -> dict`.
        batch_size: prompts per batch.
        seed: the order depends on it.
        shuffle: whether the rows are shuffled.
        sampler: decides the order instead of seed and shuffle.
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
        sampler: ResumableSampler | None = None,
        collate: Callable[[list[dict[str, Any]]], DataProto],
        workers: int = 0,
        batches_ahead: int = 1,
    ):
        self.dataset, self.collate = dataset, collate
        self._prefetcher = None
        if workers:
            from verl.data.prefetch import Prefetcher

            self._prefetcher = Prefetcher(self._row, collate, workers, batches_ahead)
        self.sampler = sampler or ResumableSampler(len(dataset), batch_size, seed=seed, shuffle=shuffle)

    def _row(self, item: "Item") -> dict[str, Any]:
        epoch, row = item
        return {**self.dataset[row], "uid": f"{epoch}:{row}"}

    def _following(self) -> "Iterator[list[Item]]":
        """The items of the next batches. The position does not change."""
        return iter(copy.deepcopy(self.sampler).next_items, None)

    def __call__(self) -> DataProto:
        items = self.sampler.next_items()
        if self._prefetcher is None:
            return self.collate([self._row(item) for item in items])
        return self._prefetcher.take(items, self._following)

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
