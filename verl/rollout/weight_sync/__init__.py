"""Weight sync: copies the weights of the training engine to the rollout engines after each update.

    report = weight_sync.push(train_engine, version=step)      # collective: call it on every training rank
    report.bytes, report.seconds, report.checksum

Five methods (`rollout.weight_sync`; "auto" chooses by placement and engine):

- in_process: the rollout engine generates with the trainer's parameters; nothing is copied.
- replica: the rollout engine in the same process has an unsharded copy, gathered from all ranks.
- ipc: the rollout engine runs in other processes that share the device; they read buckets where the trainer wrote them.
- collective: rollout ranks have their own devices; training rank 0 broadcasts buckets over torch.distributed (gloo, or
  NCCL on GPUs).
- disk: rollout ranks read safetensors files from a shared folder.

Whatever is copied is verified by checksums on the engine's side: in transit, and as stored after loading.

`version` is the number of completed training steps, so that a resumed run reproduces it.
"""

import importlib

_HOME = {
    "SyncReport": "base",
    "WeightReceiver": "base",
    "WeightSource": "base",
    "WeightSync": "base",
    "AdapterReceiver": "base",
    "RemoteReceiver": "base",
    "StoredWeights": "base",
    "BUCKET_BYTES": "buckets",
    "checksum_of": "checksums",
    "InProcessSync": "in_process",
    "ReplicaSync": "replica",
    "ModuleReceiver": "module_receiver",
    "CollectiveSync": "collective",
    "TransferGroup": "transfer_group",
    "receive_collective": "collective",
    "IpcSync": "ipc",
    "receive_ipc": "ipc",
    "DiskSync": "disk",
    "receive_disk": "disk",
    "local_sync": "factory",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'verl.rollout.weight_sync' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
