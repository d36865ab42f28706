"""The configuration: one typed tree, read from YAML and `key=value` in any dialect."""

from verl.config.batch_words import batch_words
from verl.config.checks import check_critic, check_data, check_inputs, check_models
from verl.config.errors import ConfigError, Problem
from verl.config.load import apply_preset, differences, dump_config, load_config, to_flat_dict
from verl.config.reference import reference_table
from verl.config.schema.ppo import Config
from verl.config.supported import BUILT, check_available, unavailable

__all__ = [
    "BUILT",
    "Config",
    "ConfigError",
    "Problem",
    "apply_preset",
    "batch_words",
    "check_available",
    "check_critic",
    "check_data",
    "check_inputs",
    "check_models",
    "differences",
    "dump_config",
    "load_config",
    "reference_table",
    "to_flat_dict",
    "unavailable",
]
