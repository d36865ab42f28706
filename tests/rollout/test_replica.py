"""A replica of sharded weights: generates only when filled, and holds no memory in between."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from verl.rollout.replica import ReplicaRollout

from verl.rollout.base import SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=(0,), seed=3)


@pytest.mark.parametrize("inner", [HFRollout, NativeRollout])
def test_filled_used_freed(inner):
    torch.manual_seed(0)
    source, module = (AutoModelForCausalLM.from_config(CONFIG) for _ in range(2))
    expected = inner(source, pad_token_id=0).generate([[1, 2], [3]], PARAMS)
    replica = ReplicaRollout(inner(module, pad_token_id=0), module)
    assert sum(p.numel() for p in module.parameters()) == 0
    with pytest.raises(ValueError, match="no weights"):
        replica.generate([[1, 2]], PARAMS)
    for version in range(2):
        replica.wake()
        replica.load_weights(source.named_parameters(), version)
        found = replica.generate([[1, 2], [3]], PARAMS)
        assert [a.token_ids for a in found] == [a.token_ids for a in expected]
        replica.sleep()
        assert sum(p.numel() for p in module.parameters()) == 0


def test_incomplete_weights_are_refused():
    module = AutoModelForCausalLM.from_config(CONFIG)
    weights = list(module.named_parameters())
    weights = [(name, p.detach().clone()) for name, p in weights]
    replica = ReplicaRollout(HFRollout(module, pad_token_id=0), module)
    replica.wake()
    with pytest.raises(ValueError, match="version 5 lack"):
        replica.load_weights(weights[1:], 5)
    with pytest.raises(ValueError, match="came twice"):
        replica.load_weights([weights[0], weights[0]], 6)
