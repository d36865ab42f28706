"""Custom samplers (`data.sampler`): a torch sampler in the form of public verl decides which rows come next.

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
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from verl.data.order import ResumableSampler, check_identity
from verl.protocol import DataProto


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
