"""The identity of an experiment: what must not change when a run resumes from a checkpoint.

A checkpoint stores fingerprints of the model, the training data and the custom code, the versions of packages, and the
configuration. A change that makes it another experiment is refused with a list of the differences, unless
`trainer.allow_change` names it. Other changes, such as a learning rate, are logged, and the new values are used.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl.config import to_flat_dict
from verl.config.fields import Schema
from verl.engines.traits import built_in_strategies
from verl.registry import did_you_mean
from verl.rollout.traits import built_in_engines
from verl.utils.data_names import SUFFIXES, DataName
from verl.utils.packages import version_of
from verl.utils.redaction import digest, digests, redact, redacted

logger = logging.getLogger("verl.trainer")

Fingerprint = list[Any]
"""Of a file: [name, bytes, time of the last change in ns, digest]."""

#: files up to this size are hashed completely; of larger ones, blocks at equal distances
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 64 << 20, 64, 1 << 16
#: files of a model folder that decide what it computes
_MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer.json", "*.model", "chat_template*")
#: files of custom code, and of the tools and agent loops that name it
_CODE = (".py", ".yaml", ".yml")
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "flash-attn", "verl"),
    *(
        traits.package.distributions[0]
        for traits in (*built_in_engines().values(), *built_in_strategies().values())
        if traits.package is not None
    ),
)

#: settings of another experiment ...
_EXPERIMENT = (
    *("algorithm.*", "reward.*", "data.*", "trainer.seed", "*.policy_loss.*", "*.loss_agg_mode", "*.use_kl_loss"),
    *("*.kl_loss_type", "*.rollout.n", "*model.path", "*.lora_*", "*.target_modules", "*.exclude_modules"),
)
#: ... except these: placement, speed, limits, and what is tuned during a run
_TUNED = (
    *("algorithm.kl_ctrl.*", "data.val_*", "data.max_*_length", "data.gen_batch_size"),
    *("data.dataloader_num_workers", "data.max_bad_rows", "reward.timeout", "reward.isolation"),
    *("reward.memory_limit_mb", "reward.on_error", "reward.retries", "reward.max_failure_rate"),
    *("*micro_batch_size*", "*use_dynamic_bsz", "*max_token_len*", "*use_remove_padding", "*.trust_remote_code"),
)
#: settings whose changes are not logged
_FREE = (
    *("trainer.resume_mode", "trainer.resume_from_path", "trainer.total_training_steps", "trainer.total_epochs"),
    *("trainer.logger", "trainer.save_at_end", "trainer.allow_change", "trainer.val_only"),
)
#: what `trainer.allow_change` names beside settings
GROUPS = ("model", "data", "reward", "code")


class Identity:
    """What identifies the experiment of a configuration.

    Args:
        working_dir: relative paths refer to it.
        data_digests: returns digests of training data that is not in files, by what it is; None: there is none.
    """

    def __init__(self, config: Schema, working_dir: Path, data_digests: Callable[[], Mapping[str, str | None]] = dict):
        self._config = config
        self._values = to_flat_dict(config)
        self._flat = redacted(self._values)
        self._defaults = to_flat_dict(type(config)())
        self._working_dir, self._data_digests = working_dir, data_digests
        self._state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Group -> fingerprints of its files, and the versions of packages."""
        if self._state is None:
            files = self._files()
            self._state = {group: [fingerprint(path) for path in files[group]] for group in GROUPS}
            self._state["data"] += [[name, 0, 0, digest] for name, digest in self._data_digests().items() if digest]
            self._state["packages"] = package_versions()
            self._state["variables"] = digests(self._values)
        return self._state

    def _files(self) -> dict[str, list[Path]]:
        """Group -> its files on this host."""
        files: dict[str, list[Path]] = {group: [] for group in GROUPS}
        for key, value in self._values.items():
            for path in (self._working_dir / v for v in _texts(value)):
                if key == "data.train_files":
                    files["data"] += _data_files(path)
                elif fnmatchcase(key, "*model.path") or key.endswith("model_path"):
                    files["model"] += _model_files(path)
                elif path.suffix in _CODE and path.is_file():
                    files["reward" if key.startswith("reward.") else "code"].append(path)
        return {group: list(dict.fromkeys(paths)) for group, paths in files.items()}

    def check(self, saved: Mapping[str, Any], saved_config: Mapping[str, Any], folder: Path) -> None:
        """Compare with what a checkpoint stores.

        Args:
            saved: `state()` of the run that wrote it; empty if it stores none.
            saved_config: its flat configuration.
            folder: the checkpoint, for messages.

        Raises:
            ValueError: it belongs to another experiment, and trainer.allow_change does not name the changes; or an
                entry of trainer.allow_change is neither a group nor a setting.
        """
        allowed = list(self._config.trainer.allow_change)
        for name in allowed:
            if name not in GROUPS and not any(fnmatchcase(key, name) for key in self._flat):
                raise ValueError(
                    f"trainer.allow_change: expected {', '.join(GROUPS)}, or settings, found {name!r}: "
                    f"{did_you_mean(name, [*GROUPS, *self._flat])}"
                )
        changes = self._changed_files(saved) if saved else {}
        settings = self._changed_settings(saved_config, saved.get("variables", {}), set(GROUPS) if saved else set())
        changes |= {key: text for key, text in settings.items() if _is_experiment(key)}
        refused = {name: text for name, text in changes.items() if not any(fnmatchcase(name, x) for x in allowed)}
        if refused:
            lines = "".join(f"\n  {name}: {text}" for name, text in refused.items())
            raise ValueError(
                f"{folder} belongs to another experiment:{lines}\nTo start this experiment, set a new "
                "trainer.experiment_name or trainer.default_local_dir. To continue the other one with these changes, "
                f"set trainer.allow_change=[{','.join(refused)}]"
            )
        for name in changes:
            kept = "; the KL reference is the new model, the trained weights are those of the checkpoint"
            logger.warning("allowed change of the experiment: %s: %s%s", name, changes[name], kept * (name == "model"))
        logged = [f"{key}: {text}" for key, text in settings.items() if key not in changes and key not in _FREE]
        logged += self._changed_packages(saved)
        if logged:
            logger.warning("changed since the checkpoint, the new values are used: %s", ", ".join(logged))

    def _changed_files(self, saved: Mapping[str, Any]) -> dict[str, str]:
        now = self.state()
        changes = {}
        for group in GROUPS:
            before, after = ([(name, n, d) for name, n, _, d in each.get(group, [])] for each in (saved, now))
            if group == "model":  # roles may share a folder, or have equal ones
                before, after = list(dict.fromkeys(before)), list(dict.fromkeys(after))
            if before != after and (text := _difference(before, after)):
                changes[group] = text
        return changes

    def _changed_settings(
        self, saved: Mapping[str, Any], variables: Mapping[str, str], compared: set[str]
    ) -> dict[str, str]:
        """Key -> "old -> new" of settings that differ, without paths whose contents were compared. variables: digests
        of the settings that were read from the environment."""
        changes = {}
        for key in sorted(saved.keys() | self._flat.keys()):
            is_path = ("model" in compared and key.endswith("model.path")) or (
                "data" in compared and key == "data.train_files"
            )
            old, new = saved.get(key), self._flat.get(key)
            if key not in self._flat or (key not in saved and new == self._defaults[key]):
                continue  # a setting that this version, or the one that wrote the checkpoint, does not have
            if key in variables:
                if variables[key] != digest(redact(self._values[key], key, variables=False)):
                    changes[key] = f"{old} -> {new}" if old != new else f"{old} has another value"
                continue
            if old == new or ("code" in compared and _without_code(old) == _without_code(new)):
                continue
            if not (is_path and all((self._working_dir / text).exists() for text in _texts(new))):
                changes[key] = f"{old} -> {new}"
        return changes

    def _changed_packages(self, saved: Mapping[str, Any]) -> list[str]:
        before, after = saved.get("packages", {}), self.state()["packages"] if saved else {}
        names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
        return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a file. Of one over 64 MiB, 64 blocks of 64 KiB at equal distances are hashed, the first and
    the last included; smaller files completely."""
    status = path.stat()
    key = (path.name, status.st_size, status.st_mtime_ns)
    with path.open("rb") as file:
        if status.st_size <= _WHOLE_BYTES:
            return [*key, hashlib.file_digest(file, "sha256").hexdigest()]
        digest = hashlib.sha256()
        for block in range(_BLOCKS):
            file.seek((status.st_size - _BLOCK_BYTES) * block // (_BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(_BLOCK_BYTES))
    return [*key, digest.hexdigest()]


def _difference(before: list[tuple[str, int, str]], after: list[tuple[str, int, str]]) -> str:
    """Names of the files that differ; empty if only their names do."""
    if [x[1:] for x in before] == [x[1:] for x in after]:
        return ""
    added, removed = ([x[0] for x in each if x not in other] for each, other in ((after, before), (before, after)))
    changes = [f"{name} {'has other contents' if name in removed else 'is new'}" for name in added]
    changes += [f"{name} is missing" for name in removed if name not in added]
    return ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "") or "in another order"


def _is_experiment(key: str) -> bool:
    matches = [any(fnmatchcase(key, pattern) for pattern in patterns) for patterns in (_EXPERIMENT, _TUNED)]
    return matches[0] and not matches[1]


def _without_code(value: Any) -> Any:
    """A setting without the files of custom code, whose contents are compared instead."""
    if isinstance(value, list | tuple):
        return [each for each in value if not str(each).endswith(".py")]
    return None if isinstance(value, str) and value.endswith(".py") else value


def _model_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted({file for pattern in _MODEL_FILES for file in path.glob(pattern) if file.is_file()})


def _data_files(path: Path) -> list[Path]:
    """A data file, or those of a folder, which may have a configuration and a split; not the caches of `datasets`."""
    if path.is_file():
        return [path]
    folder = Path(DataName.parse(path).path)
    files = [file for file in folder.rglob("*") if file.suffix.lower() in (*SUFFIXES, ".arrow") and file.is_file()]
    cached = {f for f in files if any(part.startswith((".", "cache-")) for part in f.relative_to(folder).parts)}
    return sorted({*files} - cached)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, str) and each and len(each) < 1000]


def package_versions() -> dict[str, str]:
    """The versions of the installed packages that a result depends on."""
    return {name: version for name in _PACKAGES if (version := version_of(name)) is not None}
