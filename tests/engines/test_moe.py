"""Mixtures of experts in the training engine: routing, replay, expert parallelism and checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.engines.ranks import (
    FLOAT64,
    MIXTURES,
    OPTIMIZER,
    UNEVEN,
    assert_same,
    make_batch,
    make_engine,
    make_spec,
    qwen2,
    results,
    run_on_ranks,
    save_model,
    train,
)
from verl.engines.base import REPLAYS, MicroBatching
from verl.engines.routing import ROUTED_EXPERTS, add_statistics
from verl.engines.sharding import make_sharding
from verl.modeling.moe import RoutingStatistics, gate_weights, install_routing
from verl.protocol import DataProto

BOTH = pytest.mark.parametrize("kind", MIXTURES)
ROWS2 = MicroBatching(rows=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    """kind -> a model of four experts, two per token, in two layers."""
    return {kind: save_model(config, tmp_path_factory.mktemp(kind)) for kind, config in MIXTURES.items()}


def with_experts(batch: DataProto, experts: torch.Tensor, replays: bool = True) -> DataProto:
    return DataProto.from_dict({**batch.tensors, ROUTED_EXPERTS: experts}, meta_info={REPLAYS: replays})


def other_experts(batch: DataProto, seed: int = 0) -> torch.Tensor:
    """Random choices for every token, (B, P + T, 2, 2), -1 at padding."""
    mask = batch.batch["attention_mask"].bool()
    scores = torch.rand(*mask.shape, 2, 4, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2).indices.masked_fill(~mask[..., None, None], -1).to(torch.int16)


# ---- routers and experts --------------------------------------------------------------------------------------------


def test_weights_of_replayed_experts_by_hand():
    # two experts, one per token: softmax((0, log 3)) = (1/4, 3/4)
    probabilities = torch.tensor([[0.0, 3.0]]).log().clamp_min(0).softmax(-1)
    assert torch.allclose(gate_weights(probabilities, torch.tensor([[0]]), normalized=False), torch.tensor([[0.25]]))
    assert torch.equal(gate_weights(probabilities, torch.tensor([[0]]), normalized=True), torch.tensor([[1.0]]))
    both = gate_weights(probabilities, torch.tensor([[1, 0]]), normalized=True)
    assert torch.allclose(both, torch.tensor([[0.75, 0.25]]))


@BOTH
def test_replayed_forward_and_gradients_equal_a_loop(paths, kind):
    """One layer with given experts, against a loop over tokens and experts that shares no code with it."""
    model = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=torch.float64)
    routing, block = install_routing(model), model.model.layers[1].mlp
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    given = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]])
    routing.start(given[:, None].expand(5, 2, 2))
    ours = block(x[None])[0]
    ours.square().sum().backward()
    parameters = dict(block.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    block.zero_grad()
    rows = []
    for token, experts in zip(x, given.tolist()):
        scores = (block.gate.weight @ token)[experts]  # the normalized softmax over the chosen experts
        weights = scores.exp() / scores.exp().sum()
        row = 0
        for weight, expert in zip(weights, experts):
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + weight * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(row)
    theirs = torch.stack(rows)
    assert torch.allclose(ours, theirs, rtol=1e-9)
    theirs.square().sum().backward()
    for name, p in parameters.items():
        assert torch.allclose(gradients[name], p.grad, rtol=1e-7, atol=1e-9), name
    assert gradients["gate.weight"].abs().max() > 1e-3  # the router learns through the weights


def test_statistics_by_hand(paths):
    routing = install_routing(AutoModelForCausalLM.from_pretrained(paths["mixtral"]))
    routing.start(torch.tensor([[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[-1, -1], [-1, -1]]]))
    own = torch.tensor([[1, 0], [0, 2], [3, 0]])  # per token; the second differs from what was recorded
    routing.computed, routing.used = [own, own], [own, own]
    routing.entropies = [torch.tensor([0.5, 0.7, 9.0]), torch.tensor([0.1, 0.3, 9.0])]
    statistics = RoutingStatistics(routing)
    packed = SimpleNamespace(attention_mask=None, tokens=torch.arange(2), input_ids=torch.zeros(1, 3))
    add_statistics(statistics, packed)  # the third token is one that sequence parallelism appends
    found = statistics.metrics(statistics.sums())
    # loads of both layers: 2, 1, 1, 0 of a mean of 1
    expected = {"max_load": 2.0, "unused_experts": 0.25, "router_entropy": 0.4, "routing_mismatch": 0.5}
    assert found == pytest.approx({f"moe/{name}": value for name, value in expected.items()})


# ---- replay in the engine -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("packed", [True, False])
def test_recorded_choices_replay_to_the_same_log_probs(paths, kind, packed):
    engine, batch = make_engine(paths[kind], use_remove_padding=packed), make_batch()
    plain = engine.infer(batch, ("log_probs", ROUTED_EXPERTS), ROWS2)
    experts = plain[ROUTED_EXPERTS]
    mask = batch.batch["attention_mask"].bool()
    assert experts.dtype == torch.int16 and (experts[~mask] == -1).all() and (experts[mask] >= 0).all()
    again = engine.infer(with_experts(batch, experts), ("log_probs",), MicroBatching(rows=3))["log_probs"]
    assert torch.allclose(plain["log_probs"], again, atol=1e-5)
    other = engine.infer(with_experts(batch, other_experts(batch)), ("log_probs",), ROWS2)["log_probs"]
    assert (other - again).abs().max() > 1e-2


def test_replay_does_not_depend_on_the_micro_batches_or_on_recomputation(paths):
    batch = make_batch()
    batch = with_experts(batch, other_experts(batch))
    expected = results(make_engine(paths["qwen3_moe"], OPTIMIZER, **FLOAT64), batch, MicroBatching())
    settings = ({}, {"enable_gradient_checkpointing": True}, {"use_remove_padding": False})
    for micro, keys in zip((UNEVEN, ROWS2, ROWS2), settings):
        found = results(make_engine(paths["qwen3_moe"], OPTIMIZER, **FLOAT64, **keys), batch, micro)
        assert_same([found], expected, atol=1e-9)
        assert found["metrics"]["moe/max_load"] == pytest.approx(expected["metrics"]["moe/max_load"])


def test_choices_are_only_compared_without_replay(paths):
    batch = make_batch()
    engine = make_engine(paths["mixtral"], OPTIMIZER)
    own = engine.infer(batch, (ROUTED_EXPERTS,), ROWS2)[ROUTED_EXPERTS]
    assert train(engine, with_experts(batch, own.flip(-1), False), ROWS2, steps=1)["moe/routing_mismatch"] == 0
    compared = with_experts(batch, other_experts(batch), replays=False)
    one, two = (make_engine(paths["mixtral"], OPTIMIZER) for _ in range(2))
    found, expected = train(one, compared, ROWS2, steps=1), train(two, batch, ROWS2, steps=1)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found["moe/routing_mismatch"] > 0.5


def test_choices_of_another_model_are_refused(paths, tmp_path):
    batch = make_batch()
    wrong = with_experts(batch, other_experts(batch)[:, :, :1])
    with pytest.raises(ValueError, match="expected 2 layers with 2 experts per token, found \\(1, 2\\)"):
        make_engine(paths["mixtral"]).infer(wrong, ("log_probs",), ROWS2)
    dense = make_engine(save_model(qwen2(), tmp_path))
    with pytest.raises(ValueError, match="needs a mixture of experts"):
        dense.infer(with_experts(batch, other_experts(batch)), ("log_probs",), ROWS2)


# ---- adapters ---------------------------------------------------------------------------------------


@BOTH
def test_adapters_are_on_the_linear_layers(paths, kind):
    pytest.importorskip("peft")
    engine, batch = make_engine(paths[kind], OPTIMIZER, lora_rank=2), make_batch()
    assert {name.rpartition(".")[2] for name in engine.adapters._layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    before = dict(engine.weights())
    train(engine, batch, ROWS2)
    changed = {name for name, value in engine.weights() if not torch.equal(value, before[name])}
    assert changed and all("self_attn" in name for name in changed)


# ---- expert parallelism ---------------------------------------------------------------------------------------------


def experts_on_rank(path: str) -> tuple[int, ...]:
    """The box of the experts of one layer that a rank has."""
    engine = make_engine(path, sharded=True, expert_parallel_size=2)
    (box,) = (shard.box for shard in engine.shard_layout() if shard.name == "model.layers.1.mlp.experts.gate_up_proj")
    return tuple(box)[:2]


def test_each_rank_has_a_share_of_the_experts(paths):
    """Two of four experts, of 2 x 24 rows each; test_fsdp2.py compares their updates."""
    assert run_on_ranks(2, experts_on_rank, paths["qwen3_moe"]) == [(0, 96), (96, 192)]


def test_what_ranks_cannot_share(paths):
    with pytest.raises(ValueError, match="expert_parallel_size is 2, but there is one process"):
        make_sharding(make_spec(paths["mixtral"], expert_parallel_size=2))
