"""The receiver of an engine that generates with a `torch.nn.Module` in this process."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from verl.utils.shards import Chunk, matrix_shape, whole
from verl.weight_sync.base import SlicedWeights, StoredWeights, check_parameters, require_weights
from verl.weight_sync.reshard.plan import Stored


class ModuleReceiver(StoredWeights, SlicedWeights):
    """Receives weights into a module. Its parameters use memory only between `receive` and `release`."""

    def __init__(self, module: torch.nn.Module, filled: bool = False):
        """filled: whether the module already has its weights."""
        self.module = module
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        #: shapes of the parameters that are sent
        self.full_shapes: Mapping[str, torch.Size] = self.shapes
        self.filled = filled
        self._layout: dict[str, Stored] = {}
        if not filled:
            self.release()

    def check_filled(self) -> None:
        """Raise ValueError before the first `receive` and after `release`."""
        require_weights(self.filled)

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightReceiver.receive`. Parameters are cast to the module's dtype."""
        self._allocate()
        for name, tensor in check_parameters(weights, self.full_shapes, version):
            self._parameters[name].copy_(self.slice_of(name, tensor))
        self.filled = True

    def _allocate(self) -> None:
        """Memory for all parameters, whose values are not valid."""
        if not self.filled:
            for name, shape in self.shapes.items():
                parameter = self._parameters[name]
                parameter.data = parameter.data.new_empty(shape)
        self.filled = False

    def _sent_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters that are sent: of those that are tied, one."""
        return ((name, self._parameters[name]) for name in self.shapes)

    def slice_layout(self) -> Mapping[str, Stored]:
        if not self._layout:
            self._layout = {name: self._stored_layout(name, p) for name, p in self._sent_parameters()}
        return self._layout

    def _stored_layout(self, name: str, parameter: torch.Tensor) -> Stored:
        shape = tuple(self.shapes[name])
        return Stored(shape, *matrix_shape(shape), (Chunk(whole(shape)),), parameter.dtype)

    @contextmanager
    def open_slices(self, version: int) -> Iterator[Mapping[str, torch.Tensor]]:
        self._allocate()
        yield dict(self._sent_parameters())
        self.filled = True

    def stored(self, name: str) -> torch.Tensor | None:
        return self._parameters[name].detach() if name in self.shapes else None

    def release(self) -> None:
        self.filled = False
        for _, parameter in self._sent_parameters():
            parameter.data = parameter.data.new_empty(0)
