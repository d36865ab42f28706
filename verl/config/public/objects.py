"""Configurations of public verl as typed objects: public verl's `verl.utils.config`."""

import pkgutil
from collections.abc import Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.fields import Section
from verl.config.load import load_config, load_section
from verl.config.schema.ppo import Config


def plain_config(config: Any) -> Any:
    """A configuration of OmegaConf as a dictionary; any other one as it is."""
    return OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """A section of a configuration as an object of `dataclass_type`.

    Args:
        config: a DictConfig or dict; an object is returned as it is, and an empty config is the default object.
        dataclass_type: a section of the schema, or any dataclass. None: the class of the key `_target_`.

    Raises:
        AssertionError: neither the type nor `_target_` says what the object is.
        ValueError: keys or values that the section does not accept, or a type that is no dataclass.
    """
    if isinstance(config, Section) or (config is not None and not isinstance(config, Mapping)):
        return config
    if dataclass_type is None:
        if not config:
            return None
        assert "_target_" in config, f"expected dataclass_type, or a config with _target_, found {config}"
        dataclass_type = pkgutil.resolve_name(config["_target_"])
    if not config:
        return dataclass_type()
    values = {key: value for key, value in plain_config(config).items() if key != "_target_"}
    if not issubclass(dataclass_type, Section):
        if not is_dataclass(dataclass_type):
            raise ValueError(f"dataclass_type: expected a dataclass, found {dataclass_type}")
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), values))
    first, *below = _path_of(dataclass_type, Config)
    for name in reversed(below):
        values = {name: values}
    section = load_section(first, values)
    for name in below:
        section = section[name]
    return section


def _path_of(section: type[Section], parent: type[Section]) -> tuple[str, ...]:
    """Where a section is in the schema, such as ("actor_rollout_ref", "rollout"); empty if it is not below `parent`."""
    for name, info in parent.model_fields.items():
        if info.annotation is section:
            return (name,)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            below = _path_of(section, info.annotation)
            if below:
                return (name, *below)
    return ()


def update_dict_with_config(dictionary: MutableMapping[str, Any], config: Any) -> None:
    """Replace the values of a dictionary by the fields of the same names, in place."""
    dictionary.update({key: getattr(config, key) for key in dictionary if hasattr(config, key)})


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Check a configuration like a run does before it starts; a loaded one has been checked. Raises ValueError with
    every problem, its key and the fix."""
    if not isinstance(config, Section):
        load_config(plain_config(config))
