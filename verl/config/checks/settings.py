"""The checks across fields, in their order: values that are valid on their own but not together.

They run before anything is loaded. A check is a function of the typed configuration that yields problems;
`load_config(extra_checks=[...])` takes more.
"""

from collections.abc import Callable, Iterable

from verl.config.checks import algorithm, asynchronous, batch, megatron, rollout, run
from verl.config.errors import Problem
from verl.config.fields import Schema
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig

_RUN = (run.check_secrets, run.check_run_name, run.check_resume)

CHECKS: dict[type[Schema], tuple[Callable[..., Iterable[Problem]], ...]] = {
    Schema: (run.check_templates, run.check_zeros),
    Config: (
        *_RUN,
        asynchronous.check_asynchronous,  # others depend on its placement
        batch.check_batches,
        batch.check_ranks,
        batch.check_rollout_ranks,
        run.check_worker_env,
        rollout.check_sampling,
        rollout.check_weight_sync,
        algorithm.check_groups,
        algorithm.check_kl,
        algorithm.check_losses,
        run.check_rewards,
        run.check_dataset_class,
        run.check_kernels,
        rollout.check_deterministic,
        run.check_adapters,
        megatron.check_megatron_settings,
        rollout.check_router_replay,
    ),
    GenerationConfig: (batch.check_generation_ranks,),
    SFTConfig: (
        *_RUN,
        run.check_dataset_class,
        batch.check_sft_ranks,
        run.check_adapters,
        megatron.check_megatron_settings,
    ),
}
"""Schema -> its checks, in the order in which they run."""

NOTES: dict[type[Schema], tuple[Callable[..., Iterable[str]], ...]] = {
    Config: (algorithm.algorithm_notes, rollout.rollout_notes, megatron.megatron_notes),
    SFTConfig: (megatron.megatron_notes,),
}
"""Schema -> functions that return warnings about settings that are valid but may be surprising."""


def check_combinations(config: Schema) -> list[Problem]:
    """Every conflict between fields of a configuration."""
    checks = [check for schema, listed in CHECKS.items() if isinstance(config, schema) for check in listed]
    return [problem for check in checks for problem in check(config)]


def notes_of(config: Schema) -> list[str]:
    """Warnings about settings that are valid but may be surprising. Logged once."""
    notes = [note for schema, listed in NOTES.items() if isinstance(config, schema) for note in listed]
    return list(dict.fromkeys(text for note in notes for text in note(config)))
