"""What the faults of `trainer.chaos` need to have an effect."""

from verl.config.schema import Config, MegatronConfig
from verl.tracking.trackers import TRACKER_REGISTRY
from verl.utils.chaos import read_faults


def check_faults(config: Config) -> None:
    """Raise ValueError for an unknown fault, or one that would have no effect with these settings."""
    trainer, reward, policy = config.trainer, config.reward, config.actor_rollout_ref
    in_processes = trainer.backend == "ray" or trainer.nnodes * trainer.n_gpus_per_node > 1
    in_thread = any(TRACKER_REGISTRY[name].background for name in trainer.logger)
    isolated = reward.isolation == "process"
    conditions = {
        "kill-reward": (isolated, "reward.isolation=process"),
        "hang-reward": (isolated and reward.timeout, "reward.isolation=process and a reward.timeout"),
        "nan-weight": (
            not isinstance(policy.actor.engine, MegatronConfig),
            f"another actor.strategy than {policy.actor.strategy}",
        ),
        "stop-rank": (in_processes, "worker processes: trainer.n_gpus_per_node of at least 2, or trainer.backend=ray"),
        "tracker-hang": (in_thread, "a tracker that runs in a thread in trainer.logger, such as wandb"),
        "stale-weights": (
            config.rollout_is_separate and policy.rollout.check_every,
            "placement.rollout_devices and rollout.check_every",
        ),
    }
    names = dict.fromkeys(fault.partition("@")[0] for fault in read_faults(trainer.chaos))
    unmet = {name: need for name, (is_met, need) in conditions.items() if name in names and not is_met}
    if unmet:
        raise ValueError(f"trainer.chaos: {'; '.join(f'{name} needs {need}' for name, need in unmet.items())}")
