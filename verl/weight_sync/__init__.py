"""Weight sync: copies the weights of the training engine to the rollout engines after each update.

    sync = local_sync("auto", rollout, device, bucket_bytes=BUCKET_BYTES)    # an engine in the trainer's process, or
    sync = CollectiveSync(TransferGroup(address, rank, size, device, timeout))    # engines on separate devices, where
    receive_collective(rollout.receiver(), group, version=step)    # is called at the same time as
    report = sync.push(train_engine, version=step)    # collective: on every training rank
    report.bytes, report.seconds    # rollout.weight_version is now `step`; at an error, the engine has no weights

The methods (`rollout.weight_sync`) are `in_process`, `replica`, `reshard` and `collective`:
docs/internals/weight_sync.md. Two mechanisms find wrong weights (`verify`): checksums of every push to other devices;
after the first push and every `rollout.check_every` versions, a comparison of what the engine stores, with the canary
of the trainer. `version` is the number of completed training steps, so that a resumed run reproduces it.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.weight_sync.base": (
        "SyncReport WeightReceiver WeightSource WeightSync ShardSource SlicedWeights StoredWeights InProcessSync"
    ),
    "verl.weight_sync.buckets": "BUCKET_BYTES",
    "verl.weight_sync.reshard.sync": "ReshardSync",
    "verl.weight_sync.module_receiver": "ModuleReceiver",
    "verl.weight_sync.collective": "CollectiveSync TransferGroup receive_collective",
    "verl.weight_sync.factory": "ReplicaSync local_sync",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
