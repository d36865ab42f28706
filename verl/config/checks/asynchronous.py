"""Checks of asynchronous training, and of the devices of its rollout."""

from collections.abc import Iterator

from verl.config.errors import Problem
from verl.config.schema.ppo import Config

_ROLLOUT = "actor_rollout_ref.rollout."


def has_separate_rollout(config: Config) -> bool:
    """Whether the rollout has separate devices, which asynchronous training needs and `placement=auto` chooses."""
    return config.rollout_is_separate or config.trainer.max_staleness > 0


def placement_is_open(config: Config) -> bool:
    """Whether the devices of the roles are not known: they will be chosen, or asynchronous training needs others."""
    return config.placement.auto or (config.trainer.max_staleness > 0 and not config.rollout_is_separate)


def check_asynchronous(config: Config) -> Iterator[Problem]:
    """What asynchronous training does not support, and the hosts of its rollout."""
    rollout, groups = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    if k := config.trainer.max_staleness:
        missing_hosts = rollout.nnodes and config.placement.rollout_devices is None  # a problem of `_check_hosts`
        if not (config.rollout_is_separate or config.placement.auto or missing_hosts):
            yield Problem("trainer.async.max_staleness", f"{k}, but {_needs_devices(config)}")
        conflicts = {
            "rollout.deterministic=true generates with the weights that are trained: turn it off": (
                rollout.deterministic
            ),
            "algorithm.shuffle_rewards permutes the rewards of a whole batch: use false": (
                config.algorithm.shuffle_rewards
            ),
            "trainer.on_bad_steps=rollback would lose the prompts in the queue: use stop": (
                config.trainer.on_bad_steps == "rollback"
            ),
            "algorithm.filter_groups.at_limit=fill fills one batch at a time: use error": (
                groups.enable and groups.at_limit == "fill"
            ),
        }
        yield from (
            Problem("trainer.async.max_staleness", f"{k}, but {message}")
            for message, is_set in conflicts.items()
            if is_set
        )
    yield from _check_hosts(config)
    if config.reward.on_error == "quarantine" and (config.trainer.max_staleness or groups.enable):
        message = "quarantine, but prompts wait in a queue with algorithm.filter_groups or trainer.async.max_staleness"
        yield Problem("reward.on_error", f"{message}: this is not supported, use count")


def _check_hosts(config: Config) -> Iterator[Problem]:
    """`rollout.nnodes` and `hybrid_engine` agree with the placement."""
    rollout, devices = config.actor_rollout_ref.rollout, config.placement.rollout_devices
    if not config.actor_rollout_ref.hybrid_engine and not has_separate_rollout(config):
        message = "false, but placement.rollout_devices gives the rollout no separate devices: set it, or use true"
        yield Problem("actor_rollout_ref.hybrid_engine", message)
    if rollout.nnodes and devices is None:
        message = (
            "the hosts of training and rollout must have the same number of processes, unless every host runs both: "
            "use trainer.n_gpus_per_node, or nnodes=trainer.nnodes"
        )
        yield Problem(f"{_ROLLOUT}n_gpus_per_node", f"{rollout.n_gpus_per_node}, but {message}")
    elif rollout.nnodes and rollout.n_gpus_per_node and len(devices) != rollout.nnodes * rollout.n_gpus_per_node:
        message = f"placement.rollout_devices has {len(devices)} devices: set only one of them"
        yield Problem(f"{_ROLLOUT}nnodes", f"{rollout.nnodes} x {rollout.n_gpus_per_node} processes, but {message}")


def _needs_devices(config: Config) -> str:
    """What an asynchronous run without a separate rollout should set."""
    need = "generation overlaps training only on separate devices"
    total = config.trainer.nnodes * config.trainer.n_gpus_per_node
    split = split_of(config, total)
    if split is not None:
        return f"{need}: set {_devices(split, total)}, or placement=auto"
    larger = next((count for count in range(total + 1, 8 * total + 9) if split_of(config, count)), None)
    if larger is None or config.trainer.nnodes > 1:
        return (
            f"{need}: use more devices, with placement.actor_devices and placement.rollout_devices, or placement=auto"
        )
    need += f", and {total} device{'s are' if total > 1 else ' is'} not enough"
    return f"{need}: set trainer.n_gpus_per_node={larger} {_devices(split_of(config, larger), larger)}"


def _devices(actor: int, total: int) -> str:
    """The keys of a placement with the rollout behind the actor."""
    first, last = (str(list(numbers)).replace(" ", "") for numbers in (range(actor), range(actor, total)))
    return f"placement.actor_devices={first} placement.rollout_devices={last}"


def split_of(config: Config, total: int) -> int | None:
    """How many of `total` devices the actor can have beside a rollout on the others, about the half; None: none."""
    policy = config.actor_rollout_ref
    rows, group = policy.actor.ppo_mini_batch_size * policy.rollout.n, policy.actor.engine.ranks_with_same_rows
    possible = [
        actor
        for actor in range(group, total, group)
        if rows % (actor // group) == 0 and (total - actor) % policy.rollout.tensor_model_parallel_size == 0
    ]
    return min(possible, key=lambda actor: abs(2 * actor - total), default=None)
