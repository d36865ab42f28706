"""LoRA adapters that vLLM applies. Tests of `real` need vLLM: make test-vllm."""

import importlib.util

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, make_batch, make_engine, train
from tests.rollout.test_adapter_sync import log_prob_gap
from verl.config import schema
from verl.engines.base import MicroBatching
from verl.rollout.adapters import AdaptedLayers
from verl.rollout.base import RolloutEnv, SamplingParams, make_requests, make_rollout_engine
from verl.rollout.weight_sync import ReplicaSync
from verl.workers.rollout.role import RolloutSource

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
LORA = {"lora_rank": 3, "lora_alpha": 6}
MICRO = MicroBatching(rows=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    from tests.rollout.contract import save_model
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


def make(engine, path, **keys):
    config = schema.RolloutConfig(name="vllm", prompt_length=16, response_length=16, max_num_seqs=8, **keys)
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32, adapted_layers=AdaptedLayers.of(engine.adapter_config()))
    return make_rollout_engine("vllm", config, schema.ModelConfig(path=path, **LORA), env, engine)


@real
def test_it(path):
    engine = make_engine(path, OPTIMIZER, **LORA)
    rollout, merged = make(engine, path), make(engine, path, lora_sync="merged")
    sync, other = ReplicaSync(rollout, adapters=True), ReplicaSync(merged)
    source = RolloutSource(engine, torch.float32)
    for version in range(3):
        one, two = sync.push(source, version), other.push(source, version)
        print(one, two, log_prob_gap(engine, rollout), log_prob_gap(engine, merged))
        train(engine, make_batch(), MICRO, steps=1)
