"""The HuggingFace side: which class a checkpoint is of, what tensors it has, and how they are called on disk."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.source import Shape, TensorInfo, WeightSource, same_bits

logger = logging.getLogger("verl.model_merger")

#: everything up to the first number: `model.layers.3`
_LAYER = re.compile(r"^.*?\.\d+(?=\.)")

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}


@dataclass(frozen=True)
class ModelDescription:
    """A model without weights.

    module: on the meta device. shapes: of every tensor, under its name in memory. tied: name -> the name of the tensor
    that it is another name of.
    """

    module: Any
    shapes: dict[str, Shape]
    tied: dict[str, str]

    @property
    def config(self) -> Any:
        """The HuggingFace config."""
        return self.module.config


def describe(config_folder: Path, names: Iterable[str], trust_remote_code: bool) -> ModelDescription:
    """The model that the config and the names of the weights speak of.

    A critic is told by its `score.` weights: the config may still be the one of the language model that it was made
    from. It gives one value per token. Raises ValueError when transformers cannot build the model.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(config_folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{config_folder / 'config.json'} is not usable: {error}") from error
    architecture = (config.architectures or ["ForCausalLM"])[0]
    if "score.weight" in names and not architecture.endswith(("ForTokenClassification", "ForSequenceClassification")):
        architecture, config.num_labels = "ForTokenClassification", 1
    ending = next((ending for ending in _AUTO_CLASSES if architecture.endswith(ending)), None)
    if ending is None:
        raise ValueError(
            f"{config_folder / 'config.json'} names the architecture {architecture}: expected one that ends with "
            f"{', '.join(_AUTO_CLASSES)}"
        )
    auto = getattr(transformers, _AUTO_CLASSES[ending])
    with torch.device("meta"):
        module = auto.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    return ModelDescription(module, shapes, dict(module.all_tied_weights_keys))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no table of missing keys: what they say is answered by errors here."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def build(
    model: ModelDescription, where: Path | None, weights: dict[str, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[Any, list[str]]:
    """The model with the weights of a folder or of a dictionary, and what is wrong with them in words.

    Weights of a dictionary are used as they are, not copied, when they have the dtype already.
    """
    with quiet_transformers():
        module, report = type(model.module).from_pretrained(
            where,
            config=None if where is not None else model.config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, with all others at once
        )
    faults = [f"missing: {name}" for name in sorted(report["missing_keys"])]
    faults += [f"unknown to the model: {name}" for name in sorted(report["unexpected_keys"])]
    faults += [
        f"{name} has the shape {tuple(found)}, the model's is {tuple(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    return module, faults + [str(message) for message in report["error_msgs"]]


def refuse_faults(model: ModelDescription, faults: list[str]) -> None:
    """Raise ValueError that names the first faults, if there are any."""
    if faults:
        raise ValueError(
            f"the weights are not those of {type(model.module).__name__} with this config.json: "
            f"{'; '.join(faults[:6])}{f'; and {len(faults) - 6} more' if len(faults) > 6 else ''}"
        )


class Export:
    """The tensors of a model as they stand in a HuggingFace folder: renamed, split and cast, one group at a time.

    transformers keeps some weights in another form in memory than on disk (the experts of a layer in one tensor), so a
    checkpoint in the names of memory is turned back to those of the disk, a layer at a time.
    """

    def __init__(self, source: WeightSource, model: ModelDescription, dtype: torch.dtype | None):
        """dtype: of the result; None keeps that of each tensor. Raises ValueError when weights do not fit the model."""
        self.source, self.model, self.dtype = source, model, dtype
        infos = source.infos(model.shapes)
        self._doubles = {name: kept for name, kept in model.tied.items() if name in infos and kept in infos}
        self.infos = {name: info for name, info in infos.items() if name not in self._doubles}
        self._groups = list(_groups(self.infos, model.shapes))
        planned: dict[str, torch.Tensor] = {}
        for names in self._groups:
            planned |= self._on_disk({name: self._cast(self.infos[name].meta()) for name in names})
        self.plan = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in planned.items()}
        self._check_names()

    def _check_names(self) -> None:
        """Compare with the model before anything is written.

        Names that the model does not know in memory may be those of the disk: whether they fit is known only when
        transformers loads the result.
        """
        expected = self.model.shapes
        if not self.infos.keys() <= expected.keys():
            return
        present = {*self.infos, *(name for name, kept in self.model.tied.items() if kept in self.infos)}
        present |= {kept for name, kept in self.model.tied.items() if name in self.infos}
        faults = [f"missing: {name}" for name in expected if name not in present]
        shapes = {name: info.shape for name, info in self.infos.items() if info.shape != expected[name]}
        faults += [f"{name} has the shape {shape}, the model's is {expected[name]}" for name, shape in shapes.items()]
        refuse_faults(self.model, faults)

    @property
    def main_dtype(self) -> torch.dtype:
        """The floating-point dtype that most of the result has."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.plan.values():
            if info.dtype.is_floating_point:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.meta().numel()
        return max(sizes, key=sizes.__getitem__)

    def check_tied(self) -> None:
        """Raise ValueError when two names of one tensor have different contents."""
        for name, kept in self._doubles.items():
            if not same_bits(self.source.read(name), self.source.read(kept)):
                raise ValueError(
                    f"{name} and {kept} differ, but config.json says that they are one (tie_word_embeddings): "
                    "set it to false there if they were trained apart"
                )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name on disk, tensor), in the order of `plan`. Raises ValueError for weights that are NaN or infinite."""
        for names in self._groups:
            whole = {name: self.source.read(name) for name in names}
            for name, tensor in whole.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ValueError(f"{name} has values that are NaN or infinite: training had diverged")
            yield from self._on_disk({name: self._cast(tensor) for name, tensor in whole.items()}).items()

    def again(self) -> dict[str, torch.Tensor]:
        """All tensors by the source's other way, under the names in which it has them."""
        return {name: self._cast(self.source.read_again(name)) for name in self.infos}

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _on_disk(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        if not group.keys() <= self.model.shapes.keys():
            return group  # written with names of the disk, by an older transformers
        return revert_weight_conversion(self.model.module, group)


def _groups(names: Iterable[str], in_memory: Mapping[str, Shape]) -> Iterator[list[str]]:
    """The names layer by layer; what is outside layers, and what does not have a name of memory, one by one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name) if name in in_memory else None
        layers.setdefault(match[0] if match else name, []).append(name)
    yield from layers.values()
