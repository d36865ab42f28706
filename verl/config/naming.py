"""Default names of a project and of an experiment, derived from the settings that define the experiment.

    trainer.project_name      {data}                        gsm8k
    trainer.experiment_name   {algorithm}-{model}-{digest}  grpo-Qwen2.5-0.5B-Instruct-3fa2c1

The digest covers the defining settings that differ from their defaults. The same command has the same names, so it
resumes its run; another model, data set, algorithm, reward or hyperparameter has another folder. Settings of length,
speed, placement, validation and output are not part of the digest.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, Self

from pydantic import model_validator

from verl.config.fields import Schema, plain_defaults, to_flat_dict
from verl.config.presets import PRESETS

PROJECT, EXPERIMENT = "{data}", "{algorithm}-{model}-{digest}"
_NAME = re.compile(r"\{(data|algorithm|model|digest)\}")
_ESTIMATOR = "algorithm.adv_estimator"

#: settings of these sections do not define an experiment ...
_OUTSIDE = ("placement", "ray_kwargs", "checkpoint", "engine", "trainer")
#: ... except these
_DEFINING = ("trainer.seed", "trainer.critic_warmup", "trainer.async.max_staleness")
#: elsewhere: speed, memory, placement, validation, and limits of time
_NOT_DEFINING = (
    *("data.val_*", "data.gen_batch_size"),
    *("*.checkpoint.*", "*.fsdp_config.*", "*.fsdp.*", "*.strategy", "*nccl_timeout", "*.hybrid_engine"),
    *("*micro_batch_size*", "*use_dynamic_bsz", "*max_token_len*", "*gradient_checkpointing", "*use_remove_padding"),
    *("*.use_liger", "*.trust_remote_code", "*.tokenizer_path"),
    *("*.rollout.name", "*.rollout.dtype", "*.rollout.*parallel*", "*.rollout.gpu_memory*", "*.rollout.*cache*"),
    *("*.rollout.enforce_eager", "*.rollout.max_num*", "*.rollout.max_model_len", "*.rollout.*chunked*"),
    *("*.rollout.engine_kwargs.*", "*.rollout.nnodes", "*.rollout.n_gpus_per_node", "*.rollout.weight_sync*"),
    *("*.rollout.check_every", "*.rollout.max_mismatch", "*.rollout.checkpoint_engine.*"),
    *("*.rollout.val_kwargs.*",),
    *("*.rollout.server.model_name", "*.rollout.server.max_concurrency", "*.tool_processes", "*.tool_isolation"),
    *("*.optim.total_training_steps", "reward.isolation", "reward.memory_limit_mb"),
    *("reward.retries", "reward.max_failure_rate", "reward.on_error"),
)
#: names of folders and files that do not identify their contents
_GENERIC = re.compile(
    r"(train|training|test|val|validation|dev|eval|data|datasets?|rows|part|model|actor|critic|huggingface|hf|merged|"
    r"snapshots|main|latest|best|checkpoints?|global_step_\d+|[0-9a-f]{40}|[-_.\d]*|/)(-\d+-of-\d+)?",
    re.I,
)


class RunSchema(Schema):
    """The root of the configuration of a run, whose strings of `trainer` may contain the names above."""

    @model_validator(mode="after")
    def _fill_run_names(self) -> Self:
        """Replace {data}, {algorithm}, {model} and {digest} in the strings of `trainer`."""
        templates = {key: text for key, text in self.trainer if isinstance(text, str) and "{" in text}
        if templates:
            names = _run_names(to_flat_dict(self), plain_defaults(type(self)))
            filled = {key: _NAME.sub(lambda match: names[match[1]], text) for key, text in templates.items()}
            # the root is frozen for its users, not for its own validator
            object.__setattr__(self, "trainer", self.trainer.model_copy(update=filled))
        return self


def _run_names(flat: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, str]:
    """The values of {data}, {algorithm}, {model} and {digest}. flat, plain: every field, as configured and default."""
    files = flat.get("data.train_files") or []
    model = flat.get("actor_rollout_ref.model.path", flat.get("model.path"))
    data = list(dict.fromkeys(_specific_part(str(path)) or "data" for path in files))
    defining = {key: value for key, value in flat.items() if value != plain.get(key) and is_defining(key)}
    return {
        "data": "+".join(data[:3]) + ("" if len(data) <= 3 else f"+{len(data) - 3}") if data else "data",
        "algorithm": _clean(str(_algorithm_of(flat))) or "rl",
        "model": _specific_part(str(model or "")) or "model",
        "digest": hashlib.sha256(json.dumps(defining, sort_keys=True, default=str).encode()).hexdigest()[:6],
    }


def _algorithm_of(flat: Mapping[str, Any]) -> str:
    """The name of an algorithm: as configured, its preference loss, or the first preset with its estimator."""
    if name := flat.get("algorithm.name") or flat.get("dpo.loss"):
        return name
    estimator = flat.get(_ESTIMATOR)
    presets = (name for name, preset in PRESETS.items() if preset.get(_ESTIMATOR) == estimator)
    return ("rm" if "rm.center_coef" in flat else "sft") if estimator is None else next(presets, estimator)


@functools.cache
def is_defining(key: str) -> bool:
    """Whether runs with different values of this setting are different experiments."""
    if key in _DEFINING:
        return True
    return key.partition(".")[0] not in _OUTSIDE and not any(fnmatchcase(key, pattern) for pattern in _NOT_DEFINING)


def _specific_part(path: str) -> str:
    """The last part of a path or Hub id that is not generic: `~/gsm8k/train.parquet` -> gsm8k."""
    parts = PurePath(path.rstrip("/")).parts
    parts = (*parts[:-1], re.sub(r"\.(parquet|jsonl?|csv|arrow)(\.gz)?$", "", parts[-1])) if parts else ()
    parts = tuple(part.removeprefix("models--").removeprefix("datasets--") for part in parts)
    return next((_clean(part) for part in reversed(parts) if not _GENERIC.fullmatch(part) and _clean(part)), "")


def _clean(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", name).strip("._-")
