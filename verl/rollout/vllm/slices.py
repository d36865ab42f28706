"""Which slice of each parameter vLLM stores, read off vLLM's own loaders: a push writes there and gathers nothing.

vLLM's layers have many layouts: q, k and v in one matrix, heads that several ranks have, a padded vocabulary, experts
of a rank. Their loaders know them. Before the first push they load parameters whose rows are numbered, so that what
vLLM stores says where each row goes, and then random ones, whose bits must be where the numbers say. Nothing depends on
layer classes or versions of vLLM. A model that is not stored as rows and columns in this way is `NotSliced`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from verl.rollout.expert_names import ExpertNames
from verl.utils.shards import Box, Chunk, matrix_shape
from verl.weight_sync.reshard.plan import Stored

# ---- layers of experts ----------------------------------------------------------------------------------------------

# Kernels for a CPU compute with packed weights.

#: vLLM's kernels that compute with `w13_weight` and `w2_weight` as they are loaded; those for a CPU pack them
_PLAIN, _PACKED = "TRITON", "CPU"


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> the module with `w13_weight` and `w2_weight`, of every layer with experts.

    Raises:
        ValueError: they are computed by kernels with another layout.
    """
    layers = {name: layer for name, layer in model.named_modules() if "w13_weight" in layer._parameters}
    for name, layer in layers.items():
        kernels = _kernels_of(layer)
        if kernels not in (_PLAIN, _PACKED):
            raise ValueError(
                f"rollout.name=vllm: expected experts that are computed by vLLM's kernels {_PLAIN}, or {_PACKED} on a "
                f"CPU, found {kernels} for {name}: weights cannot be pushed into their layout; use rollout.name=native"
            )
    return layers


def _kernels_of(layer: nn.Module) -> str:
    method = layer.quant_method
    return getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__)


def packed_layers(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `expert_layers` whose kernels compute with packed weights."""
    return {name: layer for name, layer in layers.items() if _kernels_of(layer) == _PACKED}


@contextmanager
def unpacked(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Context in which the weights of experts have the layout in which they are loaded. Its end packs them again.

    Only kernels for a CPU have another layout: blocks of rows, padded.
    """
    packed = packed_layers(layers)
    for layer in packed.values():
        experts, hidden = len(layer.w13_weight), layer.hidden_size
        width = layer.moe_config.intermediate_size_per_partition
        _replace(layer, "w13_weight", layer.w13_weight.new_empty(experts, 2 * width, hidden))
        _replace(layer, "w2_weight", layer.w2_weight.new_empty(experts, hidden, width))
    yield
    for layer in packed.values():
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _replace(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, name, tensor)


# ---- slices ---------------------------------------------------------------------------------------------------------

#: dtype -> integers of its size
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
#: a row's number has two digits; as the bits of a number of any of these dtypes, each is finite
_BASE = 2**14


class ParameterNames:
    """Names of the parameters of vLLM's model for those of HuggingFace. vLLM fuses some, such as q, k and v.

    Layers with adapters have the names of those without.
    """

    def __init__(self, model: nn.Module):
        self.parameters = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
        self.experts = ExpertNames(self.parameters)
        # of a vision-language model, the language model may have the mapping
        packed = [dict(getattr(m, "packed_modules_mapping", None) or {}) for m in reversed([*model.modules()])]
        self._packed = {part: fused for mapping in packed for fused, parts in mapping.items() for part in parts}
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)

    def target(self, name: str) -> str | None:
        """The parameter that has the weights of a parameter of HuggingFace; None if there is none."""
        if (experts := self.experts.target(name)) is not None:
            return experts
        name = self.experts.renamed(name)
        if self._mapper is not None:
            mapped = self._mapper.apply_list([name])
            name = mapped[0] if mapped else name
        if name in self.parameters:
            return name
        *path, module, kind = name.split(".")
        fused = ".".join([*path, self._packed.get(module, module), kind])
        return fused if fused in self.parameters else None


class NotSliced(ValueError):
    """The slices of a model cannot be written. The message names the parameter."""


class _Run(NamedTuple):
    """Rows of a parameter of HuggingFace in one of vLLM.

    Attributes:
        name: HuggingFace name; "" for padding.
        row: the first row in the parameter of HuggingFace.
        at: the first row in vLLM's.
    """

    name: str
    row: int
    at: int
    rows: int


@dataclass(frozen=True)
class _Slice:
    """What vLLM stores of a parameter of HuggingFace.

    Attributes:
        target: vLLM's parameter.
        start: its first row, as a matrix of `stored.columns`.
        stored: the chunks in the rows from there.
    """

    target: str
    start: int
    stored: Stored

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stored tensor, (rows, columns): a view of vLLM's parameter `target`."""
        matrix = parameter.view(-1, self.stored.columns)
        return matrix[self.start : self.start + self.stored.rows]


class Slices:
    """The slices of a model.

    Args:
        model: vLLM's model.
        slices: HuggingFace name -> what is stored of the parameter.
        padding: rows of vLLM's parameters that are zero: name, first row, end, columns.
    """

    def __init__(self, model: nn.Module, slices: Mapping[str, _Slice], padding: list[tuple[str, int, int, int]]):
        self.layout = {name: each.stored for name, each in slices.items()}
        self._slices = slices
        self._padding = padding
        self._owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in dict.fromkeys(each.target for each in slices.values())
        }
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters().items()}

    def _parameter(self, target: str) -> torch.Tensor:
        """A parameter of vLLM, as it is now."""
        module, kind = self._owners[target]
        return module._parameters[kind].detach()

    def _parameters(self) -> dict[str, torch.Tensor]:
        """vLLM's parameters, as they are now."""
        return {target: self._parameter(target) for target in self._owners}

    def stored(self, name: str) -> torch.Tensor | None:
        """The rows of a HuggingFace parameter that vLLM stores; None for another tensor, such as that of an adapter."""
        parameter_slice = self._slices.get(name)
        return None if parameter_slice is None else parameter_slice.view(self._parameter(parameter_slice.target))

    def writable(self) -> Mapping[str, torch.Tensor]:
        """HuggingFace name -> the tensor to write into. Padding is set to zero.

        Raises:
            ValueError: vLLM has replaced the memory of a parameter.
        """
        parameters = self._parameters()
        if moved := [name for name, address in self._addresses.items() if parameters[name].data_ptr() != address]:
            raise ValueError(
                f"weight sync: vLLM's parameter {moved[0]} has other memory than before the first push: set "
                "rollout.weight_sync=replica"
            )
        for name, start, end, columns in self._padding:
            parameters[name].view(-1, columns)[start:end].zero_()
        return {name: each.view(parameters[each.target]) for name, each in self._slices.items()}


def find_slices(model: nn.Module, shapes: Mapping[str, torch.Size]) -> Slices:
    """Find what this rank stores of every parameter. The weights of the model are overwritten. Collective, if vLLM's
    loaders are.

    Args:
        model: vLLM's model.
        shapes: HuggingFace name of every parameter -> its shape.

    Raises:
        NotSliced: the first parameter that is not stored as rows and columns.
    """
    finder = _Finder(model, shapes)
    buffers = {name: _bits(buffer).clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        runs = finder.find_rows()
        slices = finder.check(finder.slices_of(runs))
    for name, buffer in model.named_buffers():
        if name not in buffers or not torch.equal(_bits(buffer), buffers[name]):
            raise NotSliced(f"vLLM's loaders compute the buffer {name}")
    padding = [(target, run.at, run.at + run.rows, finder.columns[target])
               for target, its_runs in runs.items() for run in its_runs if not run.name]  # fmt: skip
    finder.check_zeros(padding)
    return Slices(model, slices, padding)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class _Finder:
    """Loads parameters with known values, and reads where they are stored.

    Attributes:
        targets: HuggingFace name -> vLLM's parameter.
        sources: the reverse, in the order in which their rows are numbered.
        columns: vLLM's parameter -> its columns, as a matrix.
        first: HuggingFace name -> the number of its first row. 0: a row that is not loaded.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, torch.Size]):
        if packed := packed_layers(expert_layers(model)):
            raise NotSliced(f"vLLM computes the experts {next(iter(packed))} with packed weights")
        self.model, self.shapes = model, shapes
        self.names = ParameterNames(model)
        self.parameters = {name: p.detach() for name, p in self.names.parameters.items()}
        self.seeds = {name: number for number, name in enumerate(shapes)}
        self.targets: dict[str, str] = {}
        self.sources: dict[str, list[str]] = {name: [] for name in self.parameters}
        for name in shapes:
            target = self.names.target(name)
            if target is None:
                raise NotSliced(f"vLLM's model has no parameter for {name}")
            self.targets[name] = target
            self.sources[target].append(name)
        self.columns = {target: self._columns_of(target) for target in self.sources}
        self.first: dict[str, int] = {}  # number of the first row; 0: a row that is not loaded
        for sources in self.sources.values():
            number = 1
            for name in sources:
                self.first[name] = number
                number += matrix_shape(shapes[name])[0]

    def _columns_of(self, target: str) -> int:
        """Columns of a parameter of vLLM, as a matrix."""
        parameter, sources = self.parameters[target], self.sources[target]
        if not sources:
            raise NotSliced(f"no parameter of HuggingFace is loaded into vLLM's {target}")
        if parameter.dtype not in _BITS or not parameter.is_contiguous():
            layout = "contiguous" if parameter.is_contiguous() else "not contiguous"
            raise NotSliced(f"vLLM's {target} is {parameter.dtype}, {layout}")
        columns = matrix_shape(parameter.shape)[1]
        full = {matrix_shape(self.shapes[name])[1] for name in sources}
        if len(full) == 1 and len(parameter.shape) != len(self.shapes[sources[0]]):
            (columns,) = full  # vLLM has it in another shape
        if parameter.numel() % columns or any(each % columns for each in full):
            shapes = tuple(parameter.shape), tuple(self.shapes[sources[0]])
            raise NotSliced(f"vLLM's {target} has shape {shapes[0]}, and {sources[0]} has {shapes[1]}")
        return columns

    def _load(self, values: Callable[[str], torch.Tensor]) -> None:
        """Load parameters by vLLM's loaders. values: HuggingFace name -> the parameter."""
        unfused = self.names.experts.unfused
        stream = (item for name in self.shapes for item in unfused(name, values(name)))
        self.model.load_weights(stream)
        for _ in stream:  # a loader may stop early
            pass

    def find_rows(self) -> dict[str, list[_Run]]:
        """Parameter of vLLM -> its rows."""
        numbers: dict[str, torch.Tensor] = {}
        for factor in (1, _BASE):
            for parameter in self.parameters.values():
                parameter.zero_()
            self._load(lambda name, factor=factor: self._numbered(name, factor))
            for target, parameter in self.parameters.items():
                digits = parameter.view(_BITS[parameter.dtype]).view(-1, self.columns[target])[:, 0].long() * factor
                numbers[target] = numbers[target] + digits if target in numbers else digits
        return {target: self._runs(target, rows.cpu()) for target, rows in numbers.items()}

    def _numbered(self, name: str, factor: int) -> torch.Tensor:
        """A parameter with a digit of the number of its row in each element."""
        parameter, (rows, columns) = self.parameters[self.targets[name]], matrix_shape(self.shapes[name])
        numbers = torch.arange(self.first[name], self.first[name] + rows, device=parameter.device)
        digits = (numbers // factor % _BASE).to(_BITS[parameter.dtype])
        return digits[:, None].repeat(1, columns).view(parameter.dtype).view(self.shapes[name])

    def _runs(self, target: str, numbers: torch.Tensor) -> list[_Run]:
        """Consecutive rows of a parameter of vLLM. numbers: of all its rows."""
        sources = self.sources[target]
        firsts = torch.tensor([self.first[name] for name in sources])
        ends = int(firsts[-1]) + matrix_shape(self.shapes[sources[-1]])[0]
        if len(numbers) and int(numbers.max()) >= ends:
            raise NotSliced(f"vLLM's {target} has other rows than {sources[0]}")
        source = torch.searchsorted(firsts, numbers, right=True) - 1  # -1: padding
        cuts = (source[1:] != source[:-1]) | ((source[1:] >= 0) & (numbers[1:] != numbers[:-1] + 1))
        starts = [0, *(cuts.nonzero().flatten() + 1).tolist(), len(numbers)] if len(numbers) else [0]
        runs = []
        for at, end in pairwise(starts):
            index = int(source[at])
            name = sources[index] if index >= 0 else ""
            row = int(numbers[at]) - self.first[name] if name else 0
            runs.append(_Run(name, row, at, end - at))
        return runs

    def slices_of(self, runs: Mapping[str, list[_Run]]) -> dict[str, _Slice]:
        """HuggingFace name -> what is stored of the parameter, by its rows; columns begin with the first one."""
        slices = {}
        for name, target in self.targets.items():
            name_runs = [run for run in runs[target] if run.name == name]
            start, rows = name_runs[0].at if name_runs else 0, sum(run.rows for run in name_runs)
            if any(after.at != run.at + run.rows for run, after in pairwise(name_runs)):
                raise NotSliced(f"vLLM's {target} has the rows of {name} in several places")
            columns, dtype = self.columns[target], self.parameters[target].dtype
            chunks = tuple(Chunk(Box(run.row, run.row + run.rows, 0, columns), run.at - start) for run in name_runs)
            slices[name] = _Slice(target, start, Stored(tuple(self.shapes[name]), rows, columns, chunks, dtype))
        return slices

    def check(self, slices: Mapping[str, _Slice]) -> dict[str, _Slice]:
        """Load random parameters, find the columns, and compare all bits. Returns the slices with their columns."""
        for parameter in self.parameters.values():
            parameter.fill_(1)  # padding must be set to zero by the loaders
        self._load(self._random)
        checked = {}
        for name, each in slices.items():
            full = self._random(name).view(matrix_shape(self.shapes[name]))
            stored = each.view(self.parameters[each.target])
            checked[name] = each = replace(each, stored=_with_columns(each.stored, full, stored))
            for chunk in each.stored.chunks:
                box = chunk.box
                rows = stored[chunk.row : chunk.row + box.rows]
                if not torch.equal(rows, full[box.top : box.bottom, box.left : box.right]):
                    raise NotSliced(f"vLLM's {each.target} does not store {name} as rows and columns of it")
        return checked

    def _random(self, name: str) -> torch.Tensor:
        """Random values of a parameter, the same in every call."""
        parameter = self.parameters[self.targets[name]]
        generator = torch.Generator(parameter.device).manual_seed(self.seeds[name])
        values = torch.empty(self.shapes[name], dtype=parameter.dtype, device=parameter.device)
        return values.normal_(generator=generator)

    def check_zeros(self, padding: list[tuple[str, int, int, int]]) -> None:
        """Raise NotSliced unless vLLM's loaders have set the padding to zero."""
        for target, at, end, columns in padding:
            if self.parameters[target].view(-1, columns)[at:end].any():
                raise NotSliced(f"vLLM's {target} has rows from {at} that are not loaded")


def _with_columns(layout: Stored, full: torch.Tensor, stored: torch.Tensor) -> Stored:
    """The layout with the columns whose values are stored in its first row."""
    count = full.shape[1] // layout.columns
    if count == 1 or not layout.chunks:
        return layout
    blocks = full[layout.chunks[0].box.top].view(count, -1)
    index = int((blocks == stored[layout.chunks[0].row]).all(1).int().argmax())
    left, right = index * layout.columns, (index + 1) * layout.columns
    chunks = (replace(chunk, box=chunk.box._replace(left=left, right=right)) for chunk in layout.chunks)
    return replace(layout, chunks=tuple(chunks))
