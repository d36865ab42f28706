"""The HuggingFace model of a checkpoint: its class, its tensors, and their names on disk."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.sources import SafetensorsFolder, Shape, WeightSource, same_bits

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}


@dataclass(frozen=True)
class ModelDescription:
    """A model without weights.

    Attributes:
        shapes: Tensor name in memory -> shape.
        tied: Name of a tied tensor -> name of the tensor it is tied to.
    """

    module: Any
    shapes: dict[str, Shape]
    tied: dict[str, str]

    @property
    def config(self) -> Any:
        """The HuggingFace config."""
        return self.module.config


def describe(config_folder: Path, names: Iterable[str], trust_remote_code: bool) -> ModelDescription:
    """Return the model described by the config and the tensor names.

    A critic is recognized by its `score.` weights, since its config may be that of the language model it was
    initialized from. It has one output per token.

    Raises:
        ValueError: If transformers cannot build the model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = transformers.AutoConfig.from_pretrained(config_folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {config_folder / 'config.json'}: {error}") from error
    architecture = (config.architectures or ["ForCausalLM"])[0]
    if "score.weight" in names and not architecture.endswith(("ForTokenClassification", "ForSequenceClassification")):
        architecture, config.num_labels = "ForTokenClassification", 1
    ending = next((ending for ending in _AUTO_CLASSES if architecture.endswith(ending)), None)
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():  # such as GPT2LMHeadModel
        ending = "ForCausalLM"
    if ending is None:
        raise ValueError(
            f"{config_folder / 'config.json'}: expected an architecture that ends with {', '.join(_AUTO_CLASSES)}, "
            f"found {architecture}"
        )
    auto = getattr(transformers, _AUTO_CLASSES[ending])
    with torch.device("meta"):
        module = auto.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    return ModelDescription(module, shapes, dict(module.all_tied_weights_keys))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and the table of missing keys, which are reported as errors here."""
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
    model: ModelDescription, folder: Path | None, weights: dict[str, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[Any, list[str]]:
    """Build the model with the weights of a folder or of a dict.

    Args:
        weights: Name -> tensor, or None. Tensors that already have `dtype` are not copied.

    Returns:
        The model, and descriptions of missing, unexpected and mismatched weights.
    """
    with quiet_transformers():
        module, report = type(model.module).from_pretrained(
            folder,
            config=None if folder is not None else model.config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",  # grouped matmuls have no float64
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, with all others at once
        )
    faults = [f"missing: {name}" for name in sorted(report["missing_keys"])]
    faults += [f"not in the model: {name}" for name in sorted(report["unexpected_keys"])]
    faults += [
        f"{name}: expected shape {tuple(expected)}, found {tuple(shape)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    return module, faults + [str(message) for message in report["error_msgs"]]


def refuse_faults(model: ModelDescription, faults: list[str]) -> None:
    """Raise ValueError with the first faults, if there are any."""
    if faults:
        raise ValueError(
            f"the weights do not match {type(model.module).__name__} with this config.json: "
            f"{'; '.join(faults[:6])}{f'; and {len(faults) - 6} more' if len(faults) > 6 else ''}"
        )


class Export:
    """The weights of a checkpoint as a model.

    Args:
        dtype: of floating-point tensors; None: unchanged.
    """

    def __init__(self, source: WeightSource, model: ModelDescription, dtype: torch.dtype | None):
        self.source, self.model, self.dtype = source, model, dtype
        infos = source.infos(model.shapes)
        self._tied = {name: target for name, target in model.tied.items() if name in infos and target in infos}
        self.infos = {name: info for name, info in infos.items() if name not in self._tied}

    @property
    def main_dtype(self) -> torch.dtype:
        """The floating-point dtype of most values of the result."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.infos.values():
            if info.dtype.is_floating_point:
                sizes[self.dtype or info.dtype] += math.prod(info.shape)
        return sizes.most_common(1)[0][0]

    def load(self) -> Any:
        """Read the weights into a model of transformers.

        Raises:
            ValueError: weights that are not those of the model, NaN or infinite values, or tied tensors with different
                contents.
        """
        for name, target in self._tied.items():
            if not same_bits(self.source.read(name), self.source.read(target)):
                raise ValueError(
                    f"{name} and {target} differ, but config.json ties them (tie_word_embeddings): "
                    "set it to false if they were trained separately"
                )
        module, faults = build(self.model, None, {name: self._read(name) for name in self.infos}, self.main_dtype)
        refuse_faults(self.model, faults)
        return module

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        if not tensor.is_floating_point():
            return tensor
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} contains NaN or infinite values: training diverged")
        return tensor if self.dtype is None else tensor.to(self.dtype)


def disk_tensors(model: ModelDescription, module: Any) -> dict[str, torch.Tensor]:
    """The weights of a model by their names on disk.

    transformers stores some weights differently in memory than on disk (the experts of a layer in one tensor).
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor for name, tensor in module.state_dict().items() if name not in model.tied}
    return revert_weight_conversion(model.module, state)


# ---- verification ---------------------------------------------------------------------------------------------------


def check_folder(folder: Path, export: Export, expected: dict[str, str]) -> None:
    """Load a folder with transformers, and compare it with the `checksums` of the checkpoint's model.

    Raises:
        ValueError: For missing or unexpected weights, or if a tensor differs.
    """
    module, faults = build(export.model, folder, None, export.main_dtype)
    refuse_faults(export.model, faults)
    found = checksums(module)
    if differing := [name for name, checksum in expected.items() if found[name] != checksum]:
        raise ValueError(
            f"{differing[0]} of the merged model differs from the checkpoint: the merge failed, nothing was written"
        )


def checksums(module: Any) -> dict[str, str]:
    """The checksum of every tensor of a model."""
    state = module.state_dict()
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        return dict(zip(state, pool.map(_checksum, state.values())))


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def first_difference(written: SafetensorsFolder, base: SafetensorsFolder) -> str | None:
    """Return the name of the first tensor that differs from the base model, or None.

    The base model is rounded to the dtype of the merged model.
    """
    base_names = set(base.names())
    for name in written.names():
        if name not in base_names:
            return name
        tensor = written.read(name)
        if not same_bits(tensor, base.read(name).to(tensor.dtype)):
            return name
    return None
