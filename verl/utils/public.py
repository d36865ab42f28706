"""Small helpers under the names of public verl (`verl/compat/published.toml` lists where it has them)."""

import asyncio
import functools
import gc
import importlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.utils.device import get_device_id, resolve_dtype
from verl.utils.paths import expanded

# ---- dtypes ---------------------------------------------------------------------------------------------------------


class PrecisionType:
    """Names of precisions: "16", "32", "bf16", their long forms, and the dtypes of torch."""

    HALF, FLOAT, FULL, BFLOAT, MIXED = "16", "32", "64", "bf16", "mixed"

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        """The dtype of a precision. Raises RuntimeError if it is none."""
        try:
            return resolve_dtype({"16": "fp16", "32": "fp32"}.get(str(precision), precision), torch.device("cpu"))
        except ValueError as error:
            raise RuntimeError(f"precision: {error}") from None

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """The short name of a dtype: fp16, bf16 or fp32. Raises RuntimeError if it has none."""
        dtype = PrecisionType.to_dtype(precision)
        return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]

    is_fp16 = staticmethod(lambda precision: precision in (16, "16", "fp16", "float16", torch.float16))
    is_fp32 = staticmethod(lambda precision: precision in (32, "32", "fp32", "float32", torch.float32))
    is_bf16 = staticmethod(lambda precision: precision in ("bf16", "bfloat16", torch.bfloat16))


# ---- imports and environment ----------------------------------------------------------------------------------------


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Import modules by name, for what they register."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or ():
        importlib.import_module(name)


def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
    """A runtime environment for `ray.init`: variables of worker processes that this process does not set itself."""
    variables = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}
    return {"env_vars": {name: value for name, value in variables.items() if name not in os.environ}}


PPO_RAY_RUNTIME_ENV = get_ppo_ray_runtime_env()


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread; a new one if it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


# ---- models ---------------------------------------------------------------------------------------------------------


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set attributes of a model's configuration, in place; a mapping sets attributes of the section of its name."""
    for name, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, name), value)
        else:
            setattr(module_config, name, value)


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Print the number of parameters, in thousands, millions or billions."""
    count = sum(parameter.numel() for parameter in model.parameters())
    size, unit = next(((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count > size), (1, ""))
    print(f"{name or type(model).__name__} contains {count / size:.2f}{unit} parameters")


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up from 0, then a cosine down to `min_lr_ratio` of the learning rate."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup as schedule

    shape = (num_warmup_steps, num_training_steps, num_cycles, last_epoch)
    return schedule(optimizer, *shape, min_lr_rate=min_lr_ratio or 0.0)


def get_generation_config(model: str, trust_remote_code: bool = False) -> Any:
    """The generation settings of a model's folder or Hub id, or those of its configuration; None: it has neither."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except OSError:
        return None
    return GenerationConfig.from_model_config(config)


# ---- processes ------------------------------------------------------------------------------------------------------


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the process group of torchrun. Returns (local rank, rank, number of ranks)."""
    timeout = timedelta(seconds=timeout_second)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, os.environ.get("DIST_INIT_METHOD"), timeout)
    local_rank, rank, world_size = (int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    return local_rank, rank, world_size


def destroy_global_process_group() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def reduce_timing(timing_raw: dict[str, float], reduce_op: Any = torch.distributed.ReduceOp.AVG) -> dict[str, float]:
    """The same timings over all ranks, which have the same names."""
    if not torch.distributed.is_initialized():
        return timing_raw
    values = torch.tensor([timing_raw[name] for name in sorted(timing_raw)], device=get_device_id())
    torch.distributed.all_reduce(values, op=reduce_op)
    return dict(zip(sorted(timing_raw), values.tolist(), strict=True))


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Return unused GPU memory to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """Whether Ray was told to leave the variables of visible devices alone."""
    return any(value for name, value in env_vars.items() if name.startswith("RAY_EXPERIMENTAL_NOSET_"))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


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


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the instance may end before another step is saved. All durations in seconds. Its end is the Unix time of
    a variable that elastic instances of two clouds set; without it the answer is False."""
    names = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
    end = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if end is None or max_steps_duration <= 0:
        return False
    remaining = float(end) - time.time()
    return 0 < remaining <= max_steps_duration + save_ckpt_duration + redundant_time


# ---- logging and profiling ------------------------------------------------------------------------------------------


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log a message with the rank before it; on rank 0 only, if asked for."""
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log the memory of this rank's GPU in GiB; nothing without one. rank: that logs; None for all."""
    if not torch.cuda.is_available() or (rank is not None and _rank() != rank):
        return
    free, total = torch.cuda.mem_get_info()
    sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free, total
    text = "{}, memory allocated (GB): {:.2f}, reserved: {:.2f}, used/total: {:.2f}/{:.2f}".format(
        head, *(size / 2**30 for size in sizes)
    )
    if logger is None:
        print(text, flush=True)
    else:
        logger.log(level, text)


class GPUMemoryLogger:
    """Decorator: log the memory of the GPU before and after a call (`log_gpu_memory_usage`)."""

    def __init__(
        self, role: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, log_only_rank_0=True
    ):
        self.role, self.logger, self.level, self.rank = role, logger, level, 0 if log_only_rank_0 else None

    def __call__(self, func: Callable) -> Callable:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            log_gpu_memory_usage(f"Before {self.role} {func.__name__}", self.logger, self.level, self.rank)
            result = func(*args, **kwargs)
            log_gpu_memory_usage(f"After {self.role} {func.__name__}", self.logger, self.level, self.rank)
            return result

        return call


class ProfilerConfig:
    """Settings of a profiler that is off. Raises ValueError for enable=True: profilers are not supported."""

    def __init__(self, enable: bool = False, **settings: Any):
        if enable:
            raise ValueError("ProfilerConfig: profilers are not supported: timing_s/* are the seconds of operators")
        vars(self).update(settings, enable=enable)


class DistProfiler:
    """A profiler that is off: functions run as they are. Raises ValueError for a config with enable=True."""

    def __init__(self, rank: int, config: Any = None, tool_config: Any = None, **settings: Any):
        ProfilerConfig(enable=getattr(config, "enable", False))

    def start(self, **kwargs: Any) -> None:
        """Nothing to start."""

    def stop(self, **kwargs: Any) -> None:
        """Nothing to stop."""

    @classmethod
    def annotate(cls, *args: Any, **kwargs: Any) -> Callable[[Callable], Callable]:
        """Decorator that returns the method: it marks a range of profiles, of which there are none."""
        return lambda func: func


class DistProfilerExtension:
    """Gives a worker `start_profile` and `stop_profile`, those of its profiler."""

    def __init__(self, profiler: DistProfiler):
        self.profiler = profiler

    def start_profile(self, **kwargs: Any) -> None:
        self.profiler.start(**kwargs)

    def stop_profile(self, **kwargs: Any) -> None:
        self.profiler.stop(**kwargs)


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A context in which everything runs as without it: traces of rollouts are not recorded."""
    yield


# ---- dicts, metrics and timers --------------------------------------------------------------------------------------


def append_to_dict(data: dict[str, list], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list of its name, with the prefix, in place."""
    for name, value in new_data.items():
        data.setdefault(f"{prefix}{name}", []).append(value)


def union_two_dict(dict1: dict, dict2: Mapping) -> dict:
    """Add the entries of the second dict to the first, in place, and return it. ValueError if a value differs."""
    for name, value in dict2.items():
        if name in dict1 and dict1[name] != value:
            raise ValueError(f"union: {name!r} is {dict1[name]!r} in one dict and {value!r} in the other")
        dict1[name] = value
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """The values of each name in all dicts, which must have the same names."""
    return {name: [entry[name] for entry in list_of_dict] for name in (list_of_dict[0] if list_of_dict else ())}


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dict with a prefix before every name, unless the name has it."""
    return {name if name.startswith(prefix) else f"{prefix}{name}": value for name, value in data.items()}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists of metrics to numbers: the maximum or minimum if "max" or "min" is in the name, else the mean."""

    def reduce(name: str, values: Any) -> Any:
        return np.max(values) if "max" in name else np.min(values) if "min" in name else np.mean(values)

    return {name: reduce(name, values) for name, values in metrics.items()}


def convert_to_regular_types(obj: Any) -> Any:
    """Dicts and lists of Python in place of OmegaConf's, at every depth; a tuple becomes a list."""
    if isinstance(obj, Mapping):
        return {name: convert_to_regular_types(value) for name, value in obj.items()}
    if isinstance(obj, MutableSequence | tuple):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def rollout_trace_op(func: Callable) -> Callable:
    """Return the function: traces of rollouts are not recorded."""
    return func


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: raise TimeoutError if a call takes longer. The call then goes on in its thread, as threads cannot be
    stopped."""

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            executor = ThreadPoolExecutor(1)
            try:
                return executor.submit(func, *args, **kwargs).result(seconds)
            except FutureTimeoutError:
                raise TimeoutError(f"{func.__name__} took longer than {seconds} s") from None
            finally:
                executor.shutdown(wait=False)

        return call

    return decorate


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`. Other arguments mark ranges in a profiler and are ignored."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


# ---- files ----------------------------------------------------------------------------------------------------------

# Addresses of other file systems are an error.


def _local(path: str) -> str:
    """The path. Raises OSError for an address such as hdfs://host/folder."""
    if "://" in str(path):
        raise OSError(f"{path}: expected a local path: copy it with the tools of its file system, or mount it")
    return path


def exists(path: str, **kwargs) -> bool:
    """Whether a file or folder exists."""
    return expanded(_local(path)).exists()


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs) -> None:
    """Create a folder and its parents."""
    expanded(_local(name)).mkdir(mode, parents=True, exist_ok=exist_ok)


def local_mkdir_safe(path: str) -> str:
    """Create a folder and its parents unless they exist. Returns its absolute path."""
    folder = expanded(_local(path)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def copy(src: str, dst: str, **kwargs) -> bool:
    """Copy a file or folder. An existing target is overwritten. Returns True; a copy that fails raises OSError."""
    source, target = expanded(_local(src)), expanded(_local(dst))
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    return True


def copy_to_local(src: str, *options, **kwargs) -> str:
    """Return a local path, or a name on a model hub, unchanged. The options of public verl are for remote addresses."""
    return _local(src)


copy_local_path_from_hdfs = copy_to_local
