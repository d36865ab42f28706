"""From files, overrides and dictionaries to a typed configuration (`load_config`), and back to YAML (`dump_config`).

    defaults  <  preset of algorithm.name  <  base  <  YAML file  <  overrides

Values keep their origin (sources.py). Aliases are translated, interpolations resolved and unknown keys found
(reader.py); keys of public verl without a field are reported (upstream.py). The rest is validated by the schema and
compared across fields (`CHECKS`). All problems are raised in one `ConfigError`, before a model is loaded.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError

from verl.config.checks import algorithm, batch, megatron, rollout, run
from verl.config.errors import ConfigError, Problem, format_value
from verl.config.fields import Schema, derived_fields, differences, fields_of, to_flat_dict, unflatten
from verl.config.presets import OTHER_COMMANDS, PRESETS
from verl.config.public.hydra import read_file, select_groups
from verl.config.reader import Reader
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.ppo import Config
from verl.config.schema.sft import SFTConfig
from verl.config.sources import Layer, Overrides, Setting, read_mapping, read_overrides
from verl.registry import did_you_mean
from verl.utils.redaction import redacted, remember_settings

T = TypeVar("T", bound=Schema)
Check = Callable[[Any], Iterable[Problem]]

#: keys of a preset that define its algorithm
_IDENTITY = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")
_ABSENT = Setting("", None, "")

log = logging.getLogger("verl.config")


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    base: Mapping[str, Any] | None = None,
    schema: type[T] = Config,
    extra_checks: Iterable[Check] = (),
) -> T:
    """Load a typed configuration. Later sources win: defaults, preset, `base`, the file at `path`, `overrides`.

    Args:
        path: a YAML file, or a dictionary with nested or dotted keys.
        overrides: `key=value`, with or without a leading `--` or `+`; or a dictionary with nested or dotted keys.
        base: a dictionary with nested or dotted keys.
        schema: the configuration to load.
        extra_checks: functions of the loaded configuration that return further problems.

    Raises:
        ConfigError: lists every problem: the key, the value found, what is expected, the nearest key, and the line of
            the file or the override.
    """
    checks = (check_combinations, *extra_checks)
    reading = read_config(path, overrides, base=base, schema=schema, checks=checks)
    remember_settings(to_flat_dict(reading.config))
    reading.log_notes()
    return reading.config


@dataclass(frozen=True)
class Reading(Generic[T]):
    """A configuration, and how it was read.

    Attributes:
        notes: (log level, text) of what may surprise, to be logged.
        settings: dotted key -> its setting, for the place of a problem.
    """

    config: T
    notes: list[tuple[int, str]]
    settings: Layer

    def log_notes(self) -> None:
        for level, note in self.notes:
            log.log(level, note)

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """The error for the problems of a later check, with file and line of each setting."""
        return ConfigError(_located(problem, self.settings) for problem in problems)


def read_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    base: Mapping[str, Any] | None = None,
    schema: type[T] = Config,
    checks: Iterable[Check] = (),
) -> Reading[T]:
    """Like `load_config`, but logs nothing, and the caller names all checks, also that of combinations."""
    layers = [read_mapping(base, "base")] if base else []
    if isinstance(path, Mapping):
        layers, path = [*layers, read_mapping(path, "config")], None
    if path is not None:
        layers += read_file(path)
    last, problems, repeated = read_overrides(overrides)
    selected, last, refused = select_groups(last, path)
    problems += refused
    reader = Reader(schema, [*layers, *selected, last])
    settings = reader.read()
    problems += reader.problems
    notes = reader.notes
    if isinstance(settings.get("algorithm.name", _ABSENT).value, str):
        settings = agree_with_preset(settings, reader.source_of, problems, notes)
    values = {key: setting.value for key, setting in settings.items()}
    if isinstance(values.get("algorithm.name"), str):
        try:
            values = apply_preset(values, schema)
        except ValueError as error:
            problems.append(Problem("algorithm.name", str(error)))
    config = _validated(schema, values, problems)
    if config is not None:
        problems += [problem for check in checks for problem in check(config)]
    if problems:
        raise ConfigError(_located(problem, settings) for problem in problems)
    infos = [(logging.INFO, note) for note in repeated]  # no warning: scripts call other scripts with more overrides
    listed = [note for section, functions in NOTES.items() if isinstance(config, section) for note in functions]
    warnings = [*notes, *dict.fromkeys(text for note in listed for text in note(config))]
    return Reading(config, [*infos, *((logging.WARNING, text) for text in warnings)], settings)


def with_overrides(config: T, overrides: Overrides) -> T:
    """A copy of a configuration with other values, which are read and checked as by `load_config`. Defaults that follow
    from a changed value change with it."""
    return load_config(_settings_of(config), overrides, schema=type(config))


def _settings_of(config: Schema) -> dict[str, Any]:
    """The settings that load to a configuration: what differs from the defaults, or from the preset."""
    flat = to_flat_dict(config)
    preset = PRESETS.get(flat.get("algorithm.name") or "", {})
    return differences(config) | {key: flat[key] for key, value in preset.items() if flat[key] != value}


def load_section(name: str, values: Mapping[str, Any], schema: type[Schema] = Config) -> Any:
    """Load one section of a configuration from a dictionary, such as `data` for a standalone dataset. Keys that are
    null keep their default. Raises ConfigError for unknown or unsupported keys, and values of a wrong type."""
    layer = read_mapping({name: {key: value for key, value in values.items() if value is not None}}, "")
    reader = Reader(schema, [layer])
    settings = {key: setting.value for key, setting in reader.read().items()}
    problems = reader.problems
    config = _validated(schema, settings, problems)
    if problems:
        raise ConfigError(problems)
    return dict(config)[name]


def agree_with_preset(
    settings: Layer, source_of: Mapping[str, int], problems: list[Problem], notes: list[str]
) -> Layer:
    """Resolve settings that disagree with the preset of `algorithm.name`.

    Another estimator or loss is another algorithm: the later of two sources wins. Within one source it changes the
    preset, except that the estimator of another preset is a problem. Other settings are kept; those of an earlier
    source are named in a note.

    Args:
        settings: dotted key -> setting.
        source_of: dotted key -> index of its source; later sources win.
        problems, notes: extended.

    Returns:
        `settings` without the settings that the preset replaces.
    """
    name, kept, result = settings["algorithm.name"], [], dict(settings)
    preset = f"algorithm.name: {name.value} ({name.location})"
    for key, expected in PRESETS.get(name.value, {}).items():
        if key not in settings or settings[key].value == expected:
            continue
        setting = f"{settings[key].key}: {settings[key].value} ({settings[key].location})"
        age = source_of[key] - source_of["algorithm.name"]
        if key not in _IDENTITY:
            kept += [f"{setting}, preset: {expected}"] if age < 0 else []
        elif age < 0:
            notes.append(f"{preset} replaces {setting} by {expected}")
            del result[key]
        elif age > 0 or key != _IDENTITY[0] or all(p.get(key) != settings[key].value for p in PRESETS.values()):
            # losses are combined freely with presets
            notes.append(f"{setting} replaces {expected}, which {preset} sets")
        else:
            message = f"{settings[key].value!r} disagrees with {preset}, which sets {expected!r}: remove one of them"
            problems.append(Problem(key, message, settings[key].location))
    if kept:
        notes.append(f"{preset} does not change settings that you gave: {'; '.join(kept)}")
    return result


def apply_preset(settings: Mapping[str, Any], schema: type[Schema]) -> dict[str, Any]:
    """Merge the preset of `algorithm.name` with the given dotted keys, which take precedence.

    A key of the preset that takes its default from a given key (clip_ratio_low from clip_ratio) is dropped as well.
    Raises ValueError if there is no such preset.
    """
    name = settings["algorithm.name"]
    if name in OTHER_COMMANDS:
        raise ValueError(f"{name!r} is not an algorithm of this command: run {OTHER_COMMANDS[name]}")
    if name not in PRESETS:
        raise ValueError(f"there is no algorithm {name!r}: {did_you_mean(name, PRESETS)}")
    derived = derived_fields(schema)
    dropped = {key for key in derived if any(f"${{{other}}}" in derived[key] for other in settings)}
    return {key: value for key, value in PRESETS[name].items() if key not in dropped} | dict(settings)


def dump_config(config: Schema, *, everything: bool = False, redact: bool = False) -> str:
    """YAML that loads to the same configuration.

    Args:
        everything: all fields, not only those that differ from their defaults.
        redact: omit the values of environment variables, which may be secrets.
    """
    settings = to_flat_dict(config) if everything else _settings_of(config)
    settings = redacted(settings) if redact else settings
    return yaml.safe_dump(unflatten(settings), sort_keys=False, allow_unicode=True)


# ---- checks across fields -------------------------------------------------------------------------------------------

_RUN = (run.check_secrets, run.check_run_name, run.check_resume, run.check_worker_env)

CHECKS: dict[type[Schema], tuple[Check, ...]] = {
    Schema: (run.check_templates, run.check_zeros),
    Config: (
        *_RUN,
        rollout.check_asynchronous,  # others depend on its placement
        batch.check_batches,
        batch.check_ranks,
        batch.check_rollout_ranks,
        rollout.check_sampling,
        rollout.check_filters,
        rollout.check_speculative,
        rollout.check_weight_sync,
        algorithm.check_groups,
        algorithm.check_kl,
        algorithm.check_losses,
        algorithm.check_distillation,
        run.check_rewards,
        run.check_dataset_class,
        run.check_sampler,
        rollout.check_deterministic,
        run.check_adapters,
        run.check_fp8,
        megatron.check_megatron_settings,
        rollout.check_router_replay,
    ),
    GenerationConfig: (batch.check_generation_ranks, run.check_fp8),
    SFTConfig: (
        *_RUN,
        run.check_dataset_class,
        batch.check_sft_ranks,
        run.check_adapters,
        run.check_fp8,
        megatron.check_megatron_settings,
    ),
}
"""Schema -> its checks, in the order in which they run."""

NOTES: dict[type[Schema], tuple[Callable[..., Iterable[str]], ...]] = {
    Config: (algorithm.algorithm_notes, rollout.rollout_notes, megatron.megatron_notes, batch.shard_notes),
    SFTConfig: (megatron.megatron_notes, batch.shard_notes),
}
"""Schema -> functions that return warnings about settings that are valid but may be surprising."""


def check_combinations(config: Schema) -> list[Problem]:
    """Every conflict between fields of a configuration."""
    checks = [check for schema, listed in CHECKS.items() if isinstance(config, schema) for check in listed]
    return [problem for check in checks for problem in check(config)]


# ---- errors ----------------------------------------------------------------------------------------------------------


def _validated(schema: type[T], values: Mapping[str, Any], problems: list[Problem]) -> T | None:
    """The configuration, or None and a problem for every value of a wrong type or out of range."""
    try:
        return schema.model_validate(unflatten(values))
    except ValidationError as error:
        known, wrong = fields_of(schema), {}
        for detail in error.errors():
            key, location = _key_of(detail["loc"], known), ".".join(map(str, detail["loc"]))
            if (entry := known[key].section_of_entries) and location != key:
                keys = f"unknown key (keys: {', '.join(entry.model_fields)})"
                message = keys if detail["type"] == "extra_forbidden" else detail["msg"]
                problems.append(Problem(location, f"found {format_value(detail['input'])}: {message}"))
                continue
            wrong[key] = values.get(key, detail["input"])
        own_values = {key: value for key, value in wrong.items() if key in values or key not in derived_fields(schema)}
        for key, value in (own_values or wrong).items():
            hint = _nearest_choice(value, key, schema)
            problems.append(Problem(key, f"found {format_value(value)}, expected {known[key].expected()}{hint}"))
        return None


def _key_of(location: tuple[Any, ...], known: Mapping[str, Any]) -> str:
    """The key that a pydantic error location belongs to; the location continues into lists and unions."""
    names = [str(name) for name in location]
    dotted = [".".join(names[:depth]) for depth in range(len(names), 0, -1)]
    return next((key for key in dotted if key in known), dotted[0])


def _nearest_choice(value: Any, key: str, schema: type[Schema]) -> str:
    """A hint at the choice that a wrong value (of a list: the first wrong item) is probably a typo of."""
    choices = fields_of(schema)[key].choices()
    items = value if isinstance(value, list) else [value]
    wrong = next((item for item in items if isinstance(item, str) and item not in choices), "")
    near = difflib.get_close_matches(wrong, choices, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _located(problem: Problem, settings: Layer) -> Problem:
    """Return the problem with the location and the spelling of its key."""
    setting = settings.get(problem.key)
    if setting is None or problem.location:
        return problem
    return Problem(problem.key, problem.message, setting.location, setting.key)
