"""Weight sync: copies the weights of the training engine to the rollout engines after each update.

    report = weight_sync.push(train_engine, version=step)      # collective: call it on every training rank
    report.bytes, report.seconds, report.checksum

Six methods (`rollout.weight_sync`; "auto" chooses by placement and engine):

- in_process: the rollout engine generates with the trainer's parameters; nothing is copied.
- replica: the rollout engine in the same process has an unsharded copy, gathered from all ranks.
- reshard: as `replica`, for an engine that stores slices of the parameters: each rank receives the chunks it lacks.
- ipc: the rollout engine runs in other processes that share the device; they read buckets where the trainer wrote them.
- collective: rollout ranks have their own devices; training rank 0 broadcasts buckets over torch.distributed (gloo, or
  NCCL on GPUs).
- disk: rollout ranks read safetensors files from a shared folder.

Whatever is copied is verified by checksums on the engine's side: in transit, and as stored after loading.

`version` is the number of completed training steps, so that a resumed run reproduces it.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "SyncReport": "verl.weight_sync.base",
    "WeightReceiver": "verl.weight_sync.base",
    "WeightSource": "verl.weight_sync.base",
    "WeightSync": "verl.weight_sync.base",
    "AdapterReceiver": "verl.weight_sync.base",
    "RemoteReceiver": "verl.weight_sync.base",
    "ShardSource": "verl.weight_sync.base",
    "SlicedWeights": "verl.weight_sync.base",
    "StoredWeights": "verl.weight_sync.base",
    "BUCKET_BYTES": "verl.weight_sync.buckets",
    "checksum_of": "verl.weight_sync.checksums",
    "InProcessSync": "verl.weight_sync.in_process",
    "ReplicaSync": "verl.weight_sync.replica",
    "ReshardSync": "verl.weight_sync.reshard.sync",
    "ModuleReceiver": "verl.weight_sync.module_receiver",
    "CollectiveSync": "verl.weight_sync.collective",
    "TransferGroup": "verl.weight_sync.transfer_group",
    "receive_collective": "verl.weight_sync.collective",
    "IpcSync": "verl.weight_sync.ipc",
    "receive_ipc": "verl.weight_sync.ipc",
    "DiskSync": "verl.weight_sync.disk",
    "receive_disk": "verl.weight_sync.disk",
    "local_sync": "verl.weight_sync.factory",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
