"""GRPO with strategy=megatron and vLLM, on the same and on separate CPU processes.

Needs both in one environment, as `make test-vllm` has.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.engines.megatron_cpu import skip_reason
from tests.trainer.runs import fit

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import make_tiny, run_settings

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MEGATRON = f"{ACTOR}megatron."
SHIM = Path(__file__).parents[1] / "engines" / "megatron_cpu" / "shim.py"
SHARED = ["trainer.n_gpus_per_node=2"]
SEPARATE = ["trainer.n_gpus_per_node=3", "placement.actor_devices=[0,1]", "placement.rollout_devices=[2]"]


@pytest.mark.parametrize(
    "keys",
    [
        [*SHARED, f"{MEGATRON}tensor_model_parallel_size=2"],  # auto: replica
        [*SHARED, f"{MEGATRON}pipeline_model_parallel_size=2"],
        [*SHARED, f"{MEGATRON}tensor_model_parallel_size=2", f"{ROLLOUT}tensor_model_parallel_size=2"],
        [*SEPARATE, f"{MEGATRON}tensor_model_parallel_size=2"],  # auto: collective
        [*SEPARATE, f"{MEGATRON}pipeline_model_parallel_size=2"],
    ],
)
def test_vllm_generates_with_the_weights_of_megatron(keys, tmp_path):
    tiny = make_tiny(tmp_path)
    tiny_model("llama", tiny / "model", seed=0, size="small")  # heads that vLLM accepts
    common = ["algorithm.name=grpo", f"{ACTOR}strategy=megatron", f"{ROLLOUT}name=vllm", f"{ROLLOUT}check_every=1"]
    common += ["trainer.total_training_steps=2", "trainer.device=cpu", f"imports=[{SHIM}]"]
    _, reports = fit([*run_settings(tiny, tmp_path / "run"), *common, *keys])
    size = (tiny / "model" / "model.safetensors").stat().st_size
    assert len(reports) == 2
    for metrics in (report.metrics for report in reports):
        assert metrics["weight_sync/canary_mismatch"] < 2e-5 and metrics["rollout/logprob_gap_max"] < 2e-5
        assert metrics["weight_sync/bytes"] > 0.9 * size
