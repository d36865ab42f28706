"""A configuration as text: its batch sizes in a line, and the reference table of all fields."""

import yaml

from verl.config.fields import Schema, fields_of
from verl.config.schema.actor import ActorConfig, CriticConfig
from verl.config.schema.ppo import Config


def batch_summary(config: Config, world_size: int = 1, *, critic: bool = True) -> str:
    """A line such as "64 prompts x 8 samples = 512 responses per step; 2 updates of 256 responses; ...".

    A batch and a mini-batch count PROMPTS over all ranks, and each prompt has `rollout.n` responses. A micro-batch
    counts SEQUENCES (a prompt with one response) of one rank.

    Args:
        config: the configuration.
        world_size: the data-parallel size.
        critic: whether a critic is trained; it is listed if its sizes differ from the actor's.

    Raises:
        ValueError: the batch is not divisible by the ranks.
    """
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    line = [f"{_count(prompts, 'prompt')} x {_count(n, 'sample')} = {_count(prompts * n, 'response')} per step"]
    if world_size > 1:
        per_rank = _per_rank(prompts * n, world_size, "data.train_batch_size x rollout.n")
        line.append(f"{per_rank} on each of {world_size} ranks")
    line.append(_describe_updates(config.actor_rollout_ref.actor, prompts, n, world_size))
    if critic and (updates := _describe_updates(config.critic, prompts, n, world_size)) != line[-1]:
        line.append(f"critic: {updates}")
    return "; ".join(line)


def _describe_updates(update: ActorConfig | CriticConfig, prompts: int, n: int, world_size: int) -> str:
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


def _per_rank(samples: int, world_size: int, sizes: str) -> int:
    if samples % world_size:
        raise ValueError(f"{sizes} = {samples} responses are not divisible by {world_size} ranks: change one of them")
    return samples // world_size


def reference_table(schema: type[Schema] = Config) -> str:
    """Every field of a schema as a Markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields_of(schema).items():
        default = field.default_from or yaml.safe_dump(field.default, default_flow_style=True).replace("\n...", "")
        rows.append(f"| `{key}` | {field.expected()} | `{default.strip()}` | {field.help.replace('|', '/')} |")
    return "\n".join(rows) + "\n"
