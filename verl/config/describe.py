"""A configuration as text: its batch sizes in a line, settings without effect, and the table of all fields."""

import functools
from typing import Any

import yaml

from verl.config.errors import format_plain
from verl.config.fields import Condition, Schema, Section, differences, fields_of, flatten
from verl.config.schema.actor import ActorConfig, CriticConfig
from verl.config.schema.ppo import Config


def batch_summary(config: Config, *, critic: bool = True) -> str:
    """A line such as "64 prompts x 8 samples = 512 responses per step; 2 updates of 256 responses; ...". A batch and a
    mini-batch count PROMPTS over all ranks, a micro-batch SEQUENCES of one rank. critic: it is listed if its sizes
    differ."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    line = [f"{_count(prompts, 'prompt')} x {_count(n, 'sample')} = {_count(prompts * n, 'response')} per step"]
    line.append(_describe_updates(config.actor_rollout_ref.actor, prompts, n))
    if critic and (updates := _describe_updates(config.critic, prompts, n)) != line[-1]:
        line.append(f"critic: {updates}")
    return "; ".join(line)


def _describe_updates(update: ActorConfig | CriticConfig, prompts: int, n: int) -> str:
    """Text such as "2 updates of 256 responses; micro-batches of 32 (8 per update)"."""
    samples = update.ppo_mini_batch_size * n
    updates = prompts * update.ppo_epochs // update.ppo_mini_batch_size
    epochs = f" ({update.ppo_epochs} epochs)" if update.ppo_epochs > 1 else ""
    head = f"{_count(updates, 'update')} of {samples} responses{epochs}"
    micro = update.ppo_micro_batch_size_per_gpu
    if micro is None or update.use_dynamic_bsz:
        tokens = update.ppo_max_token_len_per_gpu
        return f"{head}; micro-batches {f'of up to {tokens} tokens' if tokens is not None else 'sized by free memory'}"
    micro = min(micro, samples)
    count, rest = -(-samples // micro), samples % micro
    return f"{head}; micro-batches of {micro} ({count} per update{f', the last of {rest}' if rest else ''})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@functools.cache
def requirements_of(schema: type[Section]) -> dict[str, list[list[Condition]]]:
    """Dotted key -> what must hold so that the field has an effect: of each list, one condition with dotted keys."""
    known = fields_of(schema)

    def full_key(section: str, name: str) -> str:
        """The nearest key of this name in a section or above it."""
        if section + name in known:
            return section + name
        assert section, f"active_when: there is no key {name}"
        return full_key(section[: section.rstrip(".").rfind(".") + 1], name)

    def alternatives(section: str, conditions: tuple[Any, ...]) -> list[Condition]:
        conditions = (conditions,) if isinstance(conditions[0], str) else conditions
        return [(full_key(section, name), *value) for name, *value in conditions]

    requirements: dict[str, list[list[Condition]]] = {}
    for key, field in known.items():
        declared = [
            (section, item)
            for section, when in field.active_when
            for item in (when if isinstance(when, list) else [when])
        ]
        required = [alternatives(section, item) for section, item in declared]
        # the key of a condition in a section is not subject to it
        requirements[key] = [items for items in required if key not in (item[0] for item in items)]
    return {key: required for key, required in requirements.items() if required}


def settings_without_effect(config: Schema) -> list[str]:
    """Fields that were changed from their default and have no effect, each as "key: value has no effect with ...";
    those that the selected estimator and loss do not read follow from their signatures (`unused_settings`)."""
    flat, required = flatten(config.model_dump(), type(config)), requirements_of(type(config))

    def holds(condition: Condition) -> bool:
        key, value, *_ = condition
        return bool(value(flat[key])) if callable(value) else flat[key] == value

    notes = []
    for key in differences(config):
        unmet = next((items for items in required.get(key, ()) if not any(map(holds, items))), None)
        if unmet is not None:
            reason = " and ".join(f"{other}={format_plain(flat[other])}" for other, *_ in unmet)
            exceptions = "".join(text for _, _, *texts in unmet for text in texts)
            notes.append(f"{key}: {format_plain(flat[key])} has no effect with {reason}{exceptions}")
    return notes


def reference_table(schema: type[Schema] = Config) -> str:
    """Every field of a schema as a Markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields_of(schema).items():
        default = field.default_from or yaml.safe_dump(field.default, default_flow_style=True).replace("\n...", "")
        rows.append(f"| `{key}` | {field.expected()} | `{default.strip()}` | {field.help.replace('|', '/')} |")
    return "\n".join(rows) + "\n"
