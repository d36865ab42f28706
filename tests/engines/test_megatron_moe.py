"""Router replay and the metrics moe/* of strategy=megatron are those of the fsdp engine."""

from types import SimpleNamespace

import pytest
import torch

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from tests.engines.megatron_cpu.compare import assert_equal_runs, fsdp_runs, replay_on_rank
from tests.engines.megatron_cpu.ranks import FOUR_LAYERS, MODELS, OPTIMIZER, TWO_ROWS, megatron_engine
from tests.engines.ranks import make_batch, make_engine, run_on_ranks, save_model, train
from verl.engines.base import REPLAYS, MicroBatching
from verl.engines.megatron.experts import GroupedExperts
from verl.engines.routing import ROUTED_EXPERTS
from verl.protocol import DataProto

METRICS = ("max_load", "unused_experts", "router_entropy", "routing_mismatch")
MODELS = MODELS | {"deep": MODELS["mixtral"].__class__(**FOUR_LAYERS, num_local_experts=4)}
LAYERS = {"mixtral": 2, "qwen3_moe": 3, "deep": 4}  # with experts; the first one of qwen3_moe is dense
BOTH = pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def replayed(model: str, recorded: float = 0.8) -> DataProto:
    """A batch with random choices of two of four experts for a share of its tokens, -1 for the others."""
    batch, generator = make_batch(), torch.Generator().manual_seed(0)
    shape = batch.batch["attention_mask"].shape
    experts = torch.rand(*shape, LAYERS[model], 4, generator=generator).topk(2).indices
    has = batch.batch["attention_mask"].bool() & (torch.rand(shape, generator=generator) < recorded)
    experts = experts.masked_fill(~has[..., None, None], -1).to(torch.int16)
    return DataProto.from_dict({**batch.tensors, ROUTED_EXPERTS: experts})


def expected_on_one_device(path: str, batch: DataProto) -> dict:
    """What `replay_on_rank` returns, of the fsdp engine."""
    engine = make_engine(path, OPTIMIZER)
    recorded = engine.infer(make_batch(), (ROUTED_EXPERTS,), MicroBatching())[ROUTED_EXPERTS]
    compared = DataProto.from_dict(batch.tensors, meta_info={REPLAYS: False})
    mismatch = train(engine, compared, MicroBatching(), steps=1)["moe/routing_mismatch"]
    return fsdp_runs(path, batch=batch) | {"recorded": recorded, "mismatch": mismatch}


def assert_replayed(ranks: list[dict], expected: dict) -> None:
    assert_equal_runs(ranks, expected)  # the metrics too
    assert {f"moe/{name}" for name in METRICS} <= expected["float32"]["metrics"][0].keys()
    assert all(rank["mismatch"] == expected["mismatch"] > 0.3 for rank in ranks)
    shares = {rank["dp_rank"]: rank["recorded"] for rank in ranks}
    for rank in ranks:
        assert torch.equal(rank["recorded"], shares[rank["dp_rank"]])
    assert torch.equal(torch.cat([shares[i] for i in sorted(shares)]), expected["recorded"])


@BOTH
def test_replay_gives_the_updates_of_the_fsdp_engine(model, tmp_path):
    path, batch = save_model(MODELS[model], tmp_path), replayed(model)
    expected = expected_on_one_device(path, batch)
    assert_replayed(run_on_ranks(1, replay_on_rank, path, batch), expected)
    plain = make_engine(path).infer(make_batch(), ("log_probs",), TWO_ROWS)["log_probs"]
    forced = make_engine(path).infer(batch, ("log_probs",), TWO_ROWS)["log_probs"]
    ours = megatron_engine(path).infer(batch, ("log_probs",), MicroBatching(rows=3))["log_probs"]
    assert torch.allclose(ours, forced, atol=1e-5) and (forced - plain).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world", "keys"),
    [
        ("mixtral", 2, {"t": 2}),
        ("mixtral", 2, {"c": 2}),
        ("mixtral", 4, {"t": 2, "e": 2, "et": 1}),
        ("qwen3_moe", 2, {"e": 2, "enable_gradient_checkpointing": True}),
        ("qwen3_moe", 2, {"p": 2, "override_transformer_config": {"recompute_granularity": "full"}}),
        ("qwen3_moe", 2, {"p": 2, "v": 2, "enable_gradient_checkpointing": True}),
        ("qwen3_moe", 4, {"p": 2, "e": 2, "override_transformer_config": SELECTIVE}),
        # one layer of each stage is recomputed, and one is not
        ("deep", 2, {"p": 2, "override_transformer_config": BLOCK}),
        ("qwen3_moe", 4, {"p": 2, "c": 2}),
        ("qwen3_moe", 8, {"t": 2, "p": 2, "e": 2}),
    ],
)
def test_replay_over_ranks_gives_the_updates_of_one_device(model, world, keys, tmp_path):
    """With pipeline stages, the forward passes of other micro-batches come before a backward pass, which recomputes."""
    path, batch = save_model(MODELS[model], tmp_path), replayed(model)
    assert_replayed(run_on_ranks(world, replay_on_rank, path, batch, **keys), expected_on_one_device(path, batch))


def test_choices_of_another_model_are_refused(tmp_path):
    path, batch = save_model(MODELS["mixtral"], tmp_path / "mixtral"), replayed("qwen3_moe")
    with pytest.raises(ValueError, match="expected 2 layers with 2 experts per token, found \\(3, 2\\)"):
        megatron_engine(path).infer(batch, ("log_probs",), TWO_ROWS)
    dense = megatron_engine(save_model(MODELS["llama"], tmp_path / "llama"))
    for columns, outputs in ((batch, ("log_probs",)), (make_batch(), (ROUTED_EXPERTS,))):
        with pytest.raises(ValueError, match="needs a mixture of experts"):
            dense.infer(columns, outputs, TWO_ROWS)


@pytest.mark.parametrize("width", [24, 20, 7])
def test_experts_of_widths_that_grouped_matmuls_do_not_support(width, tmp_path):
    """Rows of 40 and 14 bytes in bfloat16. Expert 1 has no token."""
    config = megatron_engine(save_model(MODELS["mixtral"], tmp_path)).config
    sizes = {"moe_ffn_hidden_size": width, "num_moe_experts": 3, "params_dtype": torch.bfloat16}
    one = SimpleNamespace(size=lambda: 1)
    experts = GroupedExperts(3, SimpleNamespace(**vars(config) | sizes), SimpleNamespace(ep=one, tp=one, expt_tp=one))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(4, config.hidden_size, generator=generator).bfloat16()
    chosen, weights = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0]]), torch.rand(4, 2, generator=generator)
    expected = torch.zeros(4, config.hidden_size, dtype=torch.float64)
    for token, expert, weight in zip(range(4), chosen.tolist(), weights.tolist()):
        for each, factor in zip(expert, weight):
            gate, up = (experts.gate_up_proj[each].double() @ x[token].double()).chunk(2)
            inner = gate / (1 + torch.exp(-gate)) * up
            expected[token] += factor * (experts.down_proj[each].double() @ inner)
    found = experts(x, chosen, weights).double()
    assert (found - expected).norm() < 0.01 * expected.norm()
