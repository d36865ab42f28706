"""The rollout role: a rollout engine, and the conversion of its completions to batches.

`role.Rollout` is the role within a process. The actor's worker hosts one if both share devices. `worker.RolloutWorker`
runs it in a separate process, for `placement.rollout_devices` and for generation without training.
"""
