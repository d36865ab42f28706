"""Runs with vLLM that other tests have with the built-in engines: weights over files, asynchronous training, agents.

They need vLLM: make test-vllm.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.rollout.asynchronous_runs import check_spans, grpo_reports, model_folder, turns_agent
from tests.trainer.conftest import run_settings
from verl.single_controller.worker_group import WorkerError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(600),
]
ROLLOUT = "actor_rollout_ref.rollout"
OWN = ("trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]")
PAIR = ["trainer.n_gpus_per_node=3", "placement.rollout_devices=[1,2]", f"{ROLLOUT}.tensor_model_parallel_size=2"]
LORA = "actor_rollout_ref.model.lora_rank=4"
BOUND = 2e-5  # of log-probs in float32 on a CPU


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model of heads that vLLM accepts, with rows."""
    return model_folder(tmp_path_factory.mktemp("tiny"), model=("llama", "small"), chat=("qwen2", "small"))


def run(settings: list[str], *more: str, steps: int = 3) -> list:
    """The reports of a run whose weights are checked in every step."""
    chosen = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.check_every=1", f"trainer.total_training_steps={steps}"]
    found = grpo_reports(*settings, *chosen, *more)
    assert len(found) == steps
    for report in found:
        assert report.metrics["weight_sync/canary_mismatch"] < BOUND and report.metrics["weight_sync/bytes"] > 0
    return found


@pytest.mark.parametrize("placement", [pytest.param([], id="one rank"), pytest.param(PAIR, id="tensor parallel")])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_generation_overlaps_training(partial, lora, placement, tiny, tmp_path):
    more = [f"trainer.async.partial_rollout={json.dumps(partial)}", "trainer.async.max_staleness=1"]
    more += ["data.max_response_length=48", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    correction = "algorithm.rollout_correction.rollout_is=token"  # log-probs are computed again
    settings = run_settings(tiny, tmp_path / "run")
    more += ["trainer.test_freq=2"]
    found = run(settings, *OWN, *placement, *more, correction, *([LORA] if lora else []), steps=5)
    check_spans(found, prompts=4, partial=partial)


def test_an_agent_calls_it_over_http(tiny, tmp_path):
    (tmp_path / "agent.py").write_text(turns_agent(6))
    row = {"prompt": [{"role": "user", "content": "Go."}], "data_source": "x", "answer": "1"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    settings = [s for s in run_settings(tiny, tmp_path / "run") if "custom_reward_function" not in s]
    more = [f"{ROLLOUT}.mode=server", f"{ROLLOUT}.server.agent.path={tmp_path / 'agent.py'}"]
    more += [f"data.train_files={tmp_path / 'rows.jsonl'}", f"actor_rollout_ref.model.path={tiny / 'chat'}"]
    found = run(settings, *more, "data.max_prompt_length=64", "data.max_response_length=160")
    for report in found:
        assert report.metrics["rollout/agent_errors"] == 0 and report.metrics["rollout/logprob_gap_max"] < BOUND
        mask = report.batch.batch["response_mask"]
        turns = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
        assert turns.tolist() == [3] * len(report.batch)  # one trajectory of three turns


FAILS = """
import os
from verl.rollout.vllm.stepping import Stepper

take, steps = Stepper._take, []


def fails(self, new, removed):
    steps.append(1)
    if len(steps) > 60:
        raise MemoryError("tried to allocate 2 GiB")
    return take(self, new, removed)


if os.environ.get("RANK") == "{rank}":  # not in the controller, which is the process of the tests
    Stepper._take = fails
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_tensor_parallel_rank_ends_asynchronous_training(rank, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "fails.py").write_text(FAILS.format(rank=rank))
    more = ["trainer.async.max_staleness=1", "data.max_response_length=48", f"imports=[{tmp_path / 'fails.py'}]"]
    with pytest.raises(WorkerError, match="MemoryError: tried to allocate 2 GiB") as caught:  # and not WorkerTimeout
        run(run_settings(tiny, tmp_path / "run"), *OWN, *PAIR, *more, steps=5)
    assert (caught.value.role, caught.value.rank) == ("rollout", rank)
