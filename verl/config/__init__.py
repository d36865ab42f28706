"""The configuration: one typed schema, read from YAML files and `key=value` overrides."""

from verl.config.checks.algorithm import check_critic
from verl.config.checks.run import check_registered
from verl.config.describe import batch_summary, reference_table, settings_without_effect
from verl.config.errors import ConfigError, Problem
from verl.config.fields import differences, to_flat_dict
from verl.config.inputs import check_code, check_data, check_inputs, check_models
from verl.config.load import apply_preset, dump_config, load_config, load_section
from verl.config.schema.ppo import Config

__all__ = [
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
    "differences",
    "dump_config",
    "load_config",
    "load_section",
    "reference_table",
    "settings_without_effect",
    "to_flat_dict",
]
