"""`disk`: safetensors files in a folder that trainer and rollout ranks share, for engines elsewhere.

Every push is a folder `global_step_<version>`, written like a checkpoint: into a temporary folder, fsynced, described
by a manifest with sizes and SHA-256 checksums, then renamed. Adapters are merged. HuggingFace and vLLM load these
files.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl.checkpoints.store import CheckpointError, CheckpointStore, verify
from verl.weight_sync.adapters import Part
from verl.weight_sync.base import SyncReport, WeightReceiver, WeightSource, WeightSync
from verl.weight_sync.buckets import pack
from verl.weight_sync.verify import Loading, combine, sums_of

_FILE_BYTES = 2**30  # max size of a file; a larger parameter has a file by itself
_KEPT = 2  # versions: the last one may still be read when a new one is written


class DiskSync(WeightSync):
    """The training side of `disk`, on every training rank. Rollout ranks call `receive_disk` afterwards.

    Args:
        folder: folder of the versions.
        writes: whether this rank writes; the other ranks only gather weights.
        dtype: dtype of the written weights; None: not cast.
    """

    def __init__(self, folder: str | Path, writes: bool = True, dtype: torch.dtype | None = None):
        super().__init__(check_every=0)  # `receive_disk` compares
        key = "actor_rollout_ref.rollout.weight_sync_dir"
        self.store = CheckpointStore(folder, _KEPT, noun="weight folder of version", key=key, resumable=False)
        self.writes = writes
        self.dtype = dtype

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        size, sums = 0, []
        if not self.writes:
            for _ in engine.weights():
                pass
            return SyncReport(version)
        with self.store.writing(version) as folder:
            for bucket in pack(
                engine.weights(),
                device=torch.device("cpu"),
                dtype=self.dtype,
                bucket_bytes=_FILE_BYTES,
            ):
                path = folder / f"model-{bucket.number:05d}.safetensors"
                save_file(dict(bucket.parameters()), path, metadata={"format": "pt"})
                sums.append(sums_of(bucket.content))
                size += bucket.bytes
        return SyncReport(version, size, checksum=combine(sums))


def receive_disk(receiver: WeightReceiver, folder: str | Path, version: int, compares: bool = True) -> SyncReport:
    """The rollout side of `disk`: verify and load one version.

    Args:
        compares: whether to compare what the receiver stores with the files, if it is a `StoredWeights`.

    Raises:
        ValueError: the version is missing or damaged (the message names the file), or the receiver cannot load it.
    """
    start = time.perf_counter()
    path = CheckpointStore(folder).path(version)
    try:
        verify(path)
    except CheckpointError as error:
        raise ValueError(f"weight sync: weights of version {version} cannot be read: {error}") from error
    loading = Loading(receiver, version, compares)
    loading.load(Part(None, _tensors(path)))
    return SyncReport(version, loading.bytes, time.perf_counter() - start)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
