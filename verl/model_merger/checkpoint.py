"""Opening a checkpoint folder: detect its format, check that it is complete, and find its base model.

Formats are those that this project writes. Checkpoints of public verl, `model_world_size_W_rank_R.pt` and `dist_ckpt/`,
are merged by public verl.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl.checkpoints.manifest import MANIFEST
from verl.checkpoints.safetensors_files import has_weights
from verl.checkpoints.store import content_faults, size_faults
from verl.model_merger.lora import Adapters, MergedAdapters, has_adapters, over_base, recorded_base
from verl.model_merger.sources import DistributedCheckpoint, SafetensorsFolder, WeightSource, local_folder
from verl.utils.paths import read_json, resolved

_EXPECTED = (
    "expected shards/, lora_adapter/, or huggingface/*.safetensors, next to huggingface/ with the config; --local_dir "
    "is .../global_step_N/actor (or .../critic)"
)
#: weights of public verl: of its FSDP workers, and of its Megatron workers
_PUBLIC = ("model_world_size_*_rank_*.pt", "dist_ckpt")


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


def open_checkpoint(folder: Path, base: str | None = None) -> Checkpoint:
    """Open a checkpoint and check that it is complete.

    Args:
        folder: `.../global_step_N/actor` or `.../critic`.
        base: The base model of adapters; by default, the one the checkpoint names.

    Raises:
        ValueError: If a file is missing or damaged, or the folder is not a checkpoint.
    """
    folder = resolved(folder)
    if not folder.is_dir():
        saved = sorted(map(str, Path("checkpoints").glob("**/global_step_*")))
        listed = f". Checkpoints below checkpoints/: {', '.join(saved[-5:])}" if saved else ""
        raise ValueError(f"no folder {folder}: {_EXPECTED}{listed}")
    _verify_manifest(folder)
    config = folder / "huggingface" / "config.json"
    source, format_name = _full_weights(folder)
    adapters = source is None and has_adapters(folder / "lora_adapter")
    if source is None and not adapters:
        raise ValueError(_describe_folder(folder))
    if not config.is_file():
        raise ValueError(
            f"{config} is missing: copy the config and the tokenizer of the model there "
            "(from the base model, if training did not change them)"
        )
    if adapters:
        return _adapter_checkpoint(folder, base)
    return Checkpoint(folder, source, format_name)


def with_adapters_merged(checkpoint: Checkpoint, trust_remote_code: bool = False) -> WeightSource:
    """Return the checkpoint's weights, with adapters merged if there are any."""
    source = checkpoint.source
    if isinstance(source, Adapters):
        return MergedAdapters(source, checkpoint.config_folder, trust_remote_code)
    return source


def _full_weights(folder: Path) -> tuple[WeightSource | None, str]:
    """Return the full weights in the folder, or None, and a description of their format."""
    if (folder / "shards").is_dir():
        source = DistributedCheckpoint(folder / "shards")
        if source.names():
            return source, "shards of torch.distributed.checkpoint"
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
    if public := next((name for pattern in _PUBLIC for name in folder.glob(pattern)), None):
        return (
            f"{folder} is a checkpoint of public verl, found {public.name}: merge it with the release that wrote it, "
            "and use the result as model.path"
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
    folders = tuple(f"{role}/{name}/" for name in ("shards", "lora_adapter", "huggingface"))
    used = {name: entry for name, entry in recorded.items() if name.startswith(folders)}
    faults = list(size_faults(root, used)) or list(content_faults(root, used))
    if faults:
        raise ValueError(f"{root} is damaged: {'; '.join(faults)}")
