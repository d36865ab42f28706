"""Opening a checkpoint folder: detect its format, check that it is complete, and find its base model."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl.checkpoints.manifest import MANIFEST
from verl.checkpoints.safetensors_files import has_weights
from verl.checkpoints.store import content_faults, size_faults
from verl.engines.traits import strategy_traits
from verl.model_merger.fsdp import RankFiles, is_rank_file
from verl.model_merger.lora import (
    Adapters,
    MergedAdapters,
    among_weights,
    has_adapters,
    lora_settings,
    over_base,
    recorded_base,
)
from verl.model_merger.megatron import FOLDER as DIST_CKPT
from verl.model_merger.megatron import MegatronCheckpoint
from verl.model_merger.sources import DistributedCheckpoint, SafetensorsFolder, WeightSource, local_folder
from verl.utils.paths import read_json, resolved

_EXPECTED = (
    "expected model_world_size_W_rank_R.pt files, shards/, dist_ckpt/, lora_adapter/, or huggingface/*.safetensors, "
    "next to huggingface/ with the config; --local_dir is .../global_step_N/actor (or .../critic)"
)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one role.

    Attributes:
        folder: `.../actor`.
    """

    folder: Path
    source: WeightSource | Adapters
    format_name: str

    @property
    def config_folder(self) -> Path:
        """The folder with the HuggingFace config and tokenizer."""
        return self.folder / "huggingface"


def base_models(folder: Path) -> list[str]:
    """Return the base models that a checkpoint (.../actor) names, as paths or HuggingFace ids."""
    config = read_json(folder / "huggingface" / "config.json")
    run_config = folder.parent / "config.yaml"  # the run's configuration
    settings = yaml.safe_load(run_config.read_text(encoding="utf-8")) if run_config.is_file() else {}
    # without a critic.model.path, the critic starts from the policy's model; SFT has a single top-level section
    sections = [settings.get("critic", {})] if folder.name == "critic" else []
    sections += [settings.get("actor_rollout_ref", {}), settings]
    names = [recorded_base(folder / "lora_adapter"), config.get("_name_or_path")]
    names += [section.get("model", {}).get("path") for section in sections]
    return list(dict.fromkeys(name for name in names if name))


def find_base(folder: Path, base: str | None) -> tuple[Path | None, str]:
    """Return the folder of the base model, if it is on this machine, and otherwise the reason.

    Args:
        base: The base model; None: those that the checkpoint names.
    """
    names = [base] if base is not None else base_models(folder)
    path = next(filter(None, map(local_folder, names)), None)
    return path, f"{names} is not on this machine" if names else "the checkpoint does not name it"


def open_checkpoint(folder: Path, base: str | None = None, backend: str = "fsdp") -> Checkpoint:
    """Open a checkpoint and check that it is complete.

    Args:
        folder: `.../global_step_N/actor` or `.../critic`.
        base: The base model of adapters; by default, the one the checkpoint names.
        backend: The engine that wrote it: "fsdp" or "megatron"; the format is detected.

    Raises:
        ValueError: If a file is missing or damaged, or the folder is not a checkpoint.
    """
    folder = resolved(folder)
    if not folder.is_dir():
        saved = sorted(map(str, Path("checkpoints").glob("**/global_step_*")))
        listed = f". Checkpoints below checkpoints/: {', '.join(saved[-5:])}" if saved else ""
        raise ValueError(f"no folder {folder}: {_EXPECTED}{listed}")
    _verify_manifest(folder)
    has_rank_files = any(is_rank_file(path) for path in folder.iterdir())
    has_shards = (folder / "shards").is_dir()
    if has_rank_files and has_shards:
        raise ValueError(f"{folder} contains both rank files and shards/: expected one format; move the other away")
    config = folder / "huggingface" / "config.json"
    source, format_name = _full_weights(folder, has_rank_files, has_shards)
    adapters = source is None and has_adapters(folder / "lora_adapter")
    if source is None and not adapters:
        raise ValueError(_describe_folder(folder))
    if strategy_traits(backend).model_parallel and has_rank_files:
        raise ValueError(f"{folder} contains rank files of FSDP: use --backend fsdp")
    if not config.is_file():
        raise ValueError(
            f"{config} is missing: copy the config and the tokenizer of the model there "
            "(from the base model, if training did not change them)"
        )
    if adapters:
        return _adapter_checkpoint(folder, base)
    return Checkpoint(folder, source, format_name)


def with_adapters_merged(checkpoint: Checkpoint, alpha: float | None, trust_remote_code: bool = False) -> WeightSource:
    """Return the checkpoint's weights with adapters merged, if any. Raises ValueError for alpha without adapters."""
    source = checkpoint.source
    if isinstance(source, WeightSource) and any(".lora_" in name for name in source.names()):
        source = among_weights(source)
    if isinstance(source, Adapters):
        settings = lora_settings(checkpoint.folder, alpha)
        return MergedAdapters(source, settings, checkpoint.config_folder, trust_remote_code)
    if alpha is not None:
        raise ValueError("--lora_alpha is set, but the checkpoint contains no LoRA adapters")
    return source


def _full_weights(folder: Path, has_rank_files: bool, has_shards: bool) -> tuple[WeightSource | None, str]:
    """Return the full weights in the folder, or None, and a description of their format."""
    if has_rank_files:
        files = RankFiles(folder)
        return files, f"{len(files.files)} rank files"
    if has_shards:
        source = DistributedCheckpoint(folder / "shards")
        if source.names():
            return source, "shards of torch.distributed.checkpoint"
    if (folder / DIST_CKPT / ".metadata").is_file() and (folder / "huggingface" / "config.json").is_file():
        megatron = MegatronCheckpoint(folder / DIST_CKPT, folder / "huggingface")
        if megatron.has_model:
            return megatron, "a checkpoint of megatron-core"
    if has_weights(folder / "huggingface"):
        return SafetensorsFolder(folder / "huggingface"), "already a HuggingFace model"
    return None, ""


def _adapter_checkpoint(folder: Path, base: str | None) -> Checkpoint:
    """Open a checkpoint that contains only adapters, with the weights of their base model."""
    adapters = folder / "lora_adapter"
    path, problem = find_base(folder, base)
    if path is None:
        raise ValueError(
            f"{adapters} contains only LoRA adapters, and their base model is required: {problem}. "
            "Set it with --base (relative paths start from the current directory)"
        )
    return Checkpoint(folder, over_base(adapters, path), f"LoRA adapters of {path}")


def _describe_folder(folder: Path) -> str:
    """Describe a folder without weights, and the folder to give instead."""
    roles = [name for name in ("actor", "critic") if (folder / name).is_dir()]
    steps = sorted(path.name for path in folder.glob("global_step_*"))
    if roles:
        return f"{folder} is a checkpoint of all roles: give one role, {' or '.join(str(folder / r) for r in roles)}"
    if steps:
        return f"{folder} is a run: give the role of one checkpoint, for example {folder / steps[-1] / 'actor'}"
    if (folder / DIST_CKPT).is_dir():
        return (
            f"{folder} is a checkpoint of megatron-core without weights: expected {DIST_CKPT}/.metadata with the model "
            "and huggingface/config.json (from the base model), or huggingface/*.safetensors"
        )
    if has_weights(folder):
        return f"{folder} is already a HuggingFace model: nothing to merge"
    if (folder / "huggingface" / "config.json").is_file():
        return f"{folder} contains no weights: the run saved without 'model' (checkpoint.save_contents)"
    names = sorted(path.name for path in folder.iterdir())
    return f"{folder} is not a checkpoint: {_EXPECTED}; found {names[:8] or 'nothing'}"


def _verify_manifest(folder: Path) -> None:
    """Verify weights and config against the checkpoint's manifest, if there is one."""
    root, role = folder.parent, folder.name
    if not (root / MANIFEST).is_file():
        return
    try:
        recorded = read_json(root / MANIFEST)["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"cannot read {root / MANIFEST}: {error}") from error
    folders = tuple(f"{role}/{name}/" for name in ("shards", "lora_adapter", "huggingface", DIST_CKPT))
    used = {name: entry for name, entry in recorded.items() if name.startswith(folders)}
    faults = list(size_faults(root, used)) or list(content_faults(root, used))
    if faults:
        raise ValueError(f"{root} is damaged: {'; '.join(faults)}")
