"""Small helpers under the names of public verl (`verl/compat/published.toml` lists where it has them)."""

import importlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Import modules by name, for what they register."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or ():
        importlib.import_module(name)


def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
    """A runtime environment for `ray.init`: variables of worker processes that this process does not set itself."""
    variables = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}
    return {"env_vars": {name: value for name, value in variables.items() if name not in os.environ}}


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the newest checkpoint of a folder."""
    return str(Path(root_path) / "latest_checkpointed_iteration.txt")


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the newest checkpoint; None if there is none."""
    if path is None or not Path(get_checkpoint_tracker_filename(path)).is_file():
        return None
    step = int(Path(get_checkpoint_tracker_filename(path)).read_text(encoding="utf-8"))
    folder = Path(path) / directory_format.format(step)
    return str(folder) if folder.exists() else None


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log a message with the rank before it; on rank 0 only, if asked for."""
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[Rank %d] %s", rank, message)
