"""The HuggingFace model of a checkpoint: its class, its tensors, and their names on disk."""

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.sources import SafetensorsFolder, Shape, WeightSource, same_bits

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
    """The tensors of a model as stored in a HuggingFace folder: renamed, split and cast, one group at a time.

    transformers stores some weights differently in memory than on disk (the experts of a layer in one tensor).
    Checkpoints use the names in memory, so they are converted back, one layer at a time.
    """

    def __init__(self, source: WeightSource, model: ModelDescription, dtype: torch.dtype | None):
        """ValueError if the weights do not match the model. dtype: of floating-point tensors; None: unchanged."""
        self.source, self.model, self.dtype = source, model, dtype
        infos = source.infos(model.shapes)
        self._tied = {name: target for name, target in model.tied.items() if name in infos and target in infos}
        self.infos = {name: info for name, info in infos.items() if name not in self._tied}
        self._groups = list(_groups(self.infos, model.shapes))
        self._check_names()

    def _check_names(self) -> None:
        """Compare with the model before anything is written.

        Names that are not in the model may be names on disk. They are checked when transformers loads the result.
        """
        expected = self.model.shapes
        if not self.infos.keys() <= expected.keys():
            return
        present = {*self.infos, *(name for name, target in self.model.tied.items() if target in self.infos)}
        present |= {target for name, target in self.model.tied.items() if name in self.infos}
        faults = [f"missing: {name}" for name in expected if name not in present]
        shapes = {name: info.shape for name, info in self.infos.items() if info.shape != expected[name]}
        faults += [f"{name}: expected shape {expected[name]}, found {shape}" for name, shape in shapes.items()]
        refuse_faults(self.model, faults)

    @property
    def main_dtype(self) -> torch.dtype:
        """The floating-point dtype of most values of the result."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.infos.values():
            if info.dtype.is_floating_point:
                sizes[self.dtype or info.dtype] += math.prod(info.shape)
        return sizes.most_common(1)[0][0]

    def check_tied(self) -> None:
        """Raise ValueError if tied tensors have different contents."""
        for name, target in self._tied.items():
            if not same_bits(self.source.read(name), self.source.read(target)):
                raise ValueError(
                    f"{name} and {target} differ, but config.json ties them (tie_word_embeddings): "
                    "set it to false if they were trained separately"
                )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name on disk, tensor). Raises ValueError for NaN or infinite weights."""
        from transformers.core_model_loading import revert_weight_conversion

        for names in self._groups:
            group = {name: self.source.read(name) for name in names}
            for name, tensor in group.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ValueError(f"{name} contains NaN or infinite values: training diverged")
            group = {name: self._cast(tensor) for name, tensor in group.items()}
            if group.keys() <= self.model.shapes.keys():  # others have names on disk, saved by an older transformers
                group = revert_weight_conversion(self.model.module, group)
            yield from group.items()

    def source_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, cast, under their names in the source."""
        return {name: self._cast(self.source.read(name)) for name in self.infos}

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor


def _groups(names: Iterable[str], in_memory: Mapping[str, Shape]) -> Iterator[list[str]]:
    """Yield the names layer by layer; names outside of layers, and names on disk, one by one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name) if name in in_memory else None
        layers.setdefault(match[0] if match else name, []).append(name)
    yield from layers.values()


# ---- verification ---------------------------------------------------------------------------------------------------

#: tolerated difference relative to the largest logit: with equal weights, the order of summation may still differ
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def check_against_checkpoint(folder: Path, export: Export) -> float:
    """Load the folder with transformers and compare it with the checkpoint's weights, read a second time.

    Compares the checksum of every tensor, and the logits of a few tokens. One model is in memory at a time.

    Returns:
        The largest absolute difference of logits.

    Raises:
        ValueError: For missing or unexpected weights, or if a tensor or the logits differ.
    """
    merged, merged_sums = _load(export, folder, None)
    expected, expected_sums = _load(export, None, export.source_tensors())
    differing = [name for name, checksum in expected_sums.items() if merged_sums[name] != checksum]
    if differing:
        raise ValueError(
            f"{differing[0]} of the merged model differs from the checkpoint: the merge failed, nothing was written"
        )
    difference = (merged - expected).abs().max().item()
    if not difference <= _TOLERANCE[export.main_dtype] * expected.abs().max().item():
        raise ValueError(
            f"the logits of the merged model differ from the checkpoint's by up to {difference:.3g} "
            f"(largest logit: {expected.abs().max().item():.3g}): the merge failed, nothing was written"
        )
    return difference


def _load(
    export: Export, folder: Path | None, weights: dict[str, torch.Tensor] | None
) -> tuple[torch.Tensor, dict[str, str]]:
    """Return logits and the checksum of every tensor of a model that is freed afterwards."""
    module, faults = build(export.model, folder, weights, export.main_dtype)
    refuse_faults(export.model, faults)
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        state = module.state_dict()
        return _logits(module), dict(zip(state, pool.map(_checksum, state.values())))


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _logits(module: Any) -> torch.Tensor:
    """Return the logits of 16 tokens spread over the vocabulary, (1, 16, V) or (1, 16, labels) float32."""
    vocabulary = module.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(16)[None] * 7919 + 1) % vocabulary  # multiples of a large prime
    with torch.no_grad():
        return module.eval()(input_ids=ids).logits.float()


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
