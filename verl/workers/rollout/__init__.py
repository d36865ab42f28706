"""The rollout role: a rollout engine, and the conversion of its completions to batches.

role      `Rollout`, the role within a process; the actor's worker hosts one if both share devices
methods   the methods of the role, for every worker that hosts a `Rollout`
worker    `RolloutWorker`: a separate process, for `placement.rollout_devices` and for generation without training
service   generation in the background, for asynchronous training
"""
