"""How many tokens of an update fit: what autograd keeps per token, and what follows from the free memory."""

import pytest
import torch
from transformers import Qwen2Config

from tests.engines import ranks
from tests.vl_models import save_vl_model
from verl.config import schema
from verl.engines import memory, micro_batch
from verl.engines.base import MicroBatching
from verl.engines.token_budget import (
    MAX_AUTO_TOKENS,
    SHARE,
    ActivationBytes,
    TokenBudget,
    choose_micro_batching,
    token_budget,
)
from verl.engines.torch_engine import TorchEngine

LAYERS, HIDDEN, MLP = 3, 64, 160


def make_engine(tmp_path, **keys) -> TorchEngine:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2Config(vocab_size=331, **sizes, **heads, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    keys = {"enable_gradient_checkpointing": False} | keys
    return ranks.make_engine(tmp_path, schema.OptimConfig(), random_init=True, **keys)


def test_bytes_kept_per_token_of_a_layer_counted_by_hand(tmp_path):
    engine = make_engine(tmp_path)
    kept = memory.measure_activations(engine.probe_forward, engine.module, engine.model.vocab_size)
    a_layer = kept.plain / (LAYERS + 2)  # room for the gradients and the temporary tensors of two layers
    # float32 numbers that a layer cannot do without: the inputs of both norms, of the projections into q, k, v and
    # into the MLP and out of attention (5 hidden), q, k and v of attention (2 hidden), gate, silu, up, product (4 MLP)
    floor = 4 * (7 * HIDDEN + 4 * MLP)
    assert floor < a_layer < 3 * floor
    inputs = (4 + 2) * LAYERS * HIDDEN
    assert kept.checkpointed == pytest.approx(inputs + (1 + 2) * a_layer)


def test_wider_logits_cost_the_layers_nothing(tmp_path):
    def saved(engine: TorchEngine) -> float:
        return memory.measure_activations(engine.probe_forward, engine.module, engine.model.vocab_size).plain

    narrow = saved(make_engine(tmp_path / "narrow"))
    wide = saved(make_engine(tmp_path / "wide", override_config={"vocab_size": 4001}))
    assert wide == pytest.approx(narrow, rel=0.01)


def test_tokens_that_fit_by_hand():
    assert token_budget(ActivationBytes(plain=1000.0, checkpointed=100.0), 1_000_000) == TokenBudget(800, 8000)
    assert token_budget(ActivationBytes(plain=1000.0, checkpointed=100.0), -5) == TokenBudget(0, 0)


@pytest.mark.parametrize(
    ("tokens", "longest", "fits", "checkpointing", "expected"),
    [
        (None, 600, TokenBudget(90_000, 10**6), "auto", (MAX_AUTO_TOKENS, False)),  # plenty
        (None, 600, TokenBudget(9_000, 50_000), "auto", (9_000, False)),  # fewer tokens are better than checkpointing
        (None, 600, TokenBudget(3_000, 50_000), "auto", (MAX_AUTO_TOKENS, True)),
        (None, 12_000, TokenBudget(9_000, 50_000), "auto", (MAX_AUTO_TOKENS, True)),  # one row needs it
        (None, 60_000, TokenBudget(9_000, 50_000), "auto", (60_000, True)),  # a row is never cut
        (None, 600, TokenBudget(90_000, 10**6), True, (MAX_AUTO_TOKENS, True)),
        (None, 600, TokenBudget(3_000, 50_000), False, (3_000, False)),
        (20_000, 600, TokenBudget(30_000, 10**6), "auto", (20_000, False)),
        (20_000, 600, TokenBudget(10_000, 10**6), "auto", (20_000, True)),
    ],
)
def test_budget_and_checkpointing_follow_from_what_fits(tokens, longest, fits, checkpointing, expected):
    assert choose_micro_batching(tokens, longest, fits, checkpointing) == expected


def test_on_a_cpu_nothing_is_measured_and_activations_are_kept(tmp_path):
    engine = make_engine(tmp_path, enable_gradient_checkpointing="auto")
    ranks.train(engine, ranks.make_batch(), MicroBatching(tokens="auto"), steps=1)
    assert engine._activation_bytes is None
    assert not engine.module.training
    assert micro_batch.plan_micro_batches([5, 7], MicroBatching(tokens="auto")) == [[0, 1]]
    assert micro_batch.plan_micro_batches([MAX_AUTO_TOKENS, 7], MicroBatching(tokens="auto")) == [[0], [1]]
    assert len(micro_batch.plan_micro_batches([2 * MAX_AUTO_TOKENS, 7], MicroBatching(tokens="auto"))) == 2


def test_an_update_where_memory_is_short_cuts_smaller_and_then_checkpoints(tmp_path, monkeypatch):
    """The engine's own decision, with the memory of a device that this test makes up."""
    engine = make_engine(tmp_path, enable_gradient_checkpointing="auto")
    kept = memory.measure_activations(engine.probe_forward, engine.module, engine.model.vocab_size)
    monkeypatch.setattr(memory, "logits_bytes", lambda *_: 0)
    monkeypatch.setattr(memory, "update_bytes", lambda *_: 0)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 0)
    engine._checkpoint_activations(True)
    assert engine._token_budget() == TokenBudget(0, 0)
    assert engine._activation_bytes == kept, "measured without checkpointing"
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    for fits, checkpointing in ((40_000, False), (10_000, False), (7_000, True)):
        free = (fits + 0.5) * kept.plain / SHARE
        monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
        found = engine._choose_micro_batching([30, 12, 24, 8], MicroBatching(tokens="auto"))
        more = SHARE * free / kept.checkpointed
        assert found == MicroBatching(tokens=min(MAX_AUTO_TOKENS, int(more) if checkpointing else fits))
        assert engine.module.training is checkpointing  # where transformers checkpoints
    # cut as the user says, checkpointing is all there is to decide: 3 rows of 30 tokens fit
    assert engine._choose_micro_batching([30, 12, 24, 8], MicroBatching(rows=3)) == MicroBatching(rows=3)
    assert not engine.module.training


def test_images_leave_room_for_fewer_tokens(tmp_path):
    """Every token may be one of an image, of 4 patches; the tower has 2 layers of hidden size 16 and MLP 24."""
    path, text = save_vl_model("qwen2_5_vl", tmp_path), ActivationBytes(100.0, 10.0)
    engine = ranks.make_engine(path, schema.OptimConfig())
    layer = 4 * (11 * 16 + 4 * 24)
    found = memory.with_images(text, engine.module, 4)
    assert found == ActivationBytes(100 + 4 * 2 * layer, 10 + 4 * (2 * 16 * 4 + layer))
    frozen = ranks.make_engine(path, schema.OptimConfig(), freeze_vision_tower=True)
    assert memory.with_images(text, frozen.module, 4) == text


def test_bytes_of_an_update_are_gradients_and_at_first_the_moments():
    layer = torch.nn.Linear(4, 3, bias=False)  # 12 trained values of 4 bytes
    frozen = torch.nn.Parameter(torch.zeros(100), requires_grad=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    assert memory.update_bytes([*layer.parameters(), frozen], optimizer) == 3 * 48
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert memory.update_bytes([*layer.parameters(), frozen], optimizer) == 48


def test_the_largest_micro_batches_are_halved_for_another_rank():
    assert micro_batch.split_to([[0, 1, 2, 3], [4]], 2) == [[0, 1, 2, 3], [4]]
    assert micro_batch.split_to([[0, 1, 2, 3], [4]], 3) == [[0, 1], [2, 3], [4]]
    assert micro_batch.split_to([[0, 1, 2], [3, 4]], 5) == [[0], [1], [2], [3], [4]]
    with pytest.raises(ValueError, match="5 rows cannot be split into 6 micro-batches"):
        micro_batch.split_to([[0, 1, 2], [3, 4]], 6)
