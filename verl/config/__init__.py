"""The configuration: one typed schema, read from YAML files and `key=value` overrides."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.config.checks.algorithm": "check_critic",
    "verl.config.checks.run": "check_registered",
    "verl.config.describe": "batch_summary reference_table settings_without_effect",
    "verl.config.errors": "ConfigError Problem",
    "verl.config.fields": "differences to_flat_dict",
    "verl.config.inputs": "check_code check_data check_inputs check_models",
    "verl.config.load": "dump_config load_config load_section",
    "verl.config.schema.ppo": "Config",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
