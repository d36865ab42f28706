"""Rollout of vision-language models: the log-probs of the responses are those of training."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.ranks import make_engine
from tests.engines.test_vision import prompts
from tests.vl_models import FAMILIES, QWEN, save_vl_model
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.protocol import DataProto
from verl.rollout.base import Request, RolloutEnv, SamplingParams, make_rollout_engine


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> dict[str, Any]:
    made: dict[str, Any] = {}

    def trainer(family: str):
        if family not in made:
            made[family] = make_engine(save_vl_model(family, tmp_path_factory.mktemp(family)))
        return made[family]

    return trainer


def requests(family: str, samples: int = 2, **params: Any) -> list[Request]:
    """`samples` requests for each prompt, with different limits."""
    found = []
    for i, (ids, inputs) in enumerate(prompts(family) * samples):
        sampling = SamplingParams(max_tokens=4 + i % 3, stop_token_ids=(0,), seed=5, **params)
        found.append(Request(ids, sampling, i, multi_modal_inputs=inputs))
    return found


def trained_log_probs(engine: Any, every: list[Request], answers: list[Any], temperature: float = 1.0) -> torch.Tensor:
    columns = build_sequences([r.prompt_ids for r in every], [a.token_ids for a in answers], pad_token_id=0)
    inputs = np.empty(len(every), dtype=object)
    inputs[:] = [request.multi_modal_inputs for request in every]
    batch = DataProto.from_dict(columns, {"multi_modal_inputs": inputs})
    return engine.infer(batch, ("log_probs",), MicroBatching(), temperature)["log_probs"]


def make_rollout(name: str, engine: Any, **keys: Any):
    config = schema.RolloutConfig(name=name, prompt_length=64, response_length=8, **keys)
    env = RolloutEnv(
        rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), pad_token_id=0, compute_dtype=torch.float32
    )
    return make_rollout_engine(name, config, engine.spec.model, env, engine)


@pytest.mark.parametrize(("name", "family"), [("hf", f) for f in FAMILIES] + [("native", f) for f in QWEN])
def test_log_probs_are_those_of_training(name, family, trainers):
    engine = trainers(family)
    rollout, every = make_rollout(name, engine, max_num_seqs=5), requests(family, temperature=0.8)
    answers = rollout.generate(every)
    expected = trained_log_probs(engine, every, answers, 0.8)
    for row, answer in enumerate(answers):
        assert answer.log_probs == pytest.approx(expected[row, : len(answer.token_ids)].tolist(), abs=1e-4)
    alone = rollout.generate([every[2]])[0]  # another batch, the same response
    assert alone.token_ids == answers[2].token_ids
