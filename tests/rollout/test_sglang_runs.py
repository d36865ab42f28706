"""Runs with SGLang: weights over files and over a process group, two tensor-parallel ranks, asynchronous training.

They need SGLang: VERL_CONTRACT_ENGINES=sglang, make test-sglang.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.rollout.asynchronous_runs import check_spans, grpo_reports, model_folder
from tests.rollout.contract import CHOSEN
from tests.trainer.conftest import run_settings

pytestmark = [
    pytest.mark.skipif(
        "sglang" not in (CHOSEN or "").split(",") or importlib.util.find_spec("sglang") is None,
        reason="opt-in: VERL_CONTRACT_ENGINES=sglang",
    ),
    pytest.mark.timeout(600),
]
ROLLOUT = "actor_rollout_ref.rollout"
OWN = ("trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]")
LORA = "actor_rollout_ref.model.lora_rank=4"
BOUND = 2e-5  # of log-probs in float32 on a CPU


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Rows, and models: "mini", whose sizes SGLang's kernels for a CPU support, and "small", whose MLP they pad."""
    return model_folder(tmp_path_factory.mktemp("tiny"), mini=("llama", "mini"), small=("llama", "small"))


def run(tiny: Path, folder: Path, *more: str) -> list:
    """The reports of two steps."""
    found = reports_of(tiny, folder, *more)
    assert [report.batch.batch["weight_version"].unique().tolist() for report in found] == [[0], [1]]
    assert all(report.metrics["rollout/logprob_gap_max"] < BOUND for report in found)
    return found


def reports_of(tiny: Path, folder: Path, *more: str, steps: int = 2) -> list:
    """The reports of a run, after each step of which the engine must have the weights of training."""
    chosen = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.check_every=1", "trainer.device=cpu"]
    chosen += [f"actor_rollout_ref.model.path={tiny / 'mini'}"]
    chosen += [f"{key}.dtype=float32" for key in (ROLLOUT, "actor_rollout_ref.actor.fsdp_config")]
    found = grpo_reports(*run_settings(tiny, folder), *chosen, f"trainer.total_training_steps={steps}", *more)
    for report in found:
        assert report.metrics["weight_sync/canary_mismatch"] < BOUND and report.metrics["weight_sync/bytes"] > 0
    return found


@pytest.mark.parametrize("lora", [False, True])
def test_weights_over_a_process_group(lora, tiny, tmp_path):
    found = run(tiny, tmp_path / "run", *OWN, f"{ROLLOUT}.weight_sync=collective", *([LORA] if lora else []))
    assert len({report.metrics["weight_sync/bytes"] for report in found}) == 1


@pytest.mark.parametrize("more", [[], [LORA]])
def test_two_tensor_parallel_ranks(more, tiny, tmp_path):
    ranks = ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    run(tiny, tmp_path / "run", *ranks, *more)


@pytest.mark.parametrize("ranks", [1, 2])
def test_generation_overlaps_training(ranks, tiny, tmp_path):
    more = [*OWN, "trainer.async.max_staleness=1", "data.max_response_length=24", "trainer.test_freq=2"]
    if ranks == 2:
        more += ["trainer.n_gpus_per_node=3", "placement.rollout_devices=[1,2]"]
        more += [f"{ROLLOUT}.tensor_model_parallel_size=2"]
    check_spans(reports_of(tiny, tmp_path / "run", *more, steps=4), prompts=4)
