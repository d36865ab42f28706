"""Merging and comparing, from the folder of a checkpoint to a verified HuggingFace folder."""

import filecmp
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.model_merger import checkpoint as fsdp_checkpoint
from verl.model_merger import megatron, verify
from verl.model_merger.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from verl.model_merger.checkpoint import Checkpoint, base_models
from verl.model_merger.huggingface import Export, describe
from verl.model_merger.lora import MergedAdapters, with_adapters_merged
from verl.model_merger.safetensors_folder import SafetensorsFolder, local_folder
from verl.model_merger.writing import staged, weight_files, write_config, write_json, write_weights

logger = logging.getLogger("verl.model_merger")

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BACKENDS = {"fsdp": fsdp_checkpoint.open_checkpoint, "megatron": megatron.open_checkpoint}


@dataclass(frozen=True)
class MergeOptions:
    """What the command line says; the meaning of each is in its --help."""

    local_dir: Path
    target_dir: Path
    backend: str = "fsdp"
    dtype: str = "keep"
    max_shard_bytes: int = 5 * 10**9
    base: str | None = None
    allow_unchanged: bool = False
    overwrite: bool = False
    lora_alpha: float | None = None
    adapter_dir: Path | None = None
    trust_remote_code: bool = False


def merge(options: MergeOptions) -> Path:
    """Write the model of a checkpoint as a HuggingFace folder, verify it, and return the folder.

    Raises ValueError, with the target as it was, for a checkpoint that is not whole, weights that do not make the model
    of the config, a result that is not the checkpoint's model, or one that is the base model still.
    """
    checkpoint = _BACKENDS[options.backend](options.local_dir, options.base)
    export = _export(checkpoint, options.lora_alpha, options.trust_remote_code, DTYPES[options.dtype])
    target = options.target_dir.resolve()
    logger.info("%s: %s, %s", checkpoint.folder, checkpoint.kind, type(export.model.module).__name__)
    if checkpoint.is_merged and target == checkpoint.config_folder:
        return _already_merged(checkpoint, export, options)
    _check_target(target, checkpoint, options.overwrite)
    if options.adapter_dir is not None:
        _check_adapter_target(export, options)
    base = _base_folder(checkpoint, options.base)
    if base is not None and base.resolve() == target:
        raise ValueError(f"--target_dir {target} is the model that training started from: choose another folder")
    export.check_tied()
    with staged(target) as folder:
        model = export.model
        labels = model.config.num_labels if "score.weight" in model.shapes else None
        write_config(checkpoint.config_folder, folder, type(model.module).__name__, export.main_dtype, labels)
        _add_generation_config(folder, base, labels)
        _check_recorded_files(target, folder, checkpoint)
        write_weights(folder, export.plan, export.tensors(), options.max_shard_bytes)
        if not options.allow_unchanged:
            _refuse_unchanged(folder, base, export)
        difference = verify.check_against_checkpoint(folder, export)
    if options.adapter_dir is not None:
        _export_adapter(export, options, base)
    parameters = sum(info.meta().numel() for info in export.plan.values())
    logger.info(
        "%s: %d tensors, %d values, %s; loaded, and its logits differ from the checkpoint's by %.2g at most",
        target,
        len(export.plan),
        parameters,
        str(export.main_dtype).removeprefix("torch."),
        difference,
    )
    return target


def compare(
    backend: str,
    local_dir: Path,
    folder: Path,
    lora_alpha: float | None,
    trust_remote_code: bool,
    base: str | None = None,
) -> list[str]:
    """What differs between a checkpoint, merged in memory tensor by tensor, and a HuggingFace folder; empty: nothing.

    The checkpoint's tensors are rounded to the dtype of the folder's; no other difference is tolerated, because a step
    of reinforcement learning may move a weight by one part in a million.
    """
    export = _export(_BACKENDS[backend](local_dir, base), lora_alpha, trust_remote_code, None)
    other = SafetensorsFolder(folder)
    theirs = other.infos({})
    faults = [f"{name} is only in {folder}" for name in theirs if name not in export.plan]
    for name, tensor in export.tensors():
        if name not in theirs:
            faults.append(f"{name} is only in {local_dir}")
        elif theirs[name].shape != tuple(tensor.shape):
            faults.append(f"{name} has the shape {tuple(tensor.shape)} here, {theirs[name].shape} there")
        else:
            difference = (tensor.to(theirs[name].dtype).double() - other.read(name).double()).abs().max().item()
            if difference:
                faults.append(f"{name} differs by up to {difference:.3g}")
    return faults


def _export(checkpoint: Checkpoint, alpha: float | None, trust_remote_code: bool, dtype: torch.dtype | None) -> Export:
    source = with_adapters_merged(checkpoint, alpha)
    return Export(source, describe(checkpoint.config_folder, source.names(), trust_remote_code), dtype)


def _already_merged(checkpoint: Checkpoint, export: Export, options: MergeOptions) -> Path:
    """The checkpoint of one device, where it lies: verified, not touched."""
    if export.dtype is not None:
        raise ValueError(
            f"{checkpoint.config_folder} is the checkpoint itself, which a change to {options.dtype} would damage: "
            "give another --target_dir"
        )
    if not options.allow_unchanged:
        _refuse_unchanged(checkpoint.config_folder, _base_folder(checkpoint, options.base), export)
    verify.check_against_checkpoint(checkpoint.config_folder, export)
    logger.info("%s is a HuggingFace model already: verified, nothing written", checkpoint.config_folder)
    return checkpoint.config_folder


def _check_target(target: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    """Refuse, before any work, a target that would lose something."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"--target_dir {target} is a file")
    if checkpoint.folder.is_relative_to(target):
        raise ValueError(f"--target_dir {target} holds the checkpoint itself: give a folder of its own")
    own = target == checkpoint.config_folder
    if target.is_dir() and any(target.iterdir()) and not own and not overwrite:
        raise ValueError(
            f"--target_dir {target} is not empty: choose another, or say --overwrite to replace its weights"
        )
    if own and any(_recorded_as(checkpoint, path) in checkpoint.recorded for path in weight_files(target)):
        raise ValueError(
            f"{target} holds weights that belong to the checkpoint, which could not be resumed from if they were "
            "replaced: give another --target_dir"
        )


def _recorded_as(checkpoint: Checkpoint, path: Path) -> str:
    root = checkpoint.folder.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def _check_recorded_files(target: Path, folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse to change files by whose checksums the checkpoint is verified when a run resumes."""
    for path in folder.iterdir():
        old = target / path.name
        if _recorded_as(checkpoint, old) in checkpoint.recorded and not filecmp.cmp(path, old, shallow=False):
            raise ValueError(
                f"{old} belongs to the checkpoint and would change (another dtype or architecture); the run could not "
                "be resumed from it: give another --target_dir"
            )


def _add_generation_config(folder: Path, base: Path | None, num_labels: int | None) -> None:
    """Take how a language model ends its answers from its base, where the trainer did not write it down."""
    name = "generation_config.json"
    if num_labels is None and base is not None and not (folder / name).is_file() and (base / name).is_file():
        shutil.copy2(base / name, folder / name)


# ---- the base model -------------------------------------------------------------------------------------------------


def _base_folder(checkpoint: Checkpoint, named: str | None) -> Path | None:
    """The model that training started from, if it is on this machine."""
    if named is not None:
        folder = local_folder(named)
        if folder is None:
            raise ValueError(f"--base {named}: no model with safetensors files there, nor in the cache of HuggingFace")
        return folder
    candidates = base_models(checkpoint.folder)
    folder = next((folder for name in candidates if (folder := local_folder(name)) is not None), None)
    if folder is None:
        where = f"{candidates} is not on this machine" if candidates else "the checkpoint does not name it"
        logger.warning("not compared with the model that training started from: %s; --base says where it is", where)
    return folder


def _refuse_unchanged(folder: Path, base: Path | None, export: Export) -> None:
    source = export.source
    if isinstance(source, MergedAdapters) and source.is_untrained():
        raise ValueError(
            "the LoRA adapters are all zero: they were saved before the first step, or never trained. "
            "--allow_unchanged writes the model all the same"
        )
    if base is None:
        return
    difference = verify.first_difference(SafetensorsFolder(folder), SafetensorsFolder(base))
    if difference is None:
        raise ValueError(
            f"the result equals the model that training started from, {base}: the trained weights were never saved, or "
            f"their change is lost by rounding to {export.main_dtype} (then take --dtype float32). "
            "--allow_unchanged writes it all the same"
        )
    logger.info("differs from the model that training started from, %s (first at %s)", base, difference)


# ---- adapters -------------------------------------------------------------------------------------------------------


def _check_adapter_target(export: Export, options: MergeOptions) -> None:
    if not isinstance(export.source, MergedAdapters):
        raise ValueError("--adapter_dir is given, but the checkpoint holds no LoRA adapters")
    target = options.adapter_dir
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        raise ValueError(f"--adapter_dir {target} is not empty: choose another, or say --overwrite")


def _export_adapter(export: Export, options: MergeOptions, base: Path | None) -> None:
    task = "TOKEN_CLS" if "score.weight" in export.model.shapes else "CAUSAL_LM"
    name = options.base or (str(base) if base is not None else None)
    with staged(options.adapter_dir.resolve()) as folder:
        save_file(export.source.adapter_tensors(), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, export.source.adapter_config(name, task))
