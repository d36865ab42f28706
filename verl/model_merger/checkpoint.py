"""Opening a checkpoint folder: detect its format, check that it is complete, and find its base model.

Formats are those that this project writes. Checkpoints of public verl, `model_world_size_W_rank_R.pt` and `dist_ckpt/`,
are merged by public verl.
"""

import json
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from verl.checkpoints.manifest import MANIFEST
from verl.checkpoints.safetensors_files import SafetensorsFiles, has_weights
from verl.checkpoints.shard_files import BoxLoadPlanner, Region, ShardReader
from verl.checkpoints.store import content_faults, newest_actor, size_faults
from verl.model_merger.huggingface import WeightSource
from verl.model_merger.lora import ADAPTER_WEIGHTS, MergedAdapters, recorded_base
from verl.utils.paths import expanded, read_json, resolved

_EXPECTED = (
    "expected shards/, lora_adapter/, or huggingface/*.safetensors, next to huggingface/ with the config; --local_dir "
    "is .../global_step_N/actor (or .../critic)"
)
#: weights of public verl: of its FSDP workers, and of its Megatron workers
_PUBLIC = ("model_world_size_*_rank_*.pt", "dist_ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one role. folder: `.../actor`."""

    folder: Path
    source: WeightSource
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


def local_folder(name: str) -> Path | None:
    """Return the local folder of a safetensors model: a path, or in the HuggingFace cache. Downloads nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = expanded(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):  # not in the cache, or not a valid repository id
            return None
    return folder if has_weights(folder) else None


def find_base(folder: Path, base: str | None) -> tuple[Path | None, str]:
    """The folder of the base model, if it is on this machine, and otherwise the reason. base: None for those that the
    checkpoint names."""
    names = [base] if base is not None else base_models(folder)
    path = next(filter(None, map(local_folder, names)), None)
    return path, f"{names} is not on this machine" if names else "the checkpoint does not name it"


def open_checkpoint(folder: Path, base: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Open a checkpoint and check that it is complete. Adapters are merged into their base model.

    Args:
        folder: `.../global_step_N/actor` or `.../critic`.
        base: The base model of adapters; by default, the one the checkpoint names.

    Raises:
        ValueError: If a file is missing or damaged, or the folder is not a checkpoint.
    """
    folder = resolved(folder)
    if not folder.is_dir():
        saved = sorted(
            Path("checkpoints").glob(f"**/global_step_*/{folder.name}"), key=lambda path: path.stat().st_mtime
        )
        listed = f". The last ones below checkpoints/: {', '.join(map(str, saved[-5:]))}" if saved else ""
        raise ValueError(f"no folder {folder}: {_EXPECTED}{listed}")
    _verify_manifest(folder)
    shards = DistributedCheckpoint(folder / "shards") if (folder / "shards").is_dir() else None
    has_shards = shards is not None and bool(shards.names())  # otherwise of the optimizer alone
    adapters, huggingface = folder / "lora_adapter", folder / "huggingface"
    if not (has_shards or has_weights(huggingface) or (adapters / ADAPTER_WEIGHTS).is_file()):
        raise ValueError(_describe_folder(folder))
    if not (huggingface / "config.json").is_file():
        raise ValueError(
            f"{huggingface / 'config.json'} is missing: copy the config and the tokenizer of the model there "
            "(from the base model, if training did not change them)"
        )
    if has_shards:
        return Checkpoint(folder, shards, "shards of torch.distributed.checkpoint")
    if has_weights(huggingface):
        return Checkpoint(folder, SafetensorsFiles(huggingface), "already a HuggingFace model")
    path, problem = find_base(folder, base)
    if path is None:
        raise ValueError(
            f"{adapters} contains only LoRA adapters, and their base model is required: {problem}. "
            "Set it with --base (relative paths start from the current directory)"
        )
    merged = MergedAdapters(adapters, path, huggingface, trust_remote_code)
    return Checkpoint(folder, merged, f"LoRA adapters of {path}")


def _describe_folder(folder: Path) -> str:
    """Describe a folder without weights, and the folder to give instead."""
    roles = [name for name in ("actor", "critic") if (folder / name).is_dir()]
    if roles:
        return f"{folder} is a checkpoint of all roles: give one role, {' or '.join(str(folder / r) for r in roles)}"
    if newest := newest_actor(folder):
        return f"{folder} is a run: give the role of one checkpoint, for example {newest}"
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


# ---- sharded weights ------------------------------------------------------------------------------------------------

#: prefix of every weight: the engine saves {"model": ...} of a module that holds the HuggingFace model as `module`
_PREFIX = "model.module."


class DistributedCheckpoint:
    """A checkpoint of the sharded engine or of strategy=megatron, written by torch.distributed.checkpoint.

    actor/
      shards/.metadata, __0_0.distcp, ...   weights; the optimizer state is not read
      huggingface/                          config and tokenizer

    Raises:
        ValueError: a file is missing or truncated.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._reader = ShardReader(folder)
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{folder} is not a complete checkpoint: cannot read .metadata, which is written last ({error})"
            ) from error
        self._check_files(metadata)
        entries = metadata.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._tensors = {key.removeprefix(_PREFIX): entry for key, entry in tensors.items() if key.startswith(_PREFIX)}

    def _check_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for entry in metadata.storage_data.values():
            ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
        missing = [name for name in sorted(ends) if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder}: missing {', '.join(missing)}; found {len(ends) - len(missing)} of {len(ends)} files. "
                "With several nodes, each may have written to its local disk: copy all files into one folder"
            )
        for name, end in ends.items():
            size = (self.folder / name).stat().st_size
            if size < end:
                raise ValueError(f"{self.folder / name} is truncated: expected at least {end} bytes, found {size}")

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        entry, key = self._tensors[name], _PREFIX + name
        full = torch.empty(entry.size, dtype=entry.properties.dtype)
        region = Region(key, (0,) * full.dim(), tuple(full.shape), tuple(entry.size))
        try:
            with warnings.catch_warnings():  # reading in a single process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                boxes = {key: [(region, full)]}
                dcp.load(boxes, storage_reader=self._reader, planner=BoxLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"{self.folder}: cannot read {key}, a file is damaged: {error}") from error
        return full
