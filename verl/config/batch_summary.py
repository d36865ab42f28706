"""The batch sizes of a configuration as one line of text.

A batch and a mini-batch count PROMPTS over all ranks, and each prompt has `rollout.n` responses. A micro-batch counts
SEQUENCES (a prompt with one response) of one rank.
"""

from verl.config.schema.actor import ActorConfig, CriticConfig
from verl.config.schema.ppo import Config


def batch_summary(config: Config, world_size: int = 1, *, critic: bool = True) -> str:
    """A line such as "64 prompts x 8 samples = 512 responses per step; 2 updates of 256 responses; ...".

    Args:
        config: the configuration.
        world_size: the data-parallel size.
        critic: whether a critic is trained; it is listed if its sizes differ from the actor's.

    Raises:
        ValueError: the batch is not divisible by the ranks.
    """
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    parts = [f"{_count(prompts, 'prompt')} x {_count(n, 'sample')} = {_count(prompts * n, 'response')} per step"]
    if world_size > 1:
        per_rank = _per_rank(prompts * n, world_size, "data.train_batch_size x rollout.n")
        parts.append(f"{per_rank} on each of {world_size} ranks")
    actor = _updates(config.actor_rollout_ref.actor, prompts, n, world_size)
    parts.append(actor)
    of_critic = _updates(config.critic, prompts, n, world_size) if critic else actor
    if of_critic != actor:
        parts.append(f"critic: {of_critic}")
    return "; ".join(parts)


def _updates(update: ActorConfig | CriticConfig, prompts: int, n: int, world_size: int) -> str:
    """Text such as "2 updates of 256 responses; micro-batches of 32 (8 per update)"."""
    samples = update.ppo_mini_batch_size * n
    updates = prompts * update.ppo_epochs // update.ppo_mini_batch_size
    per_rank = _per_rank(samples, world_size, "ppo_mini_batch_size x rollout.n")
    epochs = f" ({update.ppo_epochs} epochs)" if update.ppo_epochs > 1 else ""
    head = f"{_count(updates, 'update')} of {samples} responses{epochs}"
    micro = update.ppo_micro_batch_size_per_gpu
    each = " per rank" if world_size > 1 else ""
    if micro is None or update.use_dynamic_bsz:
        tokens = update.ppo_max_token_len_per_gpu
        size = f"of up to {tokens} tokens" if tokens is not None else "sized by free memory"
        return f"{head}; micro-batches {size}{each}"
    micro = min(micro, per_rank)
    count, rest = -(-per_rank // micro), per_rank % micro
    last = f", the last of {rest}" if rest else ""
    return f"{head}; micro-batches of {micro}{each} ({count} per update{last})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _per_rank(samples: int, world_size: int, what: str) -> int:
    if samples % world_size:
        raise ValueError(f"{what} = {samples} responses are not divisible by {world_size} ranks: change one of them")
    return samples // world_size
