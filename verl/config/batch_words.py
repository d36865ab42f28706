"""What the batch sizes of a configuration mean, in numbers: `batch_words`.

Three words are mixed up more than any others: a batch and a mini-batch count PROMPTS, over all ranks; each prompt has
`rollout.n` answers; a micro-batch counts SEQUENCES (an answer with its prompt) of one rank.
"""

from verl.config.schema.ppo import ActorConfig, Config, CriticConfig


def batch_words(config: Config, world_size: int = 1, *, critic: bool = True) -> str:
    """One line such as '64 prompts x 8 samples = 512 responses a step; 2 updates of 256 responses; ...'.

    world_size: ranks that share a batch (data-parallel size). critic: whether one is trained; it is named where its
    sizes differ from the actor's. Raises ValueError when the ranks cannot share a batch evenly.
    """
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    words = [f"{_count(prompts, 'prompt')} x {_count(n, 'sample')} = {_count(prompts * n, 'response')} a step"]
    if world_size > 1:
        share = _share(prompts * n, world_size, "data.train_batch_size x rollout.n")
        words.append(f"{share} on each of {world_size} ranks")
    actor = _update_words(config.actor_rollout_ref.actor, prompts, n, world_size)
    words.append(actor)
    critic_words = _update_words(config.critic, prompts, n, world_size) if critic else actor
    if critic_words != actor:
        words.append(f"the critic: {critic_words}")
    return "; ".join(words)


def _update_words(update: ActorConfig | CriticConfig, prompts: int, n: int, world_size: int) -> str:
    """'2 updates of 256 responses, micro-batches of 32 (8 per update)' for an actor or a critic."""
    rows = update.ppo_mini_batch_size * n
    updates = prompts * update.ppo_epochs // update.ppo_mini_batch_size
    share = _share(rows, world_size, "ppo_mini_batch_size x rollout.n")
    epochs = f" ({update.ppo_epochs} passes)" if update.ppo_epochs > 1 else ""
    head = f"{_count(updates, 'update')} of {rows} responses{epochs}"
    micro = update.ppo_micro_batch_size_per_gpu
    each = " per rank" if world_size > 1 else ""
    if micro is None or update.use_dynamic_bsz:
        tokens = update.ppo_max_token_len_per_gpu
        size = f"of up to {tokens} tokens" if tokens is not None else "as memory allows"
        return f"{head}; micro-batches {size}{each}"
    micro = min(micro, share)
    count, rest = -(-share // micro), share % micro
    last = f", the last of {rest}" if rest else ""
    return f"{head}; micro-batches of {micro}{each} ({count} per update{last})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _share(rows: int, world_size: int, what: str) -> int:
    if rows % world_size:
        raise ValueError(f"{what} is {rows} responses, which do not divide by {world_size} ranks: change one of them")
    return rows // world_size
