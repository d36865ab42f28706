"""The checks across fields, in their order: values that are valid on their own but not together.

They run before anything is loaded. A check is a function of the typed configuration that yields problems;
`load_config(extra_checks=[...])` takes more.
"""

from collections.abc import Callable, Iterable

from verl.config.checks.algorithm import algorithm_notes, check_groups, check_kl, check_losses
from verl.config.checks.asynchronous import check_asynchronous
from verl.config.checks.batch import (
    check_batches,
    check_generation_ranks,
    check_ranks,
    check_rollout_ranks,
    check_sft_ranks,
)
from verl.config.checks.megatron import check_megatron_settings, megatron_notes
from verl.config.checks.rollout import (
    check_deterministic,
    check_router_replay,
    check_sampling,
    check_weight_sync,
    rollout_notes,
)
from verl.config.checks.run import (
    check_adapters,
    check_dataset_class,
    check_kernels,
    check_resume,
    check_rewards,
    check_run_name,
    check_secrets,
    check_templates,
    check_worker_env,
    check_zeros,
)
from verl.config.errors import Problem
from verl.config.fields import Schema
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig

_RUN = (check_secrets, check_run_name, check_resume)

CHECKS: dict[type[Schema], tuple[Callable[..., Iterable[Problem]], ...]] = {
    Schema: (check_templates, check_zeros),
    Config: (
        *_RUN,
        check_asynchronous,  # others depend on its placement
        check_batches,
        check_ranks,
        check_rollout_ranks,
        check_worker_env,
        check_sampling,
        check_weight_sync,
        check_groups,
        check_kl,
        check_losses,
        check_rewards,
        check_dataset_class,
        check_kernels,
        check_deterministic,
        check_adapters,
        check_megatron_settings,
        check_router_replay,
    ),
    GenerationConfig: (check_generation_ranks,),
    SFTConfig: (*_RUN, check_dataset_class, check_sft_ranks, check_adapters, check_megatron_settings),
}
"""Schema -> its checks, in the order in which they run."""

NOTES: dict[type[Schema], tuple[Callable[..., Iterable[str]], ...]] = {
    Config: (algorithm_notes, rollout_notes, megatron_notes),
    SFTConfig: (megatron_notes,),
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
