"""The configuration: one typed schema, read from YAML files and `key=value` overrides."""

from verl.config.batch_summary import batch_summary
from verl.config.checks.critic import check_critic
from verl.config.errors import ConfigError, Problem
from verl.config.fields import differences, to_flat_dict
from verl.config.inputs import check_code, check_data, check_inputs, check_models
from verl.config.load import apply_preset, dump_config, load_config, load_section
from verl.config.no_effect import settings_without_effect
from verl.config.reference import reference_table
from verl.config.schema.ppo import Config
from verl.config.supported import SUPPORTED, check_registered, check_supported, unsupported

__all__ = [
    "SUPPORTED",
    "Config",
    "ConfigError",
    "Problem",
    "apply_preset",
    "batch_summary",
    "check_code",
    "check_critic",
    "check_data",
    "check_inputs",
    "check_models",
    "check_registered",
    "check_supported",
    "differences",
    "dump_config",
    "load_config",
    "load_section",
    "reference_table",
    "settings_without_effect",
    "to_flat_dict",
    "unsupported",
]
